"""Certificates, rosters, startup kits and shared keys of a federation.

A startup kit is what a site gets from the coordinator to join. It holds no secret, but must arrive unchanged.

kit.toml      federation, site, address, fingerprint of the certificate authority, the coordinator's signing key,
              fingerprint of the roster once there is one
ca.crt        the federation's certificate authority
roster.toml   the sites, once they are known
README.txt    instructions
"""

from __future__ import annotations

import base64
import hashlib
import io
import ipaddress
import re
import secrets
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

from partsong.errors import FileError, FormatError, MissingExtra, ParameterError
from partsong.federation.site.state import make_folder
from partsong.federation.toml_files import format_toml, load_toml, save_toml
from partsong.federation.transports.base import require_name
from partsong.io.write import write_bytes
from partsong.secure_aggregation import crypto

# ---- certificates -----------------------------------------------------------------------------------------------
#
# TLS: the federation has its own certificate authority, which signs the server's certificate. Sites trust only it.

AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def new_authority(federation: str) -> Pair:
    """Make a self-signed certificate that can sign others."""
    x509 = _x509()
    key, subject = _new_key(), _name(f"partsong federation {federation}"[:64])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    built = _built(subject, subject, key.public_key(), AUTHORITY_DAYS)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    built = built.add_extension(usage, critical=True)
    built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return _signed(built, key, key)


def new_server_certificate(authority: Pair, host: str) -> Pair:
    """Make a certificate for a server reached as `host` and from its own machine, signed by an authority."""
    x509 = _x509()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    signing = load_pem_private_key(authority.key, None)
    issuer = _read(authority.certificate)
    key = _new_key()
    names = [_alternative(one) for one in dict.fromkeys((host, *HERE))]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
    built = _built(_name(host[:64]), issuer.subject, key.public_key(), SERVER_DAYS)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
    built = built.add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return _signed(built.add_extension(identifier, critical=False), key, signing)


def new_node_key() -> bytes:
    """Make a P-384 key that identifies a node, in OpenSSH format."""
    _x509()
    from cryptography.hazmat.primitives import serialization as forms

    return bytes(_new_key().private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption()))


def public_node_key(private: bytes) -> str:
    """Return the public part of a node's key; FormatError if it is invalid."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as forms

    try:
        public = forms.load_ssh_private_key(private, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FormatError(f"Not the key of a node: {error}.") from error
    return public.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH).decode()


def days_left(certificate: bytes) -> float:
    """Return the days until a certificate expires; negative after that."""
    until: datetime = _read(certificate).not_valid_after_utc
    return (until - datetime.now(UTC)) / timedelta(days=1)


def are_pair(certificate: bytes, key: bytes) -> bool:
    """Return whether a private key matches a certificate; unreadable ones do not match."""
    from cryptography.hazmat.primitives import serialization as forms

    try:
        return bool(_read(certificate).public_key() == forms.load_pem_private_key(key, None).public_key())
    except (FormatError, ValueError, TypeError):
        return False


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate in hexadecimal."""
    from cryptography.hazmat.primitives import hashes

    return str(_read(certificate).fingerprint(hashes.SHA256()).hex())


def _read(certificate: bytes) -> Any:
    """Load a PEM certificate; FormatError if it is invalid."""
    try:
        return _x509().load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise FormatError("Unreadable certificate. Copy it from its source again.") from error


def _x509() -> Any:
    try:
        from cryptography import x509
    except ImportError as error:
        raise MissingExtra(
            "Certificates and keys need the package cryptography. Run pip install 'partsong[flower]'"
        ) from error
    return x509


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _name(common: str) -> Any:
    x509 = _x509()
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> Any:
    try:
        return _x509().IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return _x509().DNSName(host)


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


# ---- files ------------------------------------------------------------------------------------------------------


