"""Commands of a site: `partsong federation join`, and what it asks and shows before a site takes part."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.console.options import AsJson, Header, Key, Label, OptionalPath, OptionalText, Transpose, examples
from partsong.console.output import guarded, put_json, visible, warn
from partsong.errors import DataError, FileError, FormatError, ParameterError, PartsongError
from partsong.io.opening import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partsong.data.table import Table
    from partsong.federation.policy import Policy
    from partsong.federation.setup.credentials import Kit, Listed, SharedKey
    from partsong.federation.setup.joining import Joining
    from partsong.federation.setup.site_folder import SiteFolder


# ---- federation secret ------------------------------------------------------------------------------------------
#
# `partsong federation secret`: what sites share, and the coordinator does not know.

SECRET = examples("partsong federation secret -o sites.key")


@guarded
def secret(
    output: Annotated[
        OptionalPath, typer.Option("--output", "-o", help="A new file for it, for its owner alone.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key that all sites share and the server does not know: names of columns are hashed with it.

    One site makes it, and tells the others by telephone or by a letter that the coordinator does not read.
    """
    from partsong.federation.setup.credentials import SharedKey, write

    key = SharedKey.made()
    if output is not None:
        if output.exists():
            raise FileError(f"{output}: there is something already. Name a new file.")
        write(output, key.text + "\n", private=True)
    if as_json:
        put_json({"file": output} if output is not None else {"shared_key": key.text})
        return
    typer.echo(key.text if output is None else f"The key is in {output}.")
    typer.echo("For the sites alone, NOT for the coordinator: partsong federation join KIT --shared-key FILE", err=True)


# ---- federation texts -------------------------------------------------------------------------------------------
#
# `partsong federation join` with texts: how they are read, what is checked, and what will leave.

OF_TABLES = ("label", "transpose", "key", "header")
NO_SHARED_KEY_OF_WORDS = (
    "This site shares no key with the others, and will refuse every run over its texts: without one, whoever has a "
    "list of words could test them. One site makes a key (partsong federation secret), tells the others by a way that "
    "does not lead through the server, and all join with --shared-key."
)
TEXTS_LEAVES = """What leaves this site, and what does not:
  never    texts, weights of texts (W), names of files; words to the server
  a run    in masked sums over all sites, under the key that sites share: of which hashes it has words that are in as
           many of its texts as the experiment asks for ({documents} at least, by site.toml); then words at enough sites
           ({parties} at least) themselves, which all sites read and the server cannot; then in how many of its texts
           each of these is, and that there are {texts} texts; and the number type
  a round  what the recipe sends: sums or factors of k × agreed words, of all texts; masked where site.toml says so
           ({masked}), so that the server sees sums over at least {fewest} sites alone
  always   names of arrays, refusals as codes, and counts; the reasons stay here, and no word is in them
A site that passes the shared key to the server lets it test words that it thinks of, and read the agreed ones.
What can be computed from it:
{exposure}
Every message is written to {audit} before it leaves.
{policy}"""


def reading_of(data: Path, reading: dict[str, Any]) -> dict[str, Any]:
    """How the data are read: as texts where a column of them is named, or where they can be nothing else."""
    from partsong.federation.setup.site_data import USUAL_COLUMN, are_texts

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
    from partsong.federation.setup.site_data import texts_at

    texts = texts_at(data, reading)
    empty = sum(not text.strip() for text in texts)
    if empty:
        typer.echo(f"Note: {empty} of {len(texts)} texts are empty. They are kept, with weights of zero.", err=True)


def leaves_of_texts(wished: Joining) -> str:
    """For people, before they join."""
    from partsong.federation.setup.site_data import texts_at

    site, policy = wished.site, wished.policy()
    return TEXTS_LEAVES.format(
        documents=policy.words.minimum_documents,
        parties=policy.words.minimum_parties,
        texts=len(texts_at(site.data, dict(site.reading))),
        masked="it does" if policy.masked else "IT DOES NOT, so that the server may see each site's own",
        fewest=policy.minimum_parties,
        exposure=wished.terms().of_texts(),
        audit=site.path / "state" / "audit.jsonl",
        policy=where_policy_is(wished),
    )


def where_policy_is(wished: Joining) -> str:
    """Or will be: nothing is written before they have joined."""
    place = wished.site.path / "site.toml"
    is_there = f"is in {place}: look at it now."
    return f"What may be asked of this site {is_there if place.exists() else f'will be in {place}, for you to change.'}"


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
    "the hashes that it is sent. One site makes a key (partsong federation secret), tells the others by a way that "
    "does not lead through the server, and all join with --shared-key."
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
  never    rows, weights of rows (W), names of rows; names of columns to the server
  a run    a hash of the name of each column that site.toml lets out ({columns} now), {keyed}; the number type;
           {names} (tell_names)
  a round  what the recipe sends: sums or factors of k × {columns} numbers, of all {rows} rows; masked where site.toml
           says so ({masked}), so that the server sees sums over at least {parties} sites alone
  always   names of arrays, refusals as codes, and counts; the reasons stay here
