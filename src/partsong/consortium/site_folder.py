"""A site's folder: its keys, its policy, and everything that it ever released. Nothing in it is read by the server.

joined.toml       federation, site, address, the coordinator's key, and where the data are
site.toml         the policy
ca.crt            the authority of the federation            roster.toml     pinned
node, node.pub    the key of its node                        secret          behind streams and signatures
card.toml         what it tells of itself                    shared.key      known to sites alone
state/            ledger, audit log, runs
results/RUN/      model and weights of a run that is over; over texts, its words as well
flower/           Flower's own files
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.consortium import certificates
from partsong.consortium.first_policy import POLICY
from partsong.consortium.kit import Kit, require_address
from partsong.consortium.private_folder import make_private
from partsong.consortium.roster import Card, Listed, key_in, require_name, same_fingerprint
from partsong.consortium.shared_key import SharedKey
from partsong.consortium.site_texts import READING as READING_TEXTS
from partsong.consortium.site_texts import texts_at
from partsong.consortium.toml_text import toml_of, write
from partsong.consortium.unready import told_unready
from partsong.errors import FileError, FormatError, ParameterError
from partsong.federation.keys import only, read_toml
from partsong.federation.policy import Policy
from partsong.federation.sealed import SignedSite
from partsong.federation.signatures import public_key, signer, verifier
from partsong.federation.site import Site
from partsong.federation.site_plan import Data
from partsong.federation.word_data import Texts

if TYPE_CHECKING:
    from partsong.data.table import Table

READING = ("label", "transpose", "key", "header", *READING_TEXTS)
TOLD = ("federation", "site", "address", "data", "coordinator")
KEYS = (*TOLD, *READING)
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class SiteFolder:
    """That folder, as it was joined; `reading` are the options with which the data are read."""

    path: Path
    federation: str
    site: str
    address: str
    data: Path
    reading: Mapping[str, Any] = field(default_factory=dict)
    coordinator: bytes = b""

    @staticmethod
    def at(path: Path) -> SiteFolder:
        """One that is there."""
        place = path / "joined.toml"
        if not place.exists():
            raise FileError(f"{path} is no folder of a site. Make it with: partsong federation join KIT --data FILE")
        table = only(read_toml(place), KEYS, str(place))
        if not all(isinstance(table.get(name), str) for name in TOLD):
            raise FormatError(f"{place} needs {', '.join(TOLD)}. Join once more.")
        require_address(table["address"])
        require_name(table["site"], "A site")
        reading = {name: table[name] for name in READING if name in table}
        coordinator, data = key_in(table["coordinator"]), Path(table["data"])
        federation, site, address = table["federation"], table["site"], table["address"]
        return SiteFolder(path.resolve(), federation, site, address, data, reading, coordinator)

    @staticmethod
    def joining(path: Path, kit: Kit, data: Path, reading: Mapping[str, Any]) -> SiteFolder:
        """Make it, or bring it up to date; keys and policy that are there stay."""
        certificates.require()
        own = (kit.federation, kit.site, kit.address, data.resolve(), dict(reading), kit.coordinator)
        place = SiteFolder(path.resolve(), *own)
        if (path / "joined.toml").exists():
            before = SiteFolder.at(path)
            if (before.federation, before.site) != (kit.federation, kit.site):
                raise ParameterError(
                    f"{path} is the folder of {before.site!r} in {before.federation!r}, and this kit is for "
                    f"{kit.site!r} in {kit.federation!r}. Choose another folder."
                )
            if (path / "ca.crt").read_bytes() != kit.authority or before.coordinator != kit.coordinator:
                raise ParameterError(
                    f"The authority or the coordinator's key in this kit is not the one that {path} trusts. Ask the "
                    "coordinator, by telephone, whether it was made anew; if so, join in a new folder, with "
                    f"--continues {path}: what was released before still counts."
                )
        for folder in (path, path / "state", path / "flower"):
            make_private(folder)
        write(path / "ca.crt", kit.authority)
        place._make_keys()
        if not (path / "site.toml").exists():
            write(path / "site.toml", POLICY)
        told = {"federation": kit.federation, "site": kit.site, "address": kit.address, "data": str(place.data)}
        told["coordinator"] = kit.coordinator.hex()
        write(path / "joined.toml", toml_of({**told, **place.reading}))
        place.card().save(path / "card.toml")
        return place

    def pin(self, roster: Listed, spoken: str | None = None) -> None:
        """Take a roster for good, if this site is in it under its own key, and it is the one that was `spoken` of."""
        if roster.federation != self.federation:
            raise ParameterError(f"This roster is of federation {roster.federation!r}, not of {self.federation!r}.")
        if roster.keys.get(self.site) != bytes.fromhex(self.card().signing_key):
            raise ParameterError(
                f"Site {self.site!r} is not in this roster under the key that was made here. Send the coordinator "
                f"{self.path / 'card.toml'}, and ask for a new roster."
            )
        authority = certificates.fingerprint((self.path / "ca.crt").read_bytes())
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
        if pinned is not None and pinned != roster and spoken is None:
            raise ParameterError(
                "This site has pinned another roster. If parties have changed, have the new fingerprint read to you by "
                "two other sites, by telephone, and give what you hear with --fingerprint."
            )
        write(self.path / "roster.toml", roster.written())

    def roster(self) -> Listed | None:
        """The one that was pinned."""
        place = self.path / "roster.toml"
        return Listed.read(place) if place.exists() else None

    def policy(self) -> Policy:
        """As its steward has left it."""
        return Policy.read(self.path / "site.toml")

    def card(self) -> Card:
        """What it tells of itself."""
        node_key = (self.path / "node.pub").read_text().strip()
        return Card(self.federation, self.site, node_key, public_key(self.secret(), self.site).hex())

    def secret(self) -> int:
        """Behind its streams and signatures."""
        return int.from_bytes((self.path / "secret").read_bytes(), "little")

    @property
    def holds_texts(self) -> bool:
        """Whether it has joined with texts, and not with a table."""
        return "text_column" in self.reading

    def shared_key(self) -> SharedKey | None:
        """What names of columns and words are hashed with; None where none was given."""
        place = self.path / "shared.key"
        return SharedKey.read(place.read_text()) if place.exists() else None

    def take(self, key: SharedKey) -> None:
        """Keep a shared key; it is never sent."""
        write(self.path / "shared.key", key.text + "\n", private=True)

    def answering(self) -> SignedSite:
        """The party as it answers over a network: what its coordinator has signed, and nothing else. With a mistake in
        its files it refuses, until that is mended.
        """

        def answer(request: bytes) -> bytes:
            try:
                site = self.opened()
            except Exception as error:
                return refuse(*told_unready(error, hides_words=self.holds_texts))
            return site.answer(request)

        def refuse(code: str, reason: str) -> bytes:
            return Site(self.site, self.path / "state", Data((), ())).refuse(code, reason)

        return SignedSite(self.site, answer, refuse, signer(self.secret(), self.site), verifier(self.coordinator))

    def opened(self) -> Site:
        """The party, ready to answer; the data are read now."""
        roster = self.roster()
        if roster is None:
            raise FileError(f"{self.path} has no roster yet. Join with --roster roster.toml.")
        shared, policy, results = self.shared_key(), self.policy(), self.path / "results"
        key = b"" if shared is None else shared.key_for("columns")
        if self.holds_texts:
            of_words = b"" if shared is None else shared.key_for("words")
            texts = Texts(texts_at(self.data, dict(self.reading)), of_words, self.secret())
            own = (texts.unread, policy, dict(roster.keys), key)
            return Site(self.site, self.path / "state", *own, results=results, texts=texts)
        stamp = self.data.stat() if self.data.exists() else None
        table = _table(self.data, tuple(self.reading.items()), stamp and (stamp.st_mtime_ns, stamp.st_size))
        columns = table.feature_names or tuple(f"column {number}" for number in range(table.X.shape[1]))
        own = (Data(table.X, columns, self.secret()), policy, dict(roster.keys), key)
        return Site(self.site, self.path / "state", *own, results=results)

    def _make_keys(self) -> None:
        if not (self.path / "secret").exists():
            write(self.path / "secret", secrets.token_bytes(SECRET_BYTES), private=True)
        if not (self.path / "node").exists():
            made = certificates.new_node_key()
            write(self.path / "node.pub", made.certificate)
            write(self.path / "node", made.key, private=True)


@lru_cache(maxsize=1)
def _table(path: Path, reading: tuple[tuple[str, Any], ...], stamp: tuple[int, int] | None) -> Table:
    """The rows; read once in a process, as long as the file stays as it is."""
    from partsong.io.opening import Wanted
    from partsong.io.read import read_wanted

    return read_wanted(path, Wanted(**dict(reading)))
