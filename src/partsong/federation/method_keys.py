"""Keys of experiment.toml: which methods there are, what each takes, and the program that they name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from partsong.core.interfaces import Program
from partsong.core.parameters import nearest, real_number, whole_number
from partsong.errors import ParameterError
from partsong.estimators.parameters import alignment_of
from partsong.methods import recipes
from partsong.methods.averaging import Consensus
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.fednmf import BOUNDS, CRITICS, fednmf, fednmf_mi
from partsong.methods.mutual_information.descent import WEIGHT_STEPS
from partsong.methods.recipes import game_named
from partsong.methods.registry import (
    ALIGNMENTS,
    ASYNCHRONOUS,
    COMMON_ONLY,
    DESCENTS,
    LOCAL_ONLY,
    LOCAL_STEPS,
    LONG_ROUNDS,
    METHODS,
    SAFE,
    SENDS_H,
    SERVERS,
    SKETCHED,
    STARTS,
    TOGETHER,
    alignment_for,
    start_of,
)
from partsong.methods.relay import Relay
from partsong.sketch.crossing import Proportion
from partsong.solvers.game_orders import LEADERS
from partsong.topics.fitting import WEIGHT_STEP

# ---- recipe names -----------------------------------------------------------------------------------------------
#
# Which recipes an experiment can name, the keys that each takes, and why some recipes cannot be run between sites.

BY_SUMS, SECURE, PLAYED, THEN_EXACT = "fnmf-by-sums", "secure-dsanls", "game-consensus", "then-exact"

BESIDE = (LOCAL_ONLY, BY_SUMS, SECURE, PLAYED, THEN_EXACT)
"""Methods that `FederatedNMF` takes as programs, and an experiment by name."""

FEDERATED = (*METHODS, *BESIDE)

FIRST_LEGS = ("fnmf-alone", BY_SUMS, "fedavg", "fedprox", "ipalm-once", "mur-once", LOCAL_ONLY, "syn-sd", PLAYED)
"""With what "then-exact" can begin: consensus programs, of which a round is whole after its last exchange."""

IN_SUMS = (BY_SUMS, THEN_EXACT)
"""Methods whose rounds are as many sums as an experiment says; sites bound all of them by maximum_rounds."""

WITH_SKETCHES = (*SKETCHED, "asyn-ssd-v")
ALIGNING = ("fnmf", "fnmf-alone", BY_SUMS)
PROXIMAL = ("syn-sd", *SKETCHED, *ASYNCHRONOUS)
GAMES = ("game", PLAYED)
AT_ONCE = ("simultaneous", "alternating")
"""Orders of play that take all rows in one place."""
PRIVATE_SKETCHES = ("gaussian", "hadamard")
"""Sketches that send no row as it is."""

RECIPES_TAKING: Mapping[str, tuple[str, ...]] = {
    "accelerate": ("exact",),
    **dict.fromkeys(("variant", "every"), ALIGNING),
    "strength": (*ALIGNING, "fedprox"),
    **dict.fromkeys(("client_align", "server_align"), ("fnmf", "fnmf-alone")),
    "sweeps": (BY_SUMS,),
    "weighted": ("fedavg",),
    "rule": PROXIMAL,
    "rho": ASYNCHRONOUS,
    "sketch": (*WITH_SKETCHES, SECURE),
    "sketch_ratio": WITH_SKETCHES,
    **dict.fromkeys(("sketch_dimension", "columns_sketch", "columns_ratio"), (SECURE,)),
    **dict.fromkeys(("order", "step", "step_decay", "self_play", "shrink", "leader"), GAMES),
    **dict.fromkeys(("first", "first_rounds"), (THEN_EXACT,)),
}
"""Key -> the methods that take it; "then-exact" also takes those of its first leg."""

RECIPE_KEYS = tuple(RECIPES_TAKING)

STEPPING = tuple(name for name in FEDERATED if name not in (SECURE, THEN_EXACT))
SHARED: Mapping[str, tuple[str, ...]] = {
    "local_steps": STEPPING,
    "align": ALIGNING,
    "start": tuple(name for name in STEPPING if name != LOCAL_ONLY),
}
"""The same for keys that most methods have; a start that is not common is for some of these alone."""

OUTSIDE: Mapping[str, str] = {
    "dsanls": "needs columns of everybody's rows at every party, which sites must not have: it is for the machines of "
    'one owner (partsong fit DATA -k 10 --engine mpi --method dsanls). Take "secure-dsanls", which needs rows alone, '
    'or "exact"',
    "row-private": 'is method = "exact" with a table privacy whose unit is "row"',
    "party-private": 'is one of the methods that send H with a table privacy whose unit is "party"',
}
"""Recipes that are no method of an experiment -> why, and what to take."""

NOT_ASKED: Mapping[str, str] = {
    "is_guarded": "How many sketches of its rows a site may send is not for an experiment to say: after "
    "⌊(n_p − 1)/d⌋ of them it refuses.",
    "budget": "Of how many rows all sites together have, a site knows only what the server says: sketches are counted "
    'against its own rows, as budget="own" does.',
}
"""Settings of recipes that are not for whoever writes an experiment -> why."""

RECIPE_ALIASES: Mapping[str, str] = {
    "steps": "local_steps",
    "repeats": "local_steps",
    "play": "order",
    "dimension": "sketch_dimension",
}
"""What recipes and the command line call keys that have another name in an experiment."""


# ---- recipe checks ----------------------------------------------------------------------------------------------
#
# What each key of a recipe may be: a name, a truth, a whole number or a number within bounds.

Check = Callable[[str, Any], Any]


def chosen(known: tuple[str, ...]) -> Check:
    """One of some names, or an error with the nearest."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in known:
            raise ParameterError(f"{name} is {str(value)[:60]!r}. {nearest(str(value), known)}")

    return check


