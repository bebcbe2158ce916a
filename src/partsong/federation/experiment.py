"""experiment.toml: method, rounds, masks and privacy, as plain values from which server and sites build one run."""

from __future__ import annotations

import codecs
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from partsong import methods
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Program, Reduction, Schedule
from partsong.core.parameters import read_toml, suggest_name
from partsong.engines.rounds import sample_participants
from partsong.errors import ParameterError
from partsong.estimators.parties import require_privacy
from partsong.estimators.validation import stop_of
from partsong.federation.toml_files import FINITE, Positive, one_of, parse_table, read_table, require_known
from partsong.methods.moment import MomentProgram
from partsong.methods.privacy_request import (
    ROW_MECHANISMS,
    Privacy,
    PrivacyPlan,
    RowPrivacy,
    build_secure_sum,
    privacy_from_dict,
)
from partsong.methods.registry import Problem, private_methods
from partsong.secure_aggregation.messages import Roster
from partsong.secure_aggregation.protocol import SecureSum
from partsong.topics.agreement.protocol import VocabularyAgreement
from partsong.topics.fitting import weighting_of
from partsong.topics.shared_vocabulary import AGREE, LONGEST, VocabularyConfig
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import TFIDF, TextVectorizer, Vocabulary

METHODS = tuple(dict.fromkeys((*methods.names(), *methods.names(methods.TEXTS))))
"""The methods that an experiment can name and a site can allow."""

ONLY_TEXTS = tuple(name for name in METHODS if methods.PARTIES not in methods.TABLE[name].tasks)
"""Methods for topic models only."""

METHOD_KEYS = tuple(dict.fromkeys(name for method in METHODS for name in methods.TABLE[method].parameters))
"""Parameters of methods."""

NEEDS_COLUMNS = (
    "needs columns of all parties' rows at every party, which sites must not have. It is for the machines of one owner "
    '(partsong fit DATA -k 10 --engine mpi --method dsanls). Use "secure-dsanls", which needs only rows, or "exact"'
)

NOT_BETWEEN_SITES: Mapping[str, str] = {
    "row-private": 'is method = "exact" with a table privacy whose unit is "row"',
    "party-private": 'is one of the methods that send H with a table privacy whose unit is "party"',
    **{name: NEEDS_COLUMNS for name in methods.TABLE if name not in METHODS},
}
"""Programs that an experiment cannot name -> the reason, and what to use."""

ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("n_topics", "n_components"), "Did you mean 'rank', as it is called here?"),
    **dict.fromkeys(("steps", "repeats"), "Did you mean 'local_steps', as it is called here?"),
    "random_state": "Did you mean 'seed', as it is called here?",
    "fraction": "Did you mean 'participation', as it is called here?",
    "play": "Did you mean 'order', as it is called here?",
    "dimension": "Did you mean 'sketch_dimension', as it is called here?",
    "is_guarded": "An experiment cannot set how many sketches of its rows a site sends: the site refuses after "
    "⌊(n_p − 1)/d⌋ sketches.",
    "budget": "A site knows the total number of rows only from the server, so sketches count against its own rows, as "
    'with budget="own".',
}
"""Names of estimators, programs and the command line that an experiment does not have -> advice."""

