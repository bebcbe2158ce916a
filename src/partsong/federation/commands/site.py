"""Commands of a site: `partsong federation join` with its checks and questions, and `shared-key`."""

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
# `partsong federation shared-key`: a key that the sites share and the coordinator does not know.

SHARED_KEY = examples("partsong federation shared-key -o sites.key")
MAKE_KEY = (
    "One site makes a key (partsong federation shared-key) and gives it to the other sites out-of-band, not through "
    "the server. Then all sites join with --shared-key."
)


@handle_errors
def shared_key(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new file for the key, readable by its owner only.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key that the sites share and the server does not know; column names are hashed with it.

    One site makes it and gives it to the others out-of-band, for example by phone, never through the coordinator.
    """
    key = SharedKey.made()
    if output is not None:
        if output.exists():
            raise FileError(f"{output} exists already. Pass a new file name.")
        write_text(output, key.text + "\n", private=True)
    result: dict[str, Any] = {"shared_key": key.text} if output is None else {"file": output}
    put_result(result, (key.text if output is None else f"The key is in {output}.",), as_json)
    typer.echo("For the sites only, NOT for the coordinator: partsong federation join KIT --shared-key FILE", err=True)


# ---- federation texts -------------------------------------------------------------------------------------------
#
# `partsong federation join` with texts: reading, checks, and what will leave.

OF_TABLES = ("label", "transpose", "key", "header")
NO_SHARED_KEY_OF_WORDS = (
    "This site has no shared key and will refuse every run over its texts: without the key, anyone with a list of "
    f"words could test which of them it has. {MAKE_KEY}"
)


def reading_of(data: Path, reading: dict[str, Any]) -> dict[str, Any]:
    """Return the reading options: texts if a text column is named or the format holds only texts."""
    if "text_column" not in reading and not are_texts(data):
        if "encoding" in reading:
            raise ParameterError("--encoding is for texts. Pass their column too: --text-column text.")
        return reading
    for name in OF_TABLES:
        if name in reading:
            raise ParameterError(f"--{name} is for tables, but the data are texts. Remove it.")
    return {"text_column": USUAL_COLUMN, **reading}


def check_texts(data: Path, reading: dict[str, Any]) -> None:
    """Read the texts, and note how many are empty."""
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
NAMES_SENT = "to a site of the roster that lacks some of them: their names, encrypted so that only that site reads them"
NAMES_KEPT = "nothing to other sites, not even the names of columns that one of them lacks"
NO_SHARED_KEY = (
    "This site has no shared key: a server with a list of likely column names can test them against the hashes that "
    f"it receives. {MAKE_KEY}"
)
OTHER_ROSTER = (
    "The roster in this kit ({}) differs from the one that this site has pinned ({}). The pinned roster stays. If the "
    "parties have changed since, pass the new roster: --roster roster.toml. If the kit has the new one, pass "
    "--fingerprint with the fingerprint that other sites read to you."
)
SEND_CARD = "\nSend {} to the coordinator over an authenticated channel."
AWAITED = "Path of the roster that the coordinator sends back (Enter: join again later)"
TAKEN = "The roster was saved. The node of {!r} is running and uses it from the next request on."
LEAVES = """What leaves this site and what does not:
{lines}
  always   names of arrays, refusals as codes, and counts; the reasons stay here
{more}What can be computed from what leaves:
{exposure}
Every message is recorded in {audit} before it leaves.
The rules for runs at this site {policy}"""
OF_ROWS = """  never    rows, weights of rows (W), row names; column names to the server
  per run  a hash of the name of each column that site.toml releases ({columns} now), {keyed}; the number type;
           {names} (tell_names)
  per round  what the method sends: sums or factors of k × {columns} numbers over all {rows} rows; a private moment
           sends {products} noisy sums of products of columns, once. Secure aggregation
           {masked}: the server sees {visible}"""
OF_TEXTS = """  never    texts, weights of texts (W), file names; words to the server
  per run  in secure sums over all sites, under the shared key: hashes of the words that occur in as many of its texts
           as the experiment asks for (at least {documents}, by site.toml); then the words that enough sites have (at
           least {least}), which all sites can read and the server cannot; then the number of texts with each of these
           words; the number of texts, {rows}; and the number type
  per round  what the method sends: sums or factors of k × agreed words over all texts. Secure aggregation
           {masked}: the server sees {visible}"""
MORE_OF_TEXTS = """           and contain no word
A site that gives the shared key to the server lets it test guessed words and read the agreed words.
"""


@handle_errors
def join(
    kit: Annotated[Path, typer.Argument(help="The startup kit: a .zip or a folder.", show_default=False)],
    data: Annotated[Path | None, typer.Option(help="The rows or texts of this site. Required the first time.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-f", help="The site's own folder.", show_default="site-NAME")
    ] = None,
    roster: Annotated[Path | None, typer.Option(help="roster.toml from the coordinator.")] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="The roster's fingerprint, confirmed by other sites out-of-band (for example, by phone)."),
    ] = None,
    shared_key: Annotated[
        Path | None, typer.Option(help="File with the key that all sites share; - reads standard input.")
    ] = None,
    rare_columns: Annotated[
        str | None,
        typer.Option(
            help="For columns with values in too few rows: refuse the run, or set them to zero (refuse, zero).",
            show_default="asked once",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Answer yes to all questions (for scripts).")] = False,
    exchange_folder: Annotated[
        Path | None, typer.Option(help="Exchange messages through this folder instead of the network.")
    ] = None,
    start: Annotated[
        bool, typer.Option("--start/--no-start", help="Start the node when everything is in place.")
    ] = True,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    text_column: Annotated[
        str | None,
        typer.Option(
            "--text-column",
            help="The data are texts; column (.jsonl: field) that holds them.",
            rich_help_panel="Reading",
            metavar="NAME",
            show_default="text, for .jsonl, .txt and folders of .txt",
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of texts.", rich_help_panel="Reading", show_default="utf-8")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Join a federation: check the data, show what will be sent, ask, make keys, and start the node."""
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
        typer.echo(f"Read {site.path / 'site.toml'} now: it sets the rules for runs at this site.", err=as_json)
    before = site.roster()
    listed = Listed.read(roster) if roster is not None else _in_kit(read, before, fingerprint)
    if listed is None and fingerprint is not None:
        listed = before  # the fingerprint of the pinned roster
        if listed is None:
            raise ParameterError("--fingerprint needs a roster, and this site has none yet. Pass --roster FILE too.")
    if listed is None and before is None and start and not (yes or as_json):
        listed = _awaited(site)
    if listed is not None:
        _pin(site, listed, fingerprint, yes)
    pinned = site.roster()
    if as_json:
        result = {
            "site": site.site,
            "federation": site.federation,
            "folder": site.path,
            "card": site.path / "card.toml",
        }
        result |= {"shared_key": site.shared_key() is not None}
        put_json({**result, "fingerprint": None if pinned is None else pinned.fingerprint})
    if pinned is None:
        if not as_json:
            if yes or not start:
                typer.echo(SEND_CARD.format(site.path / "card.toml"))
            where = "" if folder is None else f" --folder {quote(str(folder))}"
            again = f"partsong federation join {quote(str(kit))}{where} --roster roster.toml"
            typer.echo(f"When the roster arrives, run: {again}")
        return
    if pinned != before and is_held(site.lock):
        typer.echo(TAKEN.format(site.site), err=True)
    elif start:
        _start(site, exchange_folder)


def _awaited(site: SiteFolder) -> Listed | None:
    """Ask for the roster that the coordinator sends back; None to join again later."""
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
    """Return the kit's roster if none is pinned or its fingerprint was compared.

    Otherwise the pinned roster stays, because a kit may be older.
    """
    if pinned is None or kit.roster is None:
        return kit.roster
    if fingerprint is not None and same_fingerprint(kit.roster.fingerprint, fingerprint):
        return kit.roster
    if kit.roster != pinned:
        warn(OTHER_ROSTER.format(kit.roster.fingerprint, pinned.fingerprint))
    return None


def _data_of(place: Path, data: Path | None, reading: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the data, by default those that the site joined with, and their reading options."""
    if data is None:
        if not (place / "joined.toml").exists():
            raise ParameterError("This site has no data yet. Pass --data FILE.")
        before = SiteFolder.at(place)
        data, reading = before.data, {**before.reading, **reading}
    return data, reading_of(data, reading)


def _shared_key(place: Path) -> SharedKey:
    if str(place) == "-":
        return SharedKey.read(sys.stdin.readline())
    return SharedKey.read(read_file(place, "Check the path.").decode(errors="replace"))


def _checked_table(data: Path, wanted: ReadOptions) -> Table:
    """Read the table, print the findings of `partsong check`, and refuse data that cannot be factorized."""
    try:
        table = read_table(data, wanted)
    except (DataError, FormatError) as error:
        error.add_note("If the data are texts, pass their column: --text-column NAME.")
        raise
    findings = inspect(table.X, table.feature_names, table.sample_names)
    for finding in (*findings, *identifier_findings(table.X, table.feature_names)):
        if finding.severity == "error":
            raise DataError(f"{data}: {finding.message} {finding.remedy}")
        typer.echo(f"Note: {visible(finding.message)} {visible(finding.remedy)}", err=True)
    return table


def _require_answer(site: SiteFolder, rare_columns: str) -> None:
    """Refuse an invalid --rare-columns, or one that differs from site.toml."""
    if rare_columns not in ("refuse", "zero"):
        raise ParameterError(f"--rare-columns must be refuse or zero; got {rare_columns!r}.")
    if says_rare_columns(site.path) and (stated := site.policy().rare_columns) != rare_columns:
        raise ParameterError(
            f'{site.path / "site.toml"} says rare_columns = "{stated}". Remove --rare-columns, or change site.toml.'
        )


def _show_and_ask(
    site: SiteFolder, table: Table | None, shared: SharedKey | None, yes: bool, may_ask: bool, as_json: bool
) -> str | None:
    """Show what will leave, and ask. Return the answer about rare columns, if that was asked."""
    typer.echo(f"Site {site.site!r} of federation {site.federation!r}; server: {site.address}", err=as_json)
    terms, has_rare = _describe_disclosure(site, table, shared)
    typer.echo(terms, err=as_json)
    if shared is None:
        warn(NO_SHARED_KEY_OF_WORDS if table is None else NO_SHARED_KEY)
    if yes:
        return None
    if not typer.confirm("Join on these terms?", err=as_json):
        was = "is unchanged" if site.path.exists() else "was not created"
        raise ParameterError(f"Not joined. The folder {site.path} {was}.")
    if not (has_rare and may_ask):
        return None
    question = "May runs set columns with values in too few rows to zero? Otherwise this site refuses such runs."
    return "zero" if typer.confirm(question, default=False, err=as_json) else "refuse"


def _describe_disclosure(site: SiteFolder, table: Table | None, shared: SharedKey | None) -> tuple[str, bool]:
    """Describe what leaves, and return whether some columns have values in too few rows."""
    policy, terms = site.policy(), terms_in(site.path)
    if policy.secure_aggregation:
        visible_sums = {"masked": "on", "visible": f"sums over at least {policy.minimum_parties} sites only"}
    else:
        visible_sums = {"masked": "OFF", "visible": "what this site sends"}
    if table is None:
        exposure, has_rare = terms.of_texts(), False
        least = {"documents": policy.words.minimum_documents, "least": policy.words.minimum_parties}
        lines = OF_TEXTS.format(rows=len(texts_at(site.data, site.reading)), **least, **visible_sums)
    else:
        rows, columns = map(int, table.X.shape)
        names = table.feature_names or tuple(f"column {number}" for number in range(columns))
        leaving = set(_require_different(names, policy, site.data))
        exposure, has_rare = terms.of_table(table.X, [at for at, name in enumerate(names) if name in leaving])
        lines = OF_ROWS.format(
            rows=rows,
            columns=len(leaving),
            products=len(leaving) * (len(leaving) + 1) // 2,
            keyed="WITHOUT a shared key" if shared is None else "under the shared key",
            names=NAMES_SENT if policy.tell_names else NAMES_KEPT,
            **visible_sums,
        )
    place = site.path / "site.toml"
    text = LEAVES.format(
        lines=lines,
        more=MORE_OF_TEXTS if table is None else "",
        exposure=exposure,
        audit=site.path / "state" / "audit.jsonl",
        policy=f"are in {place}: read it now." if place.exists() else f"will be in {place}, for you to edit.",
    )
    return text, has_rare


def _require_different(names: Sequence[str], policy: Policy, data: Path) -> tuple[str, ...]:
    """Return the columns that leave; refuse two names that other sites cannot tell apart."""
    leaving = policy.leaving(names)
    if (same := twins(leaving)) is not None:
        first, second = (list(names).index(leaving[at]) + 1 for at in same)
        raise DataError(
            f"{data}: columns {first} and {second} (both {leaving[same[0]]!r}) {ONE_NAME} Or keep them at this site "
            "(columns in site.toml)."
        )
    return leaving


def _pin(site: SiteFolder, listed: Listed, fingerprint: str | None, yes: bool) -> None:
    is_unseen = site.roster() != listed and fingerprint is None
    if is_unseen and not yes:
        typer.echo(f"\nThe roster names: {', '.join(sorted(listed.keys))}")
        typer.echo("Call two of these sites at numbers that you already know: the coordinator made this list.")
        typer.echo(f"Its fingerprint is  {listed.fingerprint}")
        if not typer.confirm("Do you know all these sites, and did TWO OF THEM read you this fingerprint?"):
            raise ParameterError("The roster was not saved. Call other sites, compare the fingerprint, and join again.")
        fingerprint = listed.fingerprint
    site.pin(listed, fingerprint)
    if is_unseen and yes:
        warn(
            "The roster was saved, but nobody compared its fingerprint: its sender may have invented sites. In "
            "scripts, pass the fingerprint that was read to you: --fingerprint."
        )


def _start(site: SiteFolder, exchange_folder: Path | None) -> None:
    way = (
        f"calls {site.address}"
        if exchange_folder is None
        else f"answers requests in {exchange_folder / site.site / 'in'}"
    )
    typer.echo(f"Starting the node of {site.site!r}; it {way}. Stop it with Ctrl-C.", err=True)
    with suppress(KeyboardInterrupt):
        if exchange_folder is None:
            site_process.join(site)
        else:
            answer_requests(exchange_folder, site, lambda word: typer.echo(word, err=True))
    typer.echo(site_process.STOPPED, err=True)
