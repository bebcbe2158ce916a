"""Tables of docs/results/topics.md; a cell is the mean ± standard deviation over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from experiments.shared.metrics import spread
from experiments.shared.names import shown
from experiments.topics import published
from experiments.topics.corpora import SOURCES
from experiments.topics.figures import ALPHAS, DESCENDING, LONG, PARTIES, SHOWN, VARIED
from experiments.topics.figures import RANKS as RANKS_OF_FIGURE_2
from experiments.topics.methods import BAYESIAN, CENTRALISED, DESCENTS, FEDERATED, MI, OURS
from experiments.topics.settings import COUNTS, TFIDF, WORDS, build_run
from experiments.topics.table import (
    ROUNDS_OF_SUMS,
    TUNING_SEED,
    Records,
    mean_f1,
    settings_of,
    trials,
)

PUBLISHED = {
    "f1": published.F1, "accuracy": published.ACCURACY, "coherence": published.COHERENCE,
}  # fmt: skip
RANKS = (50, 100, 200)
SEEDS = 3
ANCHORS = ("matlab", "qt", "bash", "scala", "svn")
USUAL: dict[str, Any] = {"reading": "after", "alpha": 1.0, "fraction": 0.2, "looks": 0, "shown": 0}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: method, weighting, and number of rounds for sums."""

    method: str
    weighting: str = COUNTS
    rounds: int = 0

    @property
    def label(self) -> str:
        """Label in the first column."""
        own = f", {self.rounds} rounds" if self.rounds else ""
        name = shown(self.method) if self.method in OURS else self.method
        return f"{name}{own}{', tf-idf' if self.weighting == TFIDF and self.method != WORDS else ''}"


SUMS = tuple(
    Row(name, weighting, rounds) for weighting in (COUNTS, TFIDF) for name in OURS for rounds in ROUNDS_OF_SUMS
)
BASELINES = tuple(Row(name) for name in (*CENTRALISED, *FEDERATED))
ON_TFIDF = tuple(Row(name, TFIDF) for name in ("NMF", *(name for name in FEDERATED if name in DESCENTS)))
ALL = (*BASELINES, *SUMS, *ON_TFIDF, Row(WORDS, TFIDF))


def runs(found: Records, row: Row, data: str, rank: int, **wanted: Any) -> list[Mapping[str, Any]]:
    """The runs of a row on a corpus with the tuned settings, by seed."""
    chosen = settings_of(found, data, row.method, row.weighting)
    allowed = [asdict(build_run(data, row.method, rank, 0, one).settings) for one in chosen]
    if row.rounds:
        allowed = [one for one in allowed if one["rounds"] == row.rounds]
    parties = {"parties": 1 if row.method in (*CENTRALISED, WORDS) else 10}
    asked = {**USUAL, **parties, **wanted, "data": data, "method": row.method, "weighting": row.weighting}
    if row.method != WORDS:
        asked["rank"] = rank
    here = [
        record
        for record in found.values()
        if record["seed"] < TUNING_SEED
        and all(record[name] == value for name, value in asked.items())
        and (row.method == WORDS or record["settings"] in allowed)
    ]
    return list({record["seed"]: record for record in sorted(here, key=lambda record: record["seed"])}.values())


def values(found: Records, row: Row, data: str, ranks: Sequence[int], field: str, **wanted: Any) -> list[float]:
    """Mean over ranks for each seed with runs of all ranks."""
    each = [
        {one["seed"]: one[field] for one in runs(found, row, data, rank, **wanted) if one.get(field) is not None}
        for rank in ranks
    ]
    seeds = sorted(set.intersection(*(set(one) for one in each)))
    return [float(np.mean([one[seed] for one in each])) for seed in seeds]


def quality(found: Records, *, field: str, ranks: Sequence[int], reading: str = "after") -> str:
    """Methods × corpora, with the paper's number in brackets where its table has one."""
    printed = PUBLISHED[field] if reading == "after" and len(ranks) == 3 else {}
    lines = []
    for row in ALL:
        cells = []
        for place, data in enumerate(published.SETS):
            here = values(found, row, data, ranks, field, reading=reading)
            paper = f" ({printed[row.method][place]:.3f})" if row in BASELINES and printed else ""
            cells.append((mean_and_spread(here) if here else "–") + paper)
        if set(cells) != {"–"}:
            lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return table_of(["method", *(SOURCES[data].title for data in published.SETS)], lines)


def mean_and_spread(numbers: Sequence[float]) -> str:
    """Format mean ± deviation, with the number of seeds if it is not three."""
    note = "" if len(numbers) == SEEDS else f" [{len(numbers)}]"
    return spread(numbers) + note


Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


