"""What a fit over ranks leaves behind: rows of W from each; from rank 0 the list of them, the model and the report."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from partsong.cli import run_folder
from partsong.cli.choices import MODEL_ENDINGS, WEIGHT_ENDINGS
from partsong.cli.fit_report import ENDINGS
from partsong.cli.fit_settings import FitOptions
from partsong.cli.outputs import put_json, require_distinct, require_writable, visible, warn_of_formulas, write_json
from partsong.cli.ranks_settings import RankSettings, told
from partsong.cli.wording import as_options
from partsong.core import Outcome
from partsong.data.two_sided import block_range
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


def shard_path(weights: Path, rank: int, ranks: int) -> Path:
    """W.rank0of4.npy for W.npy."""
    ending = _ending(weights)
    return weights.with_name(f"{weights.name[: len(weights.name) - len(ending)]}.rank{rank}of{ranks}{ending}")


def listing_path(weights: Path) -> Path:
    """W.shards.json for W.npy."""
    return weights.with_name(f"{weights.name[: len(weights.name) - len(_ending(weights))]}.shards.json")


def _ending(path: Path) -> str:
    found = [ending for ending in WEIGHT_ENDINGS if path.name.lower().endswith(ending)]
    return path.name[len(path.name) - len(max(found, key=len)) :] if found else ""


def require_outputs(options: FitOptions, rank: int, ranks: int) -> None:
    """Refuse, before anything is read, what this rank could not write afterwards."""
    if options.output is None and options.run_folder is None:
        raise typer.BadParameter("say where the model goes: -o model.safetensors.", param_hint="--output")
    if options.overwrite and options.run_folder is None:
        raise typer.BadParameter("needs --run-folder; other files are replaced anyway.", param_hint="--overwrite")
    if options.weights is not None:
        shard = shard_path(options.weights, rank, ranks)
        others = {"--weights": shard, "--weights (the list of shards)": listing_path(options.weights)}
        require_distinct({"DATA": options.data, "--output": options.output, **others})
        require_writable("--weights", shard, WEIGHT_ENDINGS)
    if rank > 0:
        return
    require_distinct({"DATA": options.data, "--output": options.output})
    if options.output is not None:
        require_writable("--output", options.output, MODEL_ENDINGS)
    if options.run_folder is not None:
        folder = place_of(options.run_folder)
        for name in run_folder.OWN:
            require_distinct({"--run-folder": folder / name, "DATA": options.data, "--weights": options.weights})
        run_folder.make_usable(folder, options.overwrite)


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
        """How many were made; one of sketches takes two exchanges."""
        rounds = self.run.history[-1].iteration if self.run.history else 0
        return rounds // 2 if self.settings.is_sketched else self.run.rounds

    def save(self, communicator: Communicator) -> None:
        """Shards first, under names of drafts until all are written; the model last, when nothing else can fail."""
        weights, folder = self.options.weights, self.options.run_folder
        with ExitStack() as drafts:
            if weights is not None:
                path = shard_path(weights, communicator.rank, communicator.size)
                together(communicator, lambda: self._write_shard(path, drafts.enter_context(replacing(path))))
            together(communicator, drafts.close)

        def conclude() -> None:
            if weights is not None:
                write_json(listing_path(weights), self._listing(weights))
            if folder is not None:
                kept = run_folder.RunFolder(place_of(folder))
                kept.end(self.run.history, self.sent, self.as_dict())
                save_model(kept.path / run_folder.MODEL, self.model())
            if self.options.output is not None:
                save_model(self.options.output, self.model())

        together(communicator, conclude if communicator.rank == 0 else lambda: None)

    def _write_shard(self, path: Path, draft: Path) -> None:
        names = None if path.name.lower().endswith(".npy") else self.source.sample_names(self.rows)
        write_weights(draft, self.done.W, names)
        warn_of_formulas(path, names)

    def _listing(self, weights: Path) -> dict[str, Any]:
        n, ranks = self.source.shape[0], self.settings.ranks
        shards = [
            {"rank": rank, "rows": block_range(n, ranks, rank), "file": shard_path(weights, rank, ranks).name}
            for rank in range(ranks)
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
        """The JSON contract of a fit, with engine, ranks and sums; bytes are the mean over ranks."""
        options, history = self.options, self.run.history
        folder = options.run_folder
        return {
            "model": options.output or (None if folder is None else folder / run_folder.MODEL),
            "method": self.settings.method,
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
            "bytes_up_per_rank": round(sum(row.bytes_up for row in history) / self.settings.ranks),
            "bytes_down_per_rank": sum(row.bytes_down for row in history),
            "weights": None if options.weights is None else listing_path(options.weights),
            "run_folder": folder,
        }

    def report(self) -> None:
        """One JSON object, or a few lines, or nothing; for rank 0 alone."""
        if self.run.outcome is Outcome.DIVERGED:
            why = "The fit diverged: check the data and the penalties, or take another method."
            typer.echo(visible(f"{why} {as_options(self.run.trouble)}".rstrip()), err=True)
        said = self.as_dict()
        if self.options.as_json:
            put_json(said)
        elif not self.options.quiet:
            for name, value in _lines(said, ENDINGS[self.run.outcome]):
                typer.echo(f"{name:<15}{value}")


def _lines(said: dict[str, Any], ending: str) -> list[tuple[str, str]]:
    rows, columns = said["shape"]
    lines = [
        (
            "data",
            f"{rows} × {columns} over {said['ranks']} rank(s), {said['method']} ({said['engine']}, {said['sums']})",
        ),
        ("components", f"{said['n_components']}"),
        ("relative error", f"{said['relative_error']:.6f}  (explains {100 * said['explained_variance']:.2f} %)"),
        ("iterations", f"{said['iterations']} in {said['seconds']:.2f} s: {ending}"),
        ("seed", f"{said['seed']}"),
        ("sent per rank", f"{said['bytes_up_per_rank']:,} bytes up, {said['bytes_down_per_rank']:,} down"),
    ]
    outputs = {"model": said["model"], "weights": said["weights"], "run folder": said["run_folder"]}
    return lines + [(name, str(path)) for name, path in outputs.items() if path is not None]
