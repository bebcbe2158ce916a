"""Read and check DATA: one table, or the parts of several parties."""

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
# Unknown cells: blanks and NaN in tables, and cells that a sparse file does not store.

NO_KNOWN_CELL = "no known cell: all cells are blank, NaN or not stored. Provide at least one number."
MISSING_HINT = (
    "`partsong fit` can ignore unknown cells: use --solver game --missing ignore, or --method game --missing ignore "
    "for a folder of parts."
)


def with_known_cells(table: Table, missing: str | None) -> Table:
    """Return the table; if unknown cells are ignored, as a CSR matrix of the known cells, zeros included."""
    if missing != IGNORE:
        return table

    try:
        return replace(table, X=known_cells(table.X))
    except PartsongError as error:
        raise with_message(error, f"{table.source}: {error}") from error


def require_known(tables: Iterable[Table]) -> None:
    """Refuse tables without a known cell."""
    for table in tables:
        if not table.X.nnz:
            raise DataError(f"{table.source}: {NO_KNOWN_CELL}")


@contextmanager
def suggest_missing_ignore() -> Iterator[None]:
    """Add a note on `--missing ignore` to errors about missing values."""
    try:
        yield
    except (DataError, FormatError) as error:
        if any(words in str(error) for words in ("NaN in data", "look like missing values")):
            error.add_note(MISSING_HINT)
        raise


# ---- holdings ---------------------------------------------------------------------------------------------------

ALONE = "all"


@dataclass(frozen=True, slots=True)
class PartyTables:
    """The table of each party; of data in one place, a single table called "all"."""

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
        """The floating-point type to compute in: the most precise that any party needs."""
        return str(max((float_type(table.X.dtype) for table in self.tables.values()), key=lambda kind: kind.itemsize))


def read_data(path: Path, wanted: ReadOptions, dtype: str | None = None, missing: str = "refuse") -> PartyTables:
    """Read DATA, and refuse what cannot be factorized, naming the party."""
    place = resolve_path(path)
    is_federation = is_parts_folder(place)
    if place.is_dir() and not is_federation and not holds_matrix(place):
        raise FileError(
            f"{path}: the folder holds neither matrix.mtx nor the parts of a federation ({LISTING}, written by "
            "`partsong split`). Pass the file to read."
        )
    with suggest_missing_ignore():
        if is_federation:
            tables = read_parts(place)
        else:
            tables = {ALONE: read_table(path, wanted)}
            warn_about(tables[ALONE], header_notes(tables[ALONE], wanted))
        tables = {name: with_known_cells(table, missing) for name, table in tables.items()}
        if missing == IGNORE:
            require_known(tables.values())
        for name, table in tables.items():
            require_usable(table, dtype, party=name if is_federation else "")
    warn_about_identifiers(tables.values())
    return PartyTables(tables, is_federation)


LATE = "The run being resumed started without it and continues without it."


def read_valid_parties(
    path: Path, dtype: str | None, late: Collection[str], missing: str = "refuse"
) -> tuple[PartyTables, dict[str, str]]:
    """Read the parties whose files are usable, and return why the others are not. The list of parts must be valid.

    Parties in `late` are left out even if their files are usable now: the run being resumed started without them.
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
    warn_about_identifiers(kept.values())
    return PartyTables(align_columns(kept), is_federation=True), faults


def require_usable(table: Table, dtype: str | None = None, *, party: str = "") -> None:
    """Refuse what cannot be factorized (for a party, also a table of zeros), naming file, rows and columns."""
    with named_source(table):
        require_factorizable(table.X, table.feature_names, dtype, party=party)


@contextmanager
def named_source(table: Table) -> Iterator[None]:
    """Name the file, and the bad samples and features, in errors about its values."""
    try:
        yield
    except PartsongError as error:
        hint = "Run `partsong check` to see all problems of a file."
        raise with_message(error, f"{table.source}: {_with_names(table, error)} {hint}") from error


def _with_names(table: Table, error: PartsongError) -> str:
    """Return what `check` says about the first bad cells, if the error is about cells."""
    if isinstance(error, DataError):
        for finding in inspect(table.X, table.feature_names, table.sample_names):
            if finding.severity == "error" and finding.rows:
                return f"{finding.message} {finding.remedy}"
    return str(error)


def warn_about_identifiers(tables: Iterable[Table]) -> None:
    """Warn once about columns that number the rows; they would be fitted like any other."""
    for table in tables:
        findings = identifier_findings(table.X, table.feature_names)
        if findings:
            warn_about(table, findings)
            return


def header_notes(table: Table, wanted: ReadOptions) -> tuple[Finding, ...]:
    """Return a note if the first line of a text file was read as data but may hold column names."""
    reader = reader_for(Path(table.source))
    if wanted.header is not None or reader is None or "header" not in reader.takes:
        return ()
    turned = wanted.transpose
    return header_findings(table.X.T if turned else table.X, table.sample_names if turned else table.feature_names)


def warn_about(table: Table, findings: Iterable[Finding]) -> None:
    """Print findings as warnings about a file."""
    for finding in findings:
        warn(f"{table.source}: {finding.message} {finding.remedy}")
