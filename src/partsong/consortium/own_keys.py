"""A site's own keys: the secret behind its streams and signatures, and the key of its node. Others know it by them.

They are made once, by a first join. What is gone or damaged in a folder that has joined is not made anew: nobody would
take its answers. Nothing here is sent but the public parts, in the site's card.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from partsong.consortium import certificates
from partsong.consortium.toml_text import write
from partsong.consortium.used_folder import has_joined
from partsong.errors import FileError, FormatError

SECRET_BYTES = 32
OWN_KEYS = ("secret", "node")
BACK = (
    "Put your own copy back. If there is none, join in a new folder, which makes new keys, and send the coordinator "
    "its card: {}"
)
PUBLIC_BACK = "Put your own copy back: its text is node_key in card.toml, which the coordinator has as well."


def make_own_keys(folder: Path) -> None:
    """Those that are there stay."""
    if not (folder / "secret").exists():
        write(folder / "secret", secrets.token_bytes(SECRET_BYTES), private=True)
    if not (folder / "node").exists():
        made = certificates.new_node_key()
        write(folder / "node.pub", made.certificate)
        write(folder / "node", made.key, private=True)


def require_own_keys(folder: Path, elsewhere: str) -> None:
    """Refuse a folder that has joined and has lost one of them, and keys that are not whole. `elsewhere`: the command
    that joins in a new folder. Nothing is written.
    """
    gone = [str(folder / name) for name in OWN_KEYS if not (folder / name).exists()]
    if has_joined(folder) and gone:
        raise FileError(
            f"{' and '.join(gone)}: not there, and this site is known by it; with another one nobody takes its "
            f"answers. {BACK.format(elsewhere)}"
        )
    if (folder / "secret").exists():
        secret_in(folder, elsewhere)
    if (folder / "node").exists():
        _require_node_pair(folder, elsewhere)


def secret_in(folder: Path, elsewhere: str) -> int:
    """The secret, as a number; FileError where it is gone, FormatError where it is not whole."""
    place = folder / "secret"
    try:
        found = place.read_bytes()
    except OSError as error:
        raise FileError(f"{place} cannot be read: {error.strerror or error}. {BACK.format(elsewhere)}") from error
    if len(found) != SECRET_BYTES:
        raise FormatError(f"{place} has {len(found)} bytes, and a secret has {SECRET_BYTES}. {BACK.format(elsewhere)}")
    return int.from_bytes(found, "little")


def _require_node_pair(folder: Path, elsewhere: str) -> None:
    """FileError where `node` is no private key, or `node.pub` is not its public part."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as forms

    private, public = folder / "node", folder / "node.pub"
    try:
        own = forms.load_ssh_private_key(private.read_bytes(), None).public_key()
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FormatError(f"{private} is not the key of a node: {error}. {BACK.format(elsewhere)}") from error
    try:
        told = forms.load_ssh_public_key(public.read_bytes())
    except FileNotFoundError as error:
        raise FileError(f"{public} is not there. {PUBLIC_BACK}") from error
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise FormatError(f"{public} is not the public key of a node: {error}. {PUBLIC_BACK}") from error
    if told != own:
        raise FormatError(f"{public} is not the public part of {private}. {PUBLIC_BACK} {BACK.format(elsewhere)}")
