"""What DATA holds: the rows of one owner, or those of several parties."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from partsong.console.options import IGNORE
from partsong.console.output import warn
from partsong.console.tables import read_table
from partsong.data.conversion import float_type
from partsong.data.observed import known_cells
from partsong.data.party_columns import Columns, parties_with_other_columns, require_any_party
from partsong.data.scan import Finding
from partsong.data.table import Table, header_findings
from partsong.data.validation import identifier_findings, inspect, require_factorizable
from partsong.errors import DataError, FileError, FormatError, PartsongError, with_message
from partsong.io.opening import ReadOptions, resolve_path
from partsong.io.party_folder import (
    LISTING,
    align_columns,
    holds_matrix,
    is_parts_folder,
    read_listing,
    read_part,
    read_parts,
)
from partsong.io.read import reader_for

# ---- gaps -------------------------------------------------------------------------------------------------------
#
# Cells that are not known: blanks and NaN in tables, and what a sparse file does not store.

NOTHING_KNOWN = "No cell is known: all are blank, NaN or not stored. Give at least one number."
LEAVE_THEM_OUT = (
    "`partsong fit` can leave out cells that are not known: --solver game --missing ignore. Of parts: --method game "
    "--missing ignore."
)


def with_known_cells(table: Table, missing: str | None) -> Table:
    """The table as it is, or where unknown cells are ignored as CSR of the known ones, zeros among them."""
    if missing != IGNORE:
        return table

    try:
        return replace(table, X=known_cells(table.X))
    except PartsongError as error:
        raise with_message(error, f"{table.source}: {error}") from error


def require_known(tables: Iterable[Table]) -> None:
    """Refuse tables of known cells that have none."""
    for table in tables:
        if not table.X.nnz:
            raise DataError(f"{table.source}: {NOTHING_KNOWN}")


@contextmanager
def hinting_at_games() -> Iterator[None]:
    """Within this block gaps in the data are told to be no hindrance to a game."""
    try:
        yield
    except (DataError, FormatError) as error:
        if any(words in str(error) for words in ("NaN in data", "look like missing values")):
            error.add_note(LEAVE_THEM_OUT)
        raise


# ---- holdings ---------------------------------------------------------------------------------------------------

ALONE = "all"


@dataclass(frozen=True, slots=True)
class Holdings:
    """Tables by party; a single one called "all" where nobody else takes part."""

    tables: Mapping[str, Table]
    is_federation: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all parties, and their columns."""
        tables = list(self.tables.values())
        return sum(int(table.X.shape[0]) for table in tables), int(tables[0].X.shape[1])

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The names of the columns, if known."""
        return next((table.feature_names for table in self.tables.values() if table.feature_names is not None), None)

    @property
    def dtype(self) -> str:
        """The type to compute in: the most precise that any party needs."""
        return str(max((float_type(table.X.dtype) for table in self.tables.values()), key=lambda kind: kind.itemsize))


def read_holdings(path: Path, wanted: ReadOptions, dtype: str | None = None, missing: str = "refuse") -> Holdings:
    """Read DATA and refuse what cannot be factorized, saying whose it is."""
    place = resolve_path(path)
    is_federation = is_parts_folder(place)
    if place.is_dir() and not is_federation and not holds_matrix(place):
        raise FileError(
            f"{path}: a folder is data if it holds matrix.mtx, and a federation if `partsong split` wrote it "
            f"({LISTING}); this one holds neither. Name the file to read."
        )
    with hinting_at_games():
        if is_federation:
            tables = read_parts(place)
        else:
            tables = {ALONE: read_table(path, wanted)}
            warn_of(tables[ALONE], header_notes(tables[ALONE], wanted))
        tables = {name: with_known_cells(table, missing) for name, table in tables.items()}
        if missing == IGNORE:
            require_known(tables.values())
        for name, table in tables.items():
            require_usable(table, dtype, party=name if is_federation else "")
    warn_of_identifiers(tables.values())
    return Holdings(tables, is_federation)


LATE = "The run that is resumed began without it, and goes on so."


def read_sound_parties(
    path: Path, dtype: str | None, late: Collection[str], missing: str = "refuse"
) -> tuple[Holdings, dict[str, str]]:
    """The parties whose files can be used, and of the others why not; the list of parts itself has to be right.

    Those who are `late` are left out, whatever has become of their files: the run that is resumed began without them.
    """
    folder, faults = resolve_path(path), dict[str, str]()
    tables: dict[str, Table] = {}
    parts = read_listing(folder)
    for part in parts:
        try:
            tables[part.name] = read_part(folder, part)
        except PartsongError as error:
            faults[part.name] = str(error)
    faults |= parties_with_other_columns({name: Columns(t.X.shape[1], t.feature_names) for name, t in tables.items()})
    for name in tables.keys() - faults.keys():
        try:
            tables[name] = with_known_cells(tables[name], missing)
            if missing == IGNORE:
                require_known([tables[name]])
            require_usable(tables[name], dtype, party=name)
        except PartsongError as error:
            faults[name] = str(error)
    faults |= {name: LATE for name in tables if name in late and name not in faults}
    faults = {part.name: faults[part.name] for part in parts if part.name in faults}
    kept = {name: table for name, table in tables.items() if name not in faults}
    require_any_party(kept, faults)
    warn_of_identifiers(kept.values())
    return Holdings(align_columns(kept), is_federation=True), faults


def require_usable(table: Table, dtype: str | None = None, *, party: str = "") -> None:
    """Refuse what cannot be factorized (of a party also zeros alone), naming the file, and its rows and columns."""
    with named_source(table):
        require_factorizable(table.X, table.feature_names, dtype, party=party)


@contextmanager
def named_source(table: Table) -> Iterator[None]:
    """Put the file in front of whatever is wrong with its values, and the names of bad samples and features in it."""
    try:
        yield
    except PartsongError as error:
        hint = "`partsong check` shows all that is wrong with a file."
        raise with_message(error, f"{table.source}: {_with_names(table, error)} {hint}") from error


def _with_names(table: Table, error: PartsongError) -> str:
    """What `check` says of the first bad cells, if it is cells that are bad."""
    if isinstance(error, DataError):
        for finding in inspect(table.X, table.feature_names, table.sample_names):
            if finding.severity == "error" and finding.rows:
                return f"{finding.message} {finding.remedy}"
    return str(error)


def warn_of_identifiers(tables: Iterable[Table]) -> None:
    """Warn once of columns that number the rows: they would be fitted like any other."""
    for table in tables:
        findings = identifier_findings(table.X, table.feature_names)
        if findings:
            warn_of(table, findings)
            return


def header_notes(table: Table, wanted: ReadOptions) -> tuple[Finding, ...]:
    """A note where the first line of a text file was taken for data, although it may well name the columns."""
    reader = reader_for(Path(table.source))
    if wanted.header is not None or reader is None or "header" not in reader.takes:
        return ()
    turned = wanted.transpose
    return header_findings(table.X.T if turned else table.X, table.sample_names if turned else table.feature_names)


def warn_of(table: Table, findings: Iterable[Finding]) -> None:
    """Findings as warnings about a file."""
    for finding in findings:
        warn(f"{table.source}: {finding.message} {finding.remedy}")
