"""Site service: a party on its own machine with rows, a policy and a folder, which answers requests.

Nothing is kept in memory between requests, so each may be answered by a new process. The order of writes is ledger,
work, reply, audit log; then the reply is sent. After an interruption, work is repeated and replies are sent again
unchanged: docs/reference/protocol.md.
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
    bind_run,
    empty_texts_note,
    has_own_counts,
    keep_vocabulary,
    long_words_note,
    require_table,
    vocabulary_in,
)
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request, RequestRefused, refusal_from_error
from partsong.privacy.spending import DEFAULT_DELTA
from partsong.secure_aggregation.messages import Roster
from partsong.topics.vocabulary import Vocabulary

# ---- before the first round: nothing is released ----------------------------------------------------------------


def hello(site: Site, request: Request) -> SiteAnswer:
    """Return hashes of the columns that may leave, and the dtype, if the site would take part."""
    require_new_run_allowed(site, request)
    require_valid_data(site.data)
    columns = site.policy.leaving(site.data.columns)
    if not columns:
        raise RequestRefused("no-columns", "site.toml releases no column of these data.")
    mark = key_mark(site.key, request.nonce.run)
    require_key_mark(mark, str(request.note.get("shared_key", mark)))
    body = Message({"columns": hashed(columns, request.nonce.run, site.key)})
    return site.plain(request, body, {"type": type_name(site.data.matrix().dtype), "shared_key": mark})


def require_new_run_allowed(site: Site, request: Request) -> None:
    """Refuse if the policy rejects a new run of this experiment with these parties."""
    plan = _build_new_plan(site, request, parse_parties(request.note.get("parties")))
    experiment = parse_experiment(request.note)
    if experiment.get("columns", SAME) == SAME:  # else the start request decides which columns leave
        leaving, seed = site.policy.leaving(site.data.columns), experiment.get("seed", 0)
        site.policy_checker.exposure_limit.require_run(plan, request.nonce.run, leaving, seed)


def start(site: Site, request: Request) -> SiteAnswer:
    """Check the request, match the columns, and build the first state; nothing is released."""
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
    if plan.release is not None and passed >= 0:  # what a party may send next depends on what it has sent
        state = replace(state, releases=passed + 1)
    standing = plan.reduction.setup_party(site.name, site.data.secret, layout)
    # Progress first: the file of the start marks a started run, and a started run must have progress.
    files.save_progress(ProgressState(None, standing, last_released=passed), plan.source)
    rows = (site.data.n_rows, site.data.type)
    mark = data_digest(site.data.rows, order)
    of_words = site.data.context if isinstance(site.data, CountedData) else ""
    context = of_words + run_context(experiment, request.body["columns"], layout)
    keys = party_keys(site.roster, layout.parties)
    files.save_start(StartState(request.digest, experiment, layout, columns, rows, state, mark, context, keys, least))
    notes = [rare_columns_note(site.data.rows, order, least), long_words_note(state, plan.program)]
    notes += [empty_texts_note(site.data.rows)] if isinstance(site.data, CountedData) else []
    for note in filter(None, notes):
        site.log(request.nonce, "note", note)
    return site.plain(request, Message({}))


def _build_new_plan(site: Site, request: Request, parties: tuple[str, ...]) -> Plan:
    """Build the plan of a new run with these parties; refuse it if the policy does.

    A run over texts has started with its agreement on words, and has the same parties.
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
    started = {path.parent.name for path in (site.folder / "runs").glob("*/start")}
    site.policy.require_run(
        site.data.main_run(run), {site.data.main_run(name) for name in started | set(site.ledger.load().runs)}
    )
    site.policy_checker.require_budget(plan, run)
    return plan


def _require_same_start(site: Site, request: Request, before: StartState) -> None:
    """Refuse a repeated start if the run is over, has other settings, or is no longer allowed."""
    handler = site.round_handler(request)
    handler.require_unfinished()
    if before.digest != request.digest:
        raise RequestRefused("conflict", "This run was started at this site with other settings.")
    handler.require_participation()
    site.policy_checker.require_budget(handler.plan, request.nonce.run)
    site.policy_checker.require_columns(before)


def _last_released_round(site: Site, run: str) -> int:
    """Return the last released round of a run whose files are lost; -1, the usual case, if there is none."""
    charges, released = site.ledger.charges(run), site.audit.run_releases(run)
    if released is not None and released.is_over:
        raise RequestRefused("over", "The run has ended at this site, and its files are lost.")
    charged = [one.round for one in charges]
    rounds = charged if released is None else [number for number, _ in released.attempts]
    return max(rounds, default=-1)


def _check_parts(plan: Plan, layout: Layout, shard: Shard, columns: int) -> None:
    """Require that layout, program and reduction fit, before anything is computed."""
    if layout.n_features != columns or layout.dtype not in ("float64", type_name(shard.matrix.dtype)):
        raise RequestRefused(
            "layout",
            f"The run has {layout.n_features} columns of {layout.dtype}, which differs from the data of this site.",
        )
    check_compatibility(plan.program, plan.reduction, plan.program.upload_spec(layout))


