"""A site's own keys: the secret behind its streams and signatures, and the key of its node.

Others know the site by them. A first join makes them once; a site that has joined and lost one cannot make it again,
because nobody would accept its answers. Only the public parts leave, in the site's card.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from partsong.errors import FileError, FormatError
from partsong.federation.setup import credentials
from partsong.federation.setup.credentials import write

SECRET_BYTES = 32
OWN_KEYS = ("secret", "node")
WAY_OUT = (
    "Restore your backup. Without one, copy site.toml, shared.key and state/ to a new folder, join there, and send the "
    "coordinator the new card."
)


def make_own_keys(folder: Path) -> None:
    """Make those that are missing."""
    if not (folder / "secret").exists():
        write(folder / "secret", secrets.token_bytes(SECRET_BYTES), private=True)
    if not (folder / "node").exists():
        made = credentials.new_node_key()
        write(folder / "node.pub", made.certificate)
        write(folder / "node", made.key, private=True)


def require_own_keys(folder: Path, *, has_joined: bool) -> None:
    """Refuse damaged keys, and missing ones where the site has joined. Nothing is written."""
    missing = [str(folder / name) for name in OWN_KEYS if not (folder / name).exists()]
    if has_joined and missing:
        raise FileError(f"{' and '.join(missing)}: missing, and the other parties know this site by it. {WAY_OUT}")
    if (folder / "secret").exists():
        read_secret(folder)
    if (folder / "node").exists():
        _require_node_pair(folder / "node", folder / "node.pub")


def read_secret(folder: Path) -> int:
    """The secret, as a number."""
    place = folder / "secret"
    try:
        found = place.read_bytes()
    except OSError as error:
        raise FileError(f"{place} cannot be read: {error.strerror or error}. {WAY_OUT}") from error
    if len(found) != SECRET_BYTES:
        raise FormatError(f"{place} has {len(found)} bytes, and a secret has {SECRET_BYTES}. {WAY_OUT}")
    return int.from_bytes(found, "little")


def _require_node_pair(private: Path, public: Path) -> None:
    """Refuse a private key that is none, and a public key that is not its public part."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as forms

    try:
        own = forms.load_ssh_private_key(private.read_bytes(), None).public_key()
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FormatError(f"{private} is not the key of a node: {error}. {WAY_OUT}") from error
    try:
        is_pair = forms.load_ssh_public_key(public.read_bytes()) == own
    except (OSError, ValueError, UnsupportedAlgorithm):
        is_pair = False
    if not is_pair:
        raise FormatError(
            f"{public} is not the public part of {private}. Restore your backup, or write node_key of card.toml there."
        )