def read_file(path: Path, way_out: str) -> bytes:
    """Read a file; FileError with advice if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}. {way_out}") from error


def read_certificate(path: Path, way_out: str) -> bytes:
    """Read the certificate in a file; an error with advice if it is lost or damaged."""
    found = read_file(path, way_out)
    try:
        _read(found)
    except FormatError as error:
        raise FormatError(f"{path} is damaged: it holds no certificate. {way_out}") from error
    return found


def make_private(path: Path) -> None:
    """Make a folder that only its owner can access, or restrict an existing one."""
    make_folder(path)
    try:
        path.chmod(0o700)
    except OSError as error:
        raise FileError(
            f"{path} cannot be made private: {error.strerror or error}. Choose a folder that you own."
        ) from error


# ---- roster -----------------------------------------------------------------------------------------------------
#
# Cards and rosters: names and public keys. Sites compare the fingerprint of a roster out-of-band, for example by phone.
#
# A site that has pinned a roster takes part only in sums over exactly these parties: once sites that know each other
# have compared it, a server cannot invent sites.

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Card:
    """Name and public keys of a site. Not secret, but must arrive unchanged."""

    federation: str
    site: str
    node_key: str
    signing_key: str

    def __post_init__(self) -> None:
        _x509()
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key

        require_name(self.site, "A site")
        key_in(self.signing_key)
        try:
            is_sound = isinstance(load_ssh_public_key(self.node_key.encode()), ec.EllipticCurvePublicKey)
        except Exception:
            is_sound = False
        if not is_sound:
            raise FormatError("node_key is not a key on a NIST curve. Ask the site for its card again.")

    @staticmethod
    def read(path: Path) -> Card:
        """Load from a file."""
        return load_toml(path, Card, error=FormatError, way_out="Ask the site for its card again.")

    def save(self, path: Path) -> None:
        """Save to a file."""
        save_toml(path, self)


@dataclass(frozen=True, slots=True)
class RosterFile:
    """roster.toml: keys in hexadecimal, and their fingerprint."""

    federation: str
    fingerprint: str
    coordinator: str
    authority: str
    sites: dict[str, str]


@dataclass(frozen=True, slots=True)
class Listed:
    """The roster of a federation: names and signing keys of sites, the coordinator's key, and the fingerprint of the
    certificate authority. Comparing its fingerprint compares all of them.
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
                    f"The roster lists the same key for {owners[key]} and for {name}: one party under two names. Do "
                    "not use it; call the sites that it lists."
                )
            owners[key] = name

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the whole roster, as eight groups of eight hexadecimal digits."""
        parts = [part for name in sorted(self.keys) for part in (name, self.keys[name])]
        heading = ("partsong roster", self.federation, self.coordinator, self.authority)
        digest = crypto.fingerprint(*heading, *parts).hex()
        return "-".join(digest[start : start + 8] for start in range(0, len(digest), 8))

    @staticmethod
    def read(path: Path) -> Listed:
        """Load from a file; refuse one whose fingerprint does not match its keys."""
        file = load_toml(path, RosterFile, error=FormatError, way_out="Ask the coordinator for the roster again.")
        keys = {name: key_in(key) for name, key in sorted(file.sites.items())}
        found = Listed(file.federation, keys, key_in(file.coordinator), file.authority)
        if found.fingerprint != file.fingerprint:
            raise FormatError(
                f"{path}: the fingerprint does not match the keys, so the file was changed. Do not use it."
            )
        return found

    def written(self) -> bytes:
        """Return the contents of roster.toml."""
        sites = {name: self.keys[name].hex() for name in sorted(self.keys)}
        file = RosterFile(self.federation, self.fingerprint, self.coordinator.hex(), self.authority, sites)
        return format_toml(file).encode()


def same_fingerprint(one: str, other: str) -> bool:
    """Compare two fingerprints, ignoring dashes, blanks and case."""
    return re.sub(r"[-:\s]", "", one).lower() == re.sub(r"[-:\s]", "", other).lower()


def key_in(text: str) -> bytes:
    """Parse a signing key from hexadecimal digits."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise FormatError("A signing key must be 64 hexadecimal digits. Ask for it again.")
    return key


# ---- kit --------------------------------------------------------------------------------------------------------

FILES = ("kit.toml", "ca.crt", "roster.toml", "README.txt")
MOST_BYTES = 1 << 20
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, OSError)
ASK_AGAIN = "Ask for the kit again."
HOST = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")

README = """You are invited as {site!r} to the federation {federation!r}.

1. Install:        pip install "partsong[flower]"
2. Join:           partsong federation join {kit} --data YOUR-DATA --shared-key KEY-FILE
   KEY-FILE holds the key that the sites share and the coordinator does not know. Without one, omit --shared-key.
   One site makes it and gives it to the others out-of-band:  partsong federation shared-key
   For texts (.csv, .tsv, .jsonl, .txt, or a folder of .txt files), pass their column too:  --text-column text
   Texts need the shared key.
   The command checks your data, shows what would be sent, asks, and makes your keys, which never leave your machine.
3. Send the file card.toml back to the coordinator over an authenticated channel.
4. You then receive roster.toml. Compare its fingerprint BY PHONE with two other sites that you know, not only with the
   coordinator, who made it. Check that you know all sites it lists, and start your node:
                   partsong federation join {kit} --roster roster.toml

Certificate authority (SHA-256): {authority}
Server:                          {address}    (your node connects to it; it needs no open port)
"""


@dataclass(frozen=True, slots=True)
class KitFile:
    """kit.toml: fingerprints of authority and roster, and the coordinator's signing key, in hexadecimal."""

    federation: str
    site: str
    address: str
    authority: str
    coordinator: str
    roster: str = ""

    def __post_init__(self) -> None:
        require_name(self.site, "A site")
        require_address(self.address)


