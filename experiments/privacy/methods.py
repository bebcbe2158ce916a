"""Methods of the privacy experiments: noise as printed, noise with a proof, no noise, and data-free models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from experiments.shared.federations import IN_ROUNDS, ONCE
from partsong import kernels
from partsong.core.interfaces import Message, Shard
from partsong.core.streams import stream
from partsong.methods.averaging import AveragingPartyState, LocalAveraging
from partsong.methods.private import PrivateAveraging, row_private
from partsong.privacy.accounting import Release
from partsong.privacy.calibration import noise_multiplier_for
from partsong.privacy.mechanisms import ClippedGaussian, ClippedLaplace, Mechanism
from partsong.privacy.randomness import InsecureSource, Source, system_source

DELTA = 1e-5
SIGNED = ", signed"
"""Suffix of a kind of noise whose uploads are not cut off at zero before averaging."""
METHODS = ("FNMF-LAP", "FNMF-SK", "FedAvg", "FedProx", "iPALM once")
STRENGTHS: Mapping[str, float] = {"FNMF-LAP (paper)": 0.01, "FedAvg": 0.0, "iPALM once": 0.0}
"""Strength of the pull; 0.1 for all other methods."""
DATA_FREE = ("data-free: uniform", "data-free: sparse", "data-free: pieces", "data-free: tiles")


@dataclass(frozen=True, slots=True)
class Setting:
    """Privacy settings: ε in total (per round if `purpose` is "printed"), clip or row bound, rounds."""

    kind: str = ""
    epsilon: float = math.inf
    relation: str = ""
    rounds: int = 10
    steps: int = 100
    clip: float = 0.0
    ridge: float = 0.0


@dataclass(frozen=True, slots=True)
class Seeded:
    """Reproducible noise: it has the distribution of protective noise, and protects nothing."""

    seed: int

    def __call__(self, party: str, release: int) -> Source:
        return InsecureSource(self.seed, party, release)


@dataclass(frozen=True, slots=True)
class PrintedNoise(LocalAveraging):
    """A consensus whose uploads are max(0, H_p + noise of a given scale), as in the FNMF paper: nothing is clipped."""

    kind: str = "gaussian"
    scale: float = 1.0
    seed: int = 0

    def local(self, shard: Shard, party: AveragingPartyState, model: Message) -> tuple[AveragingPartyState, Message]:
        """Run the step without noise, and add noise to the upload."""
        after, upload = LocalAveraging.local(self, shard, party, model)
        H = upload["H"]
        draw = stream(self.seed, "printed noise", shard.name, int(model["turn"][0]))
        made = draw.normal if self.kind == "gaussian" else draw.laplace
        noisy = np.maximum(0.0, np.asarray(H, np.float64) + made(0.0, self.scale, H.shape))
        return after, Message({"H": kernels.of(H).cast(noisy, H)}, upload.weight)


def printed_scale(kind: str, epsilon: float, sensitivity: float = 1.0) -> float:
    """σ = Δ √(2 ln(1.25/δ)) / ε, or b = Δ/ε: the formulas of the paper, read as a deviation and as a scale."""
    return sensitivity * (math.sqrt(2 * math.log(1.25 / DELTA)) if kind == "gaussian" else 1.0) / epsilon


def _consensus(method: str, rank: int, setting: Setting, start: str) -> tuple[LocalAveraging, int]:
    strength = STRENGTHS.get(method, 0.1)
    if method in ONCE:
        return ONCE[method](rank, setting.steps, strength, start), 1
    return IN_ROUNDS[method](rank, setting.steps, strength, start), setting.rounds


def free_program(method: str, rank: int, setting: Setting, seed: int) -> tuple[Any, int]:
    """Without noise; `init_mode="local"`, as in the paper."""
    return _consensus(method, rank, setting, "independent")


def printed_program(method: str, rank: int, setting: Setting, seed: int) -> tuple[Any, int]:
    """With the paper's noise for a sensitivity of 1 and ε per round; `init_mode="local"`."""
    program, rounds = _consensus(method, rank, setting, "independent")
    whole = {field.name: getattr(program, field.name) for field in fields(program)}
    return PrintedNoise(
        **whole, kind=setting.kind, scale=printed_scale(setting.kind, setting.epsilon), seed=seed
    ), rounds


@dataclass(frozen=True, slots=True)
class CutOff:
    """A mechanism whose messages are cut off at zero before upload, as in earlier versions."""

    mechanism: Mechanism

    @property
    def release(self) -> Release:
        """The release of the inner mechanism: post-processing costs nothing."""
        return self.mechanism.release

    def protect(
        self, arrays: Mapping[str, Any], reference: Mapping[str, Any], source: Source = system_source
    ) -> dict[str, Any]:
        """max(0, ·) of the mechanism's output."""
        sent = self.mechanism.protect(arrays, reference, source)
        return {name: kernels.of(array).cast(np.maximum(array, 0), array) for name, array in sent.items()}


def party_program(method: str, rank: int, setting: Setting, seed: int) -> tuple[Any, int]:
    """With clip and noise for ε over all rounds (δ = 0 for Laplace noise); `init_mode="shared"`."""
    program, rounds = _consensus(method, rank, setting, "common")
    noise, is_signed, _ = setting.kind.partition(SIGNED)
    multiplier = noise_multiplier_for(setting.epsilon, DELTA if noise == "gaussian" else 0.0, rounds, noise)
    settings = setting.clip, multiplier, setting.relation
    mechanism: Any = ClippedGaussian(*settings) if noise == "gaussian" else ClippedLaplace(*settings)
    chosen = mechanism if is_signed else CutOff(mechanism)
    return PrivateAveraging(program, chosen, rounds, Seeded(seed)), rounds


def row_program(method: str, rank: int, setting: Setting, seed: int) -> tuple[Any, int]:
    """Noisy sums over rows for ε over all rounds; the clip is the row bound."""
    program = row_private(
        rank, epsilon=setting.epsilon, row_bound=setting.clip, delta=DELTA, rounds=setting.rounds, ridge=setting.ridge
    )
    return replace(program, source=Seeded(seed)), setting.rounds


def data_free(name: str, rank: int, columns: int, draw: np.random.Generator) -> np.ndarray:
    """Data-free H (k × m): random rows, dense or sparse; runs of columns; tiles of a square image."""
    if name == "data-free: uniform":
        return draw.random((rank, columns))
    if name == "data-free: sparse":
        return draw.random((rank, columns)) * (draw.random((rank, columns)) < 1 / max(2, rank)) + 1e-6
    if name == "data-free: pieces":
        return _pieces(rank, columns)
    side = math.isqrt(columns)
    if side * side != columns:
        return _pieces(rank, columns)
    down = max(d for d in range(1, math.isqrt(rank) + 1) if rank % d == 0)
    return np.kron(_pieces(down, side), _pieces(rank // down, side))


def _pieces(count: int, columns: int) -> np.ndarray:
    """0/1 (count × columns): each column belongs to one of `count` runs."""
    return np.equal.outer(np.arange(count), np.arange(columns) * count // columns).astype(np.float64)
