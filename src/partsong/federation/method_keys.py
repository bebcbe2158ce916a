"""Methods of experiment.toml and their keys, from the registry, with advice for names that do not exist here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partsong import methods
from partsong.core.parameters import SHARE, nearest
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

NEEDS_COLUMNS = (
    "needs columns of everybody's rows at every party, which sites must not have: it is for the machines of one owner "
    '(partsong fit DATA -k 10 --engine mpi --method dsanls). Take "secure-dsanls", which needs rows alone, or "exact"'
)

NOT_BETWEEN_SITES: Mapping[str, str] = {
    "row-private": 'is method = "exact" with a table privacy whose unit is "row"',
    "party-private": 'is one of the methods that send H with a table privacy whose unit is "party"',
    **{name: NEEDS_COLUMNS for name in methods.TABLE if name not in METHODS},
}
"""Programs that are no method of an experiment -> why, and what to take."""

ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("n_topics", "n_components"), "Did you mean 'rank', as it is called here?"),
    **dict.fromkeys(("steps", "repeats"), "Did you mean 'local_steps', as it is called here?"),
    "random_state": "Did you mean 'seed', as it is called here?",
    "fraction": "Did you mean 'participation', as it is called here?",
    "play": "Did you mean 'order', as it is called here?",
    "dimension": "Did you mean 'sketch_dimension', as it is called here?",
    "is_guarded": "How many sketches of its rows a site may send is not for an experiment to say: after "
    "⌊(n_p − 1)/d⌋ of them it refuses.",
    "budget": "Of how many rows all sites together have, a site knows only what the server says: sketches are counted "
    'against its own rows, as budget="own" does.',
}
"""Names that estimators, programs and the command line have, and an experiment has not -> what to do."""


def require_method(name: str) -> None:
    """Refuse a name that is no method between sites, with the reason or the nearest one."""
    if why := NOT_BETWEEN_SITES.get(name.replace("_", "-")):
        raise ParameterError(f"{name!r} {why}.")
    if name not in METHODS:
        raise ParameterError(f"method is {name[:60]!r}. {nearest(name, METHODS)}")


def check_options(method: Method, options: Mapping[str, Any]) -> None:
    """Refuse options that the method does not take, and values that they cannot have."""
    own = {name: value for name, value in options.items() if name != PARTICIPATION}
    if PARTICIPATION in options:
        if method.name not in ONLY_TEXTS:
            takers = ", ".join(ONLY_TEXTS)
            raise ParameterError(f"{PARTICIPATION} is for {takers}; the method is {method.name!r}. Leave it out.")
        SHARE.parse(PARTICIPATION, options[PARTICIPATION])
    if method.name == "exact" and "sweeps" in own:
        raise ParameterError('The sweeps of "exact" are its local_steps: give these.')
    method.parse(own)
    critic = [name for name in ("critic", "mi_gradient", "critic_rate") if name in own]
    if critic and own.get("strength") == 0:
        raise ParameterError(f"With strength = 0 there is no critic: leave {' and '.join(critic)} out.")


def check_topic_privacy(method: Method, options: Mapping[str, Any], *, privacy: Any, masked: bool) -> None:
    """Refuse, for a method of topics, privacy without a theorem, and masks that would hide nothing."""
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
