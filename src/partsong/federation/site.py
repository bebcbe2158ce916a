"""A party on its own machine: it holds rows, a policy and a folder, and answers requests with bytes.

Nothing lives in memory between two requests, so that each may be answered by a new process. The order of writes is
ledger, work, reply, audit; then the reply is handed over. Whatever is cut off in between is done again, or sent again
as it was: docs/federation-internals.md.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partsong import threads
from partsong.core import Layout, Message, Shard, type_name
from partsong.engines.boundary import check_together, stated_by
from partsong.errors import CompositionError, FormatError, PartsongError
from partsong.federation.audit import Audit, protection_of
from partsong.federation.columns import SAME, Names, Wanted, hashed, key_mark, require_key_mark
from partsong.federation.data_state import mark_of, require_same, require_sound
from partsong.federation.finishing import Ending, is_kept
from partsong.federation.ledger import SiteLedger
from partsong.federation.locks import locked
from partsong.federation.naming import ASK, TELL, Correspondent
from partsong.federation.policy import Policy
from partsong.federation.refusals import Denied, refusal_of
from partsong.federation.site_files import Agreed, RunFolder, Started, Tally, make_folder
from partsong.federation.site_log import write_down
from partsong.federation.site_plan import Build, Data, Plan, attempt_in, experiment_in, layout_in, names_in, plan_of
from partsong.federation.site_work import Answered, Workplace
from partsong.federation.told_alike import bound_to, context_of
from partsong.federation.wholeness import require_whole
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request
from partsong.federation.word_data import CountedData, HeldData, Texts
from partsong.federation.word_site import facing, keep_vocabulary, require_table, told_of_empty, vocabulary_in
from partsong.privacy.admission import Roster
from partsong.spending import USUAL_DELTA


@dataclass(frozen=True, slots=True)
class Site:
    """`roster`: the keys of all parties, pinned outside this protocol. `key`: what columns are hashed with, known to
    sites alone; `results`: where models of runs that are over go, for the people at the site. `texts`: where it holds
    these, what it works on follows from a run's words.
    """

    name: str
    folder: Path
    data: Data
    policy: Policy = Policy()
    roster: Roster | None = None
    key: bytes = field(default=b"", repr=False)
    build: Build = plan_of
    kernel_threads: int = 1
    results: Path | None = None
    texts: Texts | None = None

    @property
    def ledger(self) -> SiteLedger:
        """What was released, over all runs."""
        return SiteLedger(self.folder / "ledger.jsonl")

    @property
    def audit(self) -> Audit:
        """What has left."""
        return Audit(self.folder / "audit.jsonl")

    def answer(self, data: bytes) -> bytes:
        """The bytes to send back; they are in the audit log when this returns. FileError: nothing may be sent.

        A log that was edited is left as it is: what leaves then is a refusal, and it is in site.log alone.
        """
        with self._alone():
            nonce = Nonce("unknown")
            try:
                request = Request.read(data)
                nonce = request.nonce
                done = self._answered(request)
            except PartsongError as error:
                done = self._refused(nonce, refusal_of(error), " ".join((str(error), *getattr(error, "__notes__", ()))))
            except Exception:
                done = self._refused(nonce, Refusal("failed"), self._trace())
            return self._noted(done)

    def refuse(self, code: str, reason: str) -> bytes:
        """The bytes that say no to what is not even read; in the audit log as all that leaves."""
        with self._alone():
            return self._noted(self._refused(Nonce("unknown"), Refusal(code), reason))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process answers for this site meanwhile."""
        make_folder(self.folder)
        lock = self.folder / "lock"
        with contextlib.suppress(OSError):
            lock.touch(0o600)
        with locked(lock, waits=True):
            yield

    def _noted(self, done: Answered) -> bytes:
        if isinstance(done.reply.answer, Refusal) and not self.audit.is_sound:
            return done.payload
        program = None if done.plan is None else done.plan.program
        protection = protection_of(program, self._epsilon(done.plan))
        self.audit.note(done.reply, done.payload, again=done.again, protection=protection)
        return done.payload

    def _answered(self, request: Request) -> Answered:
        if request.party != self.name:
            raise Denied("not-addressed", f"A request for {request.party!r} has come here.")
        serial = self._serial()
        if request.seen > serial:
            raise Denied(
                "behind",
                f"The server has seen release {request.seen} of this site, whose ledger has {serial}: it was restored "
                "from an older copy. Bring the ledger up to date, or charge what is missing: partsong audit make-up "
                f"FOLDER --count {request.seen - serial}.",
            )
        require_whole(self.ledger, self.audit)
        if self.texts is not None:
            return facing(self, self.texts, request)._dispatched(request)
        return self._dispatched(request)

    def _dispatched(self, request: Request) -> Answered:
        match request.nonce.kind:
            case Kind.HELLO:
                return self._hello(request)
            case Kind.START:
                return self._start(request)
            case Kind.NAMES:
                return self._names(request)
            case Kind.WORK:
                return self._workplace(request).work(request)
            case Kind.REDUCE:
                return self._workplace(request).reduce(request)
            case Kind.FINISH:
                return self._finish(request)

    def _hello(self, request: Request) -> Answered:
        """Hashes of the columns that may leave, and the number type, if the site would take part at all."""
        parties = names_in(request.note.get("parties"))
        self._require_kind(request)
        plan = self.build(experiment_in(request.note), len(parties), self.roster)
        self.policy.require(plan.wish, self.data.n_rows)
        self.policy.require_mask_bound(plan.mask_bound)
        self._require_roster(parties)
        require_sound(self.data)
        columns = self.policy.leaving(self.data.columns)
        if not columns:
            raise Denied("no-columns", "site.toml lets no column of these data leave.")
        mark = key_mark(self.key, request.nonce.run)
        require_key_mark(mark, str(request.note.get("shared_key", mark)))
        body = Message({"columns": hashed(columns, request.nonce.run, self.key)})
        return self._plain(request, body, {"type": type_name(self.data.matrix().dtype), "shared_key": mark})

    def _start(self, request: Request) -> Answered:
        """Look at what is asked for, match the columns, and make the first state; nothing is released."""
        files = self._files(request)
        before = files.started()
        if before is not None and self._workplace(request).tally.over is not None:
            raise Denied("over", "The run is over here.")
        if before is not None and before.digest != request.digest:
            raise Denied("conflict", "This run was started here before, with other settings.")
        if before is None:
            self._require_kind(request)
            self.policy.require_run(self.data.run_of(request.nonce.run), self._runs())
            passed = self._passed(request.nonce.run)
            layout, experiment = layout_in(request.note), experiment_in(request.note)
            plan = self.build(experiment, len(layout.parties), self.roster)
            order = self._order(request)
            shard = Shard(self.name, self.data.matrix(order), self.data.secret)
            self._check(plan, layout, shard, len(order))
            require_sound(self.data)
            with threads.kernels_on(self.kernel_threads):
                state = plan.program.start_party(shard, layout)
            standing = plan.reduction.enrol(self.name, self.data.secret, layout)
            files.save_tally(Tally(None, standing, passed=passed), plan.source)
            columns = tuple(self.data.columns[at] for at in order)
            rows = (self.data.n_rows, self.data.type)
            mark = mark_of(self.data, order)
            context = context_of(experiment, request.body["columns"], layout)
            files.save_start(Started(request.digest, experiment, layout, columns, rows, state, mark, context))
            if isinstance(self.data, CountedData) and (empty := told_of_empty(self.data.rows)):
                self._log(request.nonce, "note", empty)
        return self._plain(request, Message({}))

    def _names(self, request: Request) -> Answered:
        """Ask for the names of missing columns, tell them to another site, or read them; the server cannot."""
        nonce, note = request.nonce, request.note
        own = Correspondent(self.name, nonce.run, self.data.secret, self.roster, self.key)
        if nonce.phase == ASK:
            return self._plain(request, own.asks())
        if nonce.phase == TELL:
            return self._plain(request, own.tells(str(note.get("for")), request.body, self._told(request)))
        names = own.reads(str(note.get("from")), request.body)
        self._log(nonce, "columns", f"By {note.get('from')!r}, missing here are: {', '.join(names) or 'none'}.")
        return self._plain(request, Message({}))

    def _told(self, request: Request) -> tuple[str, ...]:
        """Names that may be told to other sites: of agreed columns that may leave, in a run that is under way here."""
        if not self.policy.tell_names:
            raise Denied("names", "site.toml does not let this site tell names (tell_names).")
        place = self._workplace(request)
        if place.tally.over is not None:
            raise Denied("over", "The run is over here.")
        return self.policy.leaving(place.started.columns)

    def _finish(self, request: Request) -> Answered:
        """The run is over, once its result is kept: the last state that counted and the model stay, all else goes."""
        place, counted = self._workplace(request), attempt_in(request.note.get("counted"))
        if place.tally.over not in (None, request.digest):
            raise Denied("over", "The run has ended here before, with another model.")
        agreed = None
        if isinstance(self.data, HeldData):
            is_here = place.tally.over is None and counted in place.files.attempts()
            agreed = vocabulary_in(place.files, counted if is_here else place.tally.counted, request.body)
        else:
            self._keep_result(place, request)
        if place.tally.over is None:
            if counted != place.tally.counted and counted in place.files.attempts():
                place = place.counting(counted)
            place = place.ended(request.digest)
        place.files.save_model(request.body)
        if agreed is not None:
            place.files.save_agreed(Agreed(agreed, place.started.experiment, place.started.rows[0]))
        place.files.forget({place.tally.counted} if place.tally.counted else set())
        place.files.forget_replies()
        return self._plain(request, Message({}))

    def _keep_result(self, place: Workplace, request: Request) -> None:
        """What the people at the site wanted it for; it is theirs, and nothing of it leaves. It is written once."""
        run, started = request.nonce.run, place.started
        folder = (self.results or self.folder / "results") / run
        if place.tally.over is not None and is_kept(folder):
            return
        require_same(self.data, started)
        matrix, columns = self.data.matrix(self.data.order(started.columns)), started.columns
        parties = len(started.layout.parties)
        weighing = self.data.weighing if isinstance(self.data, CountedData) else None
        ending = Ending(run, started.experiment, place.plan.program, parties, matrix, columns, weighing)
        with threads.kernels_on(self.kernel_threads):
            told = ending.keep(folder, request.body)
        if told:
            self._log(request.nonce, "note", told)
        if weighing is not None:
            keep_vocabulary(folder, weighing)

    def _workplace(self, request: Request) -> Workplace:
        files = self._files(request)
        started = files.started()
        if started is None:
            raise Denied("not-started", f"Run {request.nonce.run!r} was not started here.")
        plan = self.build(started.experiment, len(started.layout.parties), self.roster)
        plan = replace(plan, reduction=bound_to(started.context, plan.reduction))
        tally, own = files.tally(plan.source), (self.name, self.data, self.policy, self.ledger)
        return Workplace(*own, files, started, plan, tally, self.audit, self.kernel_threads)

    def _files(self, request: Request) -> RunFolder:
        return RunFolder(self.folder / "runs" / request.nonce.run)

    def _runs(self) -> set[str]:
        """All that were ever started or charged here."""
        charged = set(self.ledger.books().runs)
        begun = {path.parent.name for path in (self.folder / "runs").glob("*/start")}
        return {self.data.run_of(name) for name in charged | begun}

    def _passed(self, run: str) -> int:
        """The last round that was released in a run whose files are not here: -1 as a rule, for there was none."""
        charges, released = self.ledger.charges_of(run), self.audit.released(run)
        if released is not None and released.is_over:
            raise Denied("over", "The run was over here, and its files are gone.")
        charged = [one.round for one in charges]
        rounds = charged if released is None else [number for number, _ in released.works]
        return max(rounds, default=-1)

    def _require_kind(self, request: Request) -> None:
        """A table, where the experiment is about one."""
        if not self.data.hides_names:
            require_table(experiment_in(request.note))

    def _check(self, plan: Plan, layout: Layout, shard: Shard, columns: int) -> None:
        """What the site allows, and whether the parts go together; before anything is computed."""
        self.policy.require(plan.wish, self.data.n_rows)
        self.policy.require_mask_bound(plan.mask_bound)
        self._require_roster(layout.parties)
        if layout.n_features != columns or layout.dtype not in ("float64", type_name(shard.matrix.dtype)):
            raise Denied("layout", f"{layout.n_features} columns of {layout.dtype} were agreed on.")
        if self.policy.privacy is not None:
            self.ledger.require_within(self.policy.privacy, plan.release, plan.exchanges)
        check_together(plan.program, plan.reduction, stated_by(plan.program, layout))

    def _require_roster(self, parties: Collection[str]) -> None:
        if self.name not in parties or (self.roster is not None and set(self.roster) != set(parties)):
            raise Denied("roster", f"The parties would be {', '.join(parties)}.")

    def _order(self, request: Request) -> tuple[int, ...]:
        """Where the agreed columns are here; names that are missing go to the log of the site."""
        leaving, nonce = self.policy.leaving(self.data.columns), request.nonce
        wanted = Wanted(request.body["columns"], nonce.run, str(request.note.get("rule", SAME)))
        order, unused = Names(leaving, self.key, self.data.hides_names).order(wanted)
        if unused and not self.data.hides_names:
            self._log(nonce, "note", f"Columns that are not used: {', '.join(unused)}.")
        places = {name: at for at, name in enumerate(self.data.columns)}
        return tuple(places[leaving[at]] for at in order)

    def _plain(self, request: Request, body: Message, note: Mapping[str, Any] | None = None) -> Answered:
        """A reply that releases nothing, and is not kept."""
        reply = Reply(self.name, request.nonce, body, self._serial(), note or {})
        return Answered(reply, reply.written())

    def _refused(self, nonce: Nonce, refusal: Refusal, reason: str) -> Answered:
        """The code leaves, the reason is written down."""
        self._log(nonce, refusal.code, reason)
        reply = Reply(self.name, nonce, refusal)
        return Answered(reply, reply.written())

    def _trace(self) -> str:
        """Where an error was raised; its own words only where they cannot be those of a text."""
        if self.texts is None:
            return traceback.format_exc()
        kind, _, place = sys.exc_info()
        return "".join([*traceback.format_tb(place), "" if kind is None else kind.__name__])

    def _log(self, nonce: Nonce, code: str, reason: str) -> None:
        where = f"run {nonce.run}, round {nonce.round}, attempt {nonce.attempt}, {nonce.kind} {nonce.phase}"
        write_down(self.folder, code, f"{where}: {reason}")

    def _serial(self) -> int:
        try:
            return self.ledger.serial
        except FormatError as error:
            raise Denied("ledger", str(error)) from error

    def _epsilon(self, plan: Plan | None) -> float | None:
        """What was spent by now, at the δ of the policy."""
        if plan is None or plan.release is None:
            return None
        delta = USUAL_DELTA if self.policy.privacy is None else self.policy.privacy.delta
        try:
            return float(self.ledger.spent().epsilon(delta))
        except CompositionError:
            return None
