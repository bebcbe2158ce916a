"""Commands of a site: `partsong federation join`, and what it asks and shows before a site takes part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from partsong.console.options import AsJson, Header, Key, Label, Transpose, examples
from partsong.console.output import handle_errors, put_json, put_result, visible, warn
from partsong.console.tables import read_table
from partsong.data.table import Table
from partsong.data.validation import identifier_findings, inspect
from partsong.errors import DataError, FileError, FormatError, ParameterError, PartsongError
from partsong.federation.columns import ONE_NAME, twins
from partsong.federation.flower import site_process
from partsong.federation.locks import is_held
from partsong.federation.policy import Policy, answer_rare_columns, has_policy, says_rare_columns, terms_in
from partsong.federation.setup.credentials import Kit, Listed, SharedKey, read_file, same_fingerprint
from partsong.federation.setup.site_folder import USUAL_COLUMN, SiteFolder, are_texts, texts_at
from partsong.federation.transports.files import answer_requests
from partsong.io.opening import ReadOptions
from partsong.io.write import write_text

# ---- federation shared-key ------------------------------------------------------------------------------------------
#
# `partsong federation shared-key`: what sites share, and the coordinator does not know.

SHARED_KEY = examples("partsong federation shared-key -o sites.key")
MAKE_KEY = (
    "One site makes a key (partsong federation shared-key), tells the others by a way that does not lead through the "
    "server, and all join with --shared-key."
)


@handle_errors
def shared_key(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new file for it, for its owner alone.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key that all sites share and the server does not know: names of columns are hashed with it.

    One site makes it, and tells the others by telephone or by a letter that the coordinator does not read.
    """
    key = SharedKey.made()
    if output is not None:
        if output.exists():
            raise FileError(f"{output}: there is something already. Name a new file.")
        write_text(output, key.text + "\n", private=True)
    told: dict[str, Any] = {"shared_key": key.text} if output is None else {"file": output}
    put_result(told, (key.text if output is None else f"The key is in {output}.",), as_json)
    typer.echo("For the sites alone, NOT for the coordinator: partsong federation join KIT --shared-key FILE", err=True)


# ---- federation texts -------------------------------------------------------------------------------------------
#
# `partsong federation join` with texts: how they are read, what is checked, and what will leave.

OF_TABLES = ("label", "transpose", "key", "header")
NO_SHARED_KEY_OF_WORDS = (
    "This site shares no key with the others, and will refuse every run over its texts: without one, whoever has a "
    f"list of words could test them. {MAKE_KEY}"
)


def reading_of(data: Path, reading: dict[str, Any]) -> dict[str, Any]:
    """How the data are read: as texts where a column of them is named, or where they can be nothing else."""
    if "text_column" not in reading and not are_texts(data):
        if "encoding" in reading:
            raise ParameterError("--encoding is for texts. Name their column as well: --text-column text.")
        return reading
    for name in OF_TABLES:
        if name in reading:
            raise ParameterError(f"--{name} is for tables, and these data are texts. Leave it out.")
    return {"text_column": USUAL_COLUMN, **reading}


def check_texts(data: Path, reading: dict[str, Any]) -> None:
    """Whether they can be read, and how many of them are empty."""
    texts = texts_at(data, reading)
    empty = sum(not text.strip() for text in texts)
    if empty:
        typer.echo(f"Note: {empty} of {len(texts)} texts are empty. They are kept, with weights of zero.", err=True)


# ---- federation site --------------------------------------------------------------------------------------------

