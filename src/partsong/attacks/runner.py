"""What left each party of a recorded run, what an attacker tried on it, and what came of it: no values, only measures.

Everything is computed from messages, the program and the shared seed: what an honest-but-curious server has. That an
attack finds nothing shows that this attack finds nothing.

run = RecordedRun([done.traffic for done in rounds], program, Layout.of(shards, schedule.seed))
for each in findings(run, attacker=Attacker.SERVER, truth={"clinic": X}):
    print(each.party, each.verdict)
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong.aggregation.plaintext import PlainReduction
from partsong.attacks.exact_sums import attack_differences, attack_exact_sums
from partsong.attacks.findings import Finding, Observer, PartyFindings, Recovery, SentArray, format_names, rows_within
from partsong.attacks.membership import largest_share, membership
from partsong.attacks.reconstruction import attack_factors, attack_game, attack_raw_sketches, attack_sketches
from partsong.attacks.sums import (
    Uploads,
    as_one_party,
    attack_complete_sums,
    complete_sums,
    plaintext_uploads,
    recompute_uploads,
    reconstruct_sums,
    subtract_other_parties,
)
from partsong.attacks.transcript import AttackContext, Clock, Exchange, to_float64, transcript
from partsong.core import runtime
from partsong.core.interfaces import Layout, Program, Reduction, Shard
from partsong.engines.upload_checks import check_upload
from partsong.errors import ParameterError, UploadError
from partsong.methods.game import FederatedGame
from partsong.privacy.exposure import Exposure, Support, directions_of
from partsong.training.traffic import Traffic

ATTACKS: tuple[Callable[[AttackContext, str], list[Finding]], ...] = (
    attack_exact_sums,
    attack_differences,
    attack_sketches,
    attack_factors,
    attack_game,
    attack_raw_sketches,
)
MASKED = "Single uploads were masked: only sums were visible, and only they were attacked."
FROM_SUMS = "rows, their span, XᵀX, lone columns and sparse rows from sums over all parties"
OUT_OF_TIME = "The time limit was hit ({seconds:g} s in all): the search was cut off, and a longer one may find more."
RARE_COLUMNS_UNKNOWN = (
    "The rarest column is not known without the rows: by the numbers, this is as if every cell had a value, and the "
    "true word may be worse. Give the rows by --data."
)
ROW_COUNT_UNKNOWN = (
    "Under masks the number of a party's own rows is not known without them: by the numbers, this is as if it had the "
    "rows of all parties, and the true word is worse. Give the rows by --data."
)
SECONDS = 120.0
"""How long all searches together may take, unless told otherwise."""
NO_ATTACK_ON_SUMS = "No attack is implemented on these sums. That is not a guarantee."
NO_ATTACK = "No attack is implemented on what it sent. That is not a guarantee."
NOTHING_SENT = "{party!r} has sent nothing."
NOT_SUMMED = "What it sent is not one addend of a sum, so that subtracting is no way in. That is not a guarantee."
NOISE = (
    "Uploads carry {kind} noise for the privacy of a {unit}. If these attacks find nothing, that is no proof of it; "
    "how the noise was calibrated is."
)
UNKNOWN_ADDENDS = (
    "Colluders know what they have sent, but a masked record does not say it, and rows of all of them were not given. "
    "Nothing was tried."
)
FRESH_NOISE = "Colluders know the noise that they have added, but a masked record does not. Nothing was tried."


def attack(
    traffic: Iterable[Traffic],
    program: Program,
    layout: Layout,
    *,
    truth: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> list[Finding]:
    """Every attack that the arrays of these uploads allow, on every party, as far as it gets.

    `traffic` is that of all rounds from the first one on (`Round.traffic`, or `read_traffic` of a run folder); `truth`
    are rows by party, with which findings have an error, and `asynchronous` says which engine ran.
    """
    exchanges = transcript(traffic, program, layout, asynchronous=asynchronous)
    if not exchanges:
        return [_nothing_readable(layout)]
    context = AttackContext(
        exchanges, program, layout, {name: to_float64(rows) for name, rows in (truth or {}).items()}
    )
    found = [finding for party in layout.parties for each in ATTACKS for finding in each(context, party)]
    return [*found, *attack_complete_sums(context)]


def _nothing_readable(layout: Layout) -> Finding:
    what = (
        "sums, and no single upload: these are not the program's own arrays, because they are masked and look random. "
        "All parties but one can subtract their own addends from a sum"
    )
    return Finding("masked uploads", ", ".join(layout.parties), "nothing", None, what)


def applicable_attacks(context: AttackContext, party: str) -> tuple[str, ...]:
    """The attacks that have something to work on, in words; none says that there is none for such uploads."""
    has_factors = [upload for _, upload in context.seen(party, "H") if "place" not in upload.arrays]
    is_game = isinstance(context.program, FederatedGame) and context.program.repeats == 1
    attempts = {
        "rows, their span, XᵀX, lone columns and sparse rows from WᵀW and WᵀX": bool(
            context.seen(party, "gram", "cross")
        ),
        "rows that changed between runs with one first model": bool(context.others),
        "rows from sketches, by linear algebra or as sparse ones": bool(context.seen(party, "data", "weights")),
        "what all H_p of a party with few rows have in common": len(has_factors) > 1,
        "the row space of the one H_p of a party with few rows": len(has_factors) == 1,
        "a single row from how the columns that it played have moved": is_game
        and bool(context.seen(party, "H", "place", "totals")),
        "columns of H_p, or rows of W_p, that a sketch leaves as they are": bool(
            context.seen(party, "sketch") or context.seen(party, "sketched_W")
        ),
    }
    return tuple(attempt for attempt, is_possible in attempts.items() if is_possible)


class Attacker(enum.StrEnum):
    """Whoever reads the server's inbox; or all parties but one, who know the sum and what they have sent themselves."""

    SERVER = "server"
    COLLUDERS = "colluders"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """All that a run has left behind: its traffic from the first round on, and what everybody knows of it.

    `shards` are the rows and secrets of colluders, who do their own work again where masks hide what they have sent;
    `truth` are rows by party, to compare with; those of a party that had another number of rows then are left out.
    """

    traffic: Sequence[Traffic]
    program: Any
    layout: Layout
    reduction: Reduction = PlainReduction()
    asynchronous: bool = False
    shards: Mapping[str, Shard] = field(default_factory=dict)
    truth: Mapping[str, Any] = field(default_factory=dict)

    def context(self) -> AttackContext:
        """The run as an attacker has it."""
        sizes = self._sizes()
        known = {name: to_float64(rows) for name, rows in self.truth.items()}
        known = {name: rows for name, rows in known.items() if sizes.get(name, len(rows)) == len(rows)}
        error: Any = getattr(self.reduction, "error", None) if self.reduction.hides_uploads else None
        step = None if error is None else float(error("cross", len(self.layout.parties)))
        return AttackContext(self.exchanges(), self.program, self.layout, known, mask_error=step)

    def exchanges(self) -> list[Exchange]:
        """Uploads where they are open, and sums where they are hidden."""
        if self.reduction.hides_uploads:
            return reconstruct_sums(self.traffic, self.program, self.layout, self.reduction)
        expected, trouble = self.program.upload_spec(self.layout), ""
        try:
            for party, phase, message in (each for sent in self.traffic for each in sent):
                if phase:
                    raise UploadError(f"{party!r} sent one of phase {phase}, and uploads in the open have one phase.")
                check_upload(party, message, expected)
            found = transcript(self.traffic, self.program, self.layout, asynchronous=self.asynchronous)
        except UploadError as error:
            found, trouble = [], f"{error} "
        if not found:
            raise ParameterError(
                f"These uploads are not those of {type(self.program).__name__}: they have other arrays. {trouble}Give "
                "the program of the run, and the reduction if it hides uploads."
            )
        return found

    def _sizes(self) -> dict[str, int]:
        """How many rows parties had in this run, as far as they have sent that in the open."""
        return {
            party: round(float(message["rows"]))
            for sent in self.traffic
            for party, _, message in sent
            if {"rows", "cross"} <= message.arrays.keys()
        }


