"""The coordinator's folder: all files of a federation on the machine of its server.

federation.toml       name and address
ca.crt, ca.key        certificate authority    server.crt, server.key    the server's TLS certificate
control.key           permission to start and stop runs here
coordinator.key       signs requests; sites have pinned its public part
sites/NAME.toml       cards of sites           sites/NAME.node           the number of its node, once admitted
roster.toml           names and keys, for all sites
serials.json          the highest release count that each site has reported, over all runs
kits/                 startup kits
flower/               Flower's own files
runs/NAME/            experiment.toml, state/, progress.jsonl, result.json, model.safetensors
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from partsong.core.parameters import suggest_name
from partsong.errors import FileError, FormatError, ParameterError
from partsong.federation.locks import is_held
from partsong.federation.server.state import AsyncRunState, RunState
from partsong.federation.setup import credentials
from partsong.federation.setup.credentials import (
    Card,
    Kit,
    Listed,
    Pair,
    make_private,
    read_certificate,
    read_file,
    require_address,
)
from partsong.federation.signing import COORDINATOR, SignedTransport, Verify, public_key, signer, verifier
from partsong.federation.toml_files import load_toml, save_toml
from partsong.federation.transports.base import Transport, require_name
from partsong.federation.transports.files import FolderTransport
from partsong.federation.wire import RUN_NAME
from partsong.io.write import write_bytes, write_text

CONTROL_BYTES = 32
CONTROL_KEY = re.compile(f"[0-9a-f]{{{2 * CONTROL_BYTES}}}".encode())
WITHOUT_AUTHORITY = (
    "Restore your backup, or copy ca.crt from any kit of this federation; it is the same file. No other file can "
    "replace it: sites trust only this authority."
)
WITHOUT_KEY = (
    "Restore your backup. Nothing can replace this key, because sites trust only its authority. Without it, make a new "
    "federation before the server's certificate expires."
)
WITHOUT_COORDINATOR = "Without it no site answers. Restore your backup, or make a new federation."
WITHOUT_CONTROL = (
    "Without it, anyone who reaches the port could start runs. Restore your backup, or write "
    f"{2 * CONTROL_BYTES} random hexadecimal digits there."
)


@dataclass(frozen=True, slots=True)
class FederationFile:
    """federation.toml."""

    name: str
    address: str

    def __post_init__(self) -> None:
        require_name(self.name, "A federation")
        require_address(self.address)


@dataclass(frozen=True, slots=True)
class ServerFolder:
    """The coordinator's folder."""

    path: Path
    name: str
    address: str

    @staticmethod
    def made(path: Path, name: str, address: str) -> ServerFolder:
        """Make a new folder with an authority, a server certificate and keys."""
        file = FederationFile(name, address)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileError(f"{path} is not an empty folder. Nothing was changed. Choose another name.")
        authority = credentials.new_authority(name)
        for folder in (path, path / "sites", path / "kits", path / "runs", path / "flower"):
            make_private(folder)
        write_bytes(path / "ca.crt", authority.certificate)
        write_bytes(path / "ca.key", authority.key, private=True)
        write_text(path / "control.key", secrets.token_hex(CONTROL_BYTES), private=True)
        write_bytes(path / "coordinator.key", secrets.token_bytes(32), private=True)
        made = ServerFolder(path, name, address)
        made._certify(authority)
        save_toml(path / "federation.toml", file)
        return made

    @staticmethod
    def at(path: Path) -> ServerFolder:
        """Open an existing folder."""
        if not (path / "federation.toml").exists():
            raise FileError(
                f"{path} holds no federation. Pass its folder with --folder, or make one: "
                f"partsong federation init {quote(str(path))} --name NAME --address HOST:PORT"
            )
        file = load_toml(path / "federation.toml", FederationFile)
        return ServerFolder(path.resolve(), file.name, file.address)

    def renewed(self) -> None:
        """Make a new key and certificate for the server by the same authority; sites need nothing new.

        A kill between the two files leaves a mismatch that `require_valid` detects; renewing again fixes it.
        """
        authority = Pair(self.authority, read_file(self.path / "ca.key", WITHOUT_KEY))
        if not credentials.are_pair(authority.certificate, authority.key):
            raise FormatError(
                f"{self.path / 'ca.key'} does not match {self.path / 'ca.crt'}: one of them is outdated or damaged. "
                f"Nothing was changed. {WITHOUT_KEY}"
            )
        self._certify(authority)

    def days_left(self) -> float:
        """Days until the certificate expires; negative after that."""
        return credentials.days_left(read_certificate(self.path / "server.crt", self._renewal_advice))

    def require_valid(self) -> float:
        """Return the days left; FileError if the certificate has expired or does not match the server's key, or the
        authority is missing.
        """
        _ = self.authority  # Flower reads the file too, with a less helpful error
        left = self.days_left()
        if left < 0:
            raise FileError(
                f"The server's certificate expired {-left:.0f} days ago, and sites refuse it. Renew it: "
                f"{self._renewing}"
            )
        self.require_pair()
        return left

    def require_pair(self) -> None:
        """Refuse a certificate that does not match the server's key."""
        certificate, key = (read_file(self.path / name, self._renewal_advice) for name in ("server.crt", "server.key"))
        if not credentials.are_pair(certificate, key):
            raise FileError(
                f"{self.path / 'server.crt'} does not match {self.path / 'server.key'}: one of them is outdated or "
                f"damaged. Renew both: {self._renewing}"
            )

    @property
    def _renewing(self) -> str:
        return f"partsong federation init {quote(str(self.path))} --renew"

    @property
    def _renewal_advice(self) -> str:
        return f"Renew it: {self._renewing}"

    @property
    def authority(self) -> bytes:
        """The certificate of the authority; an error if it is lost or damaged."""
        return read_certificate(self.path / "ca.crt", WITHOUT_AUTHORITY)

    @property
    def serials(self) -> Path:
        """Release counters, which reveal a site restored from an older backup; kept when a site is removed."""
        return self.path / "serials.json"

    @property
    def control_key(self) -> str:
        """The key for starting and stopping runs, not for sites; FileError if it is damaged."""
        key = read_file(self.path / "control.key", WITHOUT_CONTROL)
        if not CONTROL_KEY.fullmatch(key):
            raise FileError(f"{self.path / 'control.key'} is not the key of this federation. {WITHOUT_CONTROL}")
        return key.decode()

    @property
    def coordinator(self) -> bytes:
        """The public key of the coordinator's signatures."""
        return public_key(self._secret(), COORDINATOR)

    def signed(self, transport: Transport) -> SignedTransport:
        """Wrap a transport: sign requests, and verify replies with the keys of the roster."""
        return SignedTransport(transport, signer(self._secret(), COORDINATOR), self._known())

    def over_files(self, exchange_folder: Path, run: str) -> FolderTransport:
        """Return a signed transport for a run over an exchange folder. Other runs may use the folder too."""

        def others() -> list[str]:
            return [name for name in self.runs() if name != run and is_held(self.run(name).lock)]

        return FolderTransport(
            exchange_folder, signer(self._secret(), COORDINATOR), self._known(), run=run, other_runs=others
        )

    def _known(self) -> dict[str, Verify]:
        return {name: verifier(key) for name, key in self.roster().keys.items()}

    def _secret(self) -> int:
        return int.from_bytes(read_file(self.path / "coordinator.key", WITHOUT_COORDINATOR), "little")

    def cards(self) -> dict[str, Card]:
        """Cards of admitted sites; drafts left by a killed process are ignored."""
        return {path.stem: Card.read(path) for path in sorted((self.path / "sites").glob("[!.]*.toml"))}

    def require_admissible(self, card: Card) -> None:
        """Refuse a card of another federation, with a key of another site, or with new keys for a known site."""
        if card.federation != self.name:
            raise ParameterError(
                f"This card is for federation {card.federation!r}, not {self.name!r}. Ask the site for the right card."
            )
        for site, other in self.cards().items():
            if site != card.site and {card.node_key, card.signing_key} & {other.node_key, other.signing_key}:
                raise ParameterError(
                    f"The card of {card.site!r} has a key of {site!r}, but sites never share keys. Ask both sites, "
                    "by phone, for the cards they made."
                )
            if site == card.site and other != card:
                raise ParameterError(
                    f"Site {site!r} has other keys here. Ask the site, by phone, whether it made new keys. If so, run "
                    f"partsong federation remove {site}, then admit the new card and send all sites the new roster."
                )

    def admit(self, card: Card) -> None:
        """Admit a card and add its signing key to the roster."""
        self.require_admissible(card)
        card.save(self.path / "sites" / f"{card.site}.toml")
        self.roster()

    def remove(self, site: str) -> Listed:
        """Remove a site; return the new roster, which all other sites need."""
        if site not in self.cards():
            raise ParameterError(f"No site is called {site[:60]!r}. {suggest_name(site, tuple(self.cards()))}")
        for ending in ("toml", "node"):
            (self.path / "sites" / f"{site}.{ending}").unlink(missing_ok=True)
        return self.roster()

    def node_of(self, site: str) -> int | None:
        """The number of a site's node; None before registration."""
        return read_number(self.path / "sites" / f"{site}.node")

    def set_node(self, site: str, number: int) -> None:
        """Store the number of a registered node."""
        write_text(self.path / "sites" / f"{site}.node", str(number))

    def roster(self) -> Listed:
        """The roster of all admitted cards; also written to roster.toml if it changed."""
        keys = {name: bytes.fromhex(card.signing_key) for name, card in self.cards().items()}
        found = Listed(self.name, keys, self.coordinator, credentials.fingerprint(self.authority))
        place = self.path / "roster.toml"
        if not place.exists() or place.read_bytes() != found.written():
            write_bytes(place, found.written())
        return found

    def invite(self, site: str, place: Path | None = None) -> Path:
        """Write a startup kit, with the roster once the site is in it."""
        require_name(site, "A site")
        roster = self.roster()
        listed = roster if site in roster.keys else None
        kit = Kit(self.name, site, self.address, self.authority, self.coordinator, listed)
        path = place or self.path / "kits" / f"{self.name}-{site}.zip"
        kit.save(path)
        return path

    def run(self, name: str) -> RunPlace:
        """Return the folder of a run, existing or not; refuse invalid names."""
        if not RUN_NAME.fullmatch(name):
            raise ParameterError(
                f"Invalid run name {name[:64]!r}. Use at most 64 letters, digits, dots and dashes. The default is the "
                "name of the experiment file; set another with --name."
            )
        return RunPlace(self.path / "runs" / name)

    def known_run(self, name: str) -> RunPlace:
        """Return the folder of an existing run."""
        place = self.run(name)
        if not place.experiment.exists():
            raise FileError(f"No run is called {name!r}. {suggest_name(name, self.runs())}")
        return place

    def runs(self) -> tuple[str, ...]:
        """Names of all runs."""
        return tuple(sorted(path.parent.name for path in (self.path / "runs").glob("*/experiment.toml")))

    def _certify(self, authority: Pair) -> None:
        server = credentials.new_server_certificate(authority, require_address(self.address)[0])
        write_bytes(self.path / "server.key", server.key, private=True)
        write_bytes(self.path / "server.crt", server.certificate)