What can be computed from it:
{exposure}
Every message is written to {audit} before it leaves.
{policy}"""


@guarded
def join(
    kit: Annotated[Path, typer.Argument(help="The startup kit: a .zip or a folder.", show_default=False)],
    data: Annotated[
        OptionalPath, typer.Option(help="The rows or texts of this site; needed the first time.", show_default=False)
    ] = None,
    folder: Annotated[
        OptionalPath, typer.Option("--folder", "-f", help="The site's own folder.", show_default="site-NAME")
    ] = None,
    roster: Annotated[OptionalPath, typer.Option(help="roster.toml, from the coordinator.", show_default=False)] = None,
    fingerprint: Annotated[
        OptionalText,
        typer.Option(help="The roster's fingerprint, as heard from other sites by telephone.", show_default=False),
    ] = None,
    shared_key: Annotated[
        OptionalPath,
        typer.Option(help="File with the key that all sites share; - for standard input.", show_default=False),
    ] = None,
    rare_columns: Annotated[
        OptionalText,
        typer.Option(
            help="Columns that too few rows use: refuse the run, or set them to zero in it (refuse, zero).",
            show_default="asked once",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Answer yes to all questions; for scripts.")] = False,
    drop: Annotated[
        OptionalPath,
        typer.Option(help="Answer through this folder, and not over the network.", show_default=False),
    ] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start the node once all is there.")] = True,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    text_column: Annotated[
        OptionalText,
        typer.Option(
            "--text-column",
            help="The data are texts, and this is their column (.jsonl: field).",
            rich_help_panel="Reading",
            metavar="NAME",
            show_default="text, of .jsonl, .txt and folders of .txt",
        ),
    ] = None,
    encoding: Annotated[
        OptionalText,
        typer.Option(help="How texts are written.", rich_help_panel="Reading", show_default="utf-8"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Join a federation: checks the data, shows what will be sent, asks, makes keys, and starts the node."""
    from partsong.federation.locks import is_held
    from partsong.federation.setup.credentials import Kit, Listed
    from partsong.federation.setup.joining import Joining

    shared = None if shared_key is None else _shared_key(shared_key)
    with tempfile.TemporaryDirectory() as scratch:
        read = Kit.read(kit, Path(scratch))
    place = folder or Path(f"site-{read.site}")
    reading = {"label": label, "transpose": transpose or None, "key": key, "header": header}
    reading |= {"text_column": text_column, "encoding": encoding}
    options = {name: value for name, value in reading.items() if value is not None}
    wished = Joining(_wanted(place, read, data, options, as_json), read, shared)
    wished.shared_key()  # refused where the site has lost it
    wished = _show_and_ask(_with_answer(wished, rare_columns), yes, as_json)
    site = _agreed(wished, as_json)
    before = site.roster()
    listed = Listed.read(roster) if roster is not None else _in_kit(read, before, fingerprint)
    if listed is None and before is None and start and not (yes or as_json):
        listed = _awaited(site)
    if listed is not None:
        _pin(site, listed, fingerprint, yes)
    pinned = site.roster()
    if listed is None and fingerprint is not None:
        _compare(pinned, fingerprint)
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
        _start(site, drop)


def _awaited(site: SiteFolder) -> Listed | None:
    """The roster that comes back for the card; None where nobody waits for it."""
    from partsong.federation.setup.credentials import Listed

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
    from partsong.federation.setup.credentials import same_fingerprint

    if pinned is None or kit.roster is None:
        return kit.roster
    if fingerprint is not None and same_fingerprint(kit.roster.fingerprint, fingerprint):
        return kit.roster
    if kit.roster != pinned:
        warn(OTHER_ROSTER.format(kit.roster.fingerprint, pinned.fingerprint))
    return None


def _wanted(place: Path, kit: Kit, data: Path | None, reading: dict[str, Any], as_json: bool) -> SiteFolder:
    """The site's folder as it would be, with data that were checked."""
    from partsong.federation.setup.site_folder import SiteFolder

    if data is None:
        if not (place / "joined.toml").exists():
            raise ParameterError("Give the rows of this site the first time: --data FILE.")
        before = SiteFolder.at(place)
        data, reading = before.data, {**before.reading, **reading}
    reading = reading_of(data, reading)
    if "text_column" in reading:
        check_texts(data, reading)
    else:
        _check(data, Wanted(**reading), as_json)
    return SiteFolder.wanted(place, kit, data, reading)


def _agreed(wished: Joining, as_json: bool) -> SiteFolder:
    """The site's folder, as it is now."""
    from partsong.federation.setup.site_policy import has_policy

    is_new = not has_policy(wished.site.path)
    site = wished.agreed()
    if is_new:
        typer.echo(f"Read {site.path / 'site.toml'} now: it says what may be asked of this site.", err=as_json)
    return site


def _shared_key(place: Path) -> SharedKey:
    from partsong.federation.setup.credentials import SharedKey

    try:
        return SharedKey.read(sys.stdin.readline() if str(place) == "-" else place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"--shared-key {place} cannot be read: {error}. Check the path.") from error