def findings(
    run: RecordedRun,
    *,
    attacker: Attacker = Attacker.SERVER,
    truth: Mapping[str, Any] | None = None,
    parties: Collection[str] | None = None,
    others: Sequence[RecordedRun] = (),
    candidates: Any = None,
    seconds: float = SECONDS,
) -> list[PartyFindings]:
    """What was found of each of these parties (by default all), and last of all their rows together, if anything was.

    `truth` are rows by party: findings then have an error, and tell how many rows were recovered. `others` are further
    recorded runs of the same parties, whose uploads add to these. `candidates` (c × m) are rows that are tested for
    membership. `seconds` is how long all searches together may take.
    """
    with runtime.limit_kernel_threads(1):  # BLAS on several threads is far slower for matrices as small as these
        run = replace(run, truth=run.truth if truth is None else truth)
        candidate_rows = None if candidates is None else to_float64(candidates)
        return _findings(run, attacker, parties, others, lambda targets: Search(seconds, targets, candidate_rows))


def _findings(
    run: RecordedRun,
    attacker: Attacker,
    parties: Collection[str] | None,
    others: Sequence[RecordedRun],
    search_for: Callable[[int], Search],
) -> list[PartyFindings]:
    names = [name for name in run.layout.parties if parties is None or name in parties]
    for other in others:
        _require_same_data(run, other)
    context = replace(run.context(), others=tuple(other.context() for other in others))
    search = search_for(len(names) + (parties is None))
    if attacker is Attacker.COLLUDERS:
        return [
            search.end_target(_by_colluders(run, search.begin_target(context), name), context, name) for name in names
        ]
    found = [search.end_target(_by_server(run, search.begin_target(context), name), context, name) for name in names]
    if parties is not None:
        return found
    together = search.end_target(_of_sums(run, search.begin_target(context)), context, None)
    return [*found, together] if together.recovered or run.reduction.hides_uploads else found


