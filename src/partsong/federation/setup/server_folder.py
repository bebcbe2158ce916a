"""The coordinator's folder: all that a federation is, on the machine of its server.

federation.toml       name and address
ca.crt, ca.key        the authority            server.crt, server.key    what sites see
control.key           who may start and stop runs here
coordinator.key       what requests are signed with; sites have pinned its public part
sites/NAME.toml       cards of sites           sites/NAME.node           the number of its node, once admitted
roster.toml           names and keys, for all sites
serials.json          the most releases that each site has told of, over all runs
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
    "Put your own copy back, or the ca.crt of any kit of this federation, which is the same file. No other can replace "
    "it: sites trust this one alone."
)
WITHOUT_KEY = (
    "If it is gone or damaged, put your own copy back: nothing can replace it, for sites trust its authority alone. "
    "Without it the federation has to be made anew before the server's certificate expires."
)
WITHOUT_COORDINATOR = "Without it no site answers: take it from a copy, or make the federation anew."
WITHOUT_CONTROL = (
    "Whoever reaches the port could start runs. Take the key from a copy, or write "
    f"{2 * CONTROL_BYTES} random hexadecimal letters there."
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
    """That folder."""

    path: Path
    name: str
    address: str

    @staticmethod
    def made(path: Path, name: str, address: str) -> ServerFolder:
        """A new one, with an authority, a certificate and a key for starting runs."""
        file = FederationFile(name, address)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileError(f"{path} is not an empty folder; nothing was touched. Choose another name.")
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
        """One that is there."""
        if not (path / "federation.toml").exists():
            raise FileError(
                f"{path} holds no federation. Give its folder with --folder, or make one: "
                f"partsong federation init {quote(str(path))} --name NAME --address HOST:PORT"
            )
        file = load_toml(path / "federation.toml", FederationFile)
        return ServerFolder(path.resolve(), file.name, file.address)

    def renewed(self) -> None:
        """A new key and certificate for the server, by the same authority: sites notice nothing. Whoever is killed
        between the two files leaves a pair that is none, which `require_valid` notices; renewing once more mends it.
        """
        authority = Pair(self.authority, read_file(self.path / "ca.key", WITHOUT_KEY))
        if not credentials.are_pair(authority.certificate, authority.key):
            raise FormatError(
                f"{self.path / 'ca.key'} is not the key of {self.path / 'ca.crt'}: one of them is of another time, or "
                f"damaged. Nothing was made. {WITHOUT_KEY}"
            )
        self._certify(authority)

    def days_left(self) -> float:
        """Days that the certificate is still valid; negative where it is not any more."""
        return credentials.days_left(read_certificate(self.path / "server.crt", self._make_anew))

    def require_valid(self) -> float:
        """The same; FileError where it is not valid, or is not for the server's key, or the authority is gone."""
        _ = self.authority  # Flower is given the file, and says less of it
        left = self.days_left()
        if left < 0:
            raise FileError(
                f"The server's certificate has expired {-left:.0f} days ago, and sites refuse it. Renew it with: "
                f"{self._renewing}"
            )
        self.require_pair()
        return left

    def require_pair(self) -> None:
        """FileError where the certificate is not for the server's key."""
        certificate, key = (read_file(self.path / name, self._make_anew) for name in ("server.crt", "server.key"))
        if not credentials.are_pair(certificate, key):
            raise FileError(
                f"{self.path / 'server.crt'} is not the certificate of {self.path / 'server.key'}: one of them is of "
                f"another time, or damaged. Make both anew with: {self._renewing}"
            )

    @property
    def _renewing(self) -> str:
        return f"partsong federation init {quote(str(self.path))} --renew"

    @property
    def _make_anew(self) -> str:
        return f"Make it anew with: {self._renewing}"

    @property
    def authority(self) -> bytes:
        """Its certificate; an error with the way out where that is gone, or damaged."""
        return read_certificate(self.path / "ca.crt", WITHOUT_AUTHORITY)

    @property
    def serials(self) -> Path:
        """By which a site that was restored from an older copy is noticed; it stays when a site is removed."""
        return self.path / "serials.json"

    @property
    def control_key(self) -> str:
        """For starting and stopping runs; not for sites. FileError where it is not whole."""
        key = read_file(self.path / "control.key", WITHOUT_CONTROL)
        if not CONTROL_KEY.fullmatch(key):
            raise FileError(f"{self.path / 'control.key'} is not the key of this federation. {WITHOUT_CONTROL}")
        return key.decode()

    @property
    def coordinator(self) -> bytes:
        """What sites know the coordinator's signatures by."""
        return public_key(self._secret(), COORDINATOR)

    def signed(self, transport: Transport) -> SignedTransport:
        """The same transport, with requests that are signed here, and replies by the keys of the roster."""
        return SignedTransport(transport, signer(self._secret(), COORDINATOR), self._known())

    def over_files(self, exchange_folder: Path, run: str) -> FolderTransport:
        """The same, for a run, over a folder in which requests are dropped and replies are picked up. Other runs that
        are being worked on may use that folder at the same time.
        """

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
        """All that were taken in; drafts that a process has left which was killed are none."""
        return {path.stem: Card.read(path) for path in sorted((self.path / "sites").glob("[!.]*.toml"))}

    def require_admissible(self, card: Card) -> None:
        """Refuse a card of another federation, with a key of another site, or with other keys than this site's."""
        if card.federation != self.name:
            raise ParameterError(f"This card is for federation {card.federation!r}, and this is {self.name!r}.")
        for site, other in self.cards().items():
            if site != card.site and {card.node_key, card.signing_key} & {other.node_key, other.signing_key}:
                raise ParameterError(
                    f"The card of {card.site!r} has a key of {site!r}, and two sites never have one in common. Ask "
                    "both, by telephone, for the cards that they have made."
                )
            if site == card.site and other != card:
                raise ParameterError(
                    f"Site {site!r} is known here by other keys. Ask its steward, by telephone, whether they were made "
                    f"anew; if so: partsong federation remove {site}, and admit the new card. All sites need the new "
                    "roster."
                )

    def admit(self, card: Card) -> None:
        """Take a card in; the roster has its signing key from now on."""
        self.require_admissible(card)
        card.save(self.path / "sites" / f"{card.site}.toml")
        self.roster()

    def remove(self, site: str) -> Listed:
        """Forget a site; the roster that is left, which all others need."""
        if site not in self.cards():
            raise ParameterError(f"There is no site {site[:60]!r} here. {suggest_name(site, tuple(self.cards()))}")
        for ending in ("toml", "node"):
            (self.path / "sites" / f"{site}.{ending}").unlink(missing_ok=True)
        return self.roster()

    def node_of(self, site: str) -> int | None:
        """The number of a site's node; None before it was registered."""
        return read_number(self.path / "sites" / f"{site}.node")

    def set_node(self, site: str, number: int) -> None:
        """It was registered."""
        write_text(self.path / "sites" / f"{site}.node", str(number))

    def roster(self) -> Listed:
        """Of all cards that were taken in; also in a file, to be sent to all, which is written where it is another."""
        keys = {name: bytes.fromhex(card.signing_key) for name, card in self.cards().items()}
        found = Listed(self.name, keys, self.coordinator, credentials.fingerprint(self.authority))
        place = self.path / "roster.toml"
        if not place.exists() or place.read_bytes() != found.written():
            write_bytes(place, found.written())
        return found

    def invite(self, site: str, place: Path | None = None) -> Path:
        """A startup kit; with the roster, once the site is in it."""
        require_name(site, "A site")
        roster = self.roster()
        listed = roster if site in roster.keys else None
        kit = Kit(self.name, site, self.address, self.authority, self.coordinator, listed)
        path = place or self.path / "kits" / f"{self.name}-{site}.zip"
        kit.save(path)
        return path

    def run(self, name: str) -> RunPlace:
        """The folder of a run, whether it is there or not; nothing but a name can be one."""
        if not RUN_NAME.fullmatch(name):
            raise ParameterError(
                f"A run cannot be called {name[:64]!r}. Use letters, digits, dots and dashes, at most 64. A run is "
                "called after its file, without its ending, unless you name it with --name."
            )
        return RunPlace(self.path / "runs" / name)

    def known_run(self, name: str) -> RunPlace:
        """The folder of a run that is there."""
        place = self.run(name)
        if not place.experiment.exists():
            raise FileError(f"There is no run {name!r} here. {suggest_name(name, self.runs())}")
        return place

    def runs(self) -> tuple[str, ...]:
        """Names of all."""
        return tuple(sorted(path.parent.name for path in (self.path / "runs").glob("*/experiment.toml")))

    def _certify(self, authority: Pair) -> None:
        server = credentials.new_server_certificate(authority, require_address(self.address)[0])
        write_bytes(self.path / "server.key", server.key, private=True)
        write_bytes(self.path / "server.crt", server.certificate)


