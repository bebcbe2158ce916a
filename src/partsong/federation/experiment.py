"""experiment.toml: a recipe, its rounds, its masks and its promise, in plain values that every site reads by itself."""

from __future__ import annotations

import codecs
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partsong import methods
from partsong.aggregation.plaintext import InTheOpen
from partsong.core.interfaces import Layout, Program, Reducible, Reduction, Schedule
from partsong.core.parameters import nearest, only, read_toml, whole, words
from partsong.engines.rounds import sample_participants
from partsong.engines.upload_checks import check_together
from partsong.errors import CompositionError, ParameterError
from partsong.estimators.parties import require_privacy
from partsong.estimators.validation import physical_memory, stop_of
from partsong.federation.columns import RULES, SAME
from partsong.federation.method_keys import (
    METHOD_KEYS,
    METHODS,
    ONLY_TEXTS,
    PARTICIPATION,
    parse_options,
    require_method,
    require_no_promise,
    require_own_names,
)
from partsong.federation.policy import RunRequest
from partsong.methods.privacy_request import Privacy, masks_for, privacy_from
from partsong.methods.registry import Problem
from partsong.secure_aggregation.messages import Roster
from partsong.topics.agreement.protocol import DONE, Count, VocabularyAgreement
from partsong.topics.fitting import weighting_of
from partsong.topics.shared_vocabulary import AGREE, WordRule
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import TFIDF, Vocabulary, Weighing

if TYPE_CHECKING:
    from partsong.federation.site.plan import Plan


# ---- topic participation ----------------------------------------------------------------------------------------
#
# Rounds over some of the sites, drawn from the seed: whoever knows the experiment and the names knows who is asked.


@dataclass(frozen=True, slots=True)
class DrawnSchedule(Schedule):
    """A schedule whose rounds are over max(1, round(fraction·N)) sites each, as `core.streams.sampled` draws them.

    Whom it names absent is missing as well.
    """

    fraction: float = 1.0

    def participants(self, names: Sequence[str], index: int) -> tuple[str, ...]:
        """The names that are drawn for a round, without those who are absent from it, in name order."""
        away = _away(tuple(sorted(names)), self.rounds, self.fraction, self.seed).get(index, frozenset())
        absent = {index: away | self.absent.get(index, frozenset())}
        return Schedule(self.rounds, self.seed, absent).participants(names, index)


def drawn(n_parties: int, fraction: float) -> int:
    """How many of them are in each round."""
    if fraction == 1:
        return n_parties
    names = tuple(map(str, range(n_parties)))
    return n_parties - len(sample_participants(names, 1, fraction, 0).get(0, ()))


def masks_over(masks: Any, method: str, n_parties: int, fraction: float) -> Any:
    """Masked sums for a method of topics; refused where rounds would be over too few.

    Two sums of fedlda of which one lacks a site differ, summed over topics, by how often that site uses each word: they
    are over all sites, or there is none.
    """
    present = drawn(n_parties, fraction)
    if present < masks.fewest:
        raise ParameterError(
            f"Masks take at least {masks.fewest} sites in every round, and there are {present}: each of two would know "
            "what the other has sent. Let more take part, or run without masks."
        )
    return replace(masks, fewest=n_parties) if methods.method(method).constant_sums else masks


@lru_cache(maxsize=8)
def _away(names: tuple[str, ...], rounds: int, fraction: float, seed: int) -> dict[int, frozenset[str]]:
    return sample_participants(names, rounds, fraction, seed)


# ---- word rounds ------------------------------------------------------------------------------------------------
#
# An agreement on words as a program of a federation, which is over when it says so.


@dataclass(frozen=True, slots=True)
class WordRounds(VocabularyAgreement):
    """The same exchanges; it has no factor, and none is shared."""

    @property
    def rank(self) -> int:
        """None."""
        return 0

    def components(self, server: Count) -> Any:
        """None."""
        return np.zeros((0, 0))

    @staticmethod
    def is_over(server: Count) -> bool:
        """Whether all words are agreed on, and counted."""
        return server.step.stage == DONE


