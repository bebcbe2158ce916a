"""What `--json` prints: one row a command, with its arguments and the keys and types of its object.

Rows run in their order and in one folder, so a row may read what an earlier one wrote. `None` is null, and `dict` and
`list` are open or empty here.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from partsong.cli.main import COMMANDS, app
from tests.cli.conftest import runner

SITES = "abc"
TEXTS = ("apple pear plum", "violin cello harp")
EXPERIMENT = 'method = "exact"\nrank = 2\nrounds = 2\nseed = 3\nsecure_aggregation = true\nmask_bound = 1e6\n'

FAILURE = {"error": str, "type": str, "exit_code": int}
FIT = {
    "model": str,
    "method": str,
    "n_components": int,
    "shape": [int],
    "parties": int,
    "dtype": str,
    "seed": int,
    "outcome": str,
    "iterations": int,
    "seconds": float,
    "relative_error": float,
    "explained_variance": float,
    "bytes_up_per_party": int,
    "bytes_down_per_party": int,
    "left_out": dict,
    "weights": (str, None),
    "run_folder": (str, None),
    "checkpoint": (str, None),
    "resumed_from": (str, None),
}
EXPOSURE = {
    "level": str,
    "party": str,
    "directions": int,
    "rounds": int,
    "rank": int,
    "rows": int,
    "rarest_column": int,
    "most_rounds": int,
    "most_rank": int,
}
NO_EXPOSURE = {**EXPOSURE, "most_rounds": None, "most_rank": None}
PRIVATE = {
    "epsilon_spent": float,
    "delta": float,
    "unit": str,
    "relation": str,
    "promise": str,
    "noise": str,
    "noise_multiplier": float,
    "epsilon_by_party": {str: float},
    "mechanism": (str, None),
    "forecast": None,
    "visible_directions": None,
    "verdict": None,
    "ranks": dict,
    "simulated": [str],
}
RELEASED = {
    "forecast": {
        "n_rows": (int, None),
        "n_features": int,
        "epsilon": float,
        "tau": (float, None),
        "least_rows": int,
        "least_share": (float, None),
        "expected_directions": None,
        "expected_error": None,
        "sentence": str,
    },
    "visible_directions": int,
    "verdict": str,
}
SUMMARY = {
    "source": str,
    "shape": [int],
    "stored_entries": int,
    "sparsity": float,
    "format": str,
    "dtype": str,
    "memory_bytes": int,
    "min": float,
    "max": float,
    "mean": float,
    "feature_names": bool,
    "sample_names": bool,
    "labels": bool,
    "duplicate_feature_names": int,
    "duplicate_sample_names": int,
}
SPLIT = {
    "output": str,
    "format": str,
    "version": int,
    "source": str,
    "header": None,
    "split": str,
    "by": str,
    "seed": int,
    "concentration": float,
    "n_samples": int,
    "n_features": int,
    "parties": [{"name": str, "file": str, "sha256": str, "rows": int, "labels": {str: int}}],
}
INFO = {
    "model": str,
    "n_components": int,
    "n_features": int,
    "dtype": str,
    "has_feature_names": bool,
    "relative_error": float,
    "explained_variance": float,
    "seed": int,
    "created": str,
    "settings": {str: (str, int, float)},
    "versions": {str: str},
    "components": [{"component": int, "share": float, "top_features": [int], "top_values": [float]}],
}
COMPARED_PARTY = {
    "rows": int,
    "relative_error": float,
    "own_error": (float, None),
    "drift": (float, None),
    "aligned_drift": (float, None),
    "shares": [float],
}
COMPARED_METHOD = {
    "method": str,
    "init_mode": str,
    "rounds": int,
    "local_steps": int,
    "relative_error": float,
    "explained_variance": float,
    "bytes_up_per_party": float,
    "bytes_down_per_party": float,
    "seconds": float,
    "drift": (float, None),
    "aligned_drift": (float, None),
    "outcome": str,
    "parties": {str: COMPARED_PARTY},
}
COMPARISON = {
    "parts": str,
    "report": str,
    "n_components": int,
    "seed": int,
    "is_complete": bool,
    "missing": list,
    "left_out": dict,
    "methods": [COMPARED_METHOD],
}
FINDING = {
    "attack": str,
    "array": str,
    "shape": [int],
    "what": str,
    "verdict": str,
    "doubt": (float, None),
    "error": (float, None),
    "rows_recovered": (int, None),
    "who": str,
}
ATTACKED_PARTY = {
    "party": str,
    "attacker": str,
    "sent": [{"name": str, "shape": [int], "dtype": str, "times": int, "nbytes": int}],
    "messages": int,
    "bytes_sent": int,
    "tried": [str],
    "recovered": [FINDING],
    "notes": [str],
    "is_sum": bool,
    "by_law": str,
    "membership": list,
    "largest_share": (float, None),
    "severity": str,
    "found": (str, None),
    "verdict": str,
}
ATTACK = {
    "severity": str,
    "by_law": str,
    "found": (str, None),
    "worst_party": str,
    "run": str,
    "other_runs": list,
    "method": str,
    "n_components": int,
    "n_features": int,
    "attacker": str,
    "secure_aggregation": bool,
    "exchanges": int,
    "compared_with": [str],
    "verdict": str,
    "parties": [ATTACKED_PARTY],
    "report": None,
}
DEMO_METHOD = {
    "name": str,
    "init_mode": str,
    "relative_error": float,
    "explained_variance": float,
    "drift": (float, None),
    "aligned_drift": (float, None),
    "rounds": int,
    "seconds": float,
    "outcome": str,
    "is_oracle": bool,
    "bytes_up_per_party": (int, None),
    "bytes_down_per_party": (int, None),
}
TOPICS = [{"topic": int, "share": float, "coherence": float, "words": [str]}]
TOPICS_FIT = {
    "model": str,
    "html": str,
    "method": str,
    "n_topics": int,
    "n_parties": int,
    "n_documents": int,
    "empty_documents": int,
    "n_words": int,
    "false_pass": None,
    "rounds": int,
    "outcome": str,
    "relative_error": float,
    "coherence": float,
    "diversity": float,
    "bytes_up": int,
    "bytes_down": int,
    "agreement_bytes_up": int,
    "seed": int,
    "topics": TOPICS,
    "seconds": float,
}
ROWS = {
    "check": (
        ("check", "X.npy", "--report", "check.csv"),
        {
            "factorizable": bool,
            "summary": SUMMARY,
            "findings": list,
            "report": str,
            "exposure": {"rows": int, "rarest_column": int, "most_for_guess": int, "most_for_membership": int},
        },
    ),
    "split": (("split", "X.csv", "--parties", 20, "--by", "site", "--seed", 1, "-o", "parts"), SPLIT),
    "fit": (
        ("fit", "X.npy", "-k", 3, "--seed", 1, "-o", "m.safetensors", "--weights", "F.npy", "--checkpoint", "fit.ckpt"),
        FIT,
    ),
    "fit resumed": (("fit", "X.npy", "--resume", "fit.ckpt", "--run-folder", "fitted", "-o", "again.safetensors"), FIT),
    "fit over parts": (
        ("fit", "parts", "-k", 3, "--method", "exact", "--rounds", 4, "--seed", 1, "--run-folder", "run", "--record"),
        {**FIT, "secure_aggregation": bool, "exposure": EXPOSURE},
    ),
    "fit by noisy rounds": (
        (
            *("fit", "parts", "-k", 3, "--epsilon", 3, "--unit", "row", "--row-bound", 1, "--mechanism", "rounds"),
            *("--rounds", 2, "-o", "noisy.safetensors"),
        ),
        {**FIT, **PRIVATE, "secure_aggregation": bool, "exposure": NO_EXPOSURE},
    ),
    "fit by one release": (
        ("fit", "parts", "-k", "1,2", "--epsilon", 3, "--unit", "row", "--row-bound", 1, "-o", "released.safetensors"),
        {**FIT, **PRIVATE, **RELEASED, "secure_aggregation": bool, "exposure": NO_EXPOSURE},
    ),
    "transform": (
        ("transform", "X.npy", "m.safetensors", "-o", "W.csv"),
        {
            "output": str,
            "model": str,
            "shape": [int],
            "n_components": int,
            "missing": str,
            "relative_error": float,
            "explained_variance": float,
            "seconds": float,
        },
    ),
    "info": (("info", "m.safetensors"), INFO),
    "compare": (
        ("compare", "parts", "-k", 2, "--method", "exact", "--method", "fedavg", "--rounds", 3, "--report", "c.html"),
        COMPARISON,
    ),
    "attack": (("attack", "run", "--data", "parts"), ATTACK),
    "demo": (
        ("demo", "--quick", "-o", "demo.html"),
        {"report": str, "seed": int, "quick": bool, "seconds": float, "methods": [DEMO_METHOD]},
    ),
    "topics fit": (
        ("topics", "fit", "texts.csv", "-k", 2, "--rounds", 3, "--html", "t.html", "-o", "t.safetensors"),
        TOPICS_FIT,
    ),
    "topics show": (
        ("topics", "show", "t.safetensors"),
        {"model": str, "n_words": int, "settings": {str: (str, int, float)}, "topics": TOPICS},
    ),
    "topics transform": (
        ("topics", "transform", "texts.csv", "t.safetensors", "-o", "T.csv"),
        {"output": str, "model": str, "n_documents": int, "n_topics": int, "n_zero": int, "seconds": float},
    ),
    "a failure": (("info", "none.safetensors"), FAILURE),
    "a usage error": (("fit", "X.npy", "--none"), FAILURE),
}
STATUS = {
    "name": str,
    "address": str,
    "server": str,
    "folder": str,
    "certificate_days": int,
    "served_certificate_days": None,
    "fingerprint": str,
    "problems": dict,
    "sites": {str: str},
    "runs": {str: {"status": str, "rounds_done": int}},
    "models": {str: str},
}
SITE_STATUS = {
    "site": str,
    "federation": str,
    "address": str,
    "folder": str,
    "node": str,
    "fingerprint": str,
    "shared_key": bool,
    "problems": dict,
    "epsilon_allowed": None,
    "epsilon_spent": None,
    "releases": int,
    "releases_without_noise": int,
    "directions": int,
    "openings": list,
    "audit": {"file": str, "is_sound": bool, "lines": int, "last": str, "head": str},
    "refuses": None,
    "runs": {str: {"status": str, "result": str}},
}
AUDIT_LINE = {
    "again": bool,
    "arrays": [{"bytes": int, "name": str, "norm": None, "shape": [int], "type": str}],
    "attempt": int,
    "before": str,
    "bytes": int,
    "clip": None,
    "epsilon": None,
    "hash": str,
    "kind": str,
    "noise_multiplier": None,
    "number": int,
    "phase": int,
    "refusal": None,
    "release": None,
    "round": int,
    "run": str,
    "sha256": str,
    "time": str,
}
AUDITED_RUN = {"messages": int, "bytes": int, "again": int, "refusals": int, "rounds": int, "epsilon": None}
ROSTER = {"sites": [str], "fingerprint": str, "file": str}
FEDERATION_ROWS = {
    "federation init": (
        ("federation", "init", "liver", "--name", "liver", "--address", "nmf.example.org:8443"),
        {
            "folder": str,
            "name": str,
            "address": str,
            "certificate_days": int,
            "is_served": bool,
            "kits": dict,
        },
    ),
    "federation shared-key": (("federation", "shared-key", "-o", "sites.key"), {"file": str}),
    "federation invite": (
        ("federation", "invite", "a", "--folder", "liver", "-o", "a.zip"),
        {"site": str, "kit": str, "roster": None},
    ),
    "federation join": (
        ("federation", "join", "a.zip", "--data", "a.npy", "--yes"),
        {
            "site": str,
            "federation": str,
            "folder": str,
            "card": str,
            "shared_key": bool,
            "fingerprint": None,
        },
    ),
    "federation admit": (
        ("federation", "admit", "site-a/card.toml", "--folder", "liver", "--engine", "files"),
        {**ROSTER, "admitted": [str]},
    ),
    "federation run": (
        ("federation", "run", "first.toml", "--folder", "liver", "--engine", "files", "--exchange-folder", "drop"),
        {
            "status": str,
            "run": str,
            "rounds": int,
            "parties": [str],
            "absent": dict,
            "dropouts": dict,
            "without_result": dict,
            "seconds": float,
            "model": str,
            "folder": str,
        },
    ),
    "federation status": (("federation", "status", "--folder", "liver"), STATUS),
    "federation status at a site": (("federation", "status", "--folder", "site-a"), SITE_STATUS),
    "audit verify": (
        ("audit", "verify", "site-a"),
        {
            "is_sound": bool,
            "file": str,
            "lines": int,
            "first": str,
            "last": str,
            "head": str,
            "unfinished": int,
            "since": None,
        },
    ),
    "audit show": (
        ("audit", "show", "site-a"),
        {
            "file": str,
            "is_sound": bool,
            "runs": {str: AUDITED_RUN},
            "lines": [AUDIT_LINE],
            "unlisted_refusals": dict,
        },
    ),
    "audit opening": (
        ("audit", "opening", "site-a", "--why", "the disk is lost", "--releases", 1, "--directions", 0),
        {
            "releases": int,
            "why": str,
            "epsilon": None,
            "delta": float,
            "unit": str,
            "relation": str,
            "directions": int,
            "log_lines": int,
            "number": int,
        },
    ),
    "federation remove": (("federation", "remove", "c", "--folder", "liver"), {**ROSTER, "removed": str}),
}
NOT_CHEAP = {"federation stop", "federation demo"}
"""These need processes, and have tests of their own."""


def mismatches(value, form, place=""):
    """Yield each place where a value is not of its form."""
    if isinstance(form, tuple):
        if all(list(mismatches(value, each)) for each in form):
            yield f"{place}: {value!r} is none of {form}"
    elif form is None or isinstance(form, type):
        if (value is not None) if form is None else type(value) is not form:
            yield f"{place}: {value!r} is not {form}"
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{place}: {value!r} is no list"
        else:
            for each in value:
                yield from mismatches(each, form[0], f"{place}[]")
    elif not isinstance(value, dict):
        yield f"{place}: {value!r} is no object"
    elif form.keys() == {str}:
        for key, each in value.items():
            yield from mismatches(each, form[str], f"{place}.{key}")
    elif value.keys() != form.keys():
        yield f"{place}: other keys: {sorted(value.keys() ^ form.keys())}"
    else:
        for key, each in value.items():
            yield from mismatches(each, form[key], f"{place}.{key}")


def printed(words):
    """Return the one line of a command, as an object, and its exit code."""
    result = runner().invoke(app, [*map(str, words), "--json"])
    (line,) = result.stdout.splitlines()
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in JSON")), result.exit_code


def write_files(folder):
    """Write a matrix, its table with a column of sites, and texts."""
    draw = np.random.default_rng(0)
    X = draw.random((45, 3)) @ draw.random((3, 12)) + 0.05 * draw.random((45, 12))
    np.save(folder / "X.npy", X)
    lines = [",".join(["sample", *(f"gene {j}" for j in range(12)), "site"])]
    for i, row in enumerate(X):
        lines.append(",".join([f"patient-{i}", *map(repr, row.tolist()), "abc"[i % 3]]))
    (folder / "X.csv").write_text("\n".join(lines) + "\n")
    (folder / "texts.csv").write_text("text\n" + "\n".join(TEXTS[i % 2] for i in range(20)) + "\n")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What every row has printed."""
    folder = tmp_path_factory.mktemp("json")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {name: printed(words) for name, (words, _) in ROWS.items()}


