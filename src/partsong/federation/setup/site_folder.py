"""A site's folder: its keys, its policy, and everything that it ever released. Nothing in it is read by the server.

joined.toml       federation, site, address, the coordinator's key, where the data are, and what must not get lost
site.toml         the policy
ca.crt            the authority of the federation            roster.toml     pinned
node              the key of its node                        secret          behind streams and signatures
card.toml         its name and public keys, for the others   shared.key      known to sites alone
state/            ledger, audit log, runs
results/RUN/      model and weights of a run that is over; over texts, its words as well
flower/           Flower's own files

To move a site, end its node and copy the folder. Never use both copies: the coordinator's server has seen the releases
of one, and the other refuses to answer it (code `behind`).

Others know a site by `secret` and `node`. A first join makes them once; a site that has joined and lost one cannot make
it again, because nobody would accept its answers.
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
UNSAID = "What it says could be words of texts, and is not written down. To see it: partsong federation join KIT"
CHANGED = (
    "joined.toml, shared.key or secret in {} changed after this node was started. Restore them, or end the node and "
    "join again."
)


@dataclass(frozen=True, slots=True)
class JoinedFile:
    """joined.toml: of the kit, of the data and how they are read, and what the site has had."""

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
    """That folder, as it was joined. `reading`: options with which the data are read. `has_shared_key`, `has_roster`:
    what the site has had, and must not be without again: without the shared key the server can test names against the
    hashes it is sent, and the roster of a kit may be an old one.
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
        """One that is there."""
        if not (path / "joined.toml").exists():
            raise FileError(f"{path} is not the folder of a site. Run: partsong federation join KIT --data FILE")
        file = load_toml(path / "joined.toml", JoinedFile, error=FormatError, way_out="Restore your backup.")
        reading = {name: getattr(file, name) for name in READING if getattr(file, name) is not None}
        own = (path.resolve(), file.federation, file.site, file.address, Path(file.data), reading)
        return SiteFolder(*own, key_in(file.coordinator), file.has_shared_key, file.has_roster)

    @staticmethod
    def wanted(path: Path, kit: Kit, data: Path, reading: Mapping[str, Any]) -> SiteFolder:
        """The folder as it would be with this kit and these data; nothing is written."""
        own = (kit.federation, kit.site, kit.address, data.resolve(), dict(reading), kit.coordinator)
        place = SiteFolder(path.resolve(), *own)
        try:
            format_toml(place._file()).encode()
        except UnicodeEncodeError as error:
            raise ParameterError(
                f"The path of the data, or an option, is not written in UTF-8: {error.object!a}. Rename it."
            ) from error
        require_policy(place.path)
        if not place.has_joined:
            return place
        before = SiteFolder.at(path)
        if (before.federation, before.site) != (kit.federation, kit.site):
            raise ParameterError(
                f"{path} is the folder of {before.site!r} in {before.federation!r}, and this kit is for "
                f"{kit.site!r} in {kit.federation!r}. Choose another folder."
            )
        if (before.authority(), before.coordinator) != (kit.authority, kit.coordinator):
            raise ParameterError(
                f"The authority or the coordinator's key in this kit is not the one that {path} trusts. Ask the "
                "coordinator, by phone, whether the federation was made again. If so, copy site.toml, shared.key "
                "and state/ to a new folder and join there, so that earlier releases still count."
            )
        before.require_own_keys()
        return replace(place, has_shared_key=before.has_shared_key, has_roster=before.has_roster)

    @staticmethod
    def joining(
        path: Path, kit: Kit, data: Path, reading: Mapping[str, Any], shared: SharedKey | None = None
    ) -> SiteFolder:
        """Make it, or bring it up to date."""
        return SiteFolder.wanted(path, kit, data, reading).make(kit.authority, shared)

    def make(self, authority: bytes, shared: SharedKey | None = None) -> SiteFolder:
        """Write the folder; keys and policy that are there stay. While its node runs, nothing may change.

        The policy comes first and joined.toml after the keys: a first join that is cut off can be run again.
        """
        if is_held(self.lock):
            self.require_idle(shared)
            return self
        for folder in (self.path, self.path / "state", self.path / "flower"):
            make_private(folder)
        with held(self.lock, f"The node of {self.path} has just been started. Join again"):
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
        """Whether a first join has come to its end, but for the card."""
        return (self.path / "joined.toml").exists()

    def _make_own_keys(self) -> None:
        """Make those that a join has not made before it was cut off."""
        if not (self.path / "secret").exists():
            write_bytes(self.path / "secret", secrets.token_bytes(SECRET_BYTES), private=True)
        if not (self.path / "node").exists():
            write_bytes(self.path / "node", credentials.new_node_key(), private=True)

    def _write_down(self) -> SiteFolder:
        """Write joined.toml, with what the folder has or has had by now."""
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
        """Held by its node, as long as it runs."""
        return self.path / "node.lock"

    def serving(self) -> AbstractContextManager[None]:
        """Hold the lock of its node; FileError where the node runs already."""
        return held(self.lock, "The node of this site runs already")

    def require_idle(self, shared: SharedKey | None = None) -> None:
        """Refuse to change a folder whose node runs: the node keeps to what it was started with."""
        if not is_held(self.lock):
            return
        before = SiteFolder.at(self.path)
        if before != self or shared not in (None, before.shared_key()):
            raise FileError(
                f"The node of {self.path} runs, and this would change its data, how they are read, or a key. Nothing "
                "was changed. End the node where it runs (Ctrl-C), and join again."
            )

    def pin(self, roster: Listed, spoken: str | None = None) -> None:
        """Take a roster for good, if this site is in it under its own key, and it is the one that was `spoken` of."""
        if roster.federation != self.federation:
            raise ParameterError(f"This roster is of federation {roster.federation!r}, not of {self.federation!r}.")
        if roster.keys.get(self.site) != bytes.fromhex(self.card().signing_key):
            raise ParameterError(
                f"Site {self.site!r} is not in this roster under the key that was made here. Send the coordinator "
                f"{self.path / 'card.toml'}, and ask for a new roster."
            )
        authority = credentials.fingerprint(self.authority())
        if (roster.coordinator, roster.authority) != (self.coordinator, authority):
            raise ParameterError(
                "The coordinator's key or the authority in this roster is not that of the kit that this site has "
                "joined with: one of the two was changed on its way. Do not use it, and call the coordinator."
            )
        if spoken is not None and not same_fingerprint(roster.fingerprint, spoken):
            raise ParameterError(
                f"The fingerprint of this roster is {roster.fingerprint}, and not the one that was given. Somebody has "
                "changed it, or it is an old one: do not use it, and call the other sites."
            )
        pinned = self.roster()
        if spoken is None and (self.has_roster or pinned is not None) and pinned != roster:
            raise ParameterError(
                "This site has pinned another roster, or the one that it has pinned is gone. If parties have changed, "
                "have the new fingerprint read to you by two other sites, by phone, and give what you hear with "
                "--fingerprint."
            )
        write_bytes(self.path / "roster.toml", roster.written())
        self._write_down()

    def authority(self) -> bytes:
        """The certificate that it trusts."""
        return read_certificate(self.path / "ca.crt", "Restore it, or take it from the kit that you joined with.")

    def roster(self) -> Listed | None:
        """The one that was pinned."""
        place = self.path / "roster.toml"
        return Listed.read(place) if place.exists() else None

    def policy(self) -> Policy:
        """As its steward has left it, or as a first join would make it; FileError where it is gone, or empty."""
        return policy_in(self.path)

    def card(self) -> Card:
        """Its name and public keys; an error where a key is gone, or damaged."""
        place = self.path / "node"
        try:
            node_key = credentials.public_node_key(read_file(place, WAY_OUT))
        except FormatError as error:
            raise FormatError(f"{place}: {error} {WAY_OUT}") from error
        return Card(self.federation, self.site, node_key, public_key(self.secret(), self.site).hex())

    def require_own_keys(self) -> None:
        """Refuse keys other than those of the card, by which others know the site."""
        card, place = self.card(), self.path / "card.toml"
        if place.exists() and Card.read(place) != card:
            raise FormatError(f"{self.path / 'node'} or {self.path / 'secret'} is not the key in {place}. {WAY_OUT}")

    def secret(self) -> int:
        """Behind its streams and signatures; an error where it is gone, or not whole."""
        place = self.path / "secret"
        found = read_file(place, WAY_OUT)
        if len(found) != SECRET_BYTES:
            raise FormatError(f"{place} has {len(found)} bytes, and a secret has {SECRET_BYTES}. {WAY_OUT}")
        return int.from_bytes(found, "little")

    @property
    def holds_texts(self) -> bool:
        """Whether it has joined with texts, and not with a table."""
        return "text_column" in self.reading

    def shared_key(self) -> SharedKey | None:
        """The key for hashes of columns and words; None where there never was one, FileError where it is gone."""
        place = self.path / "shared.key"
        if place.exists():
            try:
                return SharedKey.read(place.read_text(encoding="utf-8", errors="replace"))
            except FormatError as error:
                error.add_note(f"It is in {place}.")
                raise
        if self.has_shared_key:
            raise FileError(
                f"{place} is missing, and this site has had a shared key: without it the server could test names "
                "against the hashes it is sent. Restore your backup, or ask another site, not the coordinator, for the "
                "key, and join with --shared-key FILE."
            )
        return None

    def answering(self) -> SignedSite:
        """The party as it answers over a network: what its coordinator has signed, and nothing else, with the data and
        keys of now. With a mistake in its files, or with others than these, it refuses until that is mended.
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
        """The code that leaves a site that cannot be opened, and the reason, which is for its own log."""
        code = "storage" if isinstance(error, FileError) and not isinstance(error, FormatError) else "settings"
        if self.holds_texts:
            return code, f"{type(error).__name__}. {UNSAID}"
        return code, str(error) if isinstance(error, PartsongError) else "".join(traceback.format_exception(error))

    def opened(self) -> Site:
        """The party, ready to answer; the data are read now. They can take long, so that site.toml and the roster,
        which must be there before, are read after them.
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
        """Its roster; FileError where it has none."""
        if (pinned := self.roster()) is None:
            raise FileError(f"{self.path} has no roster yet. Join with --roster roster.toml.")
        return pinned

    def _keys(self) -> list[bytes]:
        """What is in the files of its keys; nothing where there is none."""
        places = [self.path / name for name in ("secret", "shared.key")]
        return [place.read_bytes() if place.exists() else b"" for place in places]


# ---- data -------------------------------------------------------------------------------------------------------
#
# The table or the texts of a site, read from its own disk once in a process, as long as the files stay as they are.

USUAL_COLUMN = "text"
ENDINGS = (".jsonl", ".txt")
TABLES = ("matrix.mtx", "matrix.mtx.gz")

Stamp = tuple[tuple[str, int, int], ...]


def table_at(data: Path, reading: Mapping[str, Any]) -> Table:
    """The rows."""
    found: Table = _read(data, tuple(reading.items()), _stamp(data))
    return found


def texts_at(data: Path, reading: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts."""
    found: tuple[str, ...] = _read(data, tuple(reading.items()), _stamp(data))
    return found


def are_texts(data: Path) -> bool:
    """Whether a file or folder of this kind always holds texts; a .csv can hold either."""
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
