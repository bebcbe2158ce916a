"""Exclusive time of named parts of the code during a benchmark.

Functions are wrapped in the benchmark's processes only; their behavior does not change.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

FLOWER = "Flower"
MATHEMATICS = "mathematics"
OUTSIDE = frozenset({FLOWER, MATHEMATICS})
"""Not part of partsong's layer: Flower, waiting for it, and the mathematics."""


@dataclass(slots=True)
class Clock:
    """Seconds by label; time in a nested watched part counts only for that part."""

    spent: Counter[str] = field(default_factory=Counter)
    open: threading.local = field(default_factory=threading.local)

    def watch(self, owner: Any, names: str, label: str) -> None:
        """Wrap plain or static functions of a module or class."""
        for name in names.split():
            found = vars(owner)[name]
            is_static, is_property = isinstance(found, staticmethod), isinstance(found, property)
            wrapped = self._timed(found.fget if is_property else found.__func__ if is_static else found, label)
            setattr(owner, name, property(wrapped) if is_property else staticmethod(wrapped) if is_static else wrapped)

    def _timed(self, function: Any, label: str) -> Any:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.part(label):
                return function(*arguments, **named)

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure this thread within the block; other threads do not count."""
        self.open.inside = [0.0]
        try:
            yield
        finally:
            del self.open.inside

    @contextmanager
    def part(self, label: str) -> Iterator[None]:
        """Measure the block, excluding watched parts inside it."""
        inside = getattr(self.open, "inside", None)
        if inside is None:
            yield
            return
        self.open.inside, began = [0.0], time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            self.spent[label] += whole - self.open.inside[0]
            inside[0] += whole
            self.open.inside = inside

    def taken(self) -> dict[str, float]:
        """Return the times since the last call, and reset them."""
        found, self.spent = dict(self.spent), Counter()
        return found


def layer_in(seconds: float, spent: Mapping[str, float]) -> dict[str, float]:
    """Times of partsong's layer by label; unlabeled time is "rest"."""
    rest = seconds - sum(spent.values())
    return {label: one for label, one in spent.items() if label not in OUTSIDE} | {"rest": rest}


def watch_site(clock: Clock) -> None:
    """Watch the parts of a site's answer."""
    import os

    from partsong.engines import party
    from partsong.federation import audit_log as audit
    from partsong.federation import ledger, wire
    from partsong.federation import ledger as chain
    from partsong.federation import signing as signatures
    from partsong.federation.flower import site_process
    from partsong.federation.setup import site_folder
    from partsong.federation.site import service as site
    from partsong.federation.site import state as site_files
    from partsong.methods.exact import SharedSums

    clock.watch(os, "fsync", "fsync")
    clock.watch(site_process, "message_bytes reply_message", "Flower's envelope")
    clock.watch(site_folder.SiteFolder, "at opened answering", "settings, roster and policy")
    clock.watch(signatures.Envelope, "sign verify", "signatures")
    clock.watch(wire.Request, "from_bytes digest model_digest", "wire format")
    clock.watch(wire.Reply, "from_bytes to_bytes", "wire format")
    clock.watch(ledger.SiteLedger, "charge", "ledger and audit log")
    clock.watch(audit.AuditLog, "record", "ledger and audit log")
    clock.watch(chain.Chain, "head append", "ledger and audit log")
    clock.watch(site_files.RunFolder, "load_start load_progress load_work load_reply", "states of a run, read")
    clock.watch(
        site_files.RunFolder, "save_progress save_work save_reply keep_only phases attempts", "states of a run, written"
    )
    clock.watch(site, "protection_fields", "ledger and audit log")
    clock.watch(party, "check_upload", "checks")
    clock.watch(SharedSums, "local", MATHEMATICS)


def watch_server(clock: Clock) -> None:
    """Watch the parts of a round at the server."""
    import os

    from partsong.aggregation.plaintext import PlainReduction
    from partsong.engines import rounds
    from partsong.federation import signing as signatures
    from partsong.federation import wire
    from partsong.federation.server import remote, site_client, state
    from partsong.federation.transports import flower
    from partsong.federation.transports import flower as flower_pulling
    from partsong.methods.exact import SharedSums

    clock.watch(os, "fsync", "fsync")
    clock.watch(time, "sleep", FLOWER)
    clock.watch(flower_pulling.PullCalls, "replies", FLOWER)
    clock.watch(flower.FlowerTransport, "ask push next_reply cancel", "transport")
    clock.watch(flower.FlowerTransport, "_read_activations", "who is there")
    clock.watch(flower, "request_message message_bytes", "Flower's envelope")
    clock.watch(signatures.Envelope, "sign verify", "signatures")
    clock.watch(wire.Request, "to_bytes", "wire format")
    clock.watch(wire.Reply, "from_bytes", "wire format")
    clock.watch(site_client.SiteClient, "ask", "client")
    clock.watch(state.Journal, "save clear_exchanges load_attempt save_attempt load_answers save_answers", "journal")
    clock.watch(state.ReleaseCounters, "update", "journal")
    clock.watch(remote, "check_upload", "checks")
    clock.watch(rounds, "check_sum", "checks")
    clock.watch(PlainReduction, "server_step result", MATHEMATICS)
    clock.watch(SharedSums, "finish metrics", MATHEMATICS)
