"""Certificates, rosters, startup kits and shared keys of a federation.

Startup kits: what a site gets from the coordinator to join. Nothing in one is secret; it has to arrive unchanged.

kit.toml      federation, site, address, fingerprint of the authority, the coordinator's signing key, fingerprint of
              the roster once there is one
ca.crt        the federation's authority
roster.toml   who takes part, once that is known
README.txt    what to do with it
"""

from __future__ import annotations

import base64
import hashlib
import io
import ipaddress
import json
import re
import secrets
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote
from typing import Any

from partsong.core.parameters import only, read_toml
from partsong.errors import FileError, FormatError, MissingExtra, ParameterError
from partsong.federation.site.state import make_folder
from partsong.federation.transports.files import NAME
from partsong.io.write import replacing
from partsong.secure_aggregation import crypto
from partsong.secure_aggregation.crypto import fingerprint as key_fingerprint

# ---- certificates -----------------------------------------------------------------------------------------------
#
# TLS for a federation: an authority of its own, and a certificate for its server. Sites trust that authority alone.

AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def require() -> None:
    """Say at once that the package is not there."""
    _x509()


def new_authority(federation: str) -> Pair:
    """A self-signed certificate that can sign others."""
    x509 = _x509()
    key, subject = _new_key(), _name(f"partsong federation {federation}"[:64])
    public = key.public_key()
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    known = x509.SubjectKeyIdentifier.from_public_key(public)
    built = _built(subject, subject, public, AUTHORITY_DAYS)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    built = built.add_extension(usage, critical=True).add_extension(known, critical=False)
    return _signed(built, key, key)


def new_server_certificate(authority: Pair, host: str) -> Pair:
    """For a server that is reached as `host`, and by those on its own machine; of an authority that is a pair."""
    x509 = _x509()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signing = load_pem_private_key(authority.key, None)
    issuer = _read(authority.certificate)
    key = _new_key()
    names = [_alternative(one) for one in dict.fromkeys((host, *HERE))]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
    built = _built(_name(host[:64]), issuer.subject, key.public_key(), SERVER_DAYS)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
    built = built.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return _signed(built.add_extension(identifier, critical=False), key, signing)


def new_node_key() -> Pair:
    """A P-384 key by which a node is known, in the forms of SSH: public part first."""
    from cryptography.hazmat.primitives import serialization as forms

    _x509()
    key = _new_key()
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption())
    return Pair(key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH), private)


def require_node_key(text: str) -> bytes:
    """The public key of a node, checked; FormatError where it is none."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    _x509()
    try:
        is_sound = isinstance(load_ssh_public_key(text.encode()), ec.EllipticCurvePublicKey)
    except Exception as error:
        raise FormatError("The key of a node cannot be read. Ask the site for its card once more.") from error
    if not is_sound:
        raise FormatError("The key of a node is not one on a NIST curve. Ask the site for its card once more.")
    return text.encode()


def days_left(certificate: bytes) -> float:
    """How long a certificate is still valid; negative where it is not any more."""
    until: datetime = _read(certificate).not_valid_after_utc
    return (until - datetime.now(UTC)) / timedelta(days=1)


def are_pair(certificate: bytes, key: bytes) -> bool:
    """Whether a private key is that of a certificate; one that cannot be read is not."""
    from cryptography.hazmat.primitives import serialization as forms

    try:
        public = _read(certificate).public_key()
        own = forms.load_pem_private_key(key, None).public_key()
    except (FormatError, ValueError, TypeError):
        return False
    return bool(public == own)


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate, in hexadecimal, for reading out."""
    from cryptography.hazmat.primitives import hashes

    found: bytes = _read(certificate).fingerprint(hashes.SHA256())
    return found.hex()


def _read(certificate: bytes) -> Any:
    """From PEM; FormatError where it is none. Whoever knows the file, and how to come by another, says so."""
    try:
        return _x509().load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise FormatError("A certificate cannot be read. Take it from its source again.") from error


