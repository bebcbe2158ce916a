"""What a fit over ranks leaves behind: rows of W from each; from rank 0 the list of them, the model and the report."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from partsong.cli import run_folder
from partsong.cli.fit_report import ENDINGS, PLAYED
from partsong.cli.fit_settings import FitOptions
from partsong.cli.outputs import put_json, visible, warn_of_formulas, write_json
from partsong.cli.ranks_files import listing_path, shard_path
from partsong.cli.ranks_settings import RankSettings, told
from partsong.cli.wording import as_options
from partsong.core import Outcome
from partsong.engines.agreement import together
from partsong.engines.communicator import Communicator
from partsong.finished import Finished
from partsong.io import provenance
from partsong.io.atomic import replacing
from partsong.io.model_file import Model, save_model
from partsong.io.opening import place_of
from partsong.io.weights import write_weights
from partsong.running import Run

if TYPE_CHECKING:
    from partsong.io.blocks import Source

Sent = tuple[int, str, int, int]

TROUBLE = "The fit diverged: check the data and the penalties, or take another method."


@dataclass(frozen=True, slots=True)
class RankResult:
    """A fit over ranks that has ended, as one of them sees it."""

    options: FitOptions
    settings: RankSettings
    source: Source
    rows: tuple[int, int]
    run: Run
    done: Finished
    sent: list[Sent]
    seconds: float

    @property
    def iterations(self) -> int:
        """How many were made; one of sketches takes two exchanges, and where nobody waits each arrival is one."""
        rounds = self.run.history[-1].iteration if self.run.history else 0
        if self.settings.is_asynchronous:
            return rounds
        return rounds // 2 if self.settings.is_sketched else self.run.rounds

    def save(self, communicator: Communicator) -> None:
        """All files as drafts first; then the shards get their names, the list of them, and at last the model.

        A list of earlier shards goes before any of these is replaced. Where a name cannot be given, at whatever rank,
        shards that have theirs are removed.
        """
        weights, is_first = self.options.weights, communicator.rank == 0
        path = None if weights is None else shard_path(weights, communicator.rank, communicator.size)
        with ExitStack() as undone, ExitStack() as last, ExitStack() as drafts:

            def write() -> None:
                if path is not None and self.done.weights:
                    self._write_shard(path, drafts.enter_context(replacing(path)))
                if is_first:
                    self._write_model(last)

            def name_shard() -> None:
                drafts.close()
                if path is not None and self.done.weights:
                    undone.callback(_remove, path)

            together(communicator, write)
            together(communicator, self._forget_earlier if is_first else _nothing)
            together(communicator, name_shard)
            together(communicator, partial(self._conclude, last, undone) if is_first else _nothing)
            undone.pop_all()

    def _write_model(self, last: ExitStack) -> None:
        """Drafts of the model, and of the list of shards, which is named first."""
        weights, output, kept = self.options.weights, self.options.output, self._run_folder
        places = [] if output is None else [output]
        places += [] if kept is None else [kept.path / run_folder.MODEL]
        for place in places:
            save_model(last.enter_context(replacing(place)), self.model())
        if weights is not None:
            write_json(last.enter_context(replacing(listing_path(weights))), self._listing(weights))

    def _forget_earlier(self) -> None:
        if self.options.weights is not None:
            listing_path(self.options.weights).unlink(missing_ok=True)

    def _conclude(self, last: ExitStack, undone: ExitStack) -> None:
        """What is removed again if it fails was not there before."""
        kept = self._run_folder
        if self.options.weights is not None:
            undone.callback(_remove, listing_path(self.options.weights))
        if kept is not None:
            for name in (run_folder.RESULT, run_folder.MODEL):
                undone.callback(_remove, kept.path / name)
            kept.end(self.run.history, self.sent, self.as_dict())
        last.close()

    @property
    def _run_folder(self) -> run_folder.RunFolder | None:
        folder = self.options.run_folder
        return None if folder is None else run_folder.RunFolder(place_of(folder))

    def _write_shard(self, path: Path, draft: Path) -> None:
        names = None if path.name.lower().endswith(".npy") else self.source.sample_names(self.rows)
        write_weights(draft, self.done.W, names)
        warn_of_formulas(path, names)

    def _listing(self, weights: Path) -> dict[str, Any]:
        n, ranks = self.source.shape[0], self.settings.ranks
        shards = [
            {"rank": rank, "rows": self.settings.rows_at(rank, n), "file": shard_path(weights, rank, ranks).name}
            for rank in self.settings.workers
        ]
        shape = [n, self.settings.n_components]
        return {"format": "partsong-weight-shards", "version": 1, "shape": shape, "shards": shards}

    def model(self) -> Model:
        """H, names of features, settings, iterations made, and how many ranks there were."""
        counted = {"n_samples": self.source.shape[0], "parties": 1, "iterations": self.iterations}
        return Model(
            components=self.done.H,
            feature_names=self.source.feature_names,
            settings={**told(self.settings), **counted},
            seed=self.settings.seed,
            relative_error=self.done.relative_error,
            shares=self.done.shares,
            created=provenance.now(),
            versions=provenance.package_versions(),
        )

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of a fit, with engine, ranks and sums; bytes are the mean over ranks, or over workers."""
        options, history = self.options, self.run.history
        folder, workers = options.run_folder, len(self.settings.workers)
        down = sum(row.bytes_down for row in history)
        game = {"game": self.settings.rules()} if self.settings.is_game else {}
        return {
            "model": options.output or (None if folder is None else folder / run_folder.MODEL),
            "method": self.settings.method,
            **game,
            "n_components": self.settings.n_components,
            "shape": self.source.shape,
            "parties": 1,
            "engine": self.settings.engine,
            "ranks": self.settings.ranks,
            "sums": self.settings.sums,
            "dtype": self.settings.dtype,
            "seed": self.settings.seed,
            "outcome": str(self.run.outcome),
            "iterations": self.iterations,
            "seconds": round(self.seconds, 6),
            "relative_error": self.done.relative_error,
            "explained_variance": 1.0 - self.done.relative_error**2,
            "bytes_up_per_rank": round(sum(row.bytes_up for row in history) / workers),
            "bytes_down_per_rank": round(down / workers) if self.settings.is_asynchronous else down,
            "weights": None if options.weights is None else listing_path(options.weights),
            "run_folder": folder,
        }

    def report(self) -> None:
        """One JSON object, or a few lines, or nothing; for rank 0 alone."""
        if self.run.outcome is Outcome.DIVERGED:
            why = PLAYED if self.settings.is_game else TROUBLE
            typer.echo(visible(f"{why} {as_options(self.run.trouble)}".rstrip()), err=True)
        said = self.as_dict()
        if self.options.as_json:
            put_json(said)
        elif not self.options.quiet:
            lines = _lines(said, ENDINGS[self.run.outcome])
            if self.settings.is_game:
                lines.insert(2, ("game", self.settings.in_words()))
            for name, value in lines:
                typer.echo(f"{name:<15}{value}")


def _remove(path: Path) -> None:
    with suppress(OSError):  # there is an error that matters more
        path.unlink(missing_ok=True)


def _nothing() -> None:
    """What other ranks do while rank 0 writes."""


def _lines(said: dict[str, Any], ending: str) -> list[tuple[str, str]]:
    rows, columns = said["shape"]
    how = ", ".join(filter(None, (said["engine"], said["sums"])))
    lines = [
        ("data", f"{rows} × {columns} over {said['ranks']} rank(s), {said['method']} ({how})"),
        ("components", f"{said['n_components']}"),
        ("relative error", f"{said['relative_error']:.6f}  (explains {100 * said['explained_variance']:.2f} %)"),
        ("iterations", f"{said['iterations']} in {said['seconds']:.2f} s: {ending}"),
        ("seed", f"{said['seed']}"),
        ("sent per rank", f"{said['bytes_up_per_rank']:,} bytes up, {said['bytes_down_per_rank']:,} down"),
    ]
    outputs = {"model": said["model"], "weights": said["weights"], "run folder": said["run_folder"]}
    return lines + [(name, str(path)) for name, path in outputs.items() if path is not None]