def _require_same_data(run: RecordedRun, other: RecordedRun) -> None:
    """Refuse a further run that is of other columns, or of nobody who took part in the first one."""
    if run.layout.n_features != other.layout.n_features:
        raise ParameterError(
            f"The runs are of other data: one has {run.layout.n_features} columns, another {other.layout.n_features}. "
            "Give runs of the same parties and columns."
        )
    if not set(run.layout.parties) & set(other.layout.parties):
        raise ParameterError("The runs have no party in common. Give runs of the same parties and columns.")


@dataclass(slots=True)
class Search:
    """Time for the searches that are left, and candidates whose membership is tested; each target is closed with what
    follows from the numbers.
    """

    seconds: float
    targets: int
    candidates: np.ndarray | None
    began: float = field(default_factory=time.monotonic)
    clock: Clock = field(default_factory=Clock)

    def begin_target(self, context: AttackContext) -> AttackContext:
        """The scene with an even part of the time that is left."""
        left = max(0.0, self.began + self.seconds - time.monotonic()) / max(1, self.targets)
        self.targets, self.clock = self.targets - 1, Clock(time.monotonic() + left)
        return replace(context, clock=self.clock)

    def end_target(self, found: PartyFindings, context: AttackContext, party: str | None) -> PartyFindings:
        """With its word by the law, tests of membership, and notes; None: all parties together."""
        context = replace(context, clock=self.clock)
        level, note = by_law(context, party)
        notes = [*found.notes, note] if note else [*found.notes]
        one = context if party is not None and context.seen(party, "cross") else as_one_party(context)
        name = party if one is context else None if one is None else one.layout.parties[0]
        tests: Sequence[Any] = ()
        share = None
        if one is not None and name is not None and (party is None) == (one is not context):
            tests = () if self.candidates is None else membership(one, name, self.candidates)
            share = largest_share(one, name)
        notes += [OUT_OF_TIME.format(seconds=self.seconds)] if self.clock.was_over else []
        return replace(found, by_law=level, membership=tuple(tests), largest_share=share, notes=tuple(notes))


def by_law(context: AttackContext, party: str | None) -> tuple[Exposure, str]:
    """What follows for a party from the numbers of all runs, or for all of them together (None); and what is not known.

    Counted are the party's own rows, under masks too, where they are known.
    """
    names = context.layout.parties if party is None else (party,)
    sent = 0
    for one in (context, *context.others):
        for exchange in one.exchanges:
            model = next((exchange.models[name] for name in names if name in exchange.models), None)
            sent += 0 if model is None else directions_of(one.program, model)
    if not sent:
        is_noisy = all(one.program.traits.release is not None for one in (context, *context.others))
        return (Exposure.BOUNDED if is_noisy else Exposure.UNKNOWN), ""
    known = [context.truth[name] for name in names if name in context.truth]
    if len(known) == len(names):
        return Support.of(np.vstack(known)).exposure(sent), ""
    rows = _rows_of(context, party)
    if rows is None:
        return Exposure.GUESS, RARE_COLUMNS_UNKNOWN
    is_of_all = party is not None and not context.seen(party, "rows", "cross")
    return Support(rows, rows, float(rows)).exposure(sent), ROW_COUNT_UNKNOWN if is_of_all else RARE_COLUMNS_UNKNOWN


