"""A site's folder: its keys, its policy, and everything that it ever released. Nothing in it is read by the server.

joined.toml       federation, site, address, the coordinator's key, and where the data are
site.toml         the policy
ca.crt            the authority of the federation            roster.toml     pinned
node, node.pub    the key of its node                        secret          behind streams and signatures
card.toml         what it tells of itself                    shared.key      known to sites alone
state/            ledger, audit log, runs; had.toml: what it must not be without again (`used_folder`)
results/RUN/      model and weights of a run that is over; over texts, its words as well
flower/           Flower's own files
"""

from __future__ import annotations

import tomllib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from partsong.core.parameters import only, read_toml
from partsong.errors import FileError, FormatError, ParameterError, PartsongError
from partsong.federation.audit_log import FILE as REFUSALS
from partsong.federation.ledger import Chain, SiteLedger
from partsong.federation.locks import held, is_held
from partsong.federation.policy import Policy
from partsong.federation.setup import credentials
from partsong.federation.setup.credentials import (
    UNNAMED,
    Card,
    Listed,
    key_in,
    make_private,
    require_address,
    require_name,
    same_fingerprint,
    toml_of,
    write,
)
from partsong.federation.setup.exposure_terms import Terms
from partsong.federation.setup.site_keys import (
    CHAINS,
    KEY,
    POLICY,
    ROSTER,
    has_had,
    has_policy,
    key_there,
    make_own_keys,
    record,
    require_key,
    require_own_keys,
    require_policy,
    secret_in,
    shared_key_in,
)
from partsong.federation.signing import SignedSite, public_key, signer, verifier
from partsong.federation.site.plan import Data
from partsong.federation.site.service import Site
from partsong.federation.texts import Texts
from partsong.io.opening import Wanted
from partsong.topics.documents import read_documents

if TYPE_CHECKING:
    from partsong.data.table import Table
    from partsong.federation.setup.credentials import Kit, SharedKey


# ---- site table -------------------------------------------------------------------------------------------------
#
# The table of a site on its own disk; what is read stays in the process.


def table_at(data: Path, reading: dict[str, Any]) -> Table:
    """The rows; read once in a process, as long as the file stays as it is."""
    stamp = data.stat() if data.exists() else None
    return _read(data, tuple(reading.items()), stamp and (stamp.st_mtime_ns, stamp.st_size))


@lru_cache(maxsize=1)
def _read(data: Path, reading: tuple[tuple[str, Any], ...], stamp: tuple[int, int] | None) -> Table:
    from partsong.io.read import read_wanted

    return read_wanted(data, Wanted(**dict(reading)))


# ---- site texts -------------------------------------------------------------------------------------------------
#
# Texts of a site on its own disk, as `partsong topics` reads them; what is read stays in the process.

TEXT_READING = ("text_column", "encoding")
USUAL_COLUMN, USUAL_ENCODING = "text", "utf-8"
ENDINGS = (".jsonl", ".txt")
TABLES = ("matrix.mtx", "matrix.mtx.gz")


def are_texts(data: Path) -> bool:
    """Whether that is what a file or folder of this kind holds in any case; a .csv can hold either."""
    if not data.is_dir():
        return Path(data.name.lower().removesuffix(".gz")).suffix in ENDINGS
    held = {entry.name for entry in data.iterdir()}
    return not held & set(TABLES) and any(name.lower().removesuffix(".gz").endswith(".txt") for name in held)


def texts_at(data: Path, reading: dict[str, Any]) -> tuple[str, ...]:
    """The texts; read once in a process, as long as the files stay as they are."""
    column, encoding = reading.get("text_column", USUAL_COLUMN), reading.get("encoding", USUAL_ENCODING)
    return _read_texts(data, str(column), str(encoding), _stamp(data))


def _stamp(data: Path) -> tuple[tuple[str, int, int], ...]:
    files = sorted(data.iterdir()) if data.is_dir() else [data]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)


@lru_cache(maxsize=1)
def _read_texts(data: Path, column: str, encoding: str, stamp: tuple[tuple[str, int, int], ...]) -> tuple[str, ...]:
    return tuple(read_documents(data, column=column, encoding=encoding))