JOIN = examples(
    "partsong federation join liver-north.zip --data mine.h5ad --shared-key sites.key",
    "partsong federation join liver-north.zip --roster roster.toml",
    "partsong federation join liver-north.zip --data notes.csv --text-column text --shared-key sites.key",
)
NAMES_TOLD = "to a site of the roster that lacks some of them: their names, sealed, so that it alone reads them"
NAMES_KEPT = "nothing to other sites, also not the names of columns that one of them lacks"
NO_SHARED_KEY = (
    "This site shares no key with the others: a server with a list of likely names of columns can test them against "
    f"the hashes that it is sent. {MAKE_KEY}"
)
OTHER_ROSTER = (
    "The roster in this kit ({}) is not the one that this site has pinned ({}), which stays. If parties have changed "
    "since, give the new one: --roster roster.toml. If it is the one in the kit: --fingerprint, as other sites have "
    "read it to you."
)
SEND_CARD = "\nSend {} to the coordinator, over a channel others cannot write to."
AWAITED = "Wait here for the roster that comes back, and give its path (Enter: join again later)"
TAKEN = "The roster was taken. The node of {!r} runs already, and works with it from its next request on."
LEAVES = """What leaves this site, and what does not:
{lines}
  always   names of arrays, refusals as codes, and counts; the reasons stay here
{more}What can be computed from it:
{exposure}
Every message is written to {audit} before it leaves.
What may be asked of this site {policy}"""
OF_ROWS = """  never    rows, weights of rows (W), names of rows; names of columns to the server
  a run    a hash of the name of each column that site.toml lets out ({columns} now), {keyed}; the number type;
           {names} (tell_names)
  a round  what the recipe sends: sums or factors of k × {columns} numbers, of all {rows} rows; masked where site.toml
           says so ({masked}), so that the server sees sums over at least {parties} sites alone"""
OF_TEXTS = """  never    texts, weights of texts (W), names of files; words to the server
  a run    in masked sums over all sites, under the key that sites share: of which hashes it has words that are in as
           many of its texts as the experiment asks for ({documents} at least, by site.toml); then words at enough sites
           ({least} at least) themselves, which all sites read and the server cannot; then in how many of its texts
           each of these is, and that there are {rows} texts; and the number type
  a round  what the recipe sends: sums or factors of k × agreed words, of all texts; masked where site.toml says so
           ({masked}), so that the server sees sums over at least {parties} sites alone"""
MORE_OF_TEXTS = """           and no word is in them
A site that passes the shared key to the server lets it test words that it thinks of, and read the agreed ones.
"""


