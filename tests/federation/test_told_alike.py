"""Masks are among sites that were told the same: a server that tells one something else gets no sum."""

from dataclasses import replace

import numpy as np
import pytest
from federations import COLUMNS, NAMES, Federation, rows_of, secret_of
from test_site import Recorded

from partsong.core import Layout, Message
from partsong.errors import PartyError
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.signatures import public_key
from partsong.federation.site_plan import Data, plan_of
from partsong.federation.told_alike import bound_to, context_of
from partsong.federation.wire import Kind, Request

ROSTER = {name: public_key(secret_of(name), name) for name in NAMES[:3]}
MASKED = Policy(masked=True, minimum_parties=3)
SETTINGS = {"rank": 2, "rounds": 2, "masked": True, "mask_bound": 1e6}


class Pinned(Federation):
    def site(self, name, **changes):
        data = Data(rows_of(name), COLUMNS, secret_of(name))
        return replace(super().site(name), roster=ROSTER, data=data, **changes)

    def plan(self):
        return plan_of(self.experiment.told(), 3, ROSTER)


def lied_to(tmp_path, change, **experiment):
    federation = Pinned(tmp_path, Experiment.from_table({**SETTINGS, **experiment}), policy=MASKED)
    transport = Recorded(federation.transport().sites, change)
    with pytest.raises(PartyError, match=r"phase 0 \(keys\).*other settings"):
        list(federation.rounds(transport))
    assert {Request.read(request).nonce.phase for _, request, _ in transport.asked} == {0}, "nothing has been masked"


def test_a_server_that_tells_others_another_experiment_gets_no_sum(tmp_path):
    """Pulled to the model by force, the others would send nothing but that, and the sum would be one site's upload."""

    def change(name, request):
        read = Request.read(request)
        if name == "east" or read.note.get("experiment") is None:
            return request
        read.note["experiment"]["strength"] = 1e9
        return Request(name, read.nonce, read.body, read.note, read.seen).written()

    lied_to(tmp_path, change, method="fedprox", strength=0.0, local_steps=2)


def test_a_server_that_tells_one_other_columns_gets_no_sum(tmp_path):
    """In columns that are zero at all others, the sum would be one site's own."""

    def change(name, request):
        read = Request.read(request)
        if name != "east" or read.nonce.kind is not Kind.START:
            return request
        turned = Message({"columns": np.ascontiguousarray(np.asarray(read.body["columns"])[::-1])})
        return Request(name, read.nonce, turned, read.note, read.seen).written()

    lied_to(tmp_path, change, method="exact")


def test_the_context_is_that_of_all_that_a_start_tells():
    columns, layout = np.arange(32, dtype=np.uint8).reshape(2, 16), Layout(("a", "b", "c"), 2, 5, "float64")
    same = context_of({"x": 1, "y": [2]}, columns, layout)
    assert same == context_of({"y": [2], "x": 1}, columns.copy(), layout)
    others = [({"x": 1, "y": [3]}, columns, layout), ({"x": 1, "y": [2]}, columns[::-1], layout)]
    others += [({"x": 1, "y": [2]}, columns, replace(layout, seed=6))]
    assert len({same, *(context_of(*other) for other in others)}) == 4
    masks = Experiment.from_table({**SETTINGS, "method": "exact"}).reduction(3, ROSTER)
    assert bound_to(same, masks).context == same.encode()
    open_sums = Experiment.from_table({"method": "exact", "rank": 2, "rounds": 1}).reduction(3)
    assert bound_to(same, open_sums) == open_sums
