"""Rounds over some of the sites, drawn from the seed of the experiment, as methods of topics allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from partsong import methods
from partsong.core.interfaces import Schedule
from partsong.engines.rounds import sample_participants
from partsong.errors import ParameterError


@dataclass(frozen=True, slots=True)
class DrawnSchedule(Schedule):
    """Rounds over max(1, round(fraction·N)) sites each, as `engines.rounds.sample_participants` draws them.

    Sites that are `absent` from a round are missing as well.
    """

    fraction: float = 1.0

    def participants(self, names: Sequence[str], index: int) -> tuple[str, ...]:
        """The names that are drawn for a round, without those that are absent, in name order."""
        away = _away(tuple(sorted(names)), self.rounds, self.fraction, self.seed).get(index, frozenset())
        absent = {index: away | self.absent.get(index, frozenset())}
        return Schedule(self.rounds, self.seed, absent).participants(names, index)


def drawn(n_parties: int, fraction: float) -> int:
    """The number of parties in each round."""
    if fraction == 1:
        return n_parties
    names = tuple(map(str, range(n_parties)))
    return n_parties - len(sample_participants(names, 1, fraction, 0).get(0, ()))


def masks_over(masks: Any, method: str, n_parties: int, fraction: float) -> Any:
    """Masked sums for a method of topics. Refuse rounds over too few sites.

    A method with constant sums (fedlda) needs all sites in every sum: two sums of which one lacks a site differ, summed
    over topics, by how often that site uses each word.
    """
    present = drawn(n_parties, fraction)
    if present < masks.fewest:
        raise ParameterError(
            f"Masks take at least {masks.fewest} sites in every round, and there are {present}: each of two would know "
            "what the other has sent. Raise participation, admit more sites, or set masked = false."
        )
    return replace(masks, fewest=n_parties) if methods.method(method).constant_sums else masks


@lru_cache(maxsize=8)
def _away(names: tuple[str, ...], rounds: int, fraction: float, seed: int) -> dict[int, frozenset[str]]:
    return sample_participants(names, rounds, fraction, seed)
