"""Small runs of every method on every engine, by name: what golden arrays are made of and compared with.

A case is a function without arguments that returns H. Cases with the same name on different engines share one golden
array: engines must not change a result by more than rounding. The tables are:

    FITS       estimators, with threads and without
    PROGRAMS   programs, on each engine of one process and over ranks
    ARRIVALS   asynchronous programs, by the virtual clock
    SITES      experiments between sites, each in a folder of its own
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "laws"))

from method_tables import (
    ALONE,
    ASYNCHRONOUS,
    BETWEEN_PARTIES,
    LOCAL_STEPS,
    METHODS,
    ONLY_TEXTS,
    SENDS_H,
    TOGETHER,
    fednmf,
    fednmf_mi,
)

import partsong
from partsong.aggregation.alignment import ALIGNMENTS
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule, Shard
from partsong.core.streams import key
from partsong.data.blocks import two_sided_blocks
from partsong.data.conversion import as_matrix
from partsong.engines.local import Parallel, Sequential
from partsong.engines.virtual_clock import Asynchronous
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.transports.base import InProcess
from partsong.methods import build
from partsong.methods.averaging import LocalAveraging
from partsong.methods.dsanls import SketchExchange
from partsong.methods.exact import SharedSums
from partsong.methods.fedlda import FederatedLDA
from partsong.methods.privacy_request import PartyPrivacy, RowPrivacy
from partsong.methods.private import party_private, row_private
from partsong.methods.secure_sketched import SketchedSums
from partsong.methods.two_stage import TwoStageProgram, exact_after
from partsong.privacy.randomness import InsecureSource
from partsong.secure_aggregation.protocol import SecureSum
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import Gaussian
from partsong.solvers.game import SELF_PLAYS, Game
from partsong.solvers.game_orders import ORDERS
from partsong.solvers.squared_error import build_solver
from tests.federation.helpers import NAMES, Counting, Federation, by_seed, noisy_plan, topic_texts_of
from tests.federation.test_asynchronous import arrivals_of

RANK, ROUNDS, SEED = 3, 4, 5
N_PARTIES, N_COLUMNS = 4, 10
MASKS = SecureSum(bound=1e4)

Case = Callable[[], np.ndarray]


# ---- data --------------------------------------------------------------------------------------------------------


def parts() -> list[np.ndarray]:
    """Rows of each party."""
    rng = np.random.default_rng(0)
    H = rng.gamma(0.5, size=(RANK, N_COLUMNS))
    return [rng.gamma(0.5, size=(12 + 3 * i, RANK)) @ H + 0.1 * rng.random(N_COLUMNS) for i in range(N_PARTIES)]


def pooled() -> np.ndarray:
    return np.vstack(parts())


def with_gaps() -> np.ndarray:
    X = pooled()
    X[np.random.default_rng(1).random(X.shape) < 0.1] = np.nan
    return X


def row_shards() -> list[Shard]:
    return [Shard(f"p{i:02d}", as_matrix(rows), key(7, f"p{i:02d}")) for i, rows in enumerate(parts())]


def two_sided_shards() -> list[Shard]:
    blocks = two_sided_blocks(pooled(), N_PARTIES)
    return [Shard(f"p{i:02d}", block, key(7, f"p{i:02d}")) for i, block in enumerate(blocks)]


# ---- estimators --------------------------------------------------------------------------------------------------

SHORT_STEPS = {name: 5 for name in METHODS if LOCAL_STEPS[name] >= 100}
MASKABLE = (
    "exact",
    "moment",
    "fedavg",
    "fedprox",
    "one-shot-ipalm",
    "one-shot-mu",
    "syn-sd",
    "syn-ssd-u",
    "syn-ssd-v",
    "syn-ssd-uv",
)
POOLED = {
    **{solver: {"solver": solver} for solver in ("hals", "cd", "mu", "pg", "ipalm", "bpp", "game")},
    "sanls": {"solver": "sanls", "sketch_ratio": 0.5, "max_iter": 20},
    **{f"sanls, {sketch}": {"solver": "sanls", "sketch": sketch, "sketch_ratio": 0.5, "max_iter": 20}
       for sketch in ("gaussian", "count", "hadamard")},
    **{f"hals, {init}": {"init": init} for init in ("anchors", "random", "nndsvd", "nndsvda")},
    "hals, penalised": {"alpha_W": 1e-3, "alpha_H": 2e-3, "l1_ratio": 0.5},
    "hals, float32": {"dtype": np.float32},
    "hals, until it stops": {"tol": 1e-4, "max_iter": 500},
    **{f"game, {name}": {"solver": Game(order)} for name, order in ORDERS.values.items()},
    **{f"game, self-play {name}": {"solver": Game(self_play=alone)} for name, alone in SELF_PLAYS.values.items()},
}  # fmt: skip


def fitted(model: object, *data: object) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # short fits do not converge
        return model.fit(*data).components_


def fits() -> Iterator[tuple[str, str, Case]]:
    for name, settings in POOLED.items():
        settings = {"max_iter": ROUNDS, "tol": 0.0, "random_state": SEED, **settings}
        yield f"NMF {name}", "pooled", lambda s=settings: fitted(partsong.NMF(RANK, **s), pooled())
    gaps = {"solver": "game", "missing": "ignore", "max_iter": ROUNDS, "tol": 0.0, "random_state": SEED}
    yield "NMF game, gaps", "pooled", lambda: fitted(partsong.NMF(RANK, **gaps), with_gaps())
    yield "PCAGame", "pooled", lambda: fitted(partsong.PCAGame(RANK, random_state=SEED), pooled())
    for method in (*METHODS, "moment"):
        for masked in (False, True) if method in MASKABLE else (False,):
            settings = {"method": method, "rounds": ROUNDS, "tol": 0.0, "random_state": SEED}
            settings |= {"secure_aggregation": MASKS if masked else False, "local_steps": SHORT_STEPS.get(method)}
            for engine, n_jobs in (("sequential", 1), ("threads", 2)):
                made = lambda s=settings, n=n_jobs: fitted(partsong.FederatedNMF(RANK, n_jobs=n, **s), parts())  # noqa: E731
                yield f"FederatedNMF {method}{', masked' if masked else ''}", engine, made
    for method, align in itertools.product(("fnmf", "fnmf-local"), ALIGNMENTS.values):
        settings = {"method": method, "align": align, "rounds": ROUNDS, "local_steps": 5, "tol": 0.0, "n_jobs": 1}
        made = lambda s=settings: fitted(partsong.FederatedNMF(RANK, random_state=SEED, **s), parts())  # noqa: E731
        yield f"FederatedNMF {method}, {align}", "sequential", made
    for method, start in (("fedavg", "independent"), ("fnmf-local", "common"), ("fedprox", "independent")):
        init_mode = {"independent": "local", "common": "shared"}[start]  # names of cases keep the words of 0.1.0
        settings = {
            "method": method,
            "init_mode": init_mode,
            "rounds": ROUNDS,
            "local_steps": 5,
            "tol": 0.0,
            "n_jobs": 1,
        }
        made = lambda s=settings: fitted(partsong.FederatedNMF(RANK, random_state=SEED, **s), parts())  # noqa: E731
        yield f"FederatedNMF {method}, {start}", "sequential", made
    texts = [topic_texts_of(name) for name in NAMES]
    short = {"tol": 0.0, "random_state": SEED}
    for method in ALONE:
        model = partsong.TopicModel(2, method=method, max_iter=ROUNDS, **short)
        yield f"TopicModel {method}", "pooled", lambda m=model: fitted(m, [text for part in texts for text in part])
    for method in TOGETHER:
        model = partsong.FederatedTopicModel(2, method=method, rounds=ROUNDS, **short)
        yield f"FederatedTopicModel {method}", "sequential", lambda m=model: fitted(m, texts)


# ---- programs ----------------------------------------------------------------------------------------------------


def seeded(party: str, release: int) -> InsecureSource:
    """Noise that can be drawn again: it protects nothing."""
    return InsecureSource(1, party, release)


def private(program: object, **privacy: object) -> object:
    return replace(party_private(program, epsilon=3.0, delta=1e-5, rounds=ROUNDS, **privacy), source=seeded)


def of_moment(privacy: RowPrivacy | PartyPrivacy) -> object:
    """The method "moment" with noise that can be drawn again."""
    return replace(privacy.program(build("moment", RANK), ROUNDS, N_PARTIES, False), source=seeded)


PROGRAMS = {
    "exact": build("exact", RANK, local_steps=5),
    "exact, accelerated": build("exact", RANK, accelerate=True, local_steps=5),
    "exact, penalised": SharedSums(RANK, build_solver("hals", 1e-3, 2e-3, 0.5)),
    "exact, private rows": row_private(RANK, epsilon=3.0, row_bound=5.0, rounds=ROUNDS, source=seeded),
    "moment": build("moment", RANK),
    "moment, private rows": of_moment(RowPrivacy(30.0, 5.0, mechanism="moment")),
    "moment, private rows, replaced": of_moment(RowPrivacy(30.0, 5.0, mechanism="moment", relation="replace")),
    "moment, private rows, buckets": of_moment(RowPrivacy(30.0, 5.0, mechanism="moment", buckets=4)),
    "moment, private rows, centred": of_moment(RowPrivacy(30.0, 5.0, mechanism="centred")),
    "moment, private rows, hybrid": of_moment(RowPrivacy(30.0, 5.0, mechanism="hybrid")),
    "moment, private parties": of_moment(PartyPrivacy(30.0, clip=100.0)),
    "fedavg": build("fedavg", RANK, local_steps=3),
    "fedprox": build("fedprox", RANK, local_steps=3),
    "fnmf": build("fnmf-local", RANK, local_steps=3, align="assignment"),
    "fnmf as printed": build("fnmf-local", RANK, variant="paper", local_steps=3, align="assignment"),
    "fnmf by sums": build("fnmf-by-sums", RANK, local_steps=3),
    "fnmf, then exact": exact_after(build("fnmf-local", RANK, local_steps=3, align="assignment"), 2),
    "local only": build("local-only", RANK, local_steps=3),
    "ipalm once": build("one-shot-ipalm", RANK, local_steps=3),
    "mur once": build("one-shot-mu", RANK, local_steps=3),
    "syn-sd": build("syn-sd", RANK, local_steps=3),
    **{f"syn-ssd-{variant}": build(f"syn-ssd-{variant}", RANK, local_steps=3, sketch_ratio=0.5)
       for variant in ("u", "v", "uv")},
    "secure dsanls": SketchedSums(RANK, Gaussian(4 * RANK), is_guarded=False),
    "dsanls": SketchExchange(RANK, sketch=Proportion(ratio=0.5), iterations=6, every=3, n_rows=len(pooled())),
    "game": build("game", RANK),
    "game consensus": build("game-consensus", RANK, local_steps=3),
    "fednmf": fednmf(RANK, epochs=2, batch=8),
    "fednmf, adam": fednmf(RANK, epochs=2, batch=8, server="adam"),
    "fednmf-mi": fednmf_mi(RANK, epochs=2, batch=8, mi_gradient="js"),
    "lda": FederatedLDA(RANK, iterations=20),
    "fedavg, private parties": private(build("fedavg", RANK, local_steps=3)),
    "syn-sd, private parties, laplace": private(build("syn-sd", RANK, local_steps=3), kind="laplace"),
}  # fmt: skip
IN_MASKS = (
    "exact", "exact, accelerated", "moment", "fedavg", "fedprox", "fnmf by sums", "local only", "ipalm once",
    "mur once", "syn-sd", "syn-ssd-u", "syn-ssd-v", "syn-ssd-uv", "secure dsanls", "game consensus",
    "fednmf", "fednmf-mi", "lda", "fedavg, private parties",
)  # fmt: skip
ARRIVALS = {
    "asyn-sd": build("asyn-sd", RANK, local_steps=3),
    "asyn-ssd-v": build("asyn-ssd-v", RANK, local_steps=3, sketch_ratio=0.5),
}
RANKED = tuple(name for name in PROGRAMS if name not in ("game", "fednmf-mi"))
"""What a job over ranks repeats; the others make it long."""


def rounds_of(program: object) -> int:
    return ROUNDS if isinstance(program, (LocalAveraging, TwoStageProgram)) else program.exchanges(ROUNDS, N_PARTIES)


def run(name: str, engine: object = Sequential(), own: slice = slice(None)) -> np.ndarray:
    """H after a run; `own` are the parties that are here."""
    plain = name.removesuffix(", masked")
    program = {**PROGRAMS, **ARRIVALS}[plain]
    shards = two_sided_shards() if plain == "dsanls" else row_shards()
    rounds = ROUNDS * N_PARTIES if plain in ARRIVALS else rounds_of(program)
    reduction = PlainReduction() if name == plain else MASKS
    *_, last = engine.run(program, shards[own], Schedule(rounds, SEED), reduction=reduction)
    return np.asarray(program.components(last.checkpoint.server))


def programs() -> Iterator[tuple[str, str, Case]]:
    for name in (*PROGRAMS, *(f"{name}, masked" for name in IN_MASKS)):
        for engine, made in (("sequential", Sequential()), ("threads", Parallel(2))):
            yield name, engine, lambda n=name, e=made: run(n, e)
    for name in ARRIVALS:
        yield name, "virtual clock", lambda n=name: run(n, Asynchronous())


# ---- sites -------------------------------------------------------------------------------------------------------

SITES = "sites"
LEGS = {"then-exact": {"first": "fedavg", "first_rounds": 1}}
SKETCHES = {
    **{method: {"sketch_ratio": 0.5} for method in ("syn-ssd-u", "syn-ssd-v", "syn-ssd-uv", "asyn-ssd-v")},
    "secure-dsanls": {"rounds": 3, "sketch_dimension": 4},
}
WITHOUT_STEPS = ("secure-dsanls", "then-exact", "moment", *ONLY_TEXTS)
SITES_IN_MASKS = (
    *MASKABLE, "local-only", "fnmf-by-sums", "secure-dsanls", "game-consensus", "then-exact", *ONLY_TEXTS,
)  # fmt: skip


def experiment(method: str, **more: object) -> Experiment:
    table = {"method": method, "rank": 2, "rounds": 2, "seed": SEED, **LEGS.get(method, {}), **SKETCHES.get(method, {})}
    table |= {} if method in WITHOUT_STEPS else {"local_steps": 2}
    return Experiment.from_table({**table, **more})


def at_sites(experiment: Experiment) -> np.ndarray:
    """H of a run in folders that are deleted afterwards."""
    kind = Counting if experiment.is_of_topics else Federation
    with tempfile.TemporaryDirectory() as folder:
        federation = kind(Path(folder), experiment, policy=Policy(methods=(*BETWEEN_PARTIES, *ONLY_TEXTS)))
        if experiment.privacy:
            federation.policy, federation.build = Policy(), noisy_plan
        if experiment.is_asynchronous:
            rounds = arrivals_of(federation, InProcess(federation.transport().sites, by_seed(1)))
        else:
            rounds = federation.rounds()
        *_, last = rounds
        return np.asarray(federation.plan().program.components(last.checkpoint.server))


def sites() -> Iterator[tuple[str, str, Case]]:
    for method in (*BETWEEN_PARTIES, *ONLY_TEXTS):
        yield f"{SITES} {method}", SITES, lambda m=method: at_sites(experiment(m))
    for method in SITES_IN_MASKS:
        yield (
            f"{SITES} {method}, masked",
            SITES,
            lambda m=method: at_sites(experiment(m, secure_aggregation=True, mask_bound=1e4)),
        )
    of_rows = {"unit": "row", "epsilon": 3.0, "row_bound": 5.0, "mechanism": "rounds"}
    of_moments = {"unit": "row", "epsilon": 30.0, "row_bound": 5.0}
    of_parties = {"unit": "party", "epsilon": 3.0}
    for masked in (False, True):
        suffix = ", masked" if masked else ""
        yield (
            f"{SITES} exact, private rows{suffix}",
            SITES,
            lambda k=masked: at_sites(experiment("exact", local_steps=None, secure_aggregation=k, privacy=of_rows)),
        )
        for mechanism in ("moment", "centred", "hybrid"):
            asked = {**of_moments, "mechanism": mechanism}
            yield (
                f"{SITES} moment, private rows, {mechanism}{suffix}",
                SITES,
                lambda k=masked, p=asked: at_sites(experiment("moment", secure_aggregation=k, privacy=p)),
            )
        for method in (*SENDS_H, "moment") if not masked else ("fedavg", "moment"):
            yield (
                f"{SITES} {method}, private parties{suffix}",
                SITES,
                lambda m=method, k=masked: at_sites(experiment(m, secure_aggregation=k, privacy=of_parties)),
            )


# ---- all ---------------------------------------------------------------------------------------------------------

GROUPS = {"estimators": fits, "programs": programs, "sites": sites}
CASES: dict[tuple[str, str], tuple[str, Case]] = {
    (name, engine): (group, case) for group, made in GROUPS.items() for name, engine, case in made()
}
"""(name, engine) -> group and function. The first engine of a name is the one that golden arrays are made with."""

assert set(ASYNCHRONOUS) == set(ARRIVALS)