def _pairs(found: Records, reading: str = "after") -> Iterable[tuple[str, str, int, list[Pair]]]:
    """Corpus, method, k, and for each seed the run without a critic and the run with it."""
    for base in (name for name in DESCENTS if not name.endswith(MI)):
        for data, rank in product(published.SETS, RANKS):
            plain = {one["seed"]: one for one in runs(found, Row(base), data, rank, reading=reading)}
            with_mi = {one["seed"]: one for one in runs(found, Row(base + MI), data, rank, reading=reading)}
            if seeds := sorted(set(plain) & set(with_mi)):
                yield data, base, rank, [(plain[seed], with_mi[seed]) for seed in seeds]


def information(found: Records) -> str:
    """Effect of the critic: macro-F1 of +MI minus that of the same method without it, seed by seed, at each k."""
    lines = [_gain(SOURCES[data].title, base, rank, pairs) for data, base, rank, pairs in _pairs(found)]
    heads = ["corpus", "method", "k", "F1 without", "F1 with", "with − without", "… fitted weights", "coherence ±", "Î"]
    return table_of(heads, lines)


def information_in_short(found: Records) -> str:
    """All comparisons of +MI with the same without, as a distribution: macro-F1 and coherence, in both readings."""
    lines = []
    fields = {"f1": "f1", "f1, fitted weights": "f1_fitted", "coherence": "coherence"}
    for (name, field), reading in product(fields.items(), ("after", "before")):
        plain = "f1" if field == "f1_fitted" else field
        gains = [np.array([(b.get(field) or 0.0) - a[plain] for a, b in pairs]) for *_, pairs in _pairs(found, reading)]
        gains = [gain for gain in gains if len(gain) > 1]
        if not gains:
            continue
        means = np.array([gain.mean() for gain in gains])
        beyond = [float(gain.mean()) for gain in gains if abs(gain.mean()) > 2 * gain.std(ddof=1)]
        cells = [
            f"{name}, {reading}", str(len(means)), f"{np.median(means):+.4f}", f"{np.abs(means).mean():.4f}",
            f"{np.quantile(means, 0.1):+.3f} to {np.quantile(means, 0.9):+.3f}", str(int((means > 0).sum())),
            str(sum(gain > 0 for gain in beyond)), str(sum(gain < 0 for gain in beyond)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    heads = [
        "with − without",
        "pairs",
        "median",
        "mean size",
        "80 % of them",
        "above 0",
        "above twice their spread",
        "below it",
    ]
    return table_of(heads, lines)


def _gain(title: str, base: str, rank: int, pairs: Sequence[Pair]) -> str:
    def mean(place: int, field: str) -> float:
        return float(np.mean([pair[place].get(field) or 0.0 for pair in pairs]))

    gains = [b["f1"] - a["f1"] for a, b in pairs]
    fitted = [(b.get("f1_fitted") or 0.0) - a["f1"] for a, b in pairs]
    coherence = mean(1, "coherence") - mean(0, "coherence")
    cells = [
        title, base, str(rank), f"{mean(0, 'f1'):.3f}", f"{mean(1, 'f1'):.3f}", _signed(gains), _signed(fitted),
        f"{coherence:+.3f}", f"{mean(1, 'information'):.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _signed(numbers: Sequence[float]) -> str:
    plus = "+" if np.mean(numbers) >= 0 else ""
    return plus + mean_and_spread(numbers)


def costs(found: Records, rank: int = 50) -> str:
    """Rounds, megabytes of all parties both ways and seconds of learning on one core, at k = 50."""
    lines = []
    for row in (*(Row(name) for name in FEDERATED), *SUMS[:4]):
        cells = []
        for data in published.SETS:
            here = runs(found, row, data, rank)
            if here and not here[0].get("diverged"):
                seconds = np.median([one["seconds"] for one in here])
                cells.append(f"{here[0]['rounds']}, {here[0]['bytes'] / 1e6:.0f}, {seconds:.1f}")
            else:
                cells.append("–")
        if set(cells) != {"–"}:
            lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return table_of(["rounds, MB, s", *(SOURCES[data].title for data in published.SETS)], lines)


def beyond(found: Records) -> str:
    """Our best row on each corpus against the paper's best federated one, at each k and over all of them."""
    best = published.BEST_FEDERATED
    rivals = [Row(name, weighting) for name in FEDERATED for weighting in (COUNTS, TFIDF)]
    lines = []
    for place, data in enumerate(published.SETS):
        printed = published.F1[best][place]
        for ranks in (*((rank,) for rank in RANKS), RANKS):
            ours = _largest(found, SUMS, data, ranks)
            theirs = _largest(found, rivals, data, ranks)
            if ours is None:
                continue
            row, numbers = ours
            sent = [one for rank in ranks for one in runs(found, row, data, rank)]
            megabytes = np.mean([one["bytes"] for one in sent]) / 1e6
            other = f"{theirs[0].label}: {mean_and_spread(theirs[1])}" if theirs else "–"
            k = str(ranks[0]) if len(ranks) == 1 else "mean of three"
            cells = f"{printed:.3f} | {other} | {row.label}: {mean_and_spread(numbers)} | {row.rounds}, {megabytes:.0f}"
            lines.append(f"| {SOURCES[data].title} | {k} | {cells} |")
    heads = [
        "corpus",
        "k",
        f"{best}, printed (mean over k)",
        "best federated baseline here",
        "our best",
        "rounds, MB",
    ]
    return table_of(heads, lines)


def _largest(found: Records, rows: Iterable[Row], data: str, ranks: Sequence[int]) -> tuple[Row, list[float]] | None:
    here = [(row, values(found, row, data, ranks, "f1")) for row in rows]
    return max((pair for pair in here if pair[1]), key=lambda pair: np.mean(pair[1]), default=None)


def tuning(found: Records) -> str:
    """Tuned settings, numbers of draws, and numbers of diverging draws."""
    lines = []
    for data, method, weighting in product(published.SETS, (*BAYESIAN, *DESCENTS), (COUNTS, TFIDF)):
        tried = trials(found, data, method, weighting)
        if tried:
            lost = sum(any(one.get("diverged") for one in runs) for runs in tried)
            chosen = _format_settings(method, max(tried, key=mean_f1)[0]["settings"])
            numbers = [f"{len(tried)}, {lost}", str(len(tried[0])), " to ".join(_ends(tried))]
            label = method + _format_priors(max(tried, key=mean_f1)[0]["settings"]) * (method in BAYESIAN)
            lines.append(f"| {' | '.join([SOURCES[data].title, label, weighting, *chosen, *numbers])} |")
    names = ("E", "B", "η", "server's rate", "λ", "gradient", "critic's rate")
    return table_of(["corpus", "method", "rows", *names, "draws, diverged", "seeds", "F1 of draws"], lines)


def _format_settings(method: str, own: Mapping[str, Any]) -> list[str]:
    """Format the settings that the method uses."""
    if method in BAYESIAN:
        return ["–"] * 7
    server = f"{own['server_rate']:g}" if method.removesuffix(MI) in ("FedAdagrad", "FedYogi", "FedAdam") else "–"
    critic = [f"{own['strength']:g}", own["mi_gradient"], f"{own['critic_rate']:g}" if own["critic_rate"] else "η"]
    steps = [str(own["epochs"]), str(own["batch"]), f"{own['rate']:g}", server]
    return [*steps, *(critic if method.endswith(MI) else ["–"] * 3)]


def _format_priors(own: Mapping[str, Any]) -> str:
    """Format the priors of topics in a document and of words in a topic."""
    return f", priors {own['topic_prior']:g} and {own['word_prior']:g}" if own["topic_prior"] else ", priors 1/k"


def _ends(tried: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[str, str]:
    numbers = [mean_f1(runs) for runs in tried if not any(one.get("diverged") for one in runs)] or [0.0]
    return f"{min(numbers):.3f}", f"{max(numbers):.3f}"


def missing(found: Records) -> str:
    """Rows of Table IV without runs, by corpus."""
    lines = []
    for data in published.SETS:
        for reading in ("after", "before"):
            for rank in RANKS:
                lacking = [
                    row.label
                    for row in (*BASELINES, *SUMS[:4])
                    if len(runs(found, row, data, rank, reading=reading)) < SEEDS
                ]
                if lacking:
                    several = "all" if len(lacking) == len(BASELINES) + 4 else ", ".join(lacking)
                    lines.append(f"| {SOURCES[data].title} | {reading} | {rank} | {several} |")
    if not lines:
        return "Nothing is missing."
    return table_of(["corpus", "reading", "k", "fewer than three seeds"], lines)


def table_of(heads: Sequence[str], lines: Sequence[str]) -> str:
    """Format a Markdown table; "Not run yet." without lines."""
    if not lines:
        return "Not run yet."
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines])


def over_ranks(found: Records) -> str:
    """Fig. 2: accuracy over the number of topics."""
    lines = []
    for data in published.SETS:
        for method in DESCENDING:
            cells = [values(found, Row(method), data, (rank,), "accuracy") for rank in RANKS_OF_FIGURE_2]
            if any(cells):
                listed_cells = " | ".join(mean_and_spread(cell) if cell else "–" for cell in cells)
                lines.append(f"| {SOURCES[data].title} | {method} | {listed_cells} |")
    return table_of(["corpus", "method", *(f"k = {rank}" for rank in RANKS_OF_FIGURE_2)], lines)


def over_parties(found: Records) -> str:
    """Fig. 4: macro-F1 over α with ten parties, and over the number of parties with α = 1."""
    cases = [{"alpha": alpha} for alpha in ALPHAS] + [{"parties": parties} for parties in PARTIES]
    lines = []
    for data in published.SETS:
        for method in VARIED:
            cells = [values(found, Row(method), data, (50,), "f1", **case) for case in cases]
            if sum(bool(cell) for cell in cells) > 2:  # α = 1 and ten parties are in Table IV as well
                listed_cells = " | ".join(mean_and_spread(cell) if cell else "–" for cell in cells)
                lines.append(f"| {SOURCES[data].title} | {method} | {listed_cells} |")
    heads = [f"α = {alpha:g}" for alpha in ALPHAS] + [f"K = {parties}" for parties in PARTIES]
    return table_of(["corpus", "method", *heads], lines)


def topics(found: Records, data: str = "so") -> str:
    """Table V: of each method the topics in which a few words of the paper's table stand highest."""
    lines = []
    for method in (*SHOWN, "exact"):
        row = Row(method, COUNTS, ROUNDS_OF_SUMS[-1] if method in OURS else 0)
        for one in runs(found, row, data, 200, shown=200):
            listed = [_highest(one["topics"], word) for word in ANCHORS]
            listed_cells = "<br>".join(" ".join(topic[:7]) for topic in listed if topic)
            lines.append(f"| {method} | {listed_cells} | {one['diversity']:.2f} | {one['coherence']:.3f} |")
    return table_of(["method", "topics", "diversity", "coherence"], lines)


def _highest(listed: Sequence[Sequence[str]], word: str) -> Sequence[str]:
    """The topic in which a word stands highest; none where it is in no list."""
    return min((topic for topic in listed if word in topic), key=lambda topic: list(topic).index(word), default=())


def ablation(found: Records) -> str:
    """The step of weights as printed, and weights fitted before the descent, against the settings of the tables."""
    lines = []
    for data in published.SETS:
        for method in VARIED:
            (own,) = (asdict(one) for one in settings_of(found, data, method))
            cases = [own, {**own, "weight_step": "batch"}, {**own, "fits_first": True}]
            cells = [_with_settings(found, data, method, case) for case in cases]
            if cells[1] or cells[2]:
                listed_cells = " | ".join(mean_and_spread(cell) if cell else "–" for cell in cells)
                lines.append(f"| {SOURCES[data].title} | {method} | {listed_cells} |")
    return table_of(["corpus", "method", "by document", "by batch, as printed", "by document, fitted first"], lines)


def longer(found: Records) -> str:
    """Descents for LONG rounds beside those of the tables, and 20 rounds of sums, which send as much; k = 50."""
    lines = []
    for data in published.SETS:
        for method in DESCENDING:
            (own,) = (asdict(one) for one in settings_of(found, data, method))
            if here := _with_settings(found, data, method, {**own, "rounds": LONG}):
                usual = _with_settings(found, data, method, own)
                cells = f"{own['rounds']}: {mean_and_spread(usual)} | {mean_and_spread(here)}"
                lines.append(f"| {SOURCES[data].title} | {method} | {cells} |")
        for row in (one for one in SUMS if one.rounds == 20 and lines):
            if sums := values(found, row, data, (50,), "f1"):
                lines.append(f"| {SOURCES[data].title} | {row.label} | – | {mean_and_spread(sums)} |")
    return table_of(["corpus", "method", "rounds of the tables", f"{LONG} rounds"], lines)


def _with_settings(found: Records, data: str, method: str, own: Mapping[str, Any]) -> list[float]:
    asked = {**USUAL, "data": data, "method": method, "rank": 50, "parties": 10, "weighting": COUNTS, "settings": own}
    here = [one for one in found.values() if all(one[name] == value for name, value in asked.items())]
    return [one["f1"] for one in sorted(here, key=lambda one: one["seed"]) if one["seed"] < TUNING_SEED]
