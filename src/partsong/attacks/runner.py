"""Run all applicable attacks on a recorded run, and report measures without the recovered values.

Attacks use only messages, the program and the shared seed: what an honest-but-curious server has. An attack that finds
nothing is no proof of privacy; another attack may succeed.

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
from partsong.attacks.second_moment import attack_second_moment, moments_of
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
    attack_second_moment,
    attack_exact_sums,
    attack_differences,
    attack_sketches,
    attack_factors,
    attack_game,
    attack_raw_sketches,
)
MASKED = "Single uploads were masked: only sums were visible and attacked."
FROM_SUMS = "rows, their span, XᵀX, lone columns and sparse rows from sums over all parties"
OUT_OF_TIME = "The time limit ({seconds:g} s in total) ended the search; a longer one may find more."
RARE_COLUMNS_UNKNOWN = (
    "The rarest column is unknown without the rows. The level by the numbers assumes that no cell is zero; the true "
    "level may be worse. Pass the rows with --data."
)
ROW_COUNT_UNKNOWN = (
    "Under masks a party's number of rows is unknown. The level by the numbers assumes that it has the rows of all "
    "parties; the true level is worse. Pass the rows with --data."
)
SECONDS = 120.0
"""Default time limit of all searches together."""
NO_ATTACK_ON_SUMS = "No attack is implemented on these sums. That is not a guarantee."
NO_ATTACK = "No attack is implemented on what it sent. That is not a guarantee."
NOTHING_SENT = "{party!r} has sent nothing."
NOT_SUMMED = "Its upload is not an addend of a sum, so subtracting the others reveals nothing. That is not a guarantee."
NOISE = (
    "Uploads carry {kind} noise for the privacy of each {unit}. The proof of privacy is the calibration of the "
    "noise, not that these attacks find nothing."
)
UNKNOWN_ADDENDS = (
    "Colluders know their own uploads, but a masked recording does not contain them, and the rows of all colluders "
    "were not passed. No attack was tried."
)
FRESH_NOISE = "Colluders know the noise they added, but a masked recording does not contain it. No attack was tried."


def attack(
    traffic: Iterable[Traffic],
    program: Program,
    layout: Layout,
    *,
    truth: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> list[Finding]:
    """Run every attack that these uploads allow, on every party.

    `traffic`: all rounds from the first one (`Round.traffic`, or `read_traffic` of a run folder). `truth`: rows by
    party, to measure errors. `asynchronous`: whether an asynchronous engine ran.
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
        "sums, but no single upload: uploads are masked and look random. All parties but one can subtract their own "
        "addends from a sum"
    )
    return Finding("masked uploads", ", ".join(layout.parties), "nothing", None, what)


def applicable_attacks(context: AttackContext, party: str) -> tuple[str, ...]:
    """Return the applicable attacks, in words; empty if none works on such uploads."""
    has_factors = [upload for _, upload in context.seen(party, "H") if "place" not in upload.arrays]
    is_game = isinstance(context.program, FederatedGame) and context.program.repeats == 1
    attempts = {
        "XᵀX, rows that have a column of their own, and rows by their signs": bool(moments_of(context, party)),
        "rows, their span, XᵀX, lone columns and sparse rows from WᵀW and WᵀX": bool(
            context.seen(party, "gram", "cross")
        ),
        "rows that changed between runs with the same first model": bool(context.others),
        "rows from sketches, by linear algebra or sparse recovery": bool(context.seen(party, "data", "weights")),
        "the common row space of all H_p of a party with few rows": len(has_factors) > 1,
        "the row space of the one H_p of a party with few rows": len(has_factors) == 1,
        "a single row from the change of the columns that it played": is_game
        and bool(context.seen(party, "H", "place", "totals")),
        "columns of H_p, or rows of W_p, that a sketch leaves unchanged": bool(
            context.seen(party, "sketch") or context.seen(party, "sketched_W")
        ),
    }
    return tuple(attempt for attempt, is_possible in attempts.items() if is_possible)


