"""Keys of experiment.toml for methods of topics, named as in `FederatedTopicModel` and `partsong.topic_recipes`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from partsong.core import Program
from partsong.errors import ParameterError
from partsong.federation import recipe_names
from partsong.federation.keys import nearest
from partsong.methods import METHODS, SENDS_H
from partsong.mutual.descent import WEIGHT_STEPS
from partsong.programs.federated_lda import FederatedLDA
from partsong.settings import real_number, whole_number
from partsong.topic_methods import WEIGHT_STEP
from partsong.topic_names import DESCENTS, SERVERS, TOGETHER
from partsong.topic_recipes import BOUNDS, CRITICS, fednmf, fednmf_mi

TOPIC_METHODS = tuple(name for name in TOGETHER if name not in METHODS)
"""fednmf, fednmf-mi and fedlda."""

RECIPES = (*recipe_names.FEDERATED, *TOPIC_METHODS)
"""All that an experiment can name, and a site can allow."""

LDA, WITH_CRITIC = "fedlda", ("fednmf-mi",)
TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "participation": TOPIC_METHODS,
    **dict.fromkeys(("epochs", "batch", "rate", "weight_step", "fits_first", "server", "server_rate"), DESCENTS),
    **dict.fromkeys(("strength", "critic", "mi_gradient", "critic_rate"), WITH_CRITIC),
}
"""Key -> the methods that take it."""

TOPIC_KEYS = tuple(TAKEN_BY)

CHOICES = {
    "server": SERVERS,
    "critic": tuple(CRITICS),
    "mi_gradient": tuple(BOUNDS),
    "weight_step": WEIGHT_STEPS,
}
ELSEWHERE = {
    **{"n_topics": "rank", "n_components": "rank", "random_state": "seed", "fraction": "participation"},
    **recipe_names.ELSEWHERE,
}
"""What estimators, recipes and the schedule of a fit call keys that have another name in an experiment."""

NUMBERS = ("participation", "rate", "server_rate", "strength", "critic_rate")


@dataclass(frozen=True, slots=True)
class TopicKeys:
    """What a method of topics was told; None: as `FederatedTopicModel` does.

    `participation` is C, the share of sites that are drawn for each round, from the seed. All others are of descents:
    epochs of batches with a rate at the sites; the server's own steps; λ (strength) and critic of "fednmf-mi".
    """

    participation: float | None = None
    epochs: int | None = None
    batch: int | None = None
    rate: float | None = None
    weight_step: str | None = None
    fits_first: bool | None = None
    server: str | None = None
    server_rate: float | None = None
    strength: float | None = None
    critic: str | None = None
    mi_gradient: str | None = None
    critic_rate: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that were set, by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    @property
    def fraction(self) -> float:
        """C, as a number."""
        return 1.0 if self.participation is None else float(self.participation)

    def require(self, method: str) -> None:
        """Refuse what the method does not take, or what it cannot mean, by its name."""
        for name in self.given:
            if method not in TAKEN_BY[name]:
                refuse_key(name, method)
        for name in ("epochs", "batch"):
            if name in self.given:
                whole_number(name, self.given[name])
        for name in NUMBERS:
            real_number(name, self.given.get(name, 0))
        for name, known in CHOICES.items():
            if (value := self.given.get(name)) is not None and (not isinstance(value, str) or value not in known):
                raise ParameterError(f"{name} is {str(value)[:60]!r}. {nearest(str(value), known)}")
        if self.fits_first is not None and not isinstance(self.fits_first, bool):
            raise ParameterError(f"fits_first is true or false; got {self.fits_first!r}.")
        if not 0 < self.fraction <= 1:
            raise ParameterError(f"participation must be above 0 and at most 1; got {self.participation!r}.")
        if self.server_rate is not None and self.server in (None, SERVERS[0]):
            raise ParameterError(
                f"server_rate is for server = {', '.join(SERVERS[1:])}: an average has no rate. Set server to one of "
                "them, or leave server_rate out."
            )
        if beside := [
            name for name in ("critic", "mi_gradient", "critic_rate") if name in self.given and self.strength == 0
        ]:
            raise ParameterError(f"With strength = 0 there is no critic: leave {' and '.join(beside)} out.")
        if method in TOPIC_METHODS:
            self.program(method, 1)

    def require_alone(self, method: str, others: Mapping[str, Any], *, privacy: Any, masked: bool) -> None:
        """Refuse, for a method of topics, keys of other methods, promises without a theorem, and masks in vain."""
        for name, value in others.items():
            if value is not None:
                refuse_key(name, method)
        if privacy:
            raise ParameterError(
                f"There is no theorem on what noise would hide in uploads of {method}, and no budget is promised for "
                f'them. Take method = "exact" with unit = "row", or one of {", ".join(SENDS_H)} with unit = "party"; '
                "or leave the table privacy out."
            )
        if masked and method == LDA and self.fraction < 1:
            raise ParameterError(
                "Sums of fedlda over other sites each time differ by the words of single sites, and masks would hide "
                "nothing. Take participation = 1, or another method."
            )

    def program(self, method: str, rank: int) -> Program:
        """The recipe; of fedlda the number of all documents is not told: rounds of all sites count it.

        Sent per round and site: docs/what-leaves-a-party.md, and for fedlda `FederatedLDA`.
        """
        if method == LDA:
            return FederatedLDA(rank)
        steps = {name: value for name, value in self.given.items() if name != "participation"}
        recipe = fednmf_mi if method in WITH_CRITIC else fednmf
        return recipe(rank, **{"weight_step": WEIGHT_STEP, **steps})


def require_own_names(table: Any) -> None:
    """Refuse names that estimators and recipes have for keys of an experiment, and settings that are a site's own."""
    for name in table if isinstance(table, Mapping) else ():
        if name in ELSEWHERE:
            own = ELSEWHERE[name]
            raise ParameterError(f"The experiment has no setting {name!r}. Did you mean {own!r}, as it is called here?")
        if name in recipe_names.NOT_ASKED:
            raise ParameterError(f"The experiment has no setting {name!r}. {recipe_names.NOT_ASKED[name]}")


def refuse_key(name: str, method: str, of: str = "") -> NoReturn:
    """Refuse a key by the names of all methods that take it; `of`: what the method is, where its name does not say."""
    methods = (*TAKEN_BY.get(name, ()), *recipe_names.TAKEN_BY.get(name, ()), *recipe_names.SHARED.get(name, ()))
    raise ParameterError(f"{name} is for {', '.join(methods)}; the method is {of or repr(method)}. Leave it out.")
