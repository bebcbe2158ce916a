"""Private second moments over real processes of Flower: the bits of one process, each exchange at its own price."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from partsong.federation.commands import demo
from partsong.privacy.accounting import Release
from tests.federation.helpers import noisy_plan
from tests.integration.flower.flower_kills import EPSILON, lines_of, require_unharmed
from tests.integration.flower.flower_processes import federation

pytestmark = [pytest.mark.filterwarnings("default::DeprecationWarning"), pytest.mark.slow]

N_ROWS = 4600
"""Of all sites together: 4000 at the first, and 200 at each of the others."""
EXPERIMENT = f"""method = "exact"
rank = 3
seed = 5
secure_aggregation = true
[privacy]
unit = "row"
epsilon = {EPSILON}
row_bound = 10.0
mechanism = "{{}}"
n_rows = {N_ROWS}
n_features = 60
"""
POLICY = "minimum_parties = 4\nsecure_aggregation = true\n[privacy]\nepsilon = 8.001\ninsecure_noise = true\n"


@pytest.mark.parametrize(("mechanism", "exchanges"), [("moment", 1), ("hybrid", 4)])
def test_a_private_moment_of_four_sites_is_that_of_one_process_bit_for_bit(tmp_path, mechanism, exchanges):
    """The noise comes from seeds here, so that one process can draw it again; budgets cover it once and no more."""
    with federation(tmp_path, demo.NAMES, policy=POLICY, odd=dict.fromkeys(demo.NAMES, "seeded")) as made:
        code, told = made.run("first", EXPERIMENT.format(mechanism))
        assert code == 0, told
        said = (tmp_path / "run first.log").read_text()
    require_unharmed(made, "first", told, exchanges, noisy_plan)
    record = made.record("first")
    assert record.experiment["privacy"]["mechanism"] == mechanism
    charged = [Release.from_json(line["release"]) for line in lines_of(made.sites["north"], "first")]
    assert len(charged) == exchanges
    assert len({one.noise_multiplier for one in charged}) == (1 if mechanism == "moment" else 2)
    assert f'mechanism "{mechanism}": ' in said
    assert f"With {N_ROWS} rows, 60 columns and ε = 8, expect " in said
    assert told["privacy"]["mechanism"] == mechanism
    assert told["privacy"]["visible_directions"] >= 3
    assert "visible above the noise" in told["privacy"]["verdict"]