# ---- run ------------------------------------------------------------------------------------------------------------
#
# The folder of one run, and what its small files say. A damaged file is an error with its name.

TIMEOUT = 600.0
"""Seconds that a site may take to answer, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """settings.json: seconds that a site may take to answer, public names of columns, and the folder for files."""

    timeout: float = TIMEOUT
    names: tuple[str, ...] = ()
    exchange_folder: str | None = None


@dataclass(frozen=True, slots=True)
class RunPlace:
    """That folder, and what is where in it."""

    folder: Path

    @property
    def name(self) -> str:
        """The run's."""
        return self.folder.name

    @property
    def experiment(self) -> Path:
        """What is run."""
        return self.folder / "experiment.toml"

    @property
    def settings(self) -> Path:
        """How patiently, as JSON."""
        return self.folder / "settings.json"

    @property
    def state(self) -> Path:
        """The journal of the run."""
        return self.folder / "state"

    @property
    def progress(self) -> Path:
        """One line of JSON for each round that was done."""
        return self.folder / "progress.jsonl"

    @property
    def result(self) -> Path:
        """How it ended, as JSON."""
        return self.folder / "result.json"

    @property
    def model(self) -> Path:
        """What came out."""
        return self.folder / "model.safetensors"

    @property
    def number(self) -> Path:
        """The number that Flower gave it last."""
        return self.folder / "flower-run"

    @property
    def lock(self) -> Path:
        """Held while somebody works on it."""
        return self.folder / "lock"

    @property
    def command(self) -> Path:
        """Held by the command that has it worked on, also before that begins."""
        return self.folder / "command.lock"


