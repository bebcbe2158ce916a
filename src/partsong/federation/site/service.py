"""A party on its own machine: it holds rows, a policy and a folder, and answers requests with bytes.

Nothing lives in memory between two requests, so that each may be answered by a new process. The order of writes is
ledger, work, reply, audit; then the reply is handed over. Whatever is cut off in between is done again, or sent again
as it was: docs/reference/protocol.md.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partsong.core import runtime
from partsong.core.interfaces import Layout, Message, Shard, type_name
from partsong.engines.upload_checks import check_compatibility
from partsong.errors import CompositionError, PartsongError
from partsong.federation.audit_log import AuditLog, protection_fields
from partsong.federation.columns import (
    ASK,
    SAME,
    TELL,
    Correspondent,
    find_columns,
    hashed,
    key_mark,
    require_key_mark,
)
from partsong.federation.consistency import require_consistent
from partsong.federation.exposure_limit import rare_columns_note
from partsong.federation.ledger import SiteLedger
from partsong.federation.locks import locked
from partsong.federation.policy import Policy
from partsong.federation.signing import bind_context, run_context
from partsong.federation.site.consent import PolicyChecker, party_keys, restrict_roster
from partsong.federation.site.plan import (
    Plan,
    PlanBuilder,
    SiteData,
    build_plan,
    parse_attempt,
    parse_experiment,
    parse_layout,
    parse_parties,
)
from partsong.federation.site.results import ResultWriter, is_complete
from partsong.federation.site.rounds import KERNEL_THREADS, RoundHandler, SiteAnswer
from partsong.federation.site.state import (
    Attempt,
    ProgressState,
    RunFolder,
    StartState,
    VocabularyState,
    append_to_log,
    data_digest,
    make_folder,
    require_same_data,
    require_valid_data,
)
from partsong.federation.texts import (
    SUFFIX,
    CountedData,
    HeldData,
    Texts,
    facing,
    has_own_counts,
    keep_vocabulary,
    require_table,
    told_of_empty,
    told_of_long,
    vocabulary_in,
)
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request, RequestRefused, refusal_from_error
from partsong.privacy.spending import USUAL_DELTA
from partsong.secure_aggregation.messages import Roster
from partsong.topics.vocabulary import Vocabulary

# ---- before the first round: nothing is released ----------------------------------------------------------------


def hello(site: Site, request: Request) -> SiteAnswer:
    """Hashes of the columns that may leave, and the number type, if the site would take part at all."""
    require_new_run_allowed(site, request)
    require_valid_data(site.data)
    columns = site.policy.leaving(site.data.columns)
    if not columns:
        raise RequestRefused("no-columns", "site.toml lets no column of these data leave.")
    mark = key_mark(site.key, request.nonce.run)
    require_key_mark(mark, str(request.note.get("shared_key", mark)))
    body = Message({"columns": hashed(columns, request.nonce.run, site.key)})
    return site.plain(request, body, {"type": type_name(site.data.matrix().dtype), "shared_key": mark})


def require_new_run_allowed(site: Site, request: Request) -> None:
    """Refuse where the site would not begin a run of this experiment with these parties."""
    plan = _build_new_plan(site, request, parse_parties(request.note.get("parties")))
    experiment = parse_experiment(request.note)
    if experiment.get("columns", SAME) == SAME:  # else it is known at the start which columns leave
        leaving, seed = site.policy.leaving(site.data.columns), experiment.get("seed", 0)
        site.policy_checker.exposure_limit.require_run(plan, request.nonce.run, leaving, seed)


def start(site: Site, request: Request) -> SiteAnswer:
    """Look at what is asked for, match the columns, and make the first state; nothing is released."""
    files = site.run_folder(request.nonce.run)
    if (before := files.load_start()) is not None:
        _require_same_start(site, request, before)
        return site.plain(request, Message({}))
    passed = _last_released_round(site, request.nonce.run)
    layout, experiment = parse_layout(request.note), parse_experiment(request.note)
    plan = _build_new_plan(site, request, layout.parties)
    order = _match_columns(site, request)
    columns = tuple(site.data.columns[at] for at in order)
    least = site.policy_checker.exposure_limit.require_run(plan, request.nonce.run, columns, layout.seed)
    shard = Shard(site.name, site.data.matrix(order, least), site.data.secret)
    _check_parts(plan, layout, shard, len(order))
    require_valid_data(site.data)
    with runtime.limit_kernel_threads(KERNEL_THREADS):
        state = plan.program.start_party(shard, layout)
    standing = plan.reduction.setup_party(site.name, site.data.secret, layout)
    files.save_progress(ProgressState(None, standing, last_released=passed), plan.source)
    rows = (site.data.n_rows, site.data.type)
    mark = data_digest(site.data.rows, order)
    of_words = site.data.context if isinstance(site.data, CountedData) else ""
    context = of_words + run_context(experiment, request.body["columns"], layout)
    keys = party_keys(site.roster, layout.parties)
    files.save_start(StartState(request.digest, experiment, layout, columns, rows, state, mark, context, keys, least))
    notes = [rare_columns_note(site.data.rows, order, least), told_of_long(state, plan.program)]
    notes += [told_of_empty(site.data.rows)] if isinstance(site.data, CountedData) else []
    for note in filter(None, notes):
        site.log(request.nonce, "note", note)
    return site.plain(request, Message({}))


def _build_new_plan(site: Site, request: Request, parties: tuple[str, ...]) -> Plan:
    """The plan of an experiment that the site would begin with these parties; refused where it would not. A run over
    texts has begun with its agreement on words, and is of the same parties.
    """
    run, experiment = request.nonce.run, parse_experiment(request.note)
    if not site.data.hides_names:
        require_table(experiment)
    plan = site.build(experiment, len(parties), site.roster)
    agreement = site.run_folder(f"{run}{SUFFIX}").load_start()
    if agreement is None or set(agreement.layout.parties) != set(parties):
        site.policy_checker.require_plan(plan, parties)
    else:
        site.policy_checker.require_still_allowed(plan, agreement)
    begun = {path.parent.name for path in (site.folder / "runs").glob("*/start")}
    site.policy.require_run(
        site.data.main_run(run), {site.data.main_run(name) for name in begun | set(site.ledger.load().runs)}
    )
    site.policy_checker.require_budget(plan, run)
    return plan


def _require_same_start(site: Site, request: Request, before: StartState) -> None:
    """Refuse a start under the name of a run that is over, is another, or is not allowed any more."""
    place = site.round_handler(request)
    place.require_unfinished()
    if before.digest != request.digest:
        raise RequestRefused("conflict", "This run was started here before, with other settings.")
    place.require_participation()
    site.policy_checker.require_budget(place.plan, request.nonce.run)
    site.policy_checker.require_columns(before)


def _last_released_round(site: Site, run: str) -> int:
    """The last round that was released in a run whose files are not here: -1 as a rule, for there was none."""
    charges, released = site.ledger.charges(run), site.audit.run_releases(run)
    if released is not None and released.is_over:
        raise RequestRefused("over", "The run was over here, and its files are gone.")
    charged = [one.round for one in charges]
    rounds = charged if released is None else [number for number, _ in released.attempts]
    return max(rounds, default=-1)


def _check_parts(plan: Plan, layout: Layout, shard: Shard, columns: int) -> None:
    """Whether the parts go together; before anything is computed."""
    if layout.n_features != columns or layout.dtype not in ("float64", type_name(shard.matrix.dtype)):
        raise RequestRefused("layout", f"{layout.n_features} columns of {layout.dtype} were agreed on.")
    check_compatibility(plan.program, plan.reduction, plan.program.upload_spec(layout))


def _match_columns(site: Site, request: Request) -> tuple[int, ...]:
    """Where the agreed columns are here; names that are missing go to the log of the site."""
    leaving, nonce = site.policy.leaving(site.data.columns), request.nonce
    rule, are_secret = str(request.note.get("rule", SAME)), site.data.hides_names
    order, unused = find_columns(
        request.body["columns"], leaving, nonce.run, site.key, rule=rule, are_secret=are_secret
    )
    if unused and not site.data.hides_names:
        site.log(nonce, "note", f"Columns that are not used: {', '.join(unused)}.")
    places = {name: at for at, name in enumerate(site.data.columns)}
    return tuple(places[leaving[at]] for at in order)


# ---- the end of a run -------------------------------------------------------------------------------------------


def finish(site: Site, request: Request) -> SiteAnswer:
    """The run is over, once its result is kept: the last state that counted and the model stay, all else goes."""
    place, counted = site.round_handler(request), parse_attempt(request.note.get("counted"))
    if place.progress.finish_digest not in (None, request.digest):
        raise RequestRefused("over", "The run has ended here before, with another model.")
    agreed = None
    if isinstance(site.data, HeldData):
        agreed = _agreed_vocabulary(site, place, counted, request.body)
    else:
        _save_result(site, place, request)
    if place.progress.finish_digest is None:
        if counted != place.progress.counted and counted in place.files.attempts():
            place = place.advance_to(counted)
        place = place.mark_finished(request.digest)
    place.files.save_model(request.body)
    if agreed is not None:
        place.files.save_vocabulary(VocabularyState(agreed, place.started.experiment, place.started.rows[0]))
    place.files.keep_only({place.progress.counted} if place.progress.counted else set())
    place.files.remove_replies()
    return site.plain(request, Message({}))


def _agreed_vocabulary(site: Site, place: RoundHandler, counted: Attempt | None, last: Message) -> Vocabulary:
    """The words, and everybody's counts of them. Whether these can have the site's own in them is a comparison with
    numbers that masks hide: one is answered in a run, which a refusal closes, and none where the run is not allowed any
    more.
    """
    if place.progress.closed_code is not None:
        raise RequestRefused(place.progress.closed_code, "This agreement on words was closed here before.")
    place.require_participation()
    require_same_data(site.data, place.started)
    is_here = place.progress.finish_digest is None and counted in place.files.attempts()
    agreed = vocabulary_in(place.files, counted if is_here else place.progress.counted, last)
    if not has_own_counts(agreed, site.data.rows):
        place.files.save_progress(replace(place.progress, closed_code="protocol"), place.plan.source)
        raise RequestRefused(
            "protocol",
            f"The server tells of {agreed.n_documents} documents in all, {site.data.n_rows} of which are here, and of "
            "words in fewer, or more, of them than can be: its counts are not the sums of those that sites have sent. "
            "Ask there. The agreement is closed here; words are agreed on again in a new run.",
        )
    return agreed


def _save_result(site: Site, place: RoundHandler, request: Request) -> None:
    """What the people at the site wanted it for; it is theirs, and nothing of it leaves. It is written once."""
    run, started = request.nonce.run, place.started
    folder = (site.results or site.folder / "results") / run
    if place.progress.finish_digest is not None and is_complete(folder):
        return
    require_same_data(site.data, started)
    matrix, columns = site.data.matrix(site.data.order(started.columns)), started.columns
    parties = len(started.layout.parties)
    weighing = site.data.weighing if isinstance(site.data, CountedData) else None
    ending = ResultWriter(run, started.experiment, place.plan.program, parties, matrix, columns, weighing)
    with runtime.limit_kernel_threads(KERNEL_THREADS):
        told = ending.save(folder, request.body)
    if told:
        site.log(request.nonce, "note", told)
    if weighing is not None:
        keep_vocabulary(folder, weighing)


# ---- names of columns -------------------------------------------------------------------------------------------


def exchange_names(site: Site, request: Request) -> SiteAnswer:
    """Ask for the names of missing columns, tell them to another site, or read them; the server cannot."""
    nonce, note = request.nonce, request.note
    own = Correspondent(site.name, nonce.run, site.data.secret, site.roster, site.key)
    if nonce.phase == ASK:
        require_new_run_allowed(site, request)
        return site.plain(request, own.asks())
    if nonce.phase == TELL:
        if not site.policy.tell_names:
            raise RequestRefused("names", "site.toml does not let this site tell names (tell_names).")
        place = site.round_handler(request)
        place.require_unfinished()
        place.require_participation()
        own = replace(own, roster=restrict_roster(site.roster, place.started))
        names = site.policy.leaving(place.started.columns)
        with _refusing_malformed():
            letter = own.tells(str(note.get("for")), request.body, names)
        return site.plain(request, letter)
    with _refusing_malformed():
        missing = own.reads(str(note.get("from")), request.body)
    site.log(nonce, "columns", f"By {note.get('from')!r}, missing here are: {', '.join(missing) or 'none'}.")
    return site.plain(request, Message({}))


@contextmanager
def _refusing_malformed() -> Iterator[None]:
    """What cannot be a letter is refused as such."""
    try:
        yield
    except RequestRefused:
        raise
    except (PartsongError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RequestRefused(
            "protocol", f"What was sent is not a letter between sites ({type(error).__name__})."
        ) from error


# ---- site -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """`roster`: the keys of all parties, pinned outside this protocol. `key`: what columns are hashed with, known to
    sites alone; `results`: where models of runs that are over go, for the people at the site. `texts`: where it holds
    these, what it works on follows from a run's words.
    """

    name: str
    folder: Path
    data: SiteData
    policy: Policy = Policy()
    roster: Roster | None = None
    key: bytes = field(default=b"", repr=False)
    build: PlanBuilder = build_plan
    results: Path | None = None
    texts: Texts | None = None

    @property
    def ledger(self) -> SiteLedger:
        """What was released, over all runs."""
        return SiteLedger(self.folder / "ledger.jsonl")

    @property
    def audit(self) -> AuditLog:
        """What has left."""
        return AuditLog(self.folder / "audit.jsonl")

    @property
    def policy_checker(self) -> PolicyChecker:
        """What its policy says now."""
        return PolicyChecker(self.name, self.policy, self.data, self.ledger, self.roster)

    def answer(self, data: bytes) -> bytes:
        """The bytes to send back; they are in the audit log when this returns, or a refusal among many in its count.
        FileError: nothing may be sent.

        A log that was edited is left as it is: what leaves then is a refusal, and it is in site.log alone.
        """
        with self._exclusive():
            nonce = Nonce("unknown")
            try:
                request = Request.from_bytes(data)
                nonce = request.nonce
                done = self._checked_answer(request)
            except PartsongError as error:
                done = self._refusal_answer(
                    nonce, refusal_from_error(error), " ".join((str(error), *getattr(error, "__notes__", ())))
                )
            except Exception:
                done = self._refusal_answer(nonce, Refusal("failed"), self._traceback())
            return self._record(done)

    def refuse(self, code: str, reason: str) -> bytes:
        """The bytes that say no to what is not even read; in the audit log as all that leaves."""
        with self._exclusive():
            return self._record(self._refusal_answer(Nonce("unknown"), Refusal(code), reason))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """No other process answers for this site meanwhile."""
        make_folder(self.folder)
        with locked(self.folder / "lock", waits=True):
            yield

    def _record(self, done: SiteAnswer) -> bytes:
        if isinstance(done.reply.answer, Refusal) and not self.audit.is_intact:
            return done.payload
        program = None if done.plan is None else done.plan.program
        protection = protection_fields(program, self._epsilon(done.plan))
        self.audit.record(done.reply, done.payload, is_repeat=done.is_repeat, protection=protection)
        return done.payload

    def _checked_answer(self, request: Request) -> SiteAnswer:
        if request.party != self.name:
            raise RequestRefused("not-addressed", f"A request for {request.party!r} has come here.")
        require_consistent(self.ledger, self.audit, request.seen)
        if self.texts is not None:
            return facing(self, self.texts, request)._dispatch(request)
        return self._dispatch(request)

    def _dispatch(self, request: Request) -> SiteAnswer:
        match request.nonce.kind:
            case Kind.HELLO:
                return hello(self, request)
            case Kind.START:
                return start(self, request)
            case Kind.NAMES:
                return exchange_names(self, request)
            case Kind.WORK:
                return self.round_handler(request).work(request)
            case Kind.REDUCE:
                return self.round_handler(request).reduce(request)
            case Kind.FINISH:
                return finish(self, request)

    def round_handler(self, request: Request) -> RoundHandler:
        """The run that a request is about, as it stands here."""
        files, started = self.run_folder(request.nonce.run), self.load_start(request.nonce.run)
        plan = self.build(started.experiment, len(started.layout.parties), self.roster)
        plan = replace(plan, reduction=bind_context(started.context, plan.reduction))
        tally = files.load_progress(plan.source)
        return RoundHandler(self.policy_checker, files, started, plan, tally, self.audit)

    def run_folder(self, run: str) -> RunFolder:
        """The folder of a run, whether it is there or not."""
        return RunFolder(self.folder / "runs" / run)

    def load_start(self, run: str) -> StartState:
        """What was agreed on in a run; refused where it was not started here."""
        if (started := self.run_folder(run).load_start()) is None:
            raise RequestRefused("not-started", f"Run {run!r} was not started here.")
        return started

    def plain(self, request: Request, body: Message, note: Mapping[str, Any] | None = None) -> SiteAnswer:
        """A reply that releases nothing, and is not kept."""
        reply = Reply(self.name, request.nonce, body, self.ledger.serial, note or {})
        return SiteAnswer(reply, reply.to_bytes())

    def _refusal_answer(self, nonce: Nonce, refusal: Refusal, reason: str) -> SiteAnswer:
        """The code leaves, the reason is written down."""
        self.log(nonce, refusal.code, reason)
        reply = Reply(self.name, nonce, refusal)
        return SiteAnswer(reply, reply.to_bytes())

    def _traceback(self) -> str:
        """Where an error was raised; its own words only where they cannot be those of a text."""
        if self.texts is None:
            return traceback.format_exc()
        kind, _, place = sys.exc_info()
        return "".join([*traceback.format_tb(place), "" if kind is None else kind.__name__])

    def log(self, nonce: Nonce, code: str, reason: str) -> None:
        """For the people at the site; nothing of it leaves."""
        where = f"run {nonce.run}, round {nonce.round}, attempt {nonce.attempt}, {nonce.kind} {nonce.phase}"
        append_to_log(self.folder, code, f"{where}: {reason}")

    def _epsilon(self, plan: Plan | None) -> float | None:
        """What was spent by now, at the δ of the policy."""
        if plan is None or plan.release is None:
            return None
        delta = USUAL_DELTA if self.policy.privacy is None else self.policy.privacy.delta
        try:
            spent = self.ledger.load().epsilon(delta)
        except CompositionError:
            return None
        return spent if math.isfinite(spent) else None