@dataclass(frozen=True, slots=True)
class Kit:
    """A startup kit: server address, authority, coordinator's key, and the site's name."""

    federation: str
    site: str
    address: str
    authority: bytes
    coordinator: bytes
    roster: Listed | None = None

    def save(self, path: Path) -> None:
        """Save as a .zip."""
        own = (self.federation, self.site, self.address, fingerprint(self.authority), self.coordinator.hex())
        file = KitFile(*own, self.roster.fingerprint if self.roster else "")
        readme = README.format(kit=quote(path.name), **asdict(file))
        files = {"kit.toml": format_toml(file).encode(), "ca.crt": self.authority, "README.txt": readme.encode()}
        if self.roster:
            files["roster.toml"] = self.roster.written()
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content)
        write_bytes(path, packed.getvalue())

    @staticmethod
    def read(path: Path) -> Kit:
        """Load from a .zip or an unpacked folder."""
        if path.is_dir():
            return _in_folder(path)
        with TemporaryDirectory() as scratch:
            _unpack(path, Path(scratch))
            return _in_folder(Path(scratch))


def require_address(address: str) -> tuple[str, int]:
    """Parse "host:port"."""
    host, _, port = address.rpartition(":")
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if not is_port or not (_is_version_6(inner) if inner else HOST.fullmatch(host)):
        raise ParameterError(
            f"Invalid address {address[:100]!r}. Use host:port without https://, such as nmf.example.org:8443, "
            "192.0.2.1:8443 or [2001:db8::1]:8443; non-ASCII names as in xn--mnchen-3ya.de:8443."
        )
    return inner or host, int(port)


def _is_version_6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


def _in_folder(folder: Path) -> Kit:
    file = load_toml(folder / "kit.toml", KitFile, error=FormatError, way_out=ASK_AGAIN)
    authority = read_certificate(folder / "ca.crt", ASK_AGAIN)
    if days_left(authority) < 0:
        raise FormatError(f"{folder / 'ca.crt'}: the certificate authority has expired. Ask for a new kit.")
    if fingerprint(authority) != file.authority:
        raise FormatError(f"{folder / 'ca.crt'} does not match kit.toml. {ASK_AGAIN}")
    roster = Listed.read(folder / "roster.toml") if (folder / "roster.toml").exists() else None
    return Kit(file.federation, file.site, file.address, authority, key_in(file.coordinator), roster)


def _unpack(path: Path, folder: Path) -> None:
    """Unpack only the files of a kit, with limited sizes and no paths of their own."""
    try:
        with zipfile.ZipFile(path) as archive:
            for one in archive.infolist():
                if one.filename not in FILES or one.file_size > MOST_BYTES:
                    raise FormatError(f"{path} is not a startup kit. {ASK_AGAIN}")
                with archive.open(one) as file:
                    (folder / one.filename).write_bytes(file.read(MOST_BYTES))
    except FileNotFoundError as error:
        raise FileError(f"{path}: no such kit. Check the path.") from error
    except DAMAGED as error:
        if isinstance(error, FileError):
            raise
        raise FormatError(f"{path} is neither the folder nor the .zip of a kit: {error}. {ASK_AGAIN}") from error


# ---- shared key -------------------------------------------------------------------------------------------------
#
# The key that sites share and the server does not know; column names and words of texts are hashed with it.
#
# One site makes it and gives it to the others out-of-band, not through the server.
#
#     text = base32(16 random bytes | first 4 bytes of their SHA-256), in groups of four letters

SECRET_BYTES, CHECK_BYTES = 16, 4
LETTERS = 8 * (SECRET_BYTES + CHECK_BYTES) // 5
MISREAD = str.maketrans({"0": "O", "1": "I", "8": "B"})


@dataclass(frozen=True, slots=True)
class SharedKey:
    """128 random bits, from which a key for each purpose is derived."""

    secret: bytes = field(repr=False)

    @staticmethod
    def made() -> SharedKey:
        """Draw a new key from the operating system's randomness."""
        return SharedKey(secrets.token_bytes(SECRET_BYTES))

    @staticmethod
    def read(text: str) -> SharedKey:
        """Parse a key. Blanks, dashes, case and a leading byte order mark do not matter.

        FormatError if a character is wrong.
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
                f"Not a shared key: a key has {LETTERS} letters and digits, with a checksum. Compare it with the site "
                "that made it (partsong federation shared-key)."
            )
        return SharedKey(secret)

    @property
    def text(self) -> str:
        """The key as text, in groups of four characters."""
        letters = base64.b32encode(self.secret + _check(self.secret)).decode()
        return "-".join(letters[start : start + 4] for start in range(0, LETTERS, 4))

    def key_for(self, purpose: str) -> bytes:
        """Derive 32 bytes for one purpose, such as "columns"; keys of different purposes are independent."""
        return crypto.fingerprint("partsong shared key", purpose, self.secret)


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"partsong shared key" + secret).digest()[:CHECK_BYTES]
