"""What the server checks of an experiment before it asks any site: memory, and whether its parts fit together."""

from __future__ import annotations

import math

from partsong import methods
from partsong.core.interfaces import Layout, Reducible
from partsong.engines.upload_checks import check_together
from partsong.errors import CompositionError, ParameterError
from partsong.estimators.validation import physical_memory
from partsong.federation.experiment import Experiment
from partsong.federation.site.plan import Plan

NUMBER = 8
"""Bytes of one, in the sums that are kept most exactly."""


def require_room(rank: int) -> None:
    """Refuse a rank k of which k × k numbers, as in W_pᵀW_p or H Hᵀ, are more than this machine's memory."""
    memory = physical_memory()
    most = None if memory is None else math.isqrt(memory // NUMBER)
    if memory is not None and most is not None and rank > most:
        raise ParameterError(
            f"rank = {str(rank)[:40]} is too large: rank × rank numbers have no room in the {memory / 2**30:.3g} GiB "
            f"of memory of this machine, where {most} is the most. Choose far less: no more than sites have columns."
        )


def require_together(experiment: Experiment, plan: Plan, parties: tuple[str, ...]) -> None:
    """Refuse masks over what is no sum, and all else that the engine would refuse once sites had answered.

    Forms of uploads are looked at as of one column: how many there are is not known yet, and they do not depend on it.
    """
    if plan.reduction.hides_uploads and not isinstance(plan.program.aggregation, Reducible):
        key, method = _sending(experiment)
        is_aligned = "align" in methods.TABLE[method].parameters
        instead = f'{key} = "fnmf-by-sums", which can be masked' if is_aligned else "another method"
        raise ParameterError(
            f'{key} = "{method}" cannot be masked: the server has to see what each site sends. Take {instead}; or '
            "masked = false, which sites answer whose site.toml allows it."
        )
    expected = plan.program.upload_spec(Layout(parties, 1, experiment.seed))
    try:
        check_together(plan.program, plan.reduction, expected)
    except CompositionError as error:
        key, method = _sending(experiment)
        masked = "true" if experiment.masked else "false"
        raise ParameterError(f'{key} = "{method}" with masked = {masked}: {error}') from error


def out_of_memory(experiment: Experiment) -> ParameterError:
    """The error where memory has run out in a run at the server."""
    return ParameterError(
        f"The server's memory is not enough for rank = {experiment.rank} and the columns that sites have agreed on: it "
        "holds some matrices of rank × columns. Begin a run with a smaller rank, or on a machine with more memory."
    )


def _sending(experiment: Experiment) -> tuple[str, str]:
    """The key that says how sites begin, and its value."""
    other = methods.method(experiment.method).passes_to
    return ("method", experiment.method) if other is None else (other, str(experiment.options[other]))
