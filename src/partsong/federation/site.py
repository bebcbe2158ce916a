"""A party on its own machine: it holds rows, a policy and a folder, and answers requests with bytes.

Nothing lives in memory between two requests, so that each may be answered by a new process. The order of writes is
ledger, work, reply, audit; then the reply is handed over. Whatever is cut off in between is done again, or sent again
as it was: docs/federation-internals.md.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from partsong.core import Message
from partsong.errors import CompositionError, FormatError, PartsongError
from partsong.federation import site_beginning, site_ending, site_names
from partsong.federation.audit import Audit, protection_of
from partsong.federation.consent import Consent
from partsong.federation.ledger import MOST_MADE_UP, SiteLedger
from partsong.federation.locks import locked
from partsong.federation.policy import Policy
from partsong.federation.refusals import Denied, refusal_of
from partsong.federation.site_files import RunFolder, make_folder
from partsong.federation.site_log import write_down
from partsong.federation.site_plan import Build, Data, Plan, plan_of
from partsong.federation.site_work import Answered, Workplace
from partsong.federation.told_alike import bound_to
from partsong.federation.wholeness import ledger_read, require_whole
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request
from partsong.federation.word_data import Texts
from partsong.federation.word_site import facing
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

    @property
    def consent(self) -> Consent:
        """What its policy says now."""
        return Consent(self.name, self.policy, self.data, self.ledger, self.roster)

    def answer(self, data: bytes) -> bytes:
        """The bytes to send back; they are in the audit log when this returns, or a refusal among many in its count.
        FileError: nothing may be sent.

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
            raise Denied("behind", self._told_behind(request.seen, serial))
        require_whole(self.ledger, self.audit)
        if self.texts is not None:
            return facing(self, self.texts, request)._dispatched(request)
        return self._dispatched(request)

    def _told_behind(self, seen: int, serial: int) -> str:
        missing = seen - serial
        if missing > MOST_MADE_UP:
            return (
                f"The server says that it has seen release {seen} of this site, whose ledger has {serial}. No site has "
                "released so often, and nothing here is to be mended: ask at the server, and look at what it has for "
                "this site in serials.json."
            )
        return (
            f"The server has seen release {seen} of this site, whose ledger has {serial}: it was restored from an "
            "older copy. Bring the ledger up to date. Where that cannot be, charge what is missing as releases without "
            "noise, after which a site with a privacy budget takes part in nothing until noiseless_before is set in "
            "site.toml (or at a cost that is known from another copy of ledger or log, with --release): partsong audit "
            f'make-up {quote(str(self.folder))} --count {missing} --why "restored from an older copy".'
        )

    def _dispatched(self, request: Request) -> Answered:
        match request.nonce.kind:
            case Kind.HELLO:
                return site_beginning.hello(self, request)
            case Kind.START:
                return site_beginning.start(self, request)
            case Kind.NAMES:
                return site_names.exchange_names(self, request)
            case Kind.WORK:
                return self.workplace(request).work(request)
            case Kind.REDUCE:
                return self.workplace(request).reduce(request)
            case Kind.FINISH:
                return site_ending.finish(self, request)

    def workplace(self, request: Request) -> Workplace:
        """The run that a request is about, as it stands here."""
        files = self.files_of(request)
        started = files.started()
        if started is None:
            raise Denied("not-started", f"Run {request.nonce.run!r} was not started here.")
        plan = self.build(started.experiment, len(started.layout.parties), self.roster)
        plan = replace(plan, reduction=bound_to(started.context, plan.reduction))
        tally = files.tally(plan.source)
        return Workplace(self.consent, files, started, plan, tally, self.audit, self.kernel_threads)

    def files_of(self, request: Request) -> RunFolder:
        """The folder of that run, whether it is there or not."""
        return RunFolder(self.folder / "runs" / request.nonce.run)

    def plain(self, request: Request, body: Message, note: Mapping[str, Any] | None = None) -> Answered:
        """A reply that releases nothing, and is not kept."""
        reply = Reply(self.name, request.nonce, body, self._serial(), note or {})
        return Answered(reply, reply.written())

    def _refused(self, nonce: Nonce, refusal: Refusal, reason: str) -> Answered:
        """The code leaves, the reason is written down."""
        self.log(nonce, refusal.code, reason)
        reply = Reply(self.name, nonce, refusal)
        return Answered(reply, reply.written())

    def _trace(self) -> str:
        """Where an error was raised; its own words only where they cannot be those of a text."""
        if self.texts is None:
            return traceback.format_exc()
        kind, _, place = sys.exc_info()
        return "".join([*traceback.format_tb(place), "" if kind is None else kind.__name__])

    def log(self, nonce: Nonce, code: str, reason: str) -> None:
        """For the people at the site; nothing of it leaves."""
        where = f"run {nonce.run}, round {nonce.round}, attempt {nonce.attempt}, {nonce.kind} {nonce.phase}"
        write_down(self.folder, code, f"{where}: {reason}")

    def _serial(self) -> int:
        try:
            return ledger_read(self.ledger).serial
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