def result_in(place: RunPlace) -> dict[str, Any]:
    """How a run has ended: its `status` is done, or failed with `type`, `error` and `notes`."""
    try:
        found = json.loads(place.result.read_bytes())
        if found["status"] == "done" or {"type", "error", "notes"} <= found.keys():
            return dict(found)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise FormatError(
        f"{place.result} is damaged: it does not say how the run has ended. Remove it; run … --resume goes on from the "
        "run's own journal, and writes it anew."
    )


def forget_failure(place: RunPlace) -> None:
    """Remove a result that does not say that the run is done: whoever works on it now writes another."""
    with contextlib.suppress(FormatError):  # a damaged one says nothing
        if not place.result.exists() or result_in(place)["status"] == "done":
            return
    place.result.unlink()


def settings_in(place: RunPlace) -> RunSettings:
    """How a run is worked on, as it was last given."""
    if not place.settings.exists():
        return RunSettings()
    try:
        return msgspec.json.decode(place.settings.read_bytes(), type=RunSettings)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{place.settings} is damaged: it does not say how the run is worked on ({error}). Remove it; --timeout, "
            "--names and --exchange-folder then have to be given once more with --resume, if they were given before."
        ) from error


def is_starting(place: RunPlace) -> bool:
    """Whether a command is about to have a run worked on: it holds the run, and nobody works on it yet."""
    return is_held(place.command) and not is_held(place.lock) and not place.result.exists()


def read_number(path: Path) -> int | None:
    """The number in a file; None where there is none, or no number in it: whoever needs it makes it anew."""
    try:
        return int(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def number_in(place: RunPlace) -> int | None:
    """The number that Flower gave a run last; None where it was never started there."""
    return read_number(place.number)


def require_not_ended(place: RunPlace, record: RunState, arrivals: int) -> None:
    """Refuse to go on with such a run of so many `arrivals`; one that was broken off may go on, with other ends too.

    Where sites have not heard the end, they are told again, and no more.
    """
    if not isinstance(record, AsyncRunState) or record.without_result or not place.result.exists():
        return
    arrived = record.index - len(record.faults)
    if arrived < arrivals and result_in(place)["status"] == "done":
        raise ParameterError(
            f"Run {place.name!r} is over: it has ended by time_budget or tol after {arrived} of {arrivals} "
            f"arrivals, and its sites have its model and answer no more of it. The model is {place.model}. To go on "
            "for longer, begin a new run under another --name, with a larger time_budget or a smaller tol."
        )