def true_or_false(name: str, value: Any) -> None:
    """A truth."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name} is true or false; got {value!r}.")


def above_zero(name: str, value: Any) -> None:
    """A finite number above 0."""
    if not 0 < real_number(name, value) < math.inf:
        raise ParameterError(f"{name} must be a number above 0; got {value!r}.")


def not_negative(name: str, value: Any) -> None:
    """A finite number of at least 0."""
    if not 0 <= real_number(name, value) < math.inf:
        raise ParameterError(f"{name} must be a number of at least 0; got {value!r}.")


def share(name: str, value: Any) -> None:
    """A number above 0 and at most 1."""
    if not 0 < real_number(name, value) <= 1:
        raise ParameterError(f"{name} must be above 0 and at most 1; got {value!r}.")


def factor(name: str, value: Any) -> None:
    """A number from 0 to 1."""
    if not 0 <= real_number(name, value) <= 1:
        raise ParameterError(f"{name} must be from 0 to 1; got {value!r}.")


def pace(name: str, value: Any) -> None:
    """A step of a game: by the players' norms, or η."""
    if isinstance(value, str) and value != SAFE:
        raise ParameterError(f'{name} is "{SAFE}" or a number above 0; got {value[:60]!r}.')
    if value != SAFE:
        above_zero(name, value)


CHECKS: Mapping[str, Check] = {
    "local_steps": whole_number,
    "align": chosen(ALIGNMENTS),
    "start": chosen(STARTS),
    "accelerate": true_or_false,
    "variant": chosen(("paper", "robust")),
    "every": whole_number,
    "strength": not_negative,
    "client_align": chosen(ALIGNMENTS),
    "server_align": chosen(ALIGNMENTS),
    "sweeps": whole_number,
    "weighted": true_or_false,
    "rule": chosen(tuple(recipes.solver_rules())),
    "rho": above_zero,
    "sketch": chosen(tuple(recipes.sketches())),
    "sketch_ratio": share,
    "sketch_dimension": whole_number,
    "columns_sketch": chosen(tuple(recipes.sketches())),
    "columns_ratio": share,
    "order": chosen(tuple(recipes.orders())),
    "step": pace,
    "step_decay": above_zero,
    "self_play": chosen(tuple(recipes.self_plays())),
    "shrink": factor,
    "leader": chosen(tuple(name for name in LEADERS if name is not None)),
    "first": chosen(FIRST_LEGS),
    "first_rounds": whole_number,
}
"""Key -> what it may be."""


# ---- recipe programs --------------------------------------------------------------------------------------------
#
# Recipes of `partsong.methods.recipes` by the names of methods, from plain values; law: without keys, as
# `FederatedNMF`.

USUAL_STEPS = {**LOCAL_STEPS, BY_SUMS: 100, PLAYED: 10}
USUAL_START = {BY_SUMS: recipes.INDEPENDENT}
AS_THEY_ARE = ("accelerate", "variant", "strength", "every", "sweeps", "weighted", "rho")
"""Keys whose values recipes take as they are."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function of `partsong.methods.recipes`: what it calls local_steps, whether it takes a start, what the name
    settles.
    """

    make: Callable[..., Program]
    steps: str | None = "steps"
    has_start: bool = False
    settled: Mapping[str, Any] = field(default_factory=dict)