def _x509() -> Any:
    try:
        from cryptography import x509
    except ImportError as error:
        raise MissingExtra(
            "Certificates and keys need the package cryptography. Install it with: pip install 'partsong[flower]'"
        ) from error
    return x509


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _name(common: str) -> Any:
    from cryptography.x509.oid import NameOID

    x509 = _x509()
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> Any:
    x509 = _x509()
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _built(subject: Any, issuer: Any, public: Any, days: int) -> Any:
    x509, now = _x509(), datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    made = made.serial_number(x509.random_serial_number())
    return made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=days))


def _signed(built: Any, key: Any, signing: Any) -> Pair:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as forms

    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    return Pair(built.sign(signing, hashes.SHA256()).public_bytes(forms.Encoding.PEM), private)


# ---- toml text --------------------------------------------------------------------------------------------------
#
# Small TOML files that we write ourselves, whole or not at all; they are read by `core.parameters.read_toml`.


def toml_of(table: Mapping[str, Any]) -> str:
    """Texts, numbers, truth values, lists of these, and tables of them; None is left out."""
    plain = {name: value for name, value in table.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in plain.items()]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_value(value)}" for key, value in inner.items())]
    return "\n".join(lines) + "\n"


def write(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """A file, whole or not at all; one that is `private` is for its owner alone."""
    with replacing(path, private=private) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


# ---- roster -----------------------------------------------------------------------------------------------------
#
# Cards and rosters: who is known by which keys. A roster's fingerprint is what sites compare, by telephone.
#
# A site that has pinned a roster takes part in sums with exactly these parties: once sites that know each other have
# compared it, a server cannot invent sites.

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
        digest = crypto.fingerprint(*heading, *parts).hex()
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


# ---- kit --------------------------------------------------------------------------------------------------------

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


# ---- private folder ---------------------------------------------------------------------------------------------
#
# Folders that their owner alone can read, also where they were there before.


def make_private(path: Path) -> None:
    """Make a folder, or take what others may do in it away."""
    make_folder(path)
    try:
        path.chmod(0o700)
    except OSError as error:
        raise FileError(
            f"{path} cannot be kept from other accounts: {error.strerror or error}. Choose a folder of your own."
        ) from error


# ---- shared key -------------------------------------------------------------------------------------------------
#
# The key that sites share and the server does not know: names of columns, and words of texts, are hashed with it.
#
# One site makes it, and tells the others by a way that does not lead through the server.
#
#     text = base32(16 random bytes | first 4 bytes of their SHA-256), in groups of four letters

SECRET_BYTES, CHECK_BYTES = 16, 4
LETTERS = 8 * (SECRET_BYTES + CHECK_BYTES) // 5
MISREAD = str.maketrans({"0": "O", "1": "I", "8": "B"})


@dataclass(frozen=True, slots=True)
class SharedKey:
    """128 random bits, and what is derived from them for each purpose."""

    secret: bytes = field(repr=False)

    @staticmethod
    def made() -> SharedKey:
        """A new one, from the operating system's randomness."""
        return SharedKey(secrets.token_bytes(SECRET_BYTES))

    @staticmethod
    def read(text: str) -> SharedKey:
        """From its text; blanks, dashes, small letters and an editor's byte order mark before it do not matter.

        FormatError where a letter is wrong.
        """
        written = text.removeprefix("\ufeff").upper()
        letters = "".join(letter for letter in written if not letter.isspace() and letter != "-").translate(MISREAD)
        try:
            found = base64.b32decode(letters) if len(letters) == LETTERS else b""
        except ValueError:
            found = b""
        secret, check = found[:SECRET_BYTES], found[SECRET_BYTES:]
        if len(found) != SECRET_BYTES + CHECK_BYTES or check != _check(secret):
            raise FormatError(
                f"This is not a shared key: it has {LETTERS} letters and digits, and every single one counts. Compare "
                "it with whoever made it (partsong federation secret)."
            )
        return SharedKey(secret)

    @property
    def text(self) -> str:
        """For reading out, or for a letter."""
        letters = base64.b32encode(self.secret + _check(self.secret)).decode()
        return "-".join(letters[start : start + 4] for start in range(0, LETTERS, 4))

    def key_for(self, purpose: str) -> bytes:
        """32 bytes for one purpose, such as "columns"; keys for different purposes tell nothing of each other."""
        return key_fingerprint("partsong shared key", purpose, self.secret)


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"partsong shared key" + secret).digest()[:CHECK_BYTES]
