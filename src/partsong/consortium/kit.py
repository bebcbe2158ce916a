"""Startup kits: what a site gets from the coordinator to join. Nothing in one is secret; it has to arrive unchanged.

kit.toml      federation, site, address, fingerprint of the authority, the coordinator's signing key, fingerprint of
              the roster once there is one
ca.crt        the federation's authority
roster.toml   who takes part, once that is known
README.txt    what to do with it
"""

from __future__ import annotations

import io
import ipaddress
import re
import zipfile
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

from partsong.consortium.certificates import days_left, fingerprint
from partsong.consortium.roster import Listed, key_in, require_name
from partsong.consortium.toml_text import toml_of, write
from partsong.errors import FileError, FormatError, ParameterError
from partsong.federation.keys import only, read_toml

KEYS = ("federation", "site", "address", "authority", "coordinator", "roster")
FILES = ("kit.toml", "ca.crt", "roster.toml", "README.txt")
MOST_BYTES = 1 << 20
UNNAMED = Path("KIT")
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, OSError)
HOST = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")

README = """You are invited as {site!r} to the federation {federation!r}.

1. Install:        pip install "partsong[flower]"
2. Join:           partsong federation join {kit} --data YOUR-DATA --shared-key KEY-FILE
   KEY-FILE holds the key that the sites share and the coordinator does not know; without one leave --shared-key out.
   One of you makes it, and tells the others:  partsong federation secret
   Of texts (.csv, .tsv, .jsonl, .txt, or a folder of .txt files) name their column as well:  --text-column text
   They need the shared key.
   The command checks your data, shows what would be sent, asks, and makes your keys. They never leave your machine.
3. Send back the file card.toml that it names, over a channel that others cannot write to.
4. You then get roster.toml. Compare its fingerprint BY TELEPHONE with two other sites that you know, not with the
   coordinator alone, who has made it; look whether you know all that it names, and start your node:
                   partsong federation join {kit} --roster roster.toml

Authority (SHA-256): {authority}
Server:              {address}    (your node calls out to it; nobody calls in)
"""


@dataclass(frozen=True, slots=True)
class Kit:
    """Where to go, whom to trust, and under which name."""

    federation: str
    site: str
    address: str
    authority: bytes
    coordinator: bytes
    """The key that the coordinator signs requests with."""
    roster: Listed | None = None
    place: Path = field(default=UNNAMED, compare=False)
    """Where it was read from, as a command calls it."""

    def __post_init__(self) -> None:
        require_name(self.site, "A site")
        require_address(self.address)

    def save(self, path: Path) -> None:
        """As a .zip, or as a folder."""
        told = {"federation": self.federation, "site": self.site, "address": self.address}
        told |= {"authority": fingerprint(self.authority), "coordinator": self.coordinator.hex()}
        told["roster"] = self.roster.fingerprint if self.roster else ""
        files = {"kit.toml": toml_of(told).encode(), "ca.crt": self.authority}
        files["README.txt"] = README.format(kit=quote(path.name), **told).encode()
        if self.roster:
            files["roster.toml"] = self.roster.written()
        if path.suffix.lower() != ".zip":
            path.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                write(path / name, content)
            return
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content)
        write(path, packed.getvalue())

    @staticmethod
    def read(path: Path, scratch: Path) -> Kit:
        """From a .zip or a folder; `scratch` is a folder for what has to be unpacked."""
        if not path.is_dir():
            _unpack(path, scratch)
        return replace(_in_folder(path if path.is_dir() else scratch), place=path)


def require_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    if not is_port or not (_is_version_6(inner) if inner else HOST.fullmatch(host)):
        raise ParameterError(
            f"{address[:100]!r} is no address. Give host:port, such as nmf.example.org:8443, 192.0.2.1:8443 or "
            f"[2001:db8::1]:8443, without https://.{_in_ascii(host, port)}"
        )
    return inner or host, int(port)


def _is_version_6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


def _in_ascii(host: str, port: str) -> str:
    """How a name with other letters is written in certificates."""
    if host.isascii():
        return ""
    try:
        return f" Other letters are written as {host.encode('idna').decode()}:{port}."
    except UnicodeError:
        return ""


def _in_folder(folder: Path) -> Kit:
    table = only(read_toml(folder / "kit.toml"), KEYS, str(folder / "kit.toml"))
    if not all(isinstance(table.get(name), str) for name in KEYS):
        raise FormatError(f"{folder / 'kit.toml'} does not say all of {', '.join(KEYS)}. Ask for the kit once more.")
    try:
        authority = (folder / "ca.crt").read_bytes()
    except OSError as error:
        raise FileError(f"{folder / 'ca.crt'} cannot be read. Ask for the kit once more.") from error
    if days_left(authority) < 0:
        raise FormatError(f"{folder / 'ca.crt'}: the authority has expired. Ask for a new kit.")
    if fingerprint(authority) != table["authority"]:
        raise FormatError(f"{folder / 'ca.crt'} is not the certificate that kit.toml names. Ask for the kit once more.")
    listed = folder / "roster.toml"
    roster = Listed.read(listed) if listed.exists() else None
    return Kit(table["federation"], table["site"], table["address"], authority, key_in(table["coordinator"]), roster)


def _unpack(path: Path, scratch: Path) -> None:
    """Only files that a kit has, none longer than they can be, and none by a path of its own."""
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
            if any(one.filename not in FILES or one.file_size > MOST_BYTES for one in listed):
                raise FormatError(f"{path} holds what no kit holds. Ask for the kit once more.")
            for one in listed:
                with archive.open(one) as file:
                    content = file.read(MOST_BYTES + 1)
                write(scratch / one.filename, content[:MOST_BYTES])
    except FileNotFoundError as error:
        raise FileError(f"{path}: there is no such kit. Check the path.") from error
    except DAMAGED as error:
        if isinstance(error, FileError):
            raise
        raise FormatError(f"{path} is neither a kit's folder nor its .zip: {error}. Ask for it once more.") from error