class Attacker(enum.StrEnum):
    """Attackers: a reader of the server's inbox, or all parties but one, who know the sum and their own uploads."""

    SERVER = "server"
    COLLUDERS = "colluders"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded run: its traffic from the first round on, and public knowledge.

    `shards`: rows and secrets of colluders, who recompute their uploads if masks hide them. `truth`: rows by party, to
    measure errors; ignored for a party that had another number of rows in this run.
    """

    traffic: Sequence[Traffic]
    program: Any
    layout: Layout
    reduction: Reduction = PlainReduction()
    asynchronous: bool = False
    shards: Mapping[str, Shard] = field(default_factory=dict)
    truth: Mapping[str, Any] = field(default_factory=dict)

    def context(self) -> AttackContext:
        """Return the run as an attacker sees it."""
        sizes = self._sizes()
        known = {name: to_float64(rows) for name, rows in self.truth.items()}
        known = {name: rows for name, rows in known.items() if sizes.get(name, len(rows)) == len(rows)}
        error: Any = getattr(self.reduction, "error", None) if self.reduction.hides_uploads else None
        step = None if error is None else float(error("cross", len(self.layout.parties)))
        return AttackContext(self.exchanges(), self.program, self.layout, known, mask_error=step)

    def exchanges(self) -> list[Exchange]:
        """Return single uploads or, if they are hidden, sums."""
        if self.reduction.hides_uploads:
            return reconstruct_sums(self.traffic, self.program, self.layout, self.reduction)
        expected, trouble = self.program.upload_spec(self.layout), ""
        try:
            for party, phase, message in (each for sent in self.traffic for each in sent):
                if phase:
                    raise UploadError(f"{party!r} sent a message of phase {phase}, but plain uploads have one phase.")
                check_upload(party, message, expected)
            found = transcript(self.traffic, self.program, self.layout, asynchronous=self.asynchronous)
        except UploadError as error:
            found, trouble = [], f"{error} "
        if not found:
            raise ParameterError(
                f"These uploads do not match {type(self.program).__name__}: their arrays differ. {trouble}Pass the "
                "program of the run, and its reduction if that hides uploads."
            )
        return found

    def _sizes(self) -> dict[str, int]:
        """Numbers of rows by party in this run, if they were sent unmasked."""
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
    """Attack each of these parties (default: all), and then all rows together; return their findings.

    `truth`: rows by party, to measure errors and count recovered rows. `others`: further recorded runs of the same
    parties, whose uploads are combined with these. `candidates` (c × m): rows to test for membership. `seconds`: time
    limit of all searches together.
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
    """Require that a further run has the same columns and at least one common party."""
    if run.layout.n_features != other.layout.n_features:
        raise ParameterError(
            f"The runs differ in their columns: one has {run.layout.n_features}, another {other.layout.n_features}. "
            "Pass runs of the same parties and columns."
        )
    if not set(run.layout.parties) & set(other.layout.parties):
        raise ParameterError("The runs have no party in common. Pass runs of the same parties and columns.")


@dataclass(slots=True)
class Search:
    """Splits the time limit over targets, and adds exposure levels, membership tests and notes to their findings."""

    seconds: float
    targets: int
    candidates: np.ndarray | None
    began: float = field(default_factory=time.monotonic)
    clock: Clock = field(default_factory=Clock)

    def begin_target(self, context: AttackContext) -> AttackContext:
        """Return the context with an even share of the remaining time."""
        left = max(0.0, self.began + self.seconds - time.monotonic()) / max(1, self.targets)
        self.targets, self.clock = self.targets - 1, Clock(time.monotonic() + left)
        return replace(context, clock=self.clock)

    def end_target(self, found: PartyFindings, context: AttackContext, party: str | None) -> PartyFindings:
        """Add exposure by the numbers, membership tests and notes; `party=None` means all parties together."""
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
    """Return the exposure of a party (None: all together) by counting equations of all runs, and a note on assumptions.

    The unknowns are the party's own rows, also under masks, if these are known.
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
    """Number of rows of a party (None: of all), from the uploads; under masks, that of all parties."""
    seen = [] if party is None else context.seen(party, "rows", "cross")
    if not seen:
        together = as_one_party(context)
        seen = [] if together is None else together.seen(together.layout.parties[0], "rows", "cross")
    return round(float(seen[0][1]["rows"])) if seen else None


def _of_sums(run: RecordedRun, context: AttackContext) -> PartyFindings:
    """Attack all rows together, from complete sums."""
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
    """Compute a party's uploads as all others can, then run the attacks of a server on them."""
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
    """Summarize what a party sent, before any attack."""
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
    """Add a reason why no attack was tried; a party without messages gets only that reason."""
    said = note if found.messages else NOTHING_SENT.format(party=found.party)
    return replace(found, notes=(said, *found.notes))


def _arrays_of(messages: Sequence[Any]) -> tuple[SentArray, ...]:
    """Every kind of array that was sent, with counts and total bytes."""
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
