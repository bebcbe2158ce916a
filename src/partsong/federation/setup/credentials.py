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
# TLS for a federation: an authority of its own, and a certificate for its server. Sites trust that authority alone.

AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def new_authority(federation: str) -> Pair:
    """A self-signed certificate that can sign others."""
    x509 = _x509()
    key, subject = _new_key(), _name(f"partsong federation {federation}"[:64])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    built = _built(subject, subject, key.public_key(), AUTHORITY_DAYS)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    built = built.add_extension(usage, critical=True)
    built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return _signed(built, key, key)


def new_server_certificate(authority: Pair, host: str) -> Pair:
    """For a server that is reached as `host`, and by those on its own machine; of an authority that is a pair."""
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
    """A P-384 key by which a node is known, in the form of SSH."""
    _x509()
    from cryptography.hazmat.primitives import serialization as forms

    return bytes(_new_key().private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption()))


def public_node_key(private: bytes) -> str:
    """The public part of a node's key; FormatError where it is none."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as forms

    try:
        public = forms.load_ssh_private_key(private, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FormatError(f"This is not the key of a node: {error}.") from error
    return public.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH).decode()


def days_left(certificate: bytes) -> float:
    """How long a certificate is still valid; negative where it is not any more."""
    until: datetime = _read(certificate).not_valid_after_utc
    return (until - datetime.now(UTC)) / timedelta(days=1)


def are_pair(certificate: bytes, key: bytes) -> bool:
    """Whether a private key is that of a certificate; one that cannot be read is not."""
    from cryptography.hazmat.primitives import serialization as forms

    try:
        return bool(_read(certificate).public_key() == forms.load_pem_private_key(key, None).public_key())
    except (FormatError, ValueError, TypeError):
        return False


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate, in hexadecimal, for reading out."""
    from cryptography.hazmat.primitives import hashes

    return str(_read(certificate).fingerprint(hashes.SHA256()).hex())


def _read(certificate: bytes) -> Any:
    """From PEM; FormatError where it is none."""
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
    """What is in a file; FileError with the way out where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}. {way_out}") from error


def read_certificate(path: Path, way_out: str) -> bytes:
    """The certificate in a file; an error with the way out where it is gone, or damaged."""
    found = read_file(path, way_out)
    try:
        _read(found)
    except FormatError as error:
        raise FormatError(f"{path} is damaged: no certificate is in it. {way_out}") from error
    return found


def make_private(path: Path) -> None:
    """Make a folder that its owner alone can read, or take what others may do in it away."""
    make_folder(path)
    try:
        path.chmod(0o700)
    except OSError as error:
        raise FileError(
            f"{path} cannot be kept from other accounts: {error.strerror or error}. Choose a folder of your own."
        ) from error


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
            raise FormatError("node_key is not a key on a NIST curve. Ask the site for its card once more.")

    @staticmethod
    def read(path: Path) -> Card:
        """From a file."""
        return load_toml(path, Card, error=FormatError, way_out="Ask the site for its card once more.")

    def save(self, path: Path) -> None:
        """To a file."""
        save_toml(path, self)


@dataclass(frozen=True, slots=True)
class RosterFile:
    """roster.toml: keys in hexadecimal, and the fingerprint that they have."""

    federation: str
    fingerprint: str
    coordinator: str
    authority: str
    sites: dict[str, str]


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
        file = load_toml(path, RosterFile, error=FormatError, way_out="Ask the coordinator for the roster once more.")
        keys = {name: key_in(key) for name, key in sorted(file.sites.items())}
        found = Listed(file.federation, keys, key_in(file.coordinator), file.authority)
        if found.fingerprint != file.fingerprint:
            raise FormatError(f"{path}: its fingerprint is not that of its keys: it was changed. Do not use it.")
        return found

    def written(self) -> bytes:
        """As the contents of a file."""
        sites = {name: self.keys[name].hex() for name in sorted(self.keys)}
        file = RosterFile(self.federation, self.fingerprint, self.coordinator.hex(), self.authority, sites)
        return format_toml(file).encode()


def same_fingerprint(one: str, other: str) -> bool:
    """Whether two are the same to people: dashes, blanks and capitals do not count."""
    return re.sub(r"[-:\s]", "", one).lower() == re.sub(r"[-:\s]", "", other).lower()


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

FILES = ("kit.toml", "ca.crt", "roster.toml", "README.txt")
MOST_BYTES = 1 << 20
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, OSError)
ASK_AGAIN = "Ask for the kit once more."
HOST = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")

README = """You are invited as {site!r} to the federation {federation!r}.

