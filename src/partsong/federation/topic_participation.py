"""Rounds over some of the sites, drawn from the seed: whoever knows the experiment and the names knows who is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from partsong.core import Schedule
from partsong.errors import ParameterError
from partsong.federation.topic_keys import LDA
from partsong.participation import sampled


@dataclass(frozen=True, slots=True)
class DrawnSchedule(Schedule):
    """A schedule whose rounds are over max(1, round(fraction·N)) sites each, as `participation.sampled` draws them.

    Whom it names absent is missing as well.
    """

    fraction: float = 1.0

    def participants(self, names: Sequence[str], index: int) -> tuple[str, ...]:
        """The names that are drawn for a round, without those who are absent from it, in name order."""
        away = _away(tuple(sorted(names)), self.rounds, self.fraction, self.seed).get(index, frozenset())
        absent = {index: away | self.absent.get(index, frozenset())}
        return Schedule(self.rounds, self.seed, absent).participants(names, index)


def drawn(n_parties: int, fraction: float) -> int:
    """How many of them are in each round."""
    if fraction == 1:
        return n_parties
    names = tuple(map(str, range(n_parties)))
    return n_parties - len(sampled(names, 1, fraction, 0).get(0, ()))


def masks_over(masks: Any, method: str, n_parties: int, fraction: float) -> Any:
    """Masked sums for a method of topics; refused where rounds would be over too few.

    Two sums of fedlda of which one lacks a site differ, summed over topics, by how often that site uses each word: they
    are over all sites, or there is none.
    """
    present = drawn(n_parties, fraction)
    if present < masks.fewest:
        raise ParameterError(
            f"Masks take at least {masks.fewest} sites in every round, and there are {present}: each of two would know "
            "what the other has sent. Let more take part, or run without masks."
        )
    return replace(masks, fewest=n_parties) if method == LDA else masks


@lru_cache(maxsize=8)
def _away(names: tuple[str, ...], rounds: int, fraction: float, seed: int) -> dict[int, frozenset[str]]:
    return sampled(names, rounds, fraction, seed)
