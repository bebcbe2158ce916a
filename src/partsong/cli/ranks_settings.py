"""Options to settings for a fit over ranks: what all of them must have been given, and what each makes of it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import typer

from partsong.cli.choices import GAME, RANK_METHODS, SKETCHED, WITH_SKETCHES
from partsong.cli.fit_settings import FOR_SKETCHES, FitOptions
from partsong.cli.game_settings import GameSettings, complete_game, require_game
from partsong.cli.outputs import as_json
from partsong.cli.parts_folder import is_parts_folder
from partsong.cli.privacy_settings import FOR_PRIVACY
from partsong.cli.ranks_company import heard
from partsong.cli.wording import option
from partsong.data.two_sided import block_range
from partsong.engines.agreement import share
from partsong.engines.communicator import Communicator
from partsong.errors import FileError, ParameterError
from partsong.io.opening import place_of
from partsong.methods import ASYNCHRONOUS

if TYPE_CHECKING:
    from partsong.io.blocks import Source

FOREIGN = {
    "solver", "align", "start", "rounds", "local_steps", "faulty", "record", "report", "checkpoint", "checkpoint_every",
    "resume", *FOR_PRIVACY,
}  # fmt: skip
MARKED_BYTES = 1 << 16
OWN = {"as_json", "quiet"}
"""Options that ranks may be given differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings(GameSettings):
    """What decides the numbers of a fit over ranks, and how it was run."""

    method: str
    n_components: int
    init: str
    alpha_w: float
    alpha_h: float
    l1_ratio: float
    sketch: str | None
    sketch_ratio: float | None
    seed: int
    dtype: str
    tol: float
    max_iter: int
    time_budget: float | None
    threads: int
    engine: str
    sums: str | None
    ranks: int

    @property
    def is_sketched(self) -> bool:
        """Whether each rank needs columns beside its rows."""
        return self.method == SKETCHED

    @property
    def is_asynchronous(self) -> bool:
        """Whether rank 0 is a server without rows."""
        return self.method in ASYNCHRONOUS

    @property
    def workers(self) -> range:
        """The ranks that hold rows."""
        return range(int(self.is_asynchronous), self.ranks)

    def rows_at(self, rank: int, n_rows: int) -> tuple[int, int]:
        """The rows of a rank; none at a server."""
        if rank not in self.workers:
            return 0, 0
        return block_range(n_rows, len(self.workers), rank - self.workers.start)


def require_fitting(options: FitOptions, given: Collection[str], ranks: int) -> None:
    """Refuse options that mean nothing over ranks, or over so many."""
    engine = f"--engine {options.engine}"
    if is_parts_folder(place_of(options.data)):
        raise typer.BadParameter(
            f"{options.data} is a folder of parts, and {engine} splits one file over the ranks. Fit the folder with "
            "--engine parallel, or name one file; in Python partsong.engines.mpi.Mpi takes shards of your own.",
            param_hint="--engine",
        )
    if options.method not in RANK_METHODS:
        raise typer.BadParameter(
            f"{options.method} is for folders of parts; {engine} has {', '.join(RANK_METHODS)}.", param_hint="--method"
        )
    if options.method in ASYNCHRONOUS:
        _require_server_and_workers(options, given, ranks)
    foreign = sorted(FOREIGN.intersection(given))
    if foreign:
        flags = ", ".join(map(option, foreign))
        hint = " Choose by --method instead." if "solver" in foreign else ""
        raise typer.BadParameter(f"not with {engine}.{hint}", param_hint=flags)
    if options.init not in ("auto", "random"):
        raise typer.BadParameter("ranks start from random numbers: leave it out, or say random.", param_hint="--init")
    require_game(asdict(options), given, is_game=options.method == GAME, is_between_parties=True)
    idle = sorted(FOR_SKETCHES.intersection(given)) if options.method not in WITH_SKETCHES else []
    if idle:
        raise typer.BadParameter(
            f"only for --method {', '.join(WITH_SKETCHES)}.", param_hint=", ".join(map(option, idle))
        )


def _require_server_and_workers(options: FitOptions, given: Collection[str], ranks: int) -> None:
    method = options.method
    if options.engine != "mpi":
        raise typer.BadParameter(
            f"{method} needs --engine mpi: its server waits for any rank, and --engine {options.engine} only has "
            "exchanges of all. Start it with mpiexec, take syn-sd, or fit a folder of parts with --engine parallel.",
            param_hint="--method",
        )
    if ranks < 2:
        raise typer.BadParameter(
            f"{method} needs a server and at least one worker, but there is one rank. Start it with mpiexec -n 2 or "
            "more.",
            param_hint="--method",
        )
    if "sums" in given:
        raise typer.BadParameter(f"not with {method}: its server takes in one rank at a time.", param_hint="--sums")


