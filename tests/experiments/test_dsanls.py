"""The experiments of the DSANLS paper run on small data; what they find is in docs/results/dsanls.md."""

import itertools
import json
from types import SimpleNamespace

from experiments.dsanls import curves as dsanls_curves
from experiments.dsanls import ranks as dsanls_ranks
from experiments.dsanls import rates as dsanls_rates
from experiments.dsanls import report as dsanls_report
from experiments.dsanls import secure as dsanls_secure


def test_dsanls_curves_fall(tmp_path):
    place = tmp_path / "curves.jsonl"
    dsanls_curves.main(["--quick", "--methods", "DSANLS/S,RCD/G,PGD/G,HALS", "--output", str(place)])
    runs = [json.loads(line) for line in place.read_text("utf-8").splitlines()]
    assert {(run["data"], run["method"]) for run in runs} >= {("dense", "DSANLS/S"), ("sparse", "HALS")}
    for run in runs:
        errors = [error for _, _, error in run["points"]]
        assert errors[-1] < errors[0] * (1.0 if run["method"] == "HALS" else 1.02), (
            "on a busy machine these take few steps"
        )
    before = place.read_text("utf-8")
    dsanls_curves.main(["--quick", "--methods", "DSANLS/S,RCD/G,PGD/G,HALS", "--output", str(place)])
    assert place.read_text("utf-8") == before, "runs that are there are not repeated"


def test_dsanls_secure_methods_share_one_clock(tmp_path):
    place = tmp_path / "secure.jsonl"
    dsanls_secure.main(["--quick", "--splits", "half", "--output", str(place)])
    runs = [json.loads(line) for line in place.read_text("utf-8").splitlines()]
    assert {run["method"] for run in runs} == set(dsanls_secure.METHODS)
    for run in runs:
        seconds = [second for _, second, _ in run["points"]]
        assert seconds == sorted(seconds)
        assert 0 < run["points"][-1][2] < 1


def test_dsanls_rates_are_of_whole_iterations(monkeypatch):
    """Where every piece of work takes a tick, ten steps cost one piece, or eleven where means are exchanged."""
    tick, clock = 0.5, itertools.count()
    monkeypatch.setattr(dsanls_secure, "time", SimpleNamespace(perf_counter=lambda: next(clock) * tick))
    X, exchange = dsanls_secure.QUICK["dense"].load(), tick + dsanls_secure.LATENCY
    for split, parties in (("equal", 2), ("half", 3)):
        shards = dsanls_secure.shards_of(X, parties, split, 0)
        for method in dsanls_secure.METHODS:
            pieces = 11 if "Syn-SSD" in method else 1
            missing = dsanls_secure.STEPS / (pieces * exchange) - dsanls_rates.rate(method, shards, 4, 12.0, 0)
            unfinished = dsanls_secure.STEPS / 12.0 if method in dsanls_secure.ASYNCHRONOUS else 0.0
            assert -1e-9 < missing <= unfinished + 1e-9, method


def test_dsanls_rates_are_written_once(tmp_path):
    place = tmp_path / "rates.jsonl"
    asked = ["--quick", "--methods", "Syn-SD,Asyn-SSD-V", "--output", str(place)]
    dsanls_rates.main(asked)
    runs = [json.loads(line) for line in place.read_text("utf-8").splitlines()]
    assert {(run["split"], run["parties"]) for run in runs} == {(s, n) for s in ("equal", "half") for n in (2, 3)}
    assert min(run["rate"] for run in runs) > 0
    before = place.read_text("utf-8")
    dsanls_rates.main(asked)
    assert place.read_text("utf-8") == before


def test_dsanls_report_tells_medians_over_seeds(tmp_path):
    runs = [
        {"data": "face", "split": "half", "method": "Asyn-SD", "seed": seed, "parties": parties, "rate": parties * rate}
        for parties in (2, 16)
        for seed, rate in enumerate((300, 100, 110))
    ]
    (tmp_path / "dsanls-rates.jsonl").write_text("\n".join(json.dumps(run) for run in runs))
    last = dsanls_report.tables_of(tmp_path)["rates-half"].splitlines()[-1]
    assert last == "| face | asyn-sd | 220 | 1760 | 8.00 |"


def test_dsanls_report_makes_nothing_of_goals_that_zero_reaches(tmp_path):
    runs = [
        {"data": name, "rank": 3, "method": method, "seed": 0, "points": [[1, 1.0, 1.0], [2, 2.0, end]]}
        for name, end in (("face", 0.5), ("dblp-twin", 0.99))
        for method in ("DSANLS/S", "HALS")
    ]
    (tmp_path / "dsanls-curves.jsonl").write_text("\n".join(json.dumps(run) for run in runs))
    face, dblp = dsanls_report.tables_of(tmp_path)["goal"].splitlines()[-2:]
    assert face.endswith("| 2.00 | 1.00 |")
    assert dblp.endswith("| goal above 1 | – |")


def test_dsanls_traffic_is_that_of_the_formula(capsys):
    dsanls_ranks.main(["--quick", "--methods", "DSANLS/S,HALS"])
    sketched, exact = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    k, n, m = 5, 300, 200
    scalars = 2 * 8  # the weight of each of two messages
    assert {row["bytes"] for row in sketched["counted"]} == {k * (n // 10 + m // 10) * 4 + scalars}
    assert {row["bytes"] for row in exact["counted"]} == {k * m * 4 + k * k * 8 + 2 * 8 + 8}
