"""How requests reach sites: bytes to names and back. A transport knows neither what is in them nor who may say what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from partsong.engines.files import Lost

__all__ = ["InProcess", "Lost", "Transport"]


class Transport(Protocol):
    """Asks sites, all at the same time, and waits for at most so many seconds; the same request may be sent twice."""

    def names(self) -> tuple[str, ...]:
        """All sites that can be asked."""

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | Lost]:
        """What each of them answers; a site that is missing from the result is lost."""


@dataclass(frozen=True, slots=True)
class InProcess:
    """Sites in this process, through the same bytes; one whose answer ends in an error is lost."""

    sites: Mapping[str, Callable[[bytes], bytes]]

    def names(self) -> tuple[str, ...]:
        """Theirs."""
        return tuple(sorted(self.sites))

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> Mapping[str, bytes | Lost]:
        """One after another."""
        return {name: self._asked(name, request) for name, request in requests.items()}

    def _asked(self, name: str, request: bytes) -> bytes | Lost:
        try:
            return self.sites[name](request)
        except Exception as error:
            return Lost(type(error).__name__)
