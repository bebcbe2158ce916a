"""A site's folder: its keys, its policy, and the record of everything it released. The server never reads it.

joined.toml       federation, site, address, the coordinator's key, path of the data, and what the site has had
site.toml         the policy
ca.crt            the federation's certificate authority     roster.toml     pinned
node              the key of its node                        secret          seeds random streams and signatures
card.toml         its name and public keys, for the others   shared.key      known only to sites
state/            ledger, audit log, runs
results/RUN/      model and weights of a finished run; for texts, the words too
flower/           Flower's own files

To move a site, stop its node and copy the folder. Never use both copies: the server knows the releases of one, and the
other then refuses to answer (code `behind`).

`secret` and `node` identify a site. The first join makes them once. A site that loses one cannot make it again, because
nobody would accept its answers.
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.errors import FileError, FormatError, ParameterError, PartsongError
from partsong.federation.locks import held, is_held
from partsong.federation.policy import POLICY, Policy, has_policy, policy_in, require_policy
from partsong.federation.setup import credentials
from partsong.federation.setup.credentials import (
    Card,
    Kit,
    Listed,
    SharedKey,
    key_in,
    make_private,
    read_certificate,
    read_file,
    require_address,
    same_fingerprint,
)
from partsong.federation.signing import SignedSite, public_key, signer, verifier
from partsong.federation.site.plan import SiteData
from partsong.federation.site.service import Site
from partsong.federation.texts import Texts
from partsong.federation.toml_files import format_toml, load_toml, save_toml
from partsong.federation.transports.base import require_name
from partsong.io.opening import ReadOptions
from partsong.io.read import read_wanted
from partsong.io.write import write_bytes, write_text
from partsong.topics.documents import read_documents

if TYPE_CHECKING:
    from partsong.data.table import Table

SECRET_BYTES = 32
WAY_OUT = (
    "Restore your backup. Without one, copy site.toml, shared.key and state/ to a new folder, join there, and send the "
    "coordinator the new card."
)
UNSAID = "The message may contain words of texts and is not logged. To see it, run partsong federation join KIT"
CHANGED = (
    "joined.toml, shared.key or secret in {} changed after this node started. Restore them, or stop the node and join "
    "again."
)


@dataclass(frozen=True, slots=True)
class JoinedFile:
    """joined.toml: values of the kit, path and reading options of the data, and what the site has had."""

    federation: str
    site: str
    address: str
    data: str
    coordinator: str
    has_shared_key: bool = False
    has_roster: bool = False
    label: str | None = None
    transpose: bool | None = None
    key: str | None = None
    header: bool | None = None
    text_column: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        require_name(self.site, "A site")
        require_address(self.address)


READING = ("label", "transpose", "key", "header", "text_column", "encoding")


@dataclass(frozen=True, slots=True)
class SiteFolder:
    """A site's folder as it was joined. `reading`: options for reading the data.

    `has_shared_key`, `has_roster`: what the site has had and must not lose: without the shared key the server can test
    names against the hashes it receives, and the roster of a kit may be outdated.
    """

    path: Path
    federation: str
    site: str
    address: str
    data: Path
    reading: Mapping[str, Any] = field(default_factory=dict)
    coordinator: bytes = b""
    has_shared_key: bool = field(default=False, compare=False)
    has_roster: bool = field(default=False, compare=False)

    @staticmethod
    def at(path: Path) -> SiteFolder:
        """Open an existing folder."""
        if not (path / "joined.toml").exists():
            raise FileError(f"{path} is not the folder of a site. Run: partsong federation join KIT --data FILE")
        file = load_toml(path / "joined.toml", JoinedFile, error=FormatError, way_out="Restore your backup.")
        reading = {name: getattr(file, name) for name in READING if getattr(file, name) is not None}
        own = (path.resolve(), file.federation, file.site, file.address, Path(file.data), reading)
        return SiteFolder(*own, key_in(file.coordinator), file.has_shared_key, file.has_roster)

    @staticmethod
    def wanted(path: Path, kit: Kit, data: Path, reading: Mapping[str, Any]) -> SiteFolder:
        """Describe the folder for this kit and these data; write nothing."""
        own = (kit.federation, kit.site, kit.address, data.resolve(), dict(reading), kit.coordinator)
        place = SiteFolder(path.resolve(), *own)
        try:
            format_toml(place._file()).encode()
        except UnicodeEncodeError as error:
            raise ParameterError(
                f"The path of the data, or an option, is not valid UTF-8: {error.object!a}. Rename it."
            ) from error
        require_policy(place.path)
        if not place.has_joined:
            return place
        before = SiteFolder.at(path)
        if (before.federation, before.site) != (kit.federation, kit.site):
            raise ParameterError(
                f"{path} is the folder of {before.site!r} in {before.federation!r}, but the kit is for "
                f"{kit.site!r} in {kit.federation!r}. Choose another folder."
            )
        if (before.authority(), before.coordinator) != (kit.authority, kit.coordinator):
            raise ParameterError(
                f"The authority or the coordinator's key in this kit is not the one that {path} trusts. Ask the "
                "coordinator, by phone, whether the federation was set up again. If so, copy site.toml, shared.key "
                "and state/ to a new folder and join there, so that earlier releases still count."
            )
        before.require_own_keys()
        return replace(place, has_shared_key=before.has_shared_key, has_roster=before.has_roster)

    @staticmethod
    def joining(
        path: Path, kit: Kit, data: Path, reading: Mapping[str, Any], shared: SharedKey | None = None
    ) -> SiteFolder:
        """Make or update the folder."""
        return SiteFolder.wanted(path, kit, data, reading).make(kit.authority, shared)

    def make(self, authority: bytes, shared: SharedKey | None = None) -> SiteFolder:
        """Write the folder; existing keys and policy stay. While its node runs, nothing may change.

        The policy comes first and joined.toml after the keys, so that an interrupted first join can be repeated.
        """
        if is_held(self.lock):
            self.require_idle(shared)
            return self
        for folder in (self.path, self.path / "state", self.path / "flower"):
            make_private(folder)
        with held(self.lock, f"The node of {self.path} has just started. Join again"):
            if not self.has_joined:
                if not has_policy(self.path):
                    write_text(self.path / "site.toml", POLICY)
                write_bytes(self.path / "ca.crt", authority)
                self._make_own_keys()
            card = self.card()
            if shared is not None:
                write_text(self.path / "shared.key", shared.text + "\n", private=True)
            made = self._write_down()
            card.save(self.path / "card.toml")
        return made

    @property
    def has_joined(self) -> bool:
        """Whether the first join is complete, except for the card."""
        return (self.path / "joined.toml").exists()

    def _make_own_keys(self) -> None:
        """Make the keys that an interrupted join has not made."""
        if not (self.path / "secret").exists():
            write_bytes(self.path / "secret", secrets.token_bytes(SECRET_BYTES), private=True)
        if not (self.path / "node").exists():
            write_bytes(self.path / "node", credentials.new_node_key(), private=True)

    def _write_down(self) -> SiteFolder:
        """Write joined.toml, with what the folder has or has had."""
        has_key = self.has_shared_key or (self.path / "shared.key").exists()
        has_roster = self.has_roster or (self.path / "roster.toml").exists()
        made = replace(self, has_shared_key=has_key, has_roster=has_roster)
        save_toml(self.path / "joined.toml", made._file())
        return made

    def _file(self) -> JoinedFile:
        own = (self.federation, self.site, self.address, str(self.data), self.coordinator.hex())
        return JoinedFile(*own, self.has_shared_key, self.has_roster, **self.reading)

    @property
    def lock(self) -> Path:
        """Held by the node while it runs."""
        return self.path / "node.lock"

    def serving(self) -> AbstractContextManager[None]:
        """Hold the lock of the node; FileError if the node is running."""
        return held(self.lock, "The node of this site is already running")

    def require_idle(self, shared: SharedKey | None = None) -> None:
        """Refuse to change a folder whose node is running: the node keeps the settings it started with."""
        if not is_held(self.lock):
            return
        before = SiteFolder.at(self.path)
        if before != self or shared not in (None, before.shared_key()):
            raise FileError(
                f"The node of {self.path} is running, and this would change its data, their reading options or a key. "
                "Nothing was changed. Stop the node (Ctrl-C) and join again."
            )

    def pin(self, roster: Listed, spoken: str | None = None) -> None:
        """Pin a roster if it lists this site with its own key and has the fingerprint `spoken` (read out by phone)."""
        if roster.federation != self.federation:
            raise ParameterError(
                f"This roster is for federation {roster.federation!r}, not {self.federation!r}. Ask for the right one."
            )
        if roster.keys.get(self.site) != bytes.fromhex(self.card().signing_key):
            raise ParameterError(
                f"This roster does not list site {self.site!r} with the key made here. Send the coordinator "
                f"{self.path / 'card.toml'} and ask for a new roster."
            )
        authority = credentials.fingerprint(self.authority())
        if (roster.coordinator, roster.authority) != (self.coordinator, authority):
            raise ParameterError(
                "The coordinator's key or the certificate authority in this roster differs from the kit that this site "
                "joined with: one of them was changed in transit. Do not use the roster; call the coordinator."
            )
        if spoken is not None and not same_fingerprint(roster.fingerprint, spoken):
            raise ParameterError(
                f"The fingerprint of this roster is {roster.fingerprint}, not the one passed. The roster was changed "
                "or is outdated. Do not use it; call the other sites."
            )
        pinned = self.roster()
        if spoken is None and (self.has_roster or pinned is not None) and pinned != roster:
            raise ParameterError(
                "This site has pinned another roster, or lost its pinned roster. If the parties have changed, ask two "
                "other sites for the new fingerprint by phone and pass it with --fingerprint."
            )
        write_bytes(self.path / "roster.toml", roster.written())
        self._write_down()

    def authority(self) -> bytes:
        """The certificate authority that the site trusts."""
        return read_certificate(self.path / "ca.crt", "Restore it, or copy it from the kit that you joined with.")

    def roster(self) -> Listed | None:
        """The pinned roster, if any."""
        place = self.path / "roster.toml"
        return Listed.read(place) if place.exists() else None

    def policy(self) -> Policy:
        """The policy, or the default before the first join; FileError if it was lost or is empty."""
        return policy_in(self.path)

    def card(self) -> Card:
        """Name and public keys of the site; an error if a key is lost or damaged."""
        place = self.path / "node"
        try:
            node_key = credentials.public_node_key(read_file(place, WAY_OUT))
        except FormatError as error:
            raise FormatError(f"{place}: {error} {WAY_OUT}") from error
        return Card(self.federation, self.site, node_key, public_key(self.secret(), self.site).hex())

    def require_own_keys(self) -> None:
        """Refuse keys that differ from those on the card."""
        card, place = self.card(), self.path / "card.toml"
        if place.exists() and Card.read(place) != card:
            raise FormatError(
                f"{self.path / 'node'} or {self.path / 'secret'} does not match the key in {place}. {WAY_OUT}"
            )

    def secret(self) -> int:
        """The secret that seeds random streams and signatures; an error if it is lost or damaged."""
        place = self.path / "secret"
        found = read_file(place, WAY_OUT)
        if len(found) != SECRET_BYTES:
            raise FormatError(f"{place} has {len(found)} bytes instead of {SECRET_BYTES}. {WAY_OUT}")
        return int.from_bytes(found, "little")

    @property
    def holds_texts(self) -> bool:
        """Whether the site joined with texts instead of a table."""
        return "text_column" in self.reading

    def shared_key(self) -> SharedKey | None:
        """The key for hashes of columns and words; None if there never was one, FileError if it was lost."""
        place = self.path / "shared.key"
        if place.exists():
            try:
                return SharedKey.read(place.read_text(encoding="utf-8", errors="replace"))
            except FormatError as error:
                error.add_note(f"The key is in {place}.")
                raise
        if self.has_shared_key:
            raise FileError(
                f"{place} is missing, but this site has had a shared key: without it, the server could test names "
                "against the hashes it receives. Restore your backup, or ask another site (not the coordinator) for "
                "the key and join with --shared-key FILE."
            )
        return None

    def answering(self) -> SignedSite:
        """Return the party for a network: it answers only requests that its coordinator signed.

        It refuses while its files are invalid, or differ from those the node started with.
        """
        keys = self._keys()

        def answer(request: bytes) -> bytes:
            try:
                if SiteFolder.at(self.path) != self or self._keys() != keys:
                    return refuse("settings", CHANGED.format(self.path))
                site = self.opened()
            except Exception as error:
                return refuse(*self._unready(error))
            return site.answer(request)

        def refuse(code: str, reason: str) -> bytes:
            return Site(self.site, self.path / "state", SiteData((), ())).refuse(code, reason)

        return SignedSite(self.site, answer, refuse, signer(self.secret(), self.site), verifier(self.coordinator))

    def _unready(self, error: Exception) -> tuple[str, str]:
        """Return the code that leaves a site with unusable files, and the reason for its own log."""
        code = "storage" if isinstance(error, FileError) and not isinstance(error, FormatError) else "settings"
        if self.holds_texts:
            return code, f"{type(error).__name__}. {UNSAID}"
        return code, str(error) if isinstance(error, PartsongError) else "".join(traceback.format_exception(error))

    def opened(self) -> Site:
        """Return the party, ready to answer, and read the data.

        Reading can take long, so site.toml and the roster are read afterwards (and must exist before).
        """
        self._pinned()
        shared, secret, texts = SiteFolder.at(self.path).shared_key(), self.secret(), None
        key = b"" if shared is None else shared.key_for("columns")
        if self.holds_texts:
            of_words = b"" if shared is None else shared.key_for("words")
            texts = Texts(texts_at(self.data, self.reading), of_words, secret)
            data = texts.unread
        else:
            table = table_at(self.data, self.reading)
            names = table.feature_names or tuple(f"column {number}" for number in range(table.X.shape[1]))
            data = SiteData(table.X, names, secret)
        own = (self.site, self.path / "state", data, self.policy(), dict(self._pinned().keys), key)
        return Site(*own, results=self.path / "results", texts=texts)

    def _pinned(self) -> Listed:
        """The pinned roster; FileError if there is none."""
        if (pinned := self.roster()) is None:
            raise FileError(f"{self.path} has no roster yet. Join with --roster roster.toml.")
        return pinned

    def _keys(self) -> list[bytes]:
        """The contents of the key files; empty if missing."""
        places = [self.path / name for name in ("secret", "shared.key")]
        return [place.read_bytes() if place.exists() else b"" for place in places]


# ---- data -------------------------------------------------------------------------------------------------------
#
# The table or texts of a site, read once per process while the files are unchanged.

USUAL_COLUMN = "text"
ENDINGS = (".jsonl", ".txt")
TABLES = ("matrix.mtx", "matrix.mtx.gz")

Stamp = tuple[tuple[str, int, int], ...]


def table_at(data: Path, reading: Mapping[str, Any]) -> Table:
    """Read the table."""
    found: Table = _read(data, tuple(reading.items()), _stamp(data))
    return found


def texts_at(data: Path, reading: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the texts."""
    found: tuple[str, ...] = _read(data, tuple(reading.items()), _stamp(data))
    return found


def are_texts(data: Path) -> bool:
    """Return whether this kind of file or folder always holds texts; a .csv can hold either."""
    if not data.is_dir():
        return Path(data.name.lower().removesuffix(".gz")).suffix in ENDINGS
    held = {entry.name for entry in data.iterdir()}
    return not held & set(TABLES) and any(name.lower().removesuffix(".gz").endswith(".txt") for name in held)


def _stamp(data: Path) -> Stamp:
    files = sorted(data.iterdir()) if data.is_dir() else [data]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)


@lru_cache(maxsize=1)
def _read(data: Path, reading: tuple[tuple[str, Any], ...], stamp: Stamp) -> Any:
    options = dict(reading)
    if "text_column" not in options:
        return read_wanted(data, ReadOptions(**options))
    return tuple(read_documents(data, column=options["text_column"], encoding=options.get("encoding", "utf-8")))
