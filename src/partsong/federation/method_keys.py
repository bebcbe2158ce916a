"""Keys of experiment.toml for methods: those of the registry, and why some names are none here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from partsong import methods
from partsong.core.parameters import SHARE
from partsong.errors import ParameterError
from partsong.methods.registry import Method, private_methods

METHODS = tuple(dict.fromkeys((*methods.names(), *methods.names(methods.TEXTS))))
"""All that an experiment can name, and a site can allow."""

ONLY_TEXTS = tuple(name for name in METHODS if methods.PARTIES not in methods.TABLE[name].tasks)
"""Methods of topics alone."""

PARTICIPATION = "participation"
"""C, the share of sites that are drawn for each round: for methods of topics, beside their own options."""

METHOD_KEYS = tuple(
    dict.fromkeys((PARTICIPATION, *(name for method in METHODS for name in methods.TABLE[method].parameters)))
)

OUTSIDE: Mapping[str, str] = {
    "row-private": 'is method = "exact" with a table privacy whose unit is "row"',
    "party-private": 'is one of the methods that send H with a table privacy whose unit is "party"',
}
"""Programs that are no method of an experiment -> why, and what to take."""

NEEDS_COLUMNS = (
    "needs columns of everybody's rows at every party, which sites must not have: it is for the machines of one owner "
    '(partsong fit DATA -k 10 --engine mpi --method dsanls). Take "secure-dsanls", which needs rows alone, or "exact"'
)

NOT_ASKED: Mapping[str, str] = {
    "is_guarded": "How many sketches of its rows a site may send is not for an experiment to say: after "
    "⌊(n_p − 1)/d⌋ of them it refuses.",
    "budget": "Of how many rows all sites together have, a site knows only what the server says: sketches are counted "
    'against its own rows, as budget="own" does.',
}
"""Settings of programs that are not for those who write an experiment -> why."""

ELSEWHERE: Mapping[str, str] = {
    **{"n_topics": "rank", "n_components": "rank", "random_state": "seed", "fraction": "participation"},
    **{"steps": "local_steps", "repeats": "local_steps", "play": "order", "dimension": "sketch_dimension"},
}
"""What estimators, programs and the command line call keys that have another name in an experiment."""


def require_method(name: Any) -> None:
    """Refuse what is no method between sites, with the reason."""
    plain = str(name).replace("_", "-")
    if plain in methods.TABLE and plain not in METHODS:
        raise ParameterError(f"{name!r} {NEEDS_COLUMNS}.")
    if plain in OUTSIDE:
        raise ParameterError(f"{name!r} {OUTSIDE[plain]}.")


def require_own_names(table: Any) -> None:
    """Refuse names that estimators and programs have for keys of an experiment, and settings that are a site's own."""
    for name in table if isinstance(table, Mapping) else ():
        if name in ELSEWHERE:
            own = ELSEWHERE[name]
            raise ParameterError(f"The experiment has no setting {name!r}. Did you mean {own!r}, as it is called here?")
        if name in NOT_ASKED:
            raise ParameterError(f"The experiment has no setting {name!r}. {NOT_ASKED[name]}")


def parse_options(method: Method, options: Mapping[str, Any]) -> None:
    """Refuse what the method does not take, or what an option cannot mean, by its name."""
    own = {name: value for name, value in options.items() if name != PARTICIPATION}
    if PARTICIPATION in options:
        if method.name not in ONLY_TEXTS:
            _refuse(PARTICIPATION, method)
        SHARE.parse(PARTICIPATION, options[PARTICIPATION])
    if method.name == "exact" and "sweeps" in own:
        raise ParameterError('The sweeps of "exact" are its local_steps: give these.')
    method.parse(own)
    critic = [name for name in ("critic", "mi_gradient", "critic_rate") if name in own]
    if critic and own.get("strength") == 0:
        raise ParameterError(f"With strength = 0 there is no critic: leave {' and '.join(critic)} out.")


def require_no_promise(method: Method, options: Mapping[str, Any], *, privacy: Any, masked: bool) -> None:
    """Refuse, for a method of topics, promises without a theorem, and masks in vain."""
    if privacy:
        raise ParameterError(
            f"There is no theorem on what noise would hide in uploads of {method.name}, and no budget is promised for "
            f'them. Take method = "exact" with unit = "row", or one of {", ".join(private_methods("party"))} with '
            'unit = "party"; or leave the table privacy out.'
        )
    if masked and method.constant_sums and options.get(PARTICIPATION, 1) < 1:
        raise ParameterError(
            f"Sums of {method.name} over other sites each time differ by the words of single sites, and masks would "
            "hide nothing. Take participation = 1, or another method."
        )


def _refuse(name: str, method: Method) -> NoReturn:
    takers = ", ".join(ONLY_TEXTS)
    raise ParameterError(f"{name} is for {takers}; the method is {method.name!r}. Leave it out.")