def open_sites(folder):
    """Return what answers at each site, once the others have joined and all have pinned the roster."""
    from partsong.federation.setup.server_folder import ServerFolder
    from partsong.federation.setup.site_folder import SiteFolder

    for site in SITES[1:]:
        for name in ("federation invite", "federation join", "federation admit"):
            words, _ = FEDERATION_ROWS[name]
            others = {"a": site} | {f"a.{end}": f"{site}.{end}" for end in ("zip", "npy")}
            others["site-a/card.toml"] = f"site-{site}/card.toml"
            assert printed([others.get(word, word) for word in words])[1] == 0
    roster, answers = ServerFolder.at(folder / "liver").roster(), {}
    for site in SITES:
        place = SiteFolder.at(folder / f"site-{site}")
        place.pin(roster, roster.fingerprint)
        (place.path / "site.toml").write_text(
            "secure_aggregation = true\nminimum_parties = 3\nminimum_mask_bound = 1e6\n"
        )
        answers[site] = place.opened().answer
    return answers


@pytest.fixture(scope="module")
def said_by_federation(tmp_path_factory):
    """What every row about a federation has printed; its sites answer in this process."""
    pytest.importorskip("cryptography")
    from partsong.federation.transports import files
    from partsong.federation.transports.base import InProcess

    folder = tmp_path_factory.mktemp("json")
    for number, site in enumerate(SITES):
        np.save(folder / f"{site}.npy", np.random.default_rng(number).random((20, 6)))
    (folder / "first.toml").write_text(EXPERIMENT)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, (words, _) in FEDERATION_ROWS.items():
            if name == "federation run":
                sites = InProcess(open_sites(folder))
                patch.setattr(files, "request_transport", lambda *places, sites=sites: sites)
            found[name] = printed(words)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_keys_and_types(name, said):
    found, code = said[name]
    assert not list(mismatches(found, ROWS[name][1]))
    assert code == (found["exit_code"] if ROWS[name][1] is FAILURE else 0)


@pytest.mark.parametrize("name", FEDERATION_ROWS)
def test_keys_and_types_of_a_federation(name, said_by_federation):
    found, code = said_by_federation[name]
    assert not list(mismatches(found, FEDERATION_ROWS[name][1]))
    assert code == 0


def commands():
    """Yield each command that has --json."""
    for name, entry in COMMANDS.items():
        command = entry.load(name)
        for path, each in getattr(command, "commands", {"": command}).items():
            if any("--json" in parameter.opts for parameter in each.params):
                yield f"{name} {path}".strip()


def test_every_command_with_json_has_a_row():
    found = {" ".join(words[:2]) for words, _ in (*ROWS.values(), *FEDERATION_ROWS.values())}
    assert {name for name in commands() if not any(f"{each} ".startswith(f"{name} ") for each in found)} == NOT_CHEAP
