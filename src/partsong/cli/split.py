"""`partsong split`: one table to the parts of several parties, for simulations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partsong.cli.choices import IGNORE, MISSING, one_of, positive
from partsong.cli.gaps import hinting_at_games, with_known_cells
from partsong.cli.guard import guarded
from partsong.cli.holdings import (
    header_notes,
    read_table,
    require_meaningful,
    require_usable,
    warn_of,
    warn_of_identifiers,
)
from partsong.cli.options import (
    AsJson,
    Data,
    Header,
    Key,
    Label,
    OptionalFloat,
    OptionalInt,
    OptionalText,
    Transpose,
    examples,
)
from partsong.cli.outputs import put_json, visible
from partsong.cli.parts_folder import require_free, write_parts
from partsong.errors import ParameterError
from partsong.io.opening import Wanted, place_of

if TYPE_CHECKING:
    import numpy as np

    from partsong.data.table import Table

CONCENTRATION = 3.0
EPILOG = examples(
    "partsong split counts.csv --parties 5 -o parts/",
    "partsong split cells.h5ad --parties 8 --by cell_type --concentration 1 --seed 1 -o parts/",
    "partsong split counts.csv --parties 5 --sizes 0.5 -o parts/",
)


@guarded
def split(
    data: Data,
    parties: Annotated[int, typer.Option("--parties", "-p", min=1, help="Number of parties.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; it must be new or empty.", show_default=False)
    ],
    by: Annotated[
        OptionalText,
        typer.Option(help="Name of the labels (column or array): each party gets its own mixture of them."),
    ] = None,
    concentration: Annotated[
        OptionalFloat,
        typer.Option(
            help="With --by: α in Dirichlet(α · label frequencies), from which each party's mixture is drawn; small "
            "for few labels per party, large for the same mixture everywhere.",
            callback=positive,
            show_default=str(CONCENTRATION),
        ),
    ] = None,
    sizes: Annotated[
        OptionalFloat,
        typer.Option(
            help="Random shares of unequal size: α in Dirichlet(α, …, α), from which the parties' sizes are drawn; 1 "
            "or less for a few large parties and many small ones, large for nearly equal ones. Each has at least one "
            "row.",
            callback=positive,
            show_default=False,
        ),
    ] = None,
    iid: Annotated[bool, typer.Option("--iid", help="Equal random shares: the default.")] = False,
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Equal shares of neighbouring rows, in the order of the file.")
    ] = False,
    seed: Annotated[OptionalInt, typer.Option(min=0, help="Random seed.", show_default="a new one, printed")] = None,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    missing: Annotated[
        str,
        typer.Option(
            help="Blanks and NaN. refuse: an error; ignore: parts keep them as NaN, for fits with --missing ignore.",
            callback=one_of(MISSING),
            rich_help_panel="Reading",
        ),
    ] = MISSING[0],
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary.")] = False,
) -> None:
    """Split a table among parties, to try out a federation on one machine."""
    if (by is not None) + (sizes is not None) + iid + contiguous > 1:
        raise typer.BadParameter("choose one of --by, --sizes, --iid and --contiguous.", param_hint="--by")
    if by is not None and label is not None and by != label:
        raise typer.BadParameter("--by names the labels already.", param_hint="--label")
    if concentration is not None and by is None:
        raise typer.BadParameter("only with --by, which names the labels to skew.", param_hint="--concentration")
    from partsong.streams import fresh_seed

    wanted, label_option = (
        Wanted(label if by is None else by, transpose, key, header, gaps=missing == IGNORE),
        "--label" if by is None else "--by",
    )
    require_meaningful(data, wanted, label_option)
    folder = place_of(output)
    require_free(folder)
    seed = fresh_seed() >> 32 if seed is None else seed
    how = "by" if by is not None else "sizes" if sizes is not None else "contiguous" if contiguous else "iid"
    with hinting_at_games():
        table = read_table(data, wanted, label_option)
        warn_of(table, header_notes(table, wanted))
        require_usable(with_known_cells(table, missing))
    warn_of_identifiers([table])
    skew = next((given for given in (sizes, concentration) if given is not None), CONCENTRATION)
    rows = shares_of(table, parties, how, skew, seed)
    about: dict[str, Any] = {"source": data.name, "header": header, "split": how, "by": by, "seed": seed}
    about["concentration"] = skew if how in ("by", "sizes") else None
    listing = write_parts(folder, table, rows, about)
    if as_json:
        put_json({"output": output, **listing})
    elif not quiet:
        _tell(output, listing)


def shares_of(table: Table, parties: int, how: str, concentration: float, seed: int) -> dict[str, np.ndarray]:
    """The rows of each party by name; the same seed gives the same shares."""
    from partsong.data.partition import by_label, by_size, contiguous, iid, party_names
    from partsong.streams import stream

    n_rows, generator = int(table.X.shape[0]), stream(seed, "split")
    if how == "contiguous":
        shares = contiguous(n_rows, parties)
    elif how == "iid":
        shares = iid(n_rows, parties, generator)
    elif how == "sizes":
        shares = by_size(n_rows, parties, generator, concentration)
    elif table.labels is None:
        raise ParameterError(f"{table.source}: there are no labels to split by. Use --sizes, --iid or --contiguous.")
    else:
        shares = by_label(table.labels, parties, generator, concentration)
    return dict(zip(party_names(parties), shares, strict=True))


def _tell(output: Path, listing: dict[str, Any]) -> None:
    for party in listing["parties"]:
        labels = ", ".join(f"{visible(label)}: {count}" for label, count in party["labels"].items())
        typer.echo(f"{party['name']}  {party['rows']} rows" + (f"  ({labels})" if labels else ""))
    typer.echo(f"{len(listing['parties'])} parts in {output}; seed {listing['seed']}")