1. Install:        pip install "partsong[flower]"
2. Join:           partsong federation join {kit} --data YOUR-DATA --shared-key KEY-FILE
   KEY-FILE holds the key that the sites share and the coordinator does not know; without one leave --shared-key out.
   One of you makes it, and tells the others:  partsong federation shared-key
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
class KitFile:
    """kit.toml: fingerprints of the authority and of the roster, and the key that the coordinator signs requests with,
    in hexadecimal.
    """

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
    """Where to go, whom to trust, and under which name."""

    federation: str
    site: str
    address: str
    authority: bytes
    coordinator: bytes
    roster: Listed | None = None

    def save(self, path: Path) -> None:
        """As a .zip."""
        own = (self.federation, self.site, self.address, fingerprint(self.authority), self.coordinator.hex())
        told = KitFile(*own, self.roster.fingerprint if self.roster else "")
        readme = README.format(kit=quote(path.name), **asdict(told))
        files = {"kit.toml": format_toml(told).encode(), "ca.crt": self.authority, "README.txt": readme.encode()}
        if self.roster:
            files["roster.toml"] = self.roster.written()
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content)
        write_bytes(path, packed.getvalue())

    @staticmethod
    def read(path: Path) -> Kit:
        """From a .zip, or from the folder that it was unpacked to."""
        if path.is_dir():
            return _in_folder(path)
        with TemporaryDirectory() as scratch:
            _unpack(path, Path(scratch))
            return _in_folder(Path(scratch))


def require_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, _, port = address.rpartition(":")
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if not is_port or not (_is_version_6(inner) if inner else HOST.fullmatch(host)):
        raise ParameterError(
            f"{address[:100]!r} is no address. Give host:port, such as nmf.example.org:8443, 192.0.2.1:8443 or "
            "[2001:db8::1]:8443, without https://, and other letters as in xn--mnchen-3ya.de:8443."
        )
    return inner or host, int(port)


def _is_version_6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


def _in_folder(folder: Path) -> Kit:
    told = load_toml(folder / "kit.toml", KitFile, error=FormatError, way_out=ASK_AGAIN)
    authority = read_certificate(folder / "ca.crt", ASK_AGAIN)
    if days_left(authority) < 0:
        raise FormatError(f"{folder / 'ca.crt'}: the authority has expired. Ask for a new kit.")
    if fingerprint(authority) != told.authority:
        raise FormatError(f"{folder / 'ca.crt'} is not the certificate that kit.toml names. {ASK_AGAIN}")
    roster = Listed.read(folder / "roster.toml") if (folder / "roster.toml").exists() else None
    return Kit(told.federation, told.site, told.address, authority, key_in(told.coordinator), roster)


def _unpack(path: Path, folder: Path) -> None:
    """Only files that a kit has, none longer than they can be, and none by a path of its own."""
    try:
        with zipfile.ZipFile(path) as archive:
            for one in archive.infolist():
                if one.filename not in FILES or one.file_size > MOST_BYTES:
                    raise FormatError(f"{path} holds what no kit holds. {ASK_AGAIN}")
                with archive.open(one) as file:
                    (folder / one.filename).write_bytes(file.read(MOST_BYTES))
    except FileNotFoundError as error:
        raise FileError(f"{path}: there is no such kit. Check the path.") from error
    except DAMAGED as error:
        if isinstance(error, FileError):
            raise
        raise FormatError(f"{path} is neither a kit's folder nor its .zip: {error}. {ASK_AGAIN}") from error


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
                "it with whoever made it (partsong federation shared-key)."
            )
        return SharedKey(secret)

    @property
    def text(self) -> str:
        """For reading out, or for a letter."""
        letters = base64.b32encode(self.secret + _check(self.secret)).decode()
        return "-".join(letters[start : start + 4] for start in range(0, LETTERS, 4))

    def key_for(self, purpose: str) -> bytes:
        """32 bytes for one purpose, such as "columns"; keys for different purposes tell nothing of each other."""
        return crypto.fingerprint("partsong shared key", purpose, self.secret)


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"partsong shared key" + secret).digest()[:CHECK_BYTES]