# ---- unready ----------------------------------------------------------------------------------------------------
#
# A site that cannot even be opened says so with a code, and goes on: there is a mistake in one of its files.

UNSAID = "What it says could be words of texts, and is not written down. To see it: partsong federation join KIT"


def told_unready(error: Exception, *, hides_words: bool) -> tuple[str, str]:
    """The code that leaves the site, and the reason, which is for its own log."""
    code = "storage" if isinstance(error, FileError) and not isinstance(error, FormatError) else "settings"
    if hides_words:
        return code, f"{type(error).__name__}. {UNSAID}"
    return code, str(error) if isinstance(error, PartsongError) else "".join(traceback.format_exception(error))


# ---- site folder ------------------------------------------------------------------------------------------------

READING = ("label", "transpose", "key", "header", *TEXT_READING)
TOLD = ("federation", "site", "address", "data", "coordinator")
KEYS = (*TOLD, *READING)
CHANGED = (
    "joined.toml, shared.key or secret in {} are not those that this node was started with, and it works with no "
    "others. Put them back, or end the node and join again: it then starts with what is there."
)


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
    def wanted(path: Path, kit: Kit, data: Path, reading: Mapping[str, Any]) -> SiteFolder:
        """As it would be with this kit and these data; nothing is written. One that trusts others is no such folder."""
        credentials.require()
        _require_written({"data": str(data.resolve()), **reading})
        own = (kit.federation, kit.site, kit.address, data.resolve(), dict(reading), kit.coordinator)
        place = SiteFolder(path.resolve(), *own)
        if (path / "joined.toml").exists():
            before = SiteFolder.at(path)
            if (before.federation, before.site) != (kit.federation, kit.site):
                raise ParameterError(
                    f"{path} is the folder of {before.site!r} in {before.federation!r}, and this kit is for "
                    f"{kit.site!r} in {kit.federation!r}. Choose another folder."
                )
            if not before.trusts(kit.authority) or before.coordinator != kit.coordinator:
                raise ParameterError(
                    f"The authority or the coordinator's key in this kit is not the one that {path} trusts. Ask the "
                    "coordinator, by telephone, whether it was made anew; if so, join in a new folder, where what was "
                    f"released before still counts: {place.elsewhere(kit.place)}"
                )
        require_own_keys(place.path, place.elsewhere(kit.place))
        return place

    @staticmethod
    def joining(path: Path, kit: Kit, data: Path, reading: Mapping[str, Any]) -> SiteFolder:
        """Make it, or bring it up to date."""
        place = SiteFolder.wanted(path, kit, data, reading)
        place.make(kit.authority)
        return place

    def make(self, authority: bytes, shared: SharedKey | None = None) -> None:
        """Write it down; keys and policy that are there stay. While its node runs, only what is there already.

        The policy comes first: a first join that is cut off leaves a folder that was never used, or one that has it.
        """
        require_policy(self.path)
        require_own_keys(self.path, self.elsewhere())
        if shared is None:
            require_key(self.path)
        if is_held(self.lock):
            self.require_idle(shared)
            return
        for folder in (self.path, self.path / "state", self.path / "flower"):
            make_private(folder)
        with held(self.lock, f"The node of {self.path} has just been started. Join again"):
            if not has_policy(self.path):
                write(self.path / "site.toml", POLICY)
            write(self.path / "ca.crt", authority)
            make_own_keys(self.path)
            if shared is not None:
                self.take(shared)
            told = {name: getattr(self, name) for name in TOLD} | {"data": str(self.data)}
            told["coordinator"] = self.coordinator.hex()
            write(self.path / "joined.toml", toml_of({**told, **self.reading}))
            self.card().save(self.path / "card.toml")
            record(self.path)

    @property
    def lock(self) -> Path:
        """Held by its node, as long as it runs."""
        return self.path / "node.lock"

    def require_idle(self, shared: SharedKey | None = None) -> None:
        """Refuse to change a folder whose node runs: that works to its end with what it was started with."""
        if not is_held(self.lock):
            return
        before = SiteFolder.at(self.path)
        changes = [name for name in (*TOLD, "reading") if getattr(before, name) != getattr(self, name)]
        if shared not in (None, key_there(self.path)):
            changes.append("shared key")
        if changes:
            raise FileError(
                f"The node of {self.path} runs, and keeps to what it was started with. Nothing was changed: this would "
                f"be another value of {' and of '.join(changes)}. End the node where it runs (Ctrl-C), and join again."
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
        authority = credentials.fingerprint((self.path / "ca.crt").read_bytes())
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
        if spoken is None and self.roster() != roster and has_had(self.path, ROSTER):
            raise ParameterError(
                "This site has pinned another roster, or the one that it has pinned is gone. If parties have changed, "
                "have the new fingerprint read to you by two other sites, by telephone, and give what you hear with "
                "--fingerprint."
            )
        write(self.path / "roster.toml", roster.written())
        record(self.path)

    def trusts(self, authority: bytes) -> bool:
        """Whether it is the one in ca.crt; where that is gone, or empty, the one that a pinned roster names."""
        place = self.path / "ca.crt"
        if place.exists() and (found := place.read_bytes()):
            return found == authority
        pinned = self.roster()
        return pinned is None or pinned.authority == credentials.fingerprint(authority)

    def roster(self) -> Listed | None:
        """The one that was pinned."""
        place = self.path / "roster.toml"
        return Listed.read(place) if place.exists() else None

    def policy(self) -> Policy:
        """As its steward has left it; FileError where it is gone, or empty."""
        require_policy(self.path)
        return Policy.read(self.path / "site.toml")

    def card(self) -> Card:
        """What it tells of itself."""
        node_key = (self.path / "node.pub").read_text().strip()
        return Card(self.federation, self.site, node_key, public_key(self.secret(), self.site).hex())

    def secret(self) -> int:
        """Behind its streams and signatures; FileError where it is not whole."""
        return secret_in(self.path, self.elsewhere())

    def elsewhere(self, kit: Path = UNNAMED) -> str:
        """The command that goes on with these data in a new folder."""
        old, new, data = quote(str(self.path)), quote(f"{self.path}-new"), quote(str(self.data))
        options = "".join(_option(name.replace("_", "-"), value) for name, value in self.reading.items())
        return f"partsong federation join {quote(str(kit))} --data {data} --folder {new} --continues {old}{options}"

    @property
    def holds_texts(self) -> bool:
        """Whether it has joined with texts, and not with a table."""
        return "text_column" in self.reading

    def shared_key(self) -> SharedKey | None:
        """What names of columns and words are hashed with; None where none was ever given. FileError where it is gone:
        who has had a key sends no hash without one.
        """
        return shared_key_in(self.path)

    def take(self, key: SharedKey) -> None:
        """Keep a shared key; it is never sent."""
        write(self.path / "shared.key", key.text + "\n", private=True)
        record(self.path)

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
                return refuse(*told_unready(error, hides_words=self.holds_texts))
            return site.answer(request)

        def refuse(code: str, reason: str) -> bytes:
            return Site(self.site, self.path / "state", Data((), ())).refuse(code, reason)

        return SignedSite(self.site, answer, refuse, signer(self.secret(), self.site), verifier(self.coordinator))

    def opened(self) -> Site:
        """The party, ready to answer; the data are read now. They can take long, so that site.toml and the roster,
        which must be there before, are read after them.
        """
        self._pinned()
        shared, secret, texts = self.shared_key(), self.secret(), None
        key = b"" if shared is None else shared.key_for("columns")
        if self.holds_texts:
            of_words = b"" if shared is None else shared.key_for("words")
            texts = Texts(texts_at(self.data, dict(self.reading)), of_words, secret)
            data = texts.unread
        else:
            table = table_at(self.data, dict(self.reading))
            names = table.feature_names or tuple(f"column {number}" for number in range(table.X.shape[1]))
            data = Data(table.X, names, secret)
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


def _option(name: str, value: Any) -> str:
    """One with which data are read, as it is given to a command."""
    if isinstance(value, bool):
        return f" --{'' if value else 'no-'}{name}"
    return f" --{name} {quote(str(value))}"


def _require_written(told: Mapping[str, Any]) -> None:
    """Refuse what joined.toml cannot hold: a path, or an option, whose bytes are not UTF-8."""
    for name, value in told.items():
        try:
            str(value).encode()
        except UnicodeEncodeError as error:
            what = "The path of the data" if name == "data" else f"--{name.replace('_', '-')}"
            raise ParameterError(
                f"{what} is not written in UTF-8, as joined.toml is: {value!a}. Rename the file, or the folder "
                "above it, or the column that has such a name, and join again."
            ) from error


# ---- continuing -------------------------------------------------------------------------------------------------
#
# A site that moves to a new folder keeps what it has released: a budget is about rows, not about a folder.
#
# Ledger and audit log go on where they were, with the count of refusals, and so do the policy and the key that sites
# share; its own keys, runs and results do not come along.

LEDGER, AUDIT = CHAINS


def require_earlier(old: Path, site: SiteFolder) -> None:
    """Refuse a folder that is not an earlier one of this site, or not over; and one that the new one cannot follow,
    because it has lines of its own or another policy. Nothing is written.
    """
    new = site.path
    if not (old / "state").is_dir() or old.resolve() == new:
        raise FileError(f"--continues {old}: that is not an earlier folder of this site. Give the one with its state/.")
    before = _whose(old)
    if (before.federation, before.site) != (site.federation, site.site):
        raise ParameterError(
            f"--continues {old}: that is the folder of {before.site!r} in {before.federation!r}, and this kit is for "
            f"{site.site!r} in {site.federation!r}. Give the earlier folder of {site.site!r}."
        )
    for place, what in ((old, "could release more"), (new, "works with what is there")):
        if is_held(place / "node.lock"):
            raise FileError(f"--continues {old}: the node of {place} runs, and {what}. End it first.")
    for name in (LEDGER, AUDIT):
        lines, own = _whole_lines(old / "state" / name), _whole_lines(new / "state" / name)
        if own and not own.startswith(lines):
            raise ParameterError(
                f"{new / 'state' / name} has lines of its own, which do not follow from those of {old}. A ledger is "
                "continued before the first start: join in a new folder."
            )
    require_policy(new)  # of a folder that was used the old one does not take the place
    if not _whole_lines(new / "state" / AUDIT):
        require_policy(old)
        _require_same_policy(old, new)


def key_going_on(old: Path, site: SiteFolder) -> SharedKey | None:
    """The shared key of an earlier folder, where the new one never had one; FileError where it is gone there."""
    return None if has_had(site.path, KEY) else shared_key_in(old)


def continue_from(old: Path, site: SiteFolder) -> int:
    """Copy the chains of an earlier folder, verified, the count of refusals, site.toml and the shared key.

    Policy and key come first, so that no folder with a ledger is without them. The audit log comes last: who was killed
    before has no line of it, and copies all the rest again. Returns the number of releases.
    """
    require_earlier(old, site)
    new = site.path
    for folder in (new, new / "state"):
        make_private(folder)
    with held(site.lock, f"The node of {new} has just been started. End it first"):
        if not has_policy(new):
            write(new / "site.toml", (old / "site.toml").read_bytes())
        if not has_had(new, KEY) and (old / "shared.key").exists():
            write(new / "shared.key", (old / "shared.key").read_bytes(), private=True)
        record(new, *([KEY] if has_had(old, KEY) else []))
        is_first = not _whole_lines(new / "state" / AUDIT)
        if is_first and (old / "state" / REFUSALS).exists():
            write(new / "state" / REFUSALS, (old / "state" / REFUSALS).read_bytes(), private=True)
        for name in (LEDGER, AUDIT):
            if not _whole_lines(new / "state" / name):
                write(new / "state" / name, _whole_lines(old / "state" / name), private=True)
    return SiteLedger(new / "state" / LEDGER).serial


def _whose(old: Path) -> SiteFolder | Card:
    """What says of which site a folder is: joined.toml, or its card where that is gone."""
    if (old / "joined.toml").exists():
        return SiteFolder.at(old)
    if (old / "card.toml").exists():
        return Card.read(old / "card.toml")
    raise FileError(
        f"--continues {old}: nothing in it says of which site it is: joined.toml and card.toml are gone. Put one of "
        f"them back; the coordinator has the card too, as sites/NAME.toml: it goes to {old / 'card.toml'}."
    )


def _require_same_policy(old: Path, new: Path) -> None:
    """What a site has promised about rows holds in the new folder too, until it is changed there by hand later on."""
    there = Policy.read(old / "site.toml")
    here = Policy.read(new / "site.toml") if has_policy(new) else there
    differing = [field.name for field in fields(Policy) if getattr(there, field.name) != getattr(here, field.name)]
    if differing:
        told = "; ".join(f"{name}: {_told(there, name)} there, {_told(here, name)} here" for name in differing)
        raise ParameterError(
            f"{new / 'site.toml'} is not the policy of {old / 'site.toml'} ({told}), and what was promised there is "
            f"about the same rows. Make the two say the same: edit one, or copy the old one over the new."
        )


def _told(policy: Policy, name: str) -> str:
    value: Any = getattr(policy, name)
    return "none" if value is None else str(value)


def _whole_lines(path: Path) -> bytes:
    """All whole lines of a chain, after each was compared with the one before."""
    Chain(path).head()
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1]


