"""Cards and rosters: who is known by which keys. A roster's fingerprint is what sites compare, by telephone.

A site that has pinned a roster takes part in sums with exactly these parties: once sites that know each other have
compared it, a server cannot invent sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.consortium.certificates import require_node_key
from partsong.consortium.toml_text import toml_of, write
from partsong.engines.files import NAME
from partsong.errors import FormatError, ParameterError
from partsong.federation.keys import only, read_toml
from partsong.privacy import key_agreement

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Card:
    """What a site tells of itself: nothing in it is secret, but it has to arrive unchanged."""

    federation: str
    site: str
    node_key: str
    signing_key: str

    def __post_init__(self) -> None:
        require_name(self.site, "A site")
        require_node_key(self.node_key)
        key_in(self.signing_key)

    @staticmethod
    def read(path: Path) -> Card:
        """From a file."""
        return Card(**_texts(read_toml(path), ("federation", "site", "node_key", "signing_key"), path))

    def save(self, path: Path) -> None:
        """To a file."""
        write(path, toml_of({name: getattr(self, name) for name in ("federation", "site", "node_key", "signing_key")}))


@dataclass(frozen=True, slots=True)
class Listed:
    """The roster of a federation: names of sites and the keys that they sign with, the coordinator's key, and the
    fingerprint of the authority behind its server's certificate. Whoever compares one fingerprint has compared all.
    """

    federation: str
    keys: Mapping[str, bytes]
    coordinator: bytes = b""
    authority: str = ""

    def __post_init__(self) -> None:
        for name in self.keys:
            require_name(name, "A site")
        owners: dict[bytes, str] = {self.coordinator: "the coordinator"} if self.coordinator else {}
        for name, key in sorted(self.keys.items()):
            if key in owners:
                raise ParameterError(
                    f"The roster has one key for {owners[key]} and for {name}: they would be one party under two "
                    "names. Do not use it, and call the sites that it names."
                )
            owners[key] = name

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all of it: eight groups of eight letters."""
        parts = [part for name in sorted(self.keys) for part in (name, self.keys[name])]
        heading = ("partsong roster", self.federation, self.coordinator, self.authority)
        digest = key_agreement.fingerprint(*heading, *parts).hex()
        return "-".join(digest[start : start + 8] for start in range(0, len(digest), 8))

    @staticmethod
    def read(path: Path) -> Listed:
        """From a file; one whose fingerprint is not that of its keys is damaged."""
        heading = ("federation", "fingerprint", "coordinator", "authority")
        table = dict(only(read_toml(path), (*heading, "sites"), str(path)))
        sites = table.pop("sites", None)
        told = _texts(table, heading, path)
        if not isinstance(sites, dict) or not all(isinstance(key, str) for key in sites.values()):
            raise FormatError(f"{path} lists no sites. Ask the coordinator for the roster once more.")
        keys = {name: key_in(key) for name, key in sorted(sites.items())}
        found = Listed(told["federation"], keys, key_in(told["coordinator"]), told["authority"])
        if found.fingerprint != told["fingerprint"]:
            raise FormatError(f"{path}: its fingerprint is not that of its keys: it was changed. Do not use it.")
        return found

    def written(self) -> bytes:
        """As the contents of a file."""
        sites = {name: self.keys[name].hex() for name in sorted(self.keys)}
        told = {"federation": self.federation, "fingerprint": self.fingerprint}
        told |= {"coordinator": self.coordinator.hex(), "authority": self.authority}
        return toml_of({**told, "sites": sites}).encode()


def same_fingerprint(one: str, other: str) -> bool:
    """Whether two are the same to people: dashes, blanks and capitals do not count."""
    return _letters(one) == _letters(other)


def require_name(name: str, whose: str) -> str:
    """A name that can be that of a folder everywhere."""
    if not NAME.fullmatch(name):
        raise ParameterError(
            f"{whose} cannot be called {name[:60]!r}. Use letters, digits, dots and dashes, at most 100, and begin "
            "with a letter or digit."
        )
    return name


def _letters(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter not in "- \t\n:")


def _texts(table: Mapping[str, Any], names: tuple[str, ...], path: Path) -> dict[str, str]:
    only(table, names, str(path))
    for name in names:
        if not isinstance(table.get(name), str):
            raise FormatError(f"{path} does not say {name}. Take it from its source again.")
    return {name: str(table[name]) for name in names}


def key_in(text: str) -> bytes:
    """A signing key from its hexadecimal letters."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise FormatError("A signing key is 64 hexadecimal letters, and this is something else. Ask for it once more.")
    return key