def _rows_of(context: AttackContext, party: str | None) -> int | None:
    """How many rows a party has, or all of them, by what was sent; under masks that of all stands for one."""
    seen = [] if party is None else context.seen(party, "rows", "cross")
    if not seen:
        together = as_one_party(context)
        seen = [] if together is None else together.seen(together.layout.parties[0], "rows", "cross")
    return round(float(seen[0][1]["rows"])) if seen else None


def _of_sums(run: RecordedRun, context: AttackContext) -> PartyFindings:
    """Of all rows together, for whoever knows the sums."""
    everyone, is_tried = format_names(run.layout.parties), bool(complete_sums(context))
    rows = [context.truth[name] for name in run.layout.parties if name in context.truth]
    all_rows = np.vstack(rows) if len(rows) == len(run.layout.parties) else None
    recovered = tuple(_measured(each, all_rows) for each in attack_complete_sums(context))
    tried, notes = ((FROM_SUMS,), ()) if is_tried else ((), (NO_ATTACK_ON_SUMS,))
    return PartyFindings(everyone, Attacker.SERVER, (), 0, 0, tried, recovered, notes, is_sum=True)


def _by_server(run: RecordedRun, context: AttackContext, party: str) -> PartyFindings:
    left = _sent_by(run, party, Attacker.SERVER)
    return _with_note(left, MASKED) if run.reduction.hides_uploads else _attacked(left, context)


def _by_colluders(run: RecordedRun, context: AttackContext, party: str) -> PartyFindings:
    """Uploads as all others work them out, and then the attacks that a server would try on them."""
    left, others = _sent_by(run, party, Attacker.COLLUDERS), [name for name in run.layout.parties if name != party]
    if not run.reduction.hides_uploads:
        known: Uploads = plaintext_uploads(context.exchanges)
    elif not set(others) <= run.shards.keys():
        return _with_note(left, UNKNOWN_ADDENDS)
    elif run.program.traits.release is not None:
        return _with_note(left, FRESH_NOISE)
    else:
        known = recompute_uploads(context.exchanges, run.program, run.layout, [run.shards[name] for name in others])
    subtracted = subtract_other_parties(context.exchanges, run.program, party, known)
    return _attacked(left, replace(context, exchanges=subtracted)) if subtracted else _with_note(left, NOT_SUMMED)


def _sent_by(run: RecordedRun, party: str, attacker: Attacker) -> PartyFindings:
    """What left a party, before anything is tried on it."""
    messages = [message for sent in run.traffic for sender, _, message in sent if sender == party]
    release: Any = run.program.traits.release
    notes = () if release is None else (NOISE.format(kind=release.kind, unit=release.unit),)
    size = sum(message.nbytes for message in messages)
    return PartyFindings(party, attacker, _arrays_of(messages), len(messages), size, (), (), notes)


def _attacked(left: PartyFindings, context: AttackContext) -> PartyFindings:
    tried = applicable_attacks(context, left.party)
    found = [finding for each in ATTACKS for finding in each(context, left.party)]
    if left.attacker == Attacker.COLLUDERS:
        found = [replace(each, observer=Observer.OTHERS) for each in found]
    rows = context.truth.get(left.party)
    done = replace(left, tried=tried, recovered=tuple(_measured(each, rows) for each in found))
    return done if tried else _with_note(done, NO_ATTACK)


def _with_note(found: PartyFindings, note: str) -> PartyFindings:
    """With a reason why nothing was tried; of a party that has sent nothing there is only one."""
    said = note if found.messages else NOTHING_SENT.format(party=found.party)
    return replace(found, notes=(said, *found.notes))


def _arrays_of(messages: Sequence[Any]) -> tuple[SentArray, ...]:
    """Every kind of array that was sent, with how often and how many bytes in all."""
    counts: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for message in messages:
        for name, shape, dtype in message.signature:
            counts.setdefault((name, shape, dtype), []).append(int(message[name].nbytes))
    return tuple(SentArray(*kind, len(sizes), sum(sizes)) for kind, sizes in counts.items())


def _measured(finding: Finding, rows: np.ndarray | None) -> Recovery:
    """A finding without its values."""
    shape = None if finding.recovered is None else tuple(int(side) for side in finding.recovered.shape)
    rows = finding.truth if finding.truth is not None else rows
    within = None if rows is None or finding.recovered is None else rows_within(finding.array, finding.recovered, rows)
    return Recovery(
        finding.attack,
        finding.array,
        shape,
        finding.what,
        finding.verdict,
        finding.doubt,
        finding.error,
        within,
        str(finding.observer),
    )
