"""TLS for a federation: an authority of its own, and a certificate for its server. Sites trust that authority alone."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from partsong.errors import FormatError, MissingExtra

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