# ---- run ------------------------------------------------------------------------------------------------------------
#
# The folder of one run and its small files. A damaged file is an error that names it.

TIMEOUT = 600.0
"""Default seconds to wait for the answer of a site."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """settings.json: seconds to wait for a site, public column names, and the exchange folder."""

    timeout: float = TIMEOUT
    names: tuple[str, ...] = ()
    exchange_folder: str | None = None


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The folder of a run and the paths in it."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.folder.name

    @property
    def experiment(self) -> Path:
        """The experiment."""
        return self.folder / "experiment.toml"

    @property
    def settings(self) -> Path:
        """The run settings, as JSON."""
        return self.folder / "settings.json"

    @property
    def state(self) -> Path:
        """The journal of the run."""
        return self.folder / "state"

    @property
    def progress(self) -> Path:
        """One line of JSON per completed round."""
        return self.folder / "progress.jsonl"

    @property
    def result(self) -> Path:
        """The result, as JSON."""
        return self.folder / "result.json"

    @property
    def model(self) -> Path:
        """The model."""
        return self.folder / "model.safetensors"

    @property
    def number(self) -> Path:
        """The number of its last Flower run."""
        return self.folder / "flower-run"

    @property
    def lock(self) -> Path:
        """Held by the process that runs it."""
        return self.folder / "lock"

    @property
    def command(self) -> Path:
        """Held by the command that started it, also before it runs."""
        return self.folder / "command.lock"


def result_in(place: RunPlace) -> dict[str, Any]:
    """Read the result of a run: `status` is done, or failed with `type`, `error` and `notes`."""
    try:
        found = json.loads(place.result.read_bytes())
        if found["status"] == "done" or {"type", "error", "notes"} <= found.keys():
            return dict(found)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise FormatError(
        f"{place.result} is damaged. Remove it; run … --resume continues from the run's journal and writes it again."
    )


def forget_failure(place: RunPlace) -> None:
    """Remove a result other than done; the process that runs it now writes a new one."""
    with contextlib.suppress(FormatError):  # a damaged result is removed too
        if not place.result.exists() or result_in(place)["status"] == "done":
            return
    place.result.unlink()


def settings_in(place: RunPlace) -> RunSettings:
    """Read the last settings of a run."""
    if not place.settings.exists():
        return RunSettings()
    try:
        return msgspec.json.decode(place.settings.read_bytes(), type=RunSettings)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{place.settings} is damaged ({error}). Remove it, and pass --timeout, --names and --exchange-folder "
            "again with --resume if you used them before."
        ) from error


def is_starting(place: RunPlace) -> bool:
    """Return whether a command is starting a run: it holds the run, and no process runs it yet."""
    return is_held(place.command) and not is_held(place.lock) and not place.result.exists()


def read_number(path: Path) -> int | None:
    """Read the number in a file; None if there is no valid number."""
    try:
        return int(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def number_in(place: RunPlace) -> int | None:
    """Return the number of the last Flower run; None if Flower never ran it."""
    return read_number(place.number)


def require_not_ended(place: RunPlace, record: RunState, arrivals: int) -> None:
    """Refuse to continue a finished asynchronous run; an interrupted one may continue, with other limits too.

    Sites that did not receive the end are only notified again.
    """
    if not isinstance(record, AsyncRunState) or record.without_result or not place.result.exists():
        return
    arrived = record.index - len(record.faults)
    if arrived < arrivals and result_in(place)["status"] == "done":
        raise ParameterError(
            f"Run {place.name!r} has ended by time_budget or tol after {arrived} of {arrivals} arrivals, and its sites "
            f"have the model. It is {place.model}. For a longer run, start a new one with another --name and a larger "
            "time_budget or a smaller tol."
        )