def _match_columns(site: Site, request: Request) -> tuple[int, ...]:
    """Return the positions of the agreed columns. Missing names go to the site's log."""
    leaving, nonce = site.policy.leaving(site.data.columns), request.nonce
    rule, are_secret = str(request.note.get("rule", SAME)), site.data.hides_names
    order, unused = find_columns(
        request.body["columns"], leaving, nonce.run, site.key, rule=rule, are_secret=are_secret
    )
    if unused and not site.data.hides_names:
        site.log(nonce, "note", f"Unused columns: {', '.join(unused)}.")
    places = {name: at for at, name in enumerate(site.data.columns)}
    return tuple(places[leaving[at]] for at in order)


# ---- the end of a run -------------------------------------------------------------------------------------------


def finish(site: Site, request: Request) -> SiteAnswer:
    """End a run once its result is saved. The last counted state and the model stay; other files are removed."""
    handler, counted = site.round_handler(request), parse_attempt(request.note.get("counted"))
    if handler.progress.finish_digest not in (None, request.digest):
        raise RequestRefused("over", "The run has ended at this site with another model.")
    agreed = None
    if isinstance(site.data, HeldData):
        agreed = _agreed_vocabulary(site, handler, counted, request.body)
    else:
        _save_result(site, handler, request)
    if handler.progress.finish_digest is None:
        if counted != handler.progress.counted and counted in handler.files.attempts():
            handler = handler.advance_to(counted)
        # After the result is saved: a site killed in between saves it when the end is sent again.
        handler = handler.mark_finished(request.digest)
    handler.files.save_model(request.body)
    if agreed is not None:
        handler.files.save_vocabulary(VocabularyState(agreed, handler.started.experiment, handler.started.rows[0]))
    handler.files.keep_only({handler.progress.counted} if handler.progress.counted else set())
    handler.files.remove_replies()
    return site.plain(request, Message({}))


def _agreed_vocabulary(site: Site, handler: RoundHandler, counted: Attempt | None, last: Message) -> Vocabulary:
    """Return the agreed words and their counts over all sites.

    Checking that these counts can include the site's own reveals a comparison with masked values. A run answers one,
    since a refusal closes it; none if the run is no longer allowed.
    """
    if handler.progress.closed_code is not None:
        raise RequestRefused(handler.progress.closed_code, "This agreement on words is closed at this site.")
    handler.require_participation()
    require_same_data(site.data, handler.started)
    is_here = handler.progress.finish_digest is None and counted in handler.files.attempts()
    agreed = vocabulary_in(handler.files, counted if is_here else handler.progress.counted, last)
    if not has_own_counts(agreed, site.data.rows):
        handler.files.save_progress(replace(handler.progress, closed_code="protocol"), handler.plan.source)
        raise RequestRefused(
            "protocol",
            f"The server reports {agreed.n_documents} documents, {site.data.n_rows} of them at this site, and "
            "impossible counts of words: they cannot be the sums of what the sites sent. Ask the coordinator. "
            "The agreement is closed at this site; start a new run to agree on words again.",
        )
    return agreed


def _save_result(site: Site, handler: RoundHandler, request: Request) -> None:
    """Save the result for the people at the site, once. Nothing of it is sent."""
    run, started = request.nonce.run, handler.started
    folder = (site.results or site.folder / "results") / run
    if handler.progress.finish_digest is not None and is_complete(folder):
        return
    require_same_data(site.data, started)
    matrix, columns = site.data.matrix(site.data.order(started.columns)), started.columns
    parties = len(started.layout.parties)
    weighing = site.data.weighing if isinstance(site.data, CountedData) else None
    ending = ResultWriter(run, started.experiment, handler.plan.program, parties, matrix, columns, weighing)
    with runtime.limit_kernel_threads(KERNEL_THREADS):
        note = ending.save(folder, request.body)
    if note:
        site.log(request.nonce, "note", note)
    if weighing is not None:
        keep_vocabulary(folder, weighing)


# ---- names of columns -------------------------------------------------------------------------------------------


def exchange_names(site: Site, request: Request) -> SiteAnswer:
    """Request names of missing columns, send them to another site, or read them; the server cannot read them."""
    nonce, note = request.nonce, request.note
    own = Correspondent(site.name, nonce.run, site.data.secret, site.roster, site.key)
    if nonce.phase == ASK:
        require_new_run_allowed(site, request)
        return site.plain(request, own.request_names())
    if nonce.phase == TELL:
        if not site.policy.tell_names:
            raise RequestRefused("names", "site.toml does not allow this site to send names (tell_names).")
        handler = site.round_handler(request)
        handler.require_unfinished()
        handler.require_participation()
        own = replace(own, roster=restrict_roster(site.roster, handler.started))
        names = site.policy.leaving(handler.started.columns)
        with _refusing_malformed():
            letter = own.send_names(str(note.get("for")), request.body, names)
        return site.plain(request, letter)
    with _refusing_malformed():
        missing = own.read_names(str(note.get("from")), request.body)
    site.log(nonce, "columns", f"By {note.get('from')!r}, missing here are: {', '.join(missing) or 'none'}.")
    return site.plain(request, Message({}))