def require_same_options(communicator: Communicator, options: FitOptions) -> None:
    """Refuse ranks that were started with other options, at all of them."""
    own = {entry.name: as_json(getattr(options, entry.name)) for entry in fields(options) if entry.name not in OWN}
    with heard():
        all_given = [json.loads(text) for text in share(communicator, json.dumps(own))]
    for name in own:
        for rank, other in enumerate(all_given):
            if other.get(name) != all_given[0][name]:
                raise typer.BadParameter(
                    f"it is {all_given[0][name]} at rank 0 and {other.get(name)} at rank {rank}. Start every rank with "
                    "the same command.",
                    param_hint="DATA" if name == "data" else option(name),
                )


def require_same_file(communicator: Communicator, source: Source) -> None:
    """Refuse files that differ from rank to rank in shape, number type, size, or what they begin and end with."""
    with heard():
        seen = share(communicator, f"{source.shape[0]} × {source.shape[1]}, {source.dtype}, {_mark_of(source)}")
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise FileError(
                f"{source.path}: holds {seen[0]} at rank 0 and {other} at rank {rank}. Give all ranks the same file."
            )


def _mark_of(source: Source) -> str:
    """The size of a file and a checksum of its first and last bytes: enough to tell other data, and quickly read."""
    with source.path.open("rb") as file:
        checksum = zlib.crc32(file.read(MARKED_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MARKED_BYTES))
        return f"{size} bytes, checksum {zlib.crc32(file.read(MARKED_BYTES), checksum):08x}"


def require_enough(source: Source, method: str, ranks: int) -> None:
    """Each rank that works needs a row, and where both factors are distributed a column."""
    nouns, servers = ("rows", "columns") if method == SKETCHED else ("rows",), int(method in ASYNCHRONOUS)
    over = f"{ranks - servers} workers" if servers else f"{ranks} ranks"
    for noun, size in zip(nouns, source.shape, strict=False):
        if size < ranks - servers:
            raise ParameterError(
                f"{source.path}: {size} {noun} cannot be split over {over}: each needs at least one. "
                f"Start at most {size + servers} ranks{', of which the first is the server' if servers else ''}."
            )


def common_seed(communicator: Communicator, options: FitOptions) -> int:
    """The seed given, or else one that rank 0 has drawn."""
    from partsong.streams import fresh_seed

    with heard():
        seeds = share(communicator, str(fresh_seed() >> 32 if options.seed is None else options.seed))
    return int(seeds[0])


def settle(options: FitOptions, source: Source, seed: int, ranks: int) -> RankSettings:
    """All settings; sketches need at least one row and one column for each component."""
    from partsong.data.matrix import float_type
    from partsong.settings import rank_of

    is_sketched, rank = options.method == SKETCHED, rank_of(options.n_components, source.shape)
    if is_sketched and rank > min(source.shape):
        raise ParameterError(
            f"n_components={rank}: a sketch of {source.shape[0]} rows or {source.shape[1]} columns has no more columns "
            f"than that, and needs one for each component. Choose at most {min(source.shape)}, or another method."
        )
    known: dict[str, Any] = {entry.name: getattr(options, entry.name, None) for entry in fields(RankSettings)}
    known |= {
        "n_components": rank,
        "init": "random",
        "alpha_h": options.alpha_w if options.alpha_h is None else options.alpha_h,
        "sketch": options.sketch if options.method in WITH_SKETCHES else None,
        "sketch_ratio": options.sketch_ratio if options.method in WITH_SKETCHES else None,
        "seed": seed,
        "dtype": options.dtype or str(float_type(source.dtype)),
        "threads": options.threads or 1,
        "sums": None if options.method in ASYNCHRONOUS else options.sums,
        "ranks": ranks,
    }
    complete_game(known, (), is_between_parties=True)
    return RankSettings(**known)


def told(settings: RankSettings) -> Mapping[str, Any]:
    """What a model says of them."""
    return {
        name: value
        for name, value in asdict(settings).items()
        if name not in ("threads", "time_budget", "seed") and value is not None
    }