# ---- word rule --------------------------------------------------------------------------------------------------
#
# The table [words] of experiment.toml: which words of texts a run is about, by the names that topic models have.

OF_THE_VOCABULARY = ("min_documents", "min_parties", "max_words", "max_share", "longest_word")
OF_A_TEXT = ("language", "stop_words", "shortest", "lower", "strip_accents")
TEXT_RULE_KEYS = (*OF_THE_VOCABULARY, "weighting", *OF_A_TEXT)
WHERE = "The table words of the experiment"


@dataclass(frozen=True, slots=True)
class TextRule:
    """Words in ≥ `min_documents` documents at each of ≥ `min_parties` sites, of which those in more than `max_share` of
    all documents are dropped, and the `max_words` most frequent ones are kept; what a word is, and what it weighs.

    All as in `FederatedTopicModel`, but for a pattern of one's own: sites run no expressions that a server sends.
    """

    rule: WordRule
    words: Words
    weighting: str

    @staticmethod
    def from_table(table: Mapping[str, Any], method: str) -> TextRule:
        """From the table of an experiment with that method; an unknown key is an error."""
        only(table, TEXT_RULE_KEYS, WHERE)
        kept = {name: table[name] for name in OF_THE_VOCABULARY if table.get(name) is not None}
        options = {name: table[name] for name in OF_A_TEXT if name in table}
        for name in ("lower", "strip_accents"):
            if not isinstance(options.get(name, False), bool):
                raise ParameterError(f"{name} is true or false; got {options[name]!r}.")
        if not isinstance(options.get("language", ""), str):
            raise ParameterError(f"language must be a text; got {str(options['language'])[:60]!r}.")
        options["stop_words"] = words(options, "stop_words", ())
        rule = WordRule(AGREE, **{"min_documents": 1, **kept})
        return TextRule(rule, Words(**options), weighting_of(table.get("weighting"), method))

    @property
    def min_documents(self) -> int:
        """At each of these sites."""
        return self.rule.min_documents

    @property
    def min_parties(self) -> int:
        """Two, where nothing is said."""
        return 2 if self.rule.min_parties is None else self.rule.min_parties

    @property
    def rounds(self) -> WordRounds:
        """The protocol by which the words are found."""
        return WordRounds(self.min_documents, self.min_parties, longest=self.rule.longest_word)

    @property
    def told(self) -> str:
        """All of it as one text, which is the same at all sites that were asked for the same."""
        sizes = self.min_documents, self.min_parties, self.rule.max_words, self.rule.longest_word
        rule = [*sizes, float(self.rule.max_share)]
        return json.dumps([rule, self.weighting, self.words.to_json()])

    def n_kept(self, documents: Any, n_documents: int) -> int:
        """How many of the agreed words are left, by their document frequencies, which is all that a server knows."""
        few = int(np.count_nonzero(np.asarray(documents) <= float(self.rule.max_share) * max(1, n_documents)))
        return few if self.rule.max_words is None else min(few, self.rule.max_words)

    def weighing(self, agreed: Vocabulary) -> Weighing:
        """What texts are in this run: the words that are left, and what they weigh."""
        kept = self.rule.pruned(agreed)
        own = Vocabulary(kept.words)
        return (
            Weighing(self.words, own, kept.documents, kept.n_documents)
            if self.weighting == TFIDF
            else Weighing(self.words, own)
        )


# ---- experiment -------------------------------------------------------------------------------------------------

SHARED = ("local_steps", "align", "start")
"""Options of methods that every experiment has, if only as none."""
KEYS = (
    "method", "rank", "rounds", *SHARED, "seed", "masked", "mask_bound", "faulty", "columns", "time_budget", "tol",
    "privacy", "words", *(name for name in METHOD_KEYS if name not in SHARED),
)  # fmt: skip
PRIVACY_KEYS = ("unit", "epsilon", "delta", "relation", "noise_multiplier", "clip", "kind", "row_bound")
FAULTY = ("stop", "leave out")
ENDS = ("time_budget", "tol")