def _check(data: Path, wanted: Wanted, as_json: bool) -> Table:
    """What `partsong check` says; data that cannot be factorized are refused."""
    from partsong.console.tables import read_table
    from partsong.data.validation import identifier_findings, inspect

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


def _with_answer(wished: Joining, rare_columns: str | None) -> Joining:
    """With what was said of rare columns; refused where site.toml says something else."""
    if rare_columns is None:
        return wished
    if rare_columns not in ("refuse", "zero"):
        raise ParameterError(f"--rare-columns is refuse or zero; got {rare_columns!r}.")
    if not wished.asks_of_rare_columns and wished.policy().rare_columns != rare_columns:
        raise ParameterError(
            f'{wished.site.path / "site.toml"} says rare_columns = "{wished.policy().rare_columns}", which stays. '
            "Change it there."
        )
    return replace(wished, rare_columns=rare_columns)


def _show_and_ask(wished: Joining, yes: bool, as_json: bool) -> Joining:
    """Show what will leave, and ask; the same with the answer about columns that few rows use."""
    site, has_rare = wished.site, False
    typer.echo(f"Site {site.site!r} of federation {site.federation!r}; server: {site.address}", err=as_json)
    if site.holds_texts:
        typer.echo(leaves_of_texts(wished), err=as_json)
    else:
        said, has_rare = _leaves(wished)
        typer.echo(said, err=as_json)
    if wished.shared_key() is None:
        warn(NO_SHARED_KEY_OF_WORDS if site.holds_texts else NO_SHARED_KEY)
    if not yes and not typer.confirm("Join on these terms?", err=as_json):
        was = "is as it was before" if site.path.exists() else "was not made"
        raise ParameterError(f"Not joined. The folder {site.path} {was}.")
    if has_rare and not yes and wished.rare_columns is None and wished.asks_of_rare_columns:
        question = "May columns that too few rows use be set to zero in runs? Otherwise such runs are refused."
        answer = "zero" if typer.confirm(question, default=False, err=as_json) else "refuse"
        return replace(wished, rare_columns=answer)
    return wished


def _leaves(wished: Joining) -> tuple[str, bool]:
    """What leaves, in words, and whether some columns are used by too few rows."""
    from partsong.io.read import read_wanted

    site = wished.site
    table = read_wanted(site.data, Wanted(**site.reading))
    policy, n_columns = wished.policy(), int(table.X.shape[1])
    leaving, names = n_columns, tuple(f"column {number}" for number in range(n_columns))
    if table.feature_names is not None:
        leaving, names = _require_different(table.feature_names, policy, site.data), tuple(table.feature_names)
    masked = "it does" if policy.masked else "IT DOES NOT, so that the server may see each site's own"
    may_leave = set(policy.leaving(names))
    exposure, has_rare = wished.terms().of_table(table.X, [at for at, name in enumerate(names) if name in may_leave])
    said = LEAVES.format(
        exposure=exposure,
        rows=int(table.X.shape[0]),
        columns=leaving,
        keyed="with the key that sites share" if wished.shared_key() else "WITHOUT a key that sites share",
        names=NAMES_TOLD if policy.tell_names else NAMES_KEPT,
        masked=masked,
        parties=policy.minimum_parties,
        audit=site.path / "state" / "audit.jsonl",
        policy=where_policy_is(wished),
    )
    return said, has_rare


def _require_different(names: Sequence[str], policy: Policy, data: Path) -> int:
    """How many columns leave; refused where two of them are one to other sites, however the two are written."""
    from partsong.federation.columns import ONE_NAME, twins

    leaving = policy.leaving(names)
    if (same := twins(leaving)) is not None:
        first, second = (list(names).index(leaving[at]) + 1 for at in same)
        raise DataError(
            f"{data}: columns {first} and {second} (both {leaving[same[0]]!r}) {ONE_NAME} Or keep them here: columns "
            "in site.toml."
        )
    return len(leaving)


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


def _compare(pinned: Listed | None, fingerprint: str) -> None:
    """A fingerprint without a roster is about the one that is pinned."""
    from partsong.federation.setup.credentials import same_fingerprint

    if pinned is None:
        raise ParameterError("--fingerprint is of a roster, and this site has none yet. Give it too: --roster FILE.")
    if not same_fingerprint(pinned.fingerprint, fingerprint):
        raise ParameterError(
            f"The roster that this site has pinned has the fingerprint {pinned.fingerprint}, and not the one that was "
            "given. If parties have changed, give the new roster as well (--roster); otherwise call the other sites."
        )


def _start(site: SiteFolder, drop: Path | None) -> None:
    from partsong.federation.flower import site_process as supernode
    from partsong.federation.flower.site_process import STOPPED
    from partsong.federation.transports.files import answer_in

    way = f"calls {site.address}" if drop is None else f"answers what is dropped in {drop / site.site / 'in'}"
    typer.echo(f"Starting the node of {site.site!r}; it {way}. End with Ctrl-C.", err=True)
    with contextlib.suppress(KeyboardInterrupt):
        if drop is None:
            supernode.join(site)
        else:
            answer_in(drop, site, lambda word: typer.echo(word, err=True))
    typer.echo(STOPPED, err=True)
