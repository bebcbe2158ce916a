"""The key that sites share and the server does not know: names of columns, and words of texts, are hashed with it.

One site makes it, and tells the others by a way that does not lead through the server.

    text = base32(16 random bytes | first 4 bytes of their SHA-256), in groups of four letters
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass, field

from partsong.errors import FormatError
from partsong.privacy.key_agreement import fingerprint

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
        return fingerprint("partsong shared key", purpose, self.secret)


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"partsong shared key" + secret).digest()[:CHECK_BYTES]
