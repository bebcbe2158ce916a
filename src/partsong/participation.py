"""Who takes part in which round, drawn from the shared seed."""

from __future__ import annotations

from collections.abc import Sequence

from partsong.errors import ParameterError
from partsong.streams import stream


def sampled(parties: Sequence[str], rounds: int, fraction: float, seed: int) -> dict[int, frozenset[str]]:
    """Schedule(absent=…) for rounds in which m = max(1, round(fraction · N)) parties take part, without replacement.

    Round t depends on the seed, the names and t alone: a longer run begins with the same rounds, and a resumed one
    goes on as if it had not stopped.
    """
    if not 0 < fraction <= 1:
        raise ParameterError(f"The fraction of parties in a round must be above 0 and at most 1; got {fraction!r}.")
    names = sorted(parties)
    count = max(1, round(fraction * len(names)))
    if count == len(names):
        return {}

    def missing(index: int) -> frozenset[str]:
        chosen = stream(seed, "participants", index).choice(len(names), count, replace=False)
        return frozenset(names) - {names[i] for i in chosen.tolist()}

    return {index: missing(index) for index in range(rounds)}
