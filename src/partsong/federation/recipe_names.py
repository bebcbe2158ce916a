"""Which recipes an experiment can name, the keys that each takes, and why some recipes cannot be run between sites."""

from __future__ import annotations

from collections.abc import Mapping

from partsong.methods import ASYNCHRONOUS, LOCAL_ONLY, METHODS, SKETCHED

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

TAKEN_BY: Mapping[str, tuple[str, ...]] = {
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

RECIPE_KEYS = tuple(TAKEN_BY)

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

ELSEWHERE: Mapping[str, str] = {
    "steps": "local_steps",
    "repeats": "local_steps",
    "play": "order",
    "dimension": "sketch_dimension",
}
"""What recipes and the command line call keys that have another name in an experiment."""