@dataclass(frozen=True, slots=True)
class Experiment:
    """What everybody runs; the same plain values make the same program, reduction and schedule everywhere.

    `columns`: "same" where all sites must hold the same ones, "common" to take those that all have. `mask_bound`: the
    largest number that a party adds to a masked sum. Where nobody waits for others (`is_asynchronous`), a round is as
    many arrivals as there are sites; such a run also ends after `time_budget` seconds, or once the arrivals of a round
    have moved H by no more than `tol` of its norm. `options` are further options of the method, and for topics C, the
    `participation`; in a file they stand beside the rest.
    `words`: sites hold texts, and agree on words by this rule before the first round; None: they hold tables.
    """

    method: str
    rank: int
    rounds: int
    local_steps: int | None = None
    align: str | None = None
    start: str | None = None
    seed: int = 0
    masked: bool = False
    mask_bound: float | None = None
    faulty: str = "stop"
    columns: str = SAME
    privacy: Mapping[str, Any] = field(default_factory=dict)
    time_budget: float | None = None
    tol: float = 0.0
    words: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_method(self.method)
        if self.method not in METHODS:
            raise ParameterError(f"method is {str(self.method)[:60]!r}. {nearest(str(self.method), METHODS)}")
        for name, value, known in (("faulty", self.faulty, FAULTY), ("columns", self.columns, RULES)):
            if value not in known:
                raise ParameterError(f"{name} is {str(value)[:60]!r}. {nearest(str(value), known)}")
        if not isinstance(self.masked, bool):
            raise ParameterError(f"masked is true or false; got {self.masked!r}.")
        bound = self.mask_bound
        if bound is not None and (type(bound) not in (int, float) or not 0 < bound < math.inf):
            raise ParameterError(f"mask_bound must be a positive number; got {bound!r}.")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ParameterError(f"seed must be a whole number from 0 to 2^63; got {self.seed!r}.")
        self._check_ends()
        if self.text_rule is not None and self.privacy:
            raise ParameterError(
                "Sites agree on words by sums without noise, so that no budget could be promised for a run over texts. "
                "Leave the table privacy out, or run over tables of counts whose columns are public."
            )
        method = methods.method(self.method)
        parse_options(method, {**self._own_options, **self.options})
        if self.is_of_topics:
            require_no_promise(method, self.options, privacy=self.privacy, masked=self.masked)
        else:
            require_privacy(self.promise, self.masked, self.method, options=self._own_options, time_budget=None)
        method.build(Problem(self.rank, rounds=self.rounds), self._own_options)

    def _check_ends(self) -> None:
        stop_of(self.tol, self.time_budget)
        early = [name for name, value in zip(ENDS, (self.time_budget, self.tol), strict=True) if value]
        if early and not self.is_asynchronous:
            asynchronous = (name for name in METHODS if methods.method(name).traits.asynchronous)
            raise ParameterError(
                f"{' and '.join(early)} can end a run of {', '.join(asynchronous)} alone, in which sites do not share "
                f"rounds; the method is {self.method!r}. Leave it out, and give a number of rounds."
            )

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Experiment:
        """From the table of a file or a message; an unknown key is an error."""
        require_own_names(table)
        only(table, KEYS, "The experiment")
        for name in ("method", "rank", "rounds"):
            if table.get(name) is None:
                raise ParameterError(f"The experiment needs {name}.")
        only(table.get("privacy") or {}, PRIVACY_KEYS, "The table privacy of the experiment")
        for name in ("rank", "rounds", "local_steps"):
            if table.get(name) is not None:
                whole(table, name, None)
        given = {name: value for name, value in table.items() if value is not None}
        options = {name: given.pop(name) for name in METHOD_KEYS if name in given and name not in SHARED}
        return Experiment(**given, options=options)

    @staticmethod
    def read(path: Path) -> Experiment:
        """From a file."""
        return Experiment.from_table(read_toml(path))

    def told(self) -> dict[str, Any]:
        """Plain values, for a message; what a fault leads to, and an early end, are the server's affair."""
        told = {**asdict(self), "privacy": dict(self.privacy)}
        kept_back = ("faulty", "options", *ENDS, *(() if self.words is not None else ("words",)))
        plain = {name: value for name, value in told.items() if name not in kept_back}
        return plain | dict(self.options)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server takes in what arrives, and nobody waits for others."""
        return methods.method(self.method).traits.asynchronous

    @property
    def is_of_topics(self) -> bool:
        """Whether the method is one of topics, with keys of its own."""
        return self.method in ONLY_TEXTS

    @property
    def fraction(self) -> float:
        """C, the share of sites that are drawn for each round."""
        return float(self.options.get(PARTICIPATION, 1.0))

    @property
    def _own_options(self) -> dict[str, Any]:
        """Options of the method itself."""
        shared = {name: getattr(self, name) for name in SHARED}
        given = {name: value for name, value in shared.items() if value is not None}
        return given | {name: value for name, value in self.options.items() if name != PARTICIPATION}

    @property
    def text_rule(self) -> TextRule | None:
        """Which words of texts it is about; None where it is about tables."""
        return None if self.words is None else TextRule.from_table(self.words, self.method)

    @property
    def promise(self) -> Privacy | None:
        """Differential privacy, if it is asked for."""
        return privacy_from(self.privacy)

    def program(self, n_parties: int) -> Program:
        """The program, with noise where that was asked for."""
        plain = methods.method(self.method).build(Problem(self.rank, n_parties, self.rounds), self._own_options)
        if (promise := self.promise) is None:
            return plain
        return promise.program(plain, self.exchanges(plain, n_parties), n_parties, self.masked)

    def reduction(self, n_parties: int, roster: Roster | None = None) -> Reduction:
        """Sums in the open, or masked among the parties of a roster."""
        if not self.masked:
            return InTheOpen()
        masks: Reduction = replace(masks_for(self.promise, n_parties, self.mask_bound), roster=roster)
        return masks_over(masks, self.method, n_parties, self.fraction) if self.is_of_topics else masks

    def schedule(self, n_parties: int) -> Schedule:
        """How the server runs it: with all sites in each round, or with some that are drawn from the seed."""
        rounds = self.exchanges(self.program(n_parties), n_parties)
        if self.fraction < 1:
            return DrawnSchedule(rounds, self.seed, faulty=self.faulty, fraction=self.fraction)
        return Schedule(rounds, self.seed, faulty=self.faulty)

    def exchanges(self, program: Program, n_parties: int) -> int:
        """Exchanges that the rounds take: of several each, where the program says so, and arrivals of all sites."""
        return program.exchanges(1 if methods.method(self.method).is_one_shot else self.rounds, n_parties)

    def request(self, n_parties: int) -> RunRequest:
        """In the words of a site's policy. Where nobody waits, all arrivals may be those of one site; where sites are
        drawn, only these are in a sum; where whoever writes the experiment sets the sums of a round, these are counted.
        """
        counts_sums = self.is_asynchronous or methods.method(self.method).counts_exchanges
        rounds = self.exchanges(self.program(n_parties), n_parties) if counts_sums else self.rounds
        return RunRequest(self.method, self.rank, rounds, drawn(n_parties, self.fraction), self.masked)


SEED_BITS = 53
"""Of a seed that is drawn: any program reads such a number exactly."""


def with_seed(path: Path, before: Experiment | None) -> tuple[Experiment, bytes]:
    """Read an experiment and its file, with a seed: as given, as in the run that is resumed, or a new one.

    No two runs may begin with one model: sites refuse the second, because two answers to it differ by the rows that
    were added in between.
    """
    wanted, text = Experiment.read(path), path.read_bytes()
    if "seed" in read_toml(path):
        return wanted, text
    seed = secrets.randbits(SEED_BITS) if before is None else before.seed
    return replace(wanted, seed=seed), f"seed = {seed}\n".encode() + text.removeprefix(codecs.BOM_UTF8)


# ---- early checks -----------------------------------------------------------------------------------------------
#
# What the server can see of an experiment before any site is asked: whether it fits here, and in itself.

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
