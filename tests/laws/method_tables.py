"""Rows of tables of laws, from the registry: a new method is in all of them."""

from dataclasses import replace

from partsong import methods
from partsong.methods.registry import every_method, private_methods

EVERY = {one.name: one for one in every_method()}
BETWEEN_PARTIES = methods.names()
TOGETHER = methods.names(methods.TEXTS)
ALONE = tuple(methods.pooled_names())
ONLY_TEXTS = tuple(name for name in TOGETHER if name not in BETWEEN_PARTIES)
METHODS = tuple(name for name in BETWEEN_PARTIES if "local_steps" in EVERY[name].parameters)
"""Methods that need no option, and run on a few rows: not "then-exact", nor "secure-dsanls" with its budget."""

ASYNCHRONOUS = tuple(name for name in METHODS if EVERY[name].traits.asynchronous)
ONE_SHOT = tuple(name for name in METHODS if EVERY[name].is_one_shot)
SENDS_H = tuple(name for name in private_methods("party") if name in METHODS)
INIT_MODES = {name: EVERY[name].parameters["init_mode"].names for name in METHODS}
LOCAL_STEPS = {name: EVERY[name].value("local_steps", {}) for name in METHODS}


def fednmf(rank, *, information=None, weight_step="batch", **settings):
    """FedNMF with the weight steps of the paper, and any information."""
    program = methods.build("fednmf", rank, weight_step=weight_step, **settings)
    return (
        program if information is None else replace(program, descent=replace(program.descent, information=information))
    )


def fednmf_mi(rank, *, weight_step="batch", **settings):
    """FedNMF+MI with the weight steps of the paper."""
    return methods.build("fednmf-mi", rank, weight_step=weight_step, **settings)