RECIPE_OF: Mapping[str, Recipe] = {
    "exact": Recipe(recipes.shared_statistics, "sweeps"),
    "fnmf": Recipe(recipes.fnmf, has_start=True),
    "fnmf-alone": Recipe(recipes.fnmf, has_start=True),
    BY_SUMS: Recipe(recipes.fnmf_by_sums, has_start=True),
    "fedavg": Recipe(recipes.fedavg, has_start=True),
    "fedprox": Recipe(recipes.fedprox, has_start=True),
    "ipalm-once": Recipe(recipes.ipalm_once, has_start=True),
    "mur-once": Recipe(recipes.mur_once, has_start=True),
    LOCAL_ONLY: Recipe(recipes.local_only),
    "syn-sd": Recipe(recipes.syn_sd),
    **{name: Recipe(recipes.syn_ssd, settled={"variant": name.removeprefix("syn-ssd-")}) for name in SKETCHED},
    "asyn-sd": Recipe(recipes.asyn_sd),
    "asyn-ssd-v": Recipe(recipes.asyn_ssd_v),
    SECURE: Recipe(recipes.secure_dsanls, None),
    "game": Recipe(recipes.game, "repeats"),
    PLAYED: Recipe(recipes.game_consensus, has_start=True),
}
"""Method -> its recipe; "then-exact" is `recipes.then_exact` of another one of these."""


@dataclass(frozen=True, slots=True)
class Usual:
    """local_steps, align and start as they were told; None: as the method does."""

    local_steps: int | None = None
    align: str | None = None
    start: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that were set, by name."""
        told = {"local_steps": self.local_steps, "align": self.align, "start": self.start}
        return {name: value for name, value in told.items() if value is not None}

    def arguments(self, method: str) -> dict[str, Any]:
        """For the recipe of a method, by its own names."""
        recipe = RECIPE_OF[method]
        found: dict[str, Any] = {}
        if recipe.steps is not None:
            found[recipe.steps] = USUAL_STEPS[method] if self.local_steps is None else self.local_steps
        if recipe.has_start:
            found["start"] = self.start or USUAL_START.get(method) or start_of(method, None)
        if method in ALIGNING:
            align = alignment_of(alignment_for(method, self.align))
            found |= {"align": align} if method == BY_SUMS else {"client_align": align, "server_align": align}
        return found


def made(method: str, rank: int, usual: Usual, keys: Mapping[str, Any]) -> Program:
    """The program of a method; what is sent is in the docstring of its recipe."""
    if method == THEN_EXACT:
        first = made(keys["first"], rank, usual, keys)
        return recipes.then_exact(first, keys["first_rounds"] * sweeps_of(first))
    recipe = RECIPE_OF[method]
    program = recipe.make(rank, **recipe.settled, **{**usual.arguments(method), **_arguments(method, rank, keys)})
    return recipes.then_exact(program, LONG_ROUNDS) if method == "fnmf" else program


def sweeps_of(program: Program) -> int:
    """Exchanges that a round of it takes, where it is a consensus."""
    return program.sweeps if isinstance(program, Consensus) else 1


def exchanges_of(program: Program, rounds: int, n_parties: int) -> int:
    """Exchanges of so many rounds: of a relay, the first leg's as they are, and one for each exact round."""
    if isinstance(program, Relay):
        return program.rounds + rounds - program.rounds // sweeps_of(program.first)
    counts: Any = getattr(program, "rounds_for", None)
    among: Any = getattr(program, "exchanges_among", None)
    if among is not None:
        return rounds * int(among(n_parties))
    return rounds * sweeps_of(program) if counts is None else int(counts(rounds))