@handle_errors
def join(
    kit: Annotated[Path, typer.Argument(help="The startup kit: a .zip or a folder.", show_default=False)],
    data: Annotated[Path | None, typer.Option(help="The rows or texts of this site; needed the first time.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-f", help="The site's own folder.", show_default="site-NAME")
    ] = None,
    roster: Annotated[Path | None, typer.Option(help="roster.toml, from the coordinator.")] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="The roster's fingerprint, as heard from other sites by telephone.")
    ] = None,
    shared_key: Annotated[
        Path | None, typer.Option(help="File with the key that all sites share; - for standard input.")
    ] = None,
    rare_columns: Annotated[
        str | None,
        typer.Option(
            help="Columns that too few rows use: refuse the run, or set them to zero in it (refuse, zero).",
            show_default="asked once",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Answer yes to all questions; for scripts.")] = False,
    exchange_folder: Annotated[
        Path | None, typer.Option(help="Answer through this folder, and not over the network.")
    ] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start the node once all is there.")] = True,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    text_column: Annotated[
        str | None,
        typer.Option(
            "--text-column",
            help="The data are texts, and this is their column (.jsonl: field).",
            rich_help_panel="Reading",
            metavar="NAME",
            show_default="text, of .jsonl, .txt and folders of .txt",
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="How texts are written.", rich_help_panel="Reading", show_default="utf-8")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Join a federation: checks the data, shows what will be sent, asks, makes keys, and starts the node."""
    shared = None if shared_key is None else _shared_key(shared_key)
    read = Kit.read(kit)
    place = folder or Path(f"site-{read.site}")
    reading = {"label": label, "transpose": transpose or None, "key": key, "header": header}
    reading |= {"text_column": text_column, "encoding": encoding}
    data, options = _data_of(place, data, {name: value for name, value in reading.items() if value is not None})
    table = None if "text_column" in options else _checked_table(data, ReadOptions(**options))
    if table is None:
        check_texts(data, options)
    site = SiteFolder.wanted(place, read, data, options)
    site.require_idle(shared)
    if rare_columns is not None:
        _require_answer(site, rare_columns)
    may_ask = rare_columns is None and not says_rare_columns(site.path)
    answer = _show_and_ask(site, table, shared or site.shared_key(), yes, may_ask, as_json) or rare_columns
    is_new = not has_policy(site.path)
    site = site.make(read.authority, shared)
    if answer is not None:
        answer_rare_columns(site.path, answer)
    if is_new:
        typer.echo(f"Read {site.path / 'site.toml'} now: it says what may be asked of this site.", err=as_json)
    before = site.roster()
    listed = Listed.read(roster) if roster is not None else _in_kit(read, before, fingerprint)
    if listed is None and fingerprint is not None:
        listed = before  # it is about the one that is pinned
        if listed is None:
            raise ParameterError(
                "--fingerprint is of a roster, and this site has none yet. Give it too: --roster FILE."
            )
    if listed is None and before is None and start and not (yes or as_json):
        listed = _awaited(site)
    if listed is not None:
        _pin(site, listed, fingerprint, yes)
    pinned = site.roster()
    if as_json:
        told = {"site": site.site, "federation": site.federation, "folder": site.path, "card": site.path / "card.toml"}
        told |= {"shared_key": site.shared_key() is not None}
        put_json({**told, "fingerprint": None if pinned is None else pinned.fingerprint})
    if pinned is None:
        if not as_json:
            if yes or not start:
                typer.echo(SEND_CARD.format(site.path / "card.toml"))
            where = "" if folder is None else f" --folder {quote(str(folder))}"
            again = f"partsong federation join {quote(str(kit))}{where} --roster roster.toml"
            typer.echo(f"With the roster that comes back: {again}")
        return
    if pinned != before and is_held(site.lock):
        typer.echo(TAKEN.format(site.site), err=True)
    elif start:
        _start(site, exchange_folder)


def _awaited(site: SiteFolder) -> Listed | None:
    """The roster that comes back for the card; None where nobody waits for it."""
    typer.echo(SEND_CARD.format(site.path / "card.toml"))
    while True:
        try:
            place = typer.prompt(AWAITED, default="", show_default=False)
        except typer.Abort:
            return None
        if not place.strip():
            return None
        try:
            return Listed.read(Path(place.strip()).expanduser())
        except PartsongError as error:
            warn(str(error))


def _in_kit(kit: Kit, pinned: Listed | None, fingerprint: str | None) -> Listed | None:
    """The roster of a kit, where none is pinned, or where its fingerprint was compared; otherwise the pinned one stays,
    for a kit may be older than it.
    """
    if pinned is None or kit.roster is None:
        return kit.roster
    if fingerprint is not None and same_fingerprint(kit.roster.fingerprint, fingerprint):
        return kit.roster
    if kit.roster != pinned:
        warn(OTHER_ROSTER.format(kit.roster.fingerprint, pinned.fingerprint))
    return None


def _data_of(place: Path, data: Path | None, reading: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The data that were given, or those that the site has joined with, and how they are read."""
    if data is None:
        if not (place / "joined.toml").exists():
            raise ParameterError("Give the rows of this site the first time: --data FILE.")
        before = SiteFolder.at(place)
        data, reading = before.data, {**before.reading, **reading}
    return data, reading_of(data, reading)


def _shared_key(place: Path) -> SharedKey:
    if str(place) == "-":
        return SharedKey.read(sys.stdin.readline())
    return SharedKey.read(read_file(place, "Check the path.").decode(errors="replace"))


def _checked_table(data: Path, wanted: ReadOptions) -> Table:
    """What `partsong check` says; data that cannot be factorized are refused."""
    try:
        table = read_table(data, wanted)
    except (DataError, FormatError) as error:
        error.add_note("If these are texts, name their column: --text-column NAME.")
        raise
    findings = inspect(table.X, table.feature_names, table.sample_names)
    for finding in (*findings, *identifier_findings(table.X, table.feature_names)):
        if finding.severity == "error":
            raise DataError(f"{data}: {finding.message} {finding.remedy}")
        typer.echo(f"Note: {visible(finding.message)} {visible(finding.remedy)}", err=True)
    return table


def _require_answer(site: SiteFolder, rare_columns: str) -> None:
    """Refuse what is no answer about rare columns, and another one than site.toml has."""
    if rare_columns not in ("refuse", "zero"):
        raise ParameterError(f"--rare-columns is refuse or zero; got {rare_columns!r}.")
    if says_rare_columns(site.path) and (stated := site.policy().rare_columns) != rare_columns:
        raise ParameterError(f'{site.path / "site.toml"} says rare_columns = "{stated}", which stays. Change it there.')


def _show_and_ask(
    site: SiteFolder, table: Table | None, shared: SharedKey | None, yes: bool, may_ask: bool, as_json: bool
) -> str | None:
    """Show what will leave, and ask; the answer about columns that few rows use, where that was asked."""
    typer.echo(f"Site {site.site!r} of federation {site.federation!r}; server: {site.address}", err=as_json)
    said, has_rare = _leaves(site, table, shared)
    typer.echo(said, err=as_json)
    if shared is None:
        warn(NO_SHARED_KEY_OF_WORDS if table is None else NO_SHARED_KEY)
    if yes:
        return None
    if not typer.confirm("Join on these terms?", err=as_json):
        was = "is as it was before" if site.path.exists() else "was not made"
        raise ParameterError(f"Not joined. The folder {site.path} {was}.")
    if not (has_rare and may_ask):
        return None
    question = "May columns that too few rows use be set to zero in runs? Otherwise such runs are refused."
    return "zero" if typer.confirm(question, default=False, err=as_json) else "refuse"


def _leaves(site: SiteFolder, table: Table | None, shared: SharedKey | None) -> tuple[str, bool]:
    """What leaves, in words, and whether some columns are used by too few rows."""
    policy, terms = site.policy(), terms_in(site.path)
    masked = "it does" if policy.secure_aggregation else "IT DOES NOT, so that the server may see each site's own"
    told: dict[str, Any] = {"masked": masked, "parties": policy.minimum_parties}
    if table is None:
        exposure, has_rare = terms.of_texts(), False
        least = {"documents": policy.words.minimum_documents, "least": policy.words.minimum_parties}
        lines = OF_TEXTS.format(rows=len(texts_at(site.data, site.reading)), **least, **told)
    else:
        rows, columns = map(int, table.X.shape)
        names = table.feature_names or tuple(f"column {number}" for number in range(columns))
        leaving = set(_require_different(names, policy, site.data))
        exposure, has_rare = terms.of_table(table.X, [at for at, name in enumerate(names) if name in leaving])
        lines = OF_ROWS.format(
            rows=rows,
            columns=len(leaving),
            keyed="WITHOUT a key that sites share" if shared is None else "with the key that sites share",
            names=NAMES_TOLD if policy.tell_names else NAMES_KEPT,
            **told,
        )
    place = site.path / "site.toml"
    said = LEAVES.format(
        lines=lines,
        more=MORE_OF_TEXTS if table is None else "",
        exposure=exposure,
        audit=site.path / "state" / "audit.jsonl",
        policy=f"is in {place}: look at it now." if place.exists() else f"will be in {place}, for you to change.",
    )
    return said, has_rare


def _require_different(names: Sequence[str], policy: Policy, data: Path) -> tuple[str, ...]:
    """The columns that leave; refused where two of them are one to other sites, however the two are written."""
    leaving = policy.leaving(names)
    if (same := twins(leaving)) is not None:
        first, second = (list(names).index(leaving[at]) + 1 for at in same)
        raise DataError(
            f"{data}: columns {first} and {second} (both {leaving[same[0]]!r}) {ONE_NAME} Or keep them here: columns "
            "in site.toml."
        )
    return leaving


def _pin(site: SiteFolder, listed: Listed, fingerprint: str | None, yes: bool) -> None:
    is_unseen = site.roster() != listed and fingerprint is None
    if is_unseen and not yes:
        typer.echo(f"\nThe roster names: {', '.join(sorted(listed.keys))}")
        typer.echo("Call two of these sites, at numbers that you know; the coordinator has made this list.")
        typer.echo(f"Its fingerprint is  {listed.fingerprint}")
        if not typer.confirm("Do you know all these sites, and did TWO OF THEM read you this same fingerprint?"):
            raise ParameterError("The roster was not taken. Call other sites, compare, and join again with it.")
        fingerprint = listed.fingerprint
    site.pin(listed, fingerprint)
    if is_unseen and yes:
        warn(
            "The roster was taken, and nobody has compared its fingerprint: whoever sent it could have invented sites. "
            "In scripts give the one that was read to you: --fingerprint."
        )


def _start(site: SiteFolder, exchange_folder: Path | None) -> None:
    way = (
        f"calls {site.address}"
        if exchange_folder is None
        else f"answers what is dropped in {exchange_folder / site.site / 'in'}"
    )
    typer.echo(f"Starting the node of {site.site!r}; it {way}. End with Ctrl-C.", err=True)
    with suppress(KeyboardInterrupt):
        if exchange_folder is None:
            site_process.join(site)
        else:
            answer_requests(exchange_folder, site, lambda word: typer.echo(word, err=True))
    typer.echo(site_process.STOPPED, err=True)