SHARED = ("local_steps", "align", "init_mode")
"""Parameters of methods that are fields of every experiment."""
ENDS = ("time_budget", "tol")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What an experiment requests from a site: method, rank, rounds, parties in a sum, secure aggregation."""

    method: str
    rank: int
    rounds: int
    parties: int
    secure_aggregation: bool


@dataclass(frozen=True, slots=True)
class PrivacyTable:
    """The keys of [privacy]; `methods.privacy_request` checks which go together."""

    unit: Literal["row", "party"]
    epsilon: float
    delta: float | None = None
    relation: str | None = None
    noise_multiplier: float | None = None
    clip: float | None = None
    kind: str | None = None
    row_bound: float | None = None
    mechanism: Annotated[str, one_of(ROW_MECHANISMS)] | None = None
    centre_radius: float | None = None
    buckets: Positive | None = None
    n_rows: Positive | None = None
    n_features: Positive | None = None

    def __post_init__(self) -> None:
        if self.centre_radius is not None and self.mechanism != "centred":
            stated = "no mechanism" if self.mechanism is None else f'mechanism = "{self.mechanism}"'
            raise ParameterError(f'centre_radius is for mechanism = "centred"; got {stated}. Remove it.')
        if self.n_rows is not None and self.n_features is None:
            raise ParameterError(
                f"n_rows = {self.n_rows} says nothing without the number of columns. Add n_features, the number of "
                "columns that all sites have."
            )


@dataclass(frozen=True, slots=True)
class Experiment:
    """What server and sites run: the same values build the same program, reduction and schedule everywhere.

    `rounds` may be left out, and has no effect, where the method or the mechanism of privacy says how many exchanges
    there are: one for one-shot methods and the moment, two for "centred", four for "hybrid".

    `columns`: "same" if all sites must hold the same ones, "common" to take those that all have. `mask_bound`: the
    largest number that a party adds to a masked sum. In an asynchronous run (`is_asynchronous`), a round is as many
    arrivals as there are sites; such a run also ends after `time_budget` seconds, or once the arrivals of a round have
    moved H by at most `tol` of its norm. `words`: sites hold texts, and agree on words by this rule before the first
    round; None: they hold tables. `participation`: C, the share of sites that are drawn for each round, for methods of
    topics. `options`: further parameters of the method; in a file they stand beside the other keys.
    """

    method: str
    rank: Positive
    rounds: Positive = 0
    local_steps: Positive | None = None
    align: str | None = None
    init_mode: str | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    secure_aggregation: bool = False
    mask_bound: Annotated[float, Meta(gt=0, le=FINITE)] | None = None
    on_party_error: Literal["raise", "skip"] = "raise"
    columns: Literal["same", "common"] = "same"
    privacy: Mapping[str, Any] = field(default_factory=dict)
    time_budget: float | None = None
    tol: float = 0.0
    words: Mapping[str, Any] | None = None
    participation: Annotated[float, Meta(gt=0, le=1)] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if why := NOT_BETWEEN_SITES.get(self.method.replace("_", "-")):
            raise ParameterError(f"{self.method!r} {why}.")
        if self.method not in METHODS:
            raise ParameterError(f"method is {self.method[:60]!r}. {suggest_name(self.method, METHODS)}")
        self._check_ends()
        self._check_options()
        if self.privacy:
            parse_table(self.privacy, PrivacyTable, "privacy")
            if self.privacy.get("unit") == "row":
                object.__setattr__(self, "privacy", {"mechanism": "auto", **self.privacy})
        self._complete_rounds()
        if self.text_rule is not None and self.privacy:
            raise ParameterError(
                "Sites agree on words by sums without noise, so a run over texts cannot keep a privacy budget. Remove "
                "the table privacy, or run over tables of counts whose columns are public."
            )
        if self.is_of_topics:
            self._check_topics()
        else:
            require_privacy(
                self.promise, self.secure_aggregation, self.method, options=self._own_options, time_budget=None
            )
        methods.method(self.method).build(Problem(self.rank, rounds=self.rounds), self._own_options)

    def _complete_rounds(self) -> None:
        """Require `rounds`, unless something else says how many exchanges there are."""
        if self.rounds:
            return
        promise = self.promise
        is_set = methods.method(self.method).is_one_shot or (isinstance(promise, RowPrivacy) and promise.sets_exchanges)
        if not is_set:
            raise ParameterError(f'method = "{self.method}" needs rounds: a whole number of at least 1. Add it.')
        object.__setattr__(self, "rounds", 1)

    def _check_options(self) -> None:
        """Refuse options that the method does not take, and values that they cannot have."""
        own = self._own_options
        if self.participation is not None and not self.is_of_topics:
            takers = ", ".join(ONLY_TEXTS)
            raise ParameterError(f"participation is for {takers}; the method is {self.method!r}. Remove it.")
        if self.method == "exact" and "sweeps" in own:
            raise ParameterError('The sweeps of "exact" are its local_steps. Set local_steps.')
        methods.method(self.method).parse(own)
        critic = [name for name in ("critic", "mi_gradient", "critic_rate") if name in own]
        if critic and own.get("strength") == 0:
            raise ParameterError(f"With strength = 0 there is no critic. Remove {' and '.join(critic)}.")

    def _check_topics(self) -> None:
        """Refuse, for a method of topics, privacy without a theorem, and masks that would hide nothing."""
        if self.privacy:
            raise ParameterError(
                f'{self.method} has no differential privacy guarantee. Use method = "exact" with unit = "row", one of '
                f'{", ".join(private_methods("party"))} with unit = "party", or remove the table privacy.'
            )
        if self.secure_aggregation and methods.method(self.method).constant_sums and self.fraction < 1:
            raise ParameterError(
                f"Sums of {self.method} over different sites differ by the words of single sites, so secure "
                "aggregation would hide nothing. Set participation = 1, or use another method."
            )

    def _check_ends(self) -> None:
        stop_of(self.tol, self.time_budget)
        early = [name for name, value in zip(ENDS, (self.time_budget, self.tol), strict=True) if value]
        if early and not self.is_asynchronous:
            asynchronous = (name for name in METHODS if methods.method(name).traits.asynchronous)
            raise ParameterError(
                f"{' and '.join(early)} can end only runs of {', '.join(asynchronous)}, where sites share no rounds; "
                f"the method is {self.method!r}. Remove it and set rounds."
            )

    @staticmethod
    def from_table(table: Mapping[str, Any], where: str = "The experiment") -> Experiment:
        """Parse the table of a file or a message; `where` begins every error."""
        require_known(table, KEYS, where, ADVICE)
        given = {name: value for name, value in table.items() if value is not None}
        options = {name: given.pop(name) for name in METHOD_KEYS if name in given and name not in SHARED}
        return parse_table({**given, "options": options}, Experiment, where)

    @staticmethod
    def from_message(table: Mapping[str, Any]) -> Experiment:
        """Parse what `to_dict` wrote, now or in an older version: privacy of rows by rounds is without a mechanism."""
        return Experiment.from_table({**table, "privacy": _with_mechanism(table.get("privacy"))})

    @staticmethod
    def read(path: Path) -> Experiment:
        return Experiment.from_table(read_table(path, Experiment), str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a message. Handling of faults and early ends of a run stay at the server."""
        plain = {
            name: value for name, value in asdict(self).items() if name not in ("on_party_error", "options", *ENDS)
        }
        for name in ("words", "participation"):  # which older versions do not know
            if plain[name] is None:
                del plain[name]
        if plain["privacy"].get("mechanism") == "rounds":  # the only one that they know
            del plain["privacy"]["mechanism"]
        return plain | dict(self.options)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the server takes answers as they arrive."""
        return methods.method(self.method).traits.asynchronous

    @property
    def is_of_topics(self) -> bool:
        """Whether the method is one of topics, with keys of its own."""
        return self.method in ONLY_TEXTS

    @property
    def fraction(self) -> float:
        """C, the share of sites that are drawn for each round."""
        return 1.0 if self.participation is None else float(self.participation)

    @property
    def _own_options(self) -> dict[str, Any]:
        """Options of the method itself."""
        shared = {name: getattr(self, name) for name in SHARED}
        return {name: value for name, value in shared.items() if value is not None} | dict(self.options)

    @property
    def text_rule(self) -> TextRule | None:
        """The words of texts that the run is about; None for a run over tables."""
        return None if self.words is None else TextRule.from_table(self.words, self.method)

    @property
    def promise(self) -> Privacy | None:
        """Differential privacy, if it is asked for."""
        return privacy_from_dict(self.privacy)

    def with_mechanism_for(self, n_parties: int, started: Mapping[str, Any] | None = None) -> Experiment:
        """Replace mechanism "auto" by what it stands for, once for all sites and for as long as the run lasts.

        `started`: the plain values of the run if it has started. It keeps its mechanism, also where an older version
        has started it or where other public numbers would now be decisive.
        """
        promise = self.promise
        if not isinstance(promise, RowPrivacy) or promise.mechanism != "auto":
            return self
        before = _with_mechanism((started or {}).get("privacy")) or {}
        chosen = {name: before[name] for name in ("mechanism", "buckets") if before.get(name) is not None}
        if not chosen:
            plan = self.privacy_plan(n_parties)
            assert plan is not None
            chosen = {"mechanism": plan.mechanism, **({} if plan.buckets is None else {"buckets": plan.buckets})}
        return replace(self, privacy={**self.privacy, **chosen})

    def privacy_plan(self, n_parties: int) -> PrivacyPlan | None:
        """The mechanism of privacy of rows, and what to expect of it by public numbers; None without such privacy.

        The number of columns is public if the experiment states it (n_features); else there is no forecast.
        """
        promise = self.promise
        if not isinstance(promise, RowPrivacy):
            return None
        return promise.plan(self.rank, n_parties, self.secure_aggregation, None, one_release=self.is_moment)

    @property
    def is_moment(self) -> bool:
        """Whether the method itself is one release of a second moment."""
        return self.method == "moment"

    def program(self, n_parties: int) -> Program:
        """Build the program, with noise if the experiment asks for privacy."""
        plain = methods.method(self.method).build(Problem(self.rank, n_parties, self.rounds), self._own_options)
        if (promise := self.promise) is None:
            return plain
        return promise.program(plain, self.exchanges(plain, n_parties), n_parties, self.secure_aggregation)

    def reduction(self, n_parties: int, roster: Roster | None = None) -> Reduction:
        """Build plain sums, or masked sums among the parties of a roster."""
        if not self.secure_aggregation:
            return PlainReduction()
        in_shares = self.promise is not None and self.program(n_parties).traits.min_in_sum > 1
        made = build_secure_sum(self.promise, n_parties, self.mask_bound, in_shares=in_shares)
        masks = replace(made, roster=roster)
        return self._over_drawn(masks, n_parties) if self.is_of_topics else masks

    def _over_drawn(self, masks: SecureSum, n_parties: int) -> SecureSum:
        """Masked sums for a method of topics. Refuse rounds over too few sites.

        A method with constant sums (fedlda) needs all sites in every sum: two sums of which one lacks a site differ,
        summed over topics, by how often that site uses each word.
        """
        present = self._n_drawn(n_parties)
        if present < masks.fewest:
            raise ParameterError(
                f"Secure aggregation needs at least {masks.fewest} sites in every round, and there are {present}: each "
                "of two sites would know the upload of the other. Raise participation, admit more sites, or set "
                "secure_aggregation = false."
            )
        return replace(masks, fewest=n_parties) if methods.method(self.method).constant_sums else masks

    def schedule(self, n_parties: int) -> Schedule:
        """Build the schedule: all sites in each round, or some that are drawn from the seed."""
        rounds = self.exchanges(self.program(n_parties), n_parties)
        if self.fraction < 1:
            return DrawnSchedule(rounds, self.seed, on_party_error=self.on_party_error, fraction=self.fraction)
        return Schedule(rounds, self.seed, on_party_error=self.on_party_error)

    def exchanges(self, program: Program, n_parties: int) -> int:
        """Count the exchanges of all rounds: several a round if the program says so, or the arrivals of all sites."""
        return program.exchanges(1 if methods.method(self.method).is_one_shot else self.rounds, n_parties)

    def request(self, n_parties: int) -> RunRequest:
        """Describe the run in the terms of a site's policy.

        In an asynchronous run, all arrivals may be those of one site. If sites are drawn, only these are in a sum. If
        options of the method set the number of sums in a round, or if the method or mechanism sets the number of
        exchanges without `rounds`, these are counted.
        """
        program = self.program(n_parties)
        counts_sums = self.is_asynchronous or methods.method(self.method).counts_exchanges
        counts_sums = counts_sums or isinstance(program, MomentProgram)
        rounds = self.exchanges(program, n_parties) if counts_sums else self.rounds
        return RunRequest(self.method, self.rank, rounds, self._n_drawn(n_parties), self.secure_aggregation)

    def _n_drawn(self, n_parties: int) -> int:
        """Count the sites in each round."""
        if self.fraction == 1:
            return n_parties
        names = tuple(map(str, range(n_parties)))
        return n_parties - len(sample_participants(names, 1, self.fraction, 0).get(0, ()))


def _with_mechanism(privacy: Any) -> Any:
    """The table privacy of a message, in which older versions know no mechanism but noisy rounds."""
    is_of_rows = isinstance(privacy, Mapping) and privacy.get("unit") == "row"
    return {"mechanism": "rounds", **privacy} if is_of_rows else privacy


KEYS = tuple(dict.fromkeys((*(one.name for one in fields(Experiment) if one.name != "options"), *METHOD_KEYS)))
"""All keys of experiment.toml."""

SEED_BITS = 53
"""Bits of a drawn seed; any program can read such a number exactly."""


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


# ---- words of texts -------------------------------------------------------------------------------------------------
#
# The table [words]: the vocabulary of a run over texts, and the program that agrees on it.


@dataclass(frozen=True, slots=True)
class TextRule:
    """The keys of [words], with the names and defaults of `FederatedTopicModel`.

    Words in ≥ `min_documents` documents at each of ≥ `min_parties` sites; those in more than `max_df`
    of all documents are dropped, and the `max_words` most frequent ones are kept. `weighting`: what a word weighs, by
    default what the method takes. There is no key for a pattern: sites do not run expressions that a server sends.
    """

    min_documents: Positive = 1
    min_parties: Positive = 2
    max_words: Positive | None = None
    max_df: Annotated[float, Meta(gt=0, le=1)] = 1.0
    max_word_bytes: Positive = LONGEST
    weighting: str | None = None
    language: str = "english"
    stop_words: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    shortest: Positive = 2
    lower: bool = True
    strip_accents: bool = False

    def __post_init__(self) -> None:
        _ = self.rule, self.words  # which check what goes beyond types

    @staticmethod
    def from_table(table: Any, method: str) -> TextRule:
        """Parse the table of an experiment with that method."""
        found = parse_table(table, TextRule, "words")
        return replace(found, weighting=weighting_of(found.weighting, method))

    @property
    def rule(self) -> VocabularyConfig:
        """Which words are kept."""
        limits = self.min_documents, self.min_parties, self.max_words, self.max_df, self.max_word_bytes
        return VocabularyConfig(AGREE, *limits)

    @property
    def words(self) -> Words:
        """The tokenizer settings."""
        return Words(
            self.language,
            self.stop_words,
            shortest=self.shortest,
            lower=self.lower,
            strip_accents=self.strip_accents,
        )

    @property
    def rounds(self) -> VocabularyAgreement:
        """The program by which sites agree on the words."""
        return VocabularyAgreement(self.min_documents, self.min_parties, longest=self.max_word_bytes)

    @property
    def key(self) -> str:
        """The rule as one text, equal at all sites with the same rule."""
        rule = [self.min_documents, self.min_parties, self.max_words, self.max_word_bytes, float(self.max_df)]
        return json.dumps([rule, self.weighting, self.words.to_json()])

    def n_kept(self, documents: Any, n_documents: int) -> int:
        """Count the agreed words that are kept, from their document frequencies, which is all that a server knows."""
        few = int(np.count_nonzero(np.asarray(documents) <= float(self.max_df) * max(1, n_documents)))
        return few if self.max_words is None else min(few, self.max_words)

    def weighing(self, agreed: Vocabulary) -> TextVectorizer:
        """Return the vectorizer for the kept words."""
        kept = self.rule.pruned(agreed)
        frequencies = (kept.documents, kept.n_documents) if self.weighting == TFIDF else ()
        return TextVectorizer(self.words, Vocabulary(kept.words), *frequencies)


# ---- drawn sites ----------------------------------------------------------------------------------------------------
#
# Rounds over some of the sites, drawn from the seed of the experiment, as methods of topics allow.


@dataclass(frozen=True, slots=True)
class DrawnSchedule(Schedule):
    """Rounds over max(1, round(fraction·N)) sites each, as `engines.rounds.sample_participants` draws them.

    Sites that are `absent` from a round are missing as well.
    """

    fraction: float = 1.0

    def participants(self, names: Sequence[str], index: int) -> tuple[str, ...]:
        """The names that are drawn for a round, without those that are absent, in name order."""
        away = _away(tuple(sorted(names)), self.rounds, self.fraction, self.seed).get(index, frozenset())
        absent = {index: away | self.absent.get(index, frozenset())}
        return Schedule(self.rounds, self.seed, absent).participants(names, index)


@lru_cache(maxsize=8)
def _away(names: tuple[str, ...], rounds: int, fraction: float, seed: int) -> dict[int, frozenset[str]]:
    return sample_participants(names, rounds, fraction, seed)