@contextmanager
def _refusing_malformed() -> Iterator[None]:
    """Refuse a malformed letter."""
    try:
        yield
    except RequestRefused:
        raise
    except (PartsongError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RequestRefused(
            "protocol", f"The request has no valid letter between sites ({type(error).__name__})."
        ) from error


# ---- site -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """A site. `roster`: the keys of all parties, pinned out-of-band. `key`: the shared key with which column names are
    hashed, unknown to the server. `results`: the folder for models of finished runs. `texts`: the site's texts, if it
    has these; its data then follow from the words of a run.
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
        """The release ledger, over all runs."""
        return SiteLedger(self.folder / "ledger.jsonl")

    @property
    def audit(self) -> AuditLog:
        """The audit log."""
        return AuditLog(self.folder / "audit.jsonl")

    @property
    def policy_checker(self) -> PolicyChecker:
        """Checks against the current policy."""
        return PolicyChecker(self.name, self.policy, self.data, self.ledger, self.roster)

    def answer(self, data: bytes) -> bytes:
        """Answer a request. The reply is in the audit log when this returns, or counted there if it is one of many
        refusals. If FileError is raised, nothing may be sent.

        An edited audit log is left unchanged: the site then only refuses, and notes it in site.log.
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
                # The code alone leaves: the text of an unexpected error could quote data.
                done = self._refusal_answer(nonce, Refusal("failed"), self._traceback())
            return self._record(done)

    def refuse(self, code: str, reason: str) -> bytes:
        """Return the bytes of a refusal of an unread request; it is in the audit log too."""
        with self._exclusive():
            return self._record(self._refusal_answer(Nonce("unknown"), Refusal(code), reason))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the site's folder: one process answers at a time."""
        make_folder(self.folder)
        with locked(self.folder / "lock", waits=True):
            yield

    def _record(self, done: SiteAnswer) -> bytes:
        if isinstance(done.reply.answer, Refusal) and not self.audit.is_intact:
            return done.payload
        program = None if done.plan is None else done.plan.program
        protection = protection_fields(program, self._epsilon(done.plan), done.reply.nonce.round)
        self.audit.record(done.reply, done.payload, is_repeat=done.is_repeat, protection=protection)
        return done.payload

    def _checked_answer(self, request: Request) -> SiteAnswer:
        if request.party != self.name:
            raise RequestRefused("not-addressed", f"The request is addressed to {request.party!r}.")
        require_consistent(self.ledger, self.audit, request.seen)
        if self.texts is not None:
            return bind_run(self, self.texts, request)._dispatch(request)
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
        """Load the run of a request, and return its handler."""
        files, started = self.run_folder(request.nonce.run), self.load_start(request.nonce.run)
        plan = self.build(started.experiment, len(started.layout.parties), self.roster)
        plan = replace(plan, reduction=bind_context(started.context, plan.reduction))
        tally = files.load_progress(plan.source)
        return RoundHandler(self.policy_checker, files, started, plan, tally, self.audit)

    def run_folder(self, run: str) -> RunFolder:
        """Return the folder of a run, which need not exist."""
        return RunFolder(self.folder / "runs" / run)

    def load_start(self, run: str) -> StartState:
        """Load what was agreed on in a run; refuse if it was not started here."""
        if (started := self.run_folder(run).load_start()) is None:
            raise RequestRefused("not-started", f"Run {run!r} was not started at this site.")
        return started

    def plain(self, request: Request, body: Message, note: Mapping[str, Any] | None = None) -> SiteAnswer:
        """Build a reply that releases nothing and is not stored."""
        reply = Reply(self.name, request.nonce, body, self.ledger.serial, note or {})
        return SiteAnswer(reply, reply.to_bytes())

    def _refusal_answer(self, nonce: Nonce, refusal: Refusal, reason: str) -> SiteAnswer:
        """Build a refusal: the code is sent, the reason is logged."""
        self.log(nonce, refusal.code, reason)
        reply = Reply(self.name, nonce, refusal)
        return SiteAnswer(reply, reply.to_bytes())

    def _traceback(self) -> str:
        """Return a traceback; without the message of the error if the site has texts, which it could quote."""
        if self.texts is None:
            return traceback.format_exc()
        kind, _, trace = sys.exc_info()
        return "".join([*traceback.format_tb(trace), "" if kind is None else kind.__name__])

    def log(self, nonce: Nonce, code: str, reason: str) -> None:
        """Append to the site's log, which never leaves."""
        where = f"run {nonce.run}, round {nonce.round}, attempt {nonce.attempt}, {nonce.kind} {nonce.phase}"
        append_to_log(self.folder, code, f"{where}: {reason}")

    def _epsilon(self, plan: Plan | None) -> float | None:
        """Return ε spent so far, at the δ of the policy."""
        if plan is None or plan.release is None:
            return None
        delta = DEFAULT_DELTA if self.policy.privacy is None else self.policy.privacy.delta
        try:
            spent = self.ledger.load().epsilon(delta)
        except CompositionError:
            return None
        return spent if math.isfinite(spent) else None