def _arguments(method: str, rank: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    """What keys mean to the recipe of a method."""
    found: dict[str, Any] = {name: keys[name] for name in AS_THEY_ARE if name in keys}
    found |= {name: alignment_of(keys[name]) for name in ("client_align", "server_align") if name in keys}
    if "rule" in keys:
        found["rule"] = recipes.solver_rules()[keys["rule"]]
    if method == SECURE:
        return found | _secure(rank, keys)
    if {"sketch", "sketch_ratio"} & keys.keys():
        found["sketch"] = _proportion(keys, "sketch", "sketch_ratio")
    if method in GAMES:
        game = game_named({**keys, "play": keys.get("order")})
        parts = {name: getattr(game, name) for name in ("order", "step", "self_play", "leader")}
        found |= {"game": game} if method == PLAYED else parts
    return found


def _secure(rank: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Sketches of rows have a dimension, by default as the recipe has it; of columns, a share of their number."""
    found: dict[str, Any] = {}
    if {"sketch", "sketch_dimension"} & keys.keys():
        kind = recipes.sketches()[keys.get("sketch", "gaussian")]
        found["sketch"] = kind(keys.get("sketch_dimension", 4 * rank))
    if "columns_sketch" in keys:
        found["columns_sketch"] = _proportion(keys, "columns_sketch", "columns_ratio")
    return found


def _proportion(keys: Mapping[str, Any], kind: str, ratio: str) -> Proportion:
    usual = Proportion()
    chosen = recipes.sketches()[keys[kind]] if kind in keys else usual.kind
    return Proportion(chosen, keys.get(ratio, usual.ratio))


# ---- topic keys -------------------------------------------------------------------------------------------------

TOPIC_METHODS = tuple(name for name in TOGETHER if name not in METHODS)
"""fednmf, fednmf-mi and fedlda."""

RECIPES = (*FEDERATED, *TOPIC_METHODS)
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
    **RECIPE_ALIASES,
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
        if name in NOT_ASKED:
            raise ParameterError(f"The experiment has no setting {name!r}. {NOT_ASKED[name]}")


def refuse_key(name: str, method: str, of: str = "") -> NoReturn:
    """Refuse a key by the names of all methods that take it; `of`: what the method is, where its name does not say."""
    methods = (*TAKEN_BY.get(name, ()), *RECIPES_TAKING.get(name, ()), *SHARED.get(name, ()))
    raise ParameterError(f"{name} is for {', '.join(methods)}; the method is {of or repr(method)}. Leave it out.")


# ---- recipe keys ------------------------------------------------------------------------------------------------
#
# Keys of experiment.toml for recipes of `partsong.methods.recipes`: what was told, and what cannot be meant.


@dataclass(frozen=True, slots=True)
class RecipeKeys:
    """What a recipe was told, beside what most methods share; a key that was not given is as the recipe has it."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def require(self, method: str, rank: int, rounds: int, usual: Usual) -> None:
        """Refuse what the method does not take, or what it cannot mean, by its name."""
        if method == THEN_EXACT:
            self._require_legs(rounds)
        for name, value in {**usual.given, **self.given}.items():
            self._require_taken(name, method)
            CHECKS[name](name, value)
        self._require_meaning(self._leg(method), usual.start)
        self._require_pairs()
        if self.given or method in BESIDE:
            self.program(method, rank, usual)

    def require_plain(self, method: str, privacy: Mapping[str, Any]) -> None:
        """Refuse a key of which noisy sums over rows would take nothing over."""
        if privacy.get("unit") == "row" and self.given:
            told = " and ".join(self.given)
            raise ParameterError(f"{told} of {method} has no place in noisy sums over rows: leave it out.")

    def program(self, method: str, rank: int, usual: Usual) -> Program:
        """The recipe, with these keys."""
        return made(method, rank, usual, self.given)

    def _leg(self, method: str) -> str:
        """The method whose keys these are: of "then-exact" that of its first leg."""
        return str(self.given["first"]) if method == THEN_EXACT else method

    def _require_taken(self, name: str, method: str) -> None:
        takes = SHARED[name] if name in SHARED else RECIPES_TAKING[name]
        first = self.given.get("first") if method == THEN_EXACT else None
        if method in takes or first in takes:
            return
        if (method, name) == ("exact", "sweeps"):
            raise ParameterError('The sweeps of "exact" are its local_steps: give these.')
        refuse_key(name, method, of=f'"{THEN_EXACT}" with first = "{first}"' if first else "")

    def _require_legs(self, rounds: int) -> None:
        missing = [name for name in ("first", "first_rounds") if name not in self.given]
        if missing:
            raise ParameterError(
                f'"{THEN_EXACT}" needs {" and ".join(missing)}: with which method it begins ({", ".join(FIRST_LEGS)}), '
                "and for how many rounds; all others are exact."
            )
        for name in ("first", "first_rounds"):
            CHECKS[name](name, self.given[name])
        if self.given["first_rounds"] >= rounds:
            raise ParameterError(
                f"first_rounds = {self.given['first_rounds']} leaves none of {rounds} rounds to be exact. Take fewer, "
                f'or method = "{self.given["first"]}".'
            )

    def _require_meaning(self, leg: str, start: str | None) -> None:
        """Refuse what the method takes, but not with this value."""
        order, sketch = self.given.get("order"), self.given.get("sketch", PRIVATE_SKETCHES[0])
        if leg in COMMON_ONLY and start == "independent":
            raise ParameterError(f'method="{leg}" has one start for all parties: start must be None or "common".')
        if leg == "game" and order in AT_ONCE:
            raise ParameterError(
                f'order = "{order}" moves all players at once, which takes all rows in one place. Take another, or '
                'method = "game-consensus".'
            )
        if leg == SECURE and sketch not in PRIVATE_SKETCHES:
            raise ParameterError(
                f'sketch = "{sketch}" would send rows of a site as they are. Take {" or ".join(PRIVATE_SKETCHES)}.'
            )

    def _require_pairs(self) -> None:
        """Refuse keys that mean nothing without another."""
        if "step_decay" in self.given and self.given.get("step", SAFE) == SAFE:
            raise ParameterError("step_decay needs a number as step: safe steps set their own pace.")
        if "shrink" in self.given and self.given.get("self_play", "none") == "none":
            raise ParameterError('shrink needs self_play = "min" or "max".')
        if "columns_ratio" in self.given and "columns_sketch" not in self.given:
            raise ParameterError("columns_ratio needs columns_sketch: without one, steps of W are exact.")