# ---- joining ----------------------------------------------------------------------------------------------------
#
# A site that joins: its folder as it would be, which people look at; nothing is written before they have agreed.


@dataclass(frozen=True, slots=True)
class Joining:
    """`site`: the folder as it would be. `shared`: a key that it would keep; None: the one that it has stays.
    `earlier`: the folder whose ledger and audit log would go on there. `rare_columns`: what site.toml will say of
    columns that few rows use; None: what it says already.
    """

    site: SiteFolder
    kit: Kit
    shared: SharedKey | None = None
    earlier: Path | None = None
    rare_columns: str | None = None

    def __post_init__(self) -> None:
        self.site.require_idle(self.shared)
        if self.earlier is not None:
            require_earlier(self.earlier, self.site)

    def policy(self) -> Policy:
        """The one that is there, comes along, or would be made."""
        places = [self.site.path] if self.earlier is None else [self.site.path, self.earlier]
        found = [place / "site.toml" for place in places if has_policy(place)]
        return Policy.read(found[0]) if found else Policy.from_table(tomllib.loads(POLICY))

    @property
    def asks_of_rare_columns(self) -> bool:
        """Whether site.toml does not say yet what to do about columns that few rows use."""
        places = [self.site.path] if self.earlier is None else [self.site.path, self.earlier]
        return not any("rare_columns" in read_toml(place / "site.toml") for place in places if has_policy(place))

    def terms(self) -> Terms:
        """What can be computed from its uploads, for the site to read."""
        policy, place = self.policy(), self.site.path if self.earlier is None else self.earlier
        books, stated = SiteLedger(place / "state" / LEDGER).books(), policy.directions_before
        sent = books.directions(policy.other_rows_since) + (stated or 0)
        return Terms(policy, sent, books.uncounted(policy.other_rows_since) if stated is None else 0)

    def shared_key(self) -> SharedKey | None:
        """The one that would be used."""
        return self.shared or self.site.shared_key()

    def agreed(self) -> int:
        """Write all of it down; how many releases there were in the folder that goes on here."""
        releases = 0 if self.earlier is None else continue_from(self.earlier, self.site)
        self.site.make(self.kit.authority, self.shared)
        if self.rare_columns is not None and self.asks_of_rare_columns:
            place = self.site.path / "site.toml"
            write(place, with_rare_columns(place.read_text(encoding="utf-8-sig"), self.rare_columns))
        return releases


def with_rare_columns(policy: str, answer: str) -> str:
    """The text of a site.toml that also says what to do about columns that few rows use."""
    line, commented = f'rare_columns = "{answer}"', '# rare_columns = "refuse"'
    return policy.replace(commented, line, 1) if commented in policy else f"{line}\n{policy}"
