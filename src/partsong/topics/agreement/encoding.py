"""Encode agreed words as sums: no party learns which party holds a word, and the server learns no word.

A word goes into three cells, chosen by keyed hash. Each holder adds 1 to each cell, and the word as numbers encrypted
with a pad for this cell that only key holders can compute. A cell with a single word of c holders has the sum
(c, c·code): the word is read and subtracted from its other two cells, and so on (an invertible Bloom lookup table;
Goodrich and Mitzenmacher, 2011).

A word has one name of 128 bits, its keyed BLAKE2b (RFC 7693). From the name, AES-256 (FIPS 197), which is fast in bulk,
derives numbers for each purpose: random without the key, equal for all parties with the key. Short words of plain
letters take five bits per letter, all others are in UTF-8. The count and the code of a cell go into few whole numbers,
whose sums over all parties are exact.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from partsong.core.streams import key as stream_key
from partsong.errors import MissingExtra, ParameterError, PartyError
from partsong.privacy.randomness import system_source
from partsong.secure_aggregation import crypto

KEY_BYTES = 32
NAME_BYTES = 16
LANES = 4
"""Numbers of 32 bits in a block."""

LETTERS = 11
NARROW_BYTES = 7
"""Bytes of up to 11 letters from a to z, with five bits each."""
_NARROW = re.compile(rb"[a-z]{1,%d}" % LETTERS)
_SHIFTS = 5 * np.arange(LETTERS, dtype=np.uint64)
EXACT_BITS = 52
"""Whole numbers below 2⁵³ are exact in float64, the type of the sums."""
MOST_IN_A_CELL = 32
"""Maximum number of words of one party in a cell; two or three on average."""
MOST_CHECKED = 4
"""Maximum bytes of a checksum; the minimum is one."""
Naming = Callable[[Sequence[bytes]], Any]
"""A function from words to their names (n × 16)."""
COPIES = 3


def fresh_key() -> bytes:
    """Return a random key; parties share it out-of-band, so that the server does not see it."""
    return system_source(KEY_BYTES)


def key_from_seed(seed: int) -> bytes:
    """Return a key derived from a seed, for reproducible runs in one process; it is not secret."""
    return b"".join(stream_key(seed, "words", half).to_bytes(16, "little") for half in range(2))


def require_key(key: bytes) -> bytes:
    """Return the key, if it is valid."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ParameterError(f"key must have {KEY_BYTES} bytes. Use fresh_key().")
    return key


def session_key(key: bytes, seed: int, parties: Sequence[str]) -> bytes:
    """Return the key of one agreement, from its public seed and its parties."""
    text = repr((int(seed), tuple(parties))).encode()
    return hashlib.blake2b(text, key=key, digest_size=KEY_BYTES, person=b"agreement").digest()


def hash_names(key: bytes, texts: Sequence[bytes]) -> Any:
    """Return a name of 16 bytes for each text, as an array (n × 16)."""
    keyed = hashlib.blake2b(key=key, digest_size=NAME_BYTES, person=b"name")

    def name(text: bytes) -> bytes:
        one = keyed.copy()
        one.update(text)
        return one.digest()

    return np.frombuffer(b"".join(map(name, texts)), np.uint8).reshape(len(texts), NAME_BYTES)


def keyed_numbers(key: bytes, purpose: str, names: Any, count: int) -> Any:
    """Return `count` independent numbers below 2³² for each name and purpose, as an array (n × count)."""
    blocks = np.repeat(names[:, None, :], -(-count // LANES), axis=1)
    blocks[:, :, 0] ^= np.arange(blocks.shape[1], dtype=np.uint8)
    mixed = _encrypted(key, purpose, blocks.tobytes())
    return np.frombuffer(mixed, "<u4").reshape(len(names), LANES * blocks.shape[1])[:, :count]


def scale_below(numbers: Any, size: int) -> Any:
    """Map numbers below 2³² to numbers below `size`; each has a probability of at most (1/size)·(1 + size/2³²)."""
    return ((numbers.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)


def keystream(key: bytes, purpose: str, count: int) -> Any:
    """Return a stream of bytes, to be used once for one purpose."""
    counters = np.zeros((-(-count // NAME_BYTES), 2), dtype="<u8")
    counters[:, 0] = np.arange(len(counters))
    return np.frombuffer(_encrypted(key, f"pad {purpose}", counters.tobytes()), np.uint8)[:count]


def _encrypted(key: bytes, purpose: str, blocks: bytes) -> bytes:
    """Encrypt each block of 16 bytes with a key for this purpose."""
    try:
        crypto.require_cryptography()
    except MissingExtra as error:
        raise MissingExtra(
            'An agreement on words needs the package cryptography, which is not installed: pip install "partsong'
            '[privacy]". Without it, use a public list of words, or vocabulary="hash".'
        ) from error
    ciphers = import_module("cryptography.hazmat.primitives.ciphers")
    own = hashlib.blake2b(purpose.encode(), key=key, digest_size=KEY_BYTES, person=b"purpose").digest()
    return bytes(ciphers.Cipher(ciphers.algorithms.AES(own), ciphers.modes.ECB()).encryptor().update(blocks))


def are_wide(words: Sequence[bytes]) -> Any:
    """Mark the words that are not short ones of plain letters."""
    return np.array([_NARROW.fullmatch(word) is None for word in words], dtype=bool)


def encode_words(words: Sequence[bytes], longest: int | None) -> Any:
    """Encode words as an array (n × bytes), padded with zeros; None: narrow words."""
    width = LETTERS if longest is None else longest
    letters = np.array(words, dtype=f"S{width}").view(np.uint8).reshape(len(words), width)
    if longest is not None:
        return letters
    coded = ((letters & 31).astype(np.uint64) << _SHIFTS).sum(axis=1, dtype=np.uint64)
    return coded.astype("<u8")[:, None].view(np.uint8)[:, :NARROW_BYTES]


def decode_words(rows: Any, longest: int | None) -> tuple[list[bytes], Any]:
    """Decode words, and mark the rows that are valid words."""
    letters = np.ascontiguousarray(rows)
    is_one: Any = np.ones(len(rows), dtype=bool)
    if longest is None:
        coded = np.zeros((len(rows), 8), dtype=np.uint8)
        coded[:, :NARROW_BYTES] = rows
        letters = ((coded.view("<u8") >> _SHIFTS) & np.uint64(31)).astype(np.uint8)
        is_one = (letters <= 26).all(axis=1)
        letters[letters > 0] += 96
    is_behind = letters == 0
    is_one &= ~is_behind[:, 0] & (is_behind[:, 1:] >= is_behind[:, :-1]).all(axis=1)
    return letters[is_one].view(f"S{letters.shape[1]}").reshape(-1).tolist(), is_one


@dataclass(frozen=True, slots=True)
class Packing:
    """A cell as numbers: the first contains the count of words above some bytes of their codes, the others codes.

    `count_bits` are left free above each code, for sums.
    """

    text_bytes: int
    parties: int

    @property
    def count_bits(self) -> int:
        """Bits for the count of a cell, over all parties."""
        return (MOST_IN_A_CELL * self.parties).bit_length()

    @property
    def width(self) -> int:
        """Bytes of a code per number."""
        return (EXACT_BITS - self.count_bits) // 8

    @property
    def beside(self) -> int:
        """Bytes of a code in the first number."""
        return max(0, EXACT_BITS - 2 * self.count_bits) // 8

    @property
    def numbers(self) -> int:
        """Numbers per cell."""
        return 1 + -(-max(0, self.text_bytes + 1 - self.beside) // self.width)

    @property
    def code_bytes(self) -> int:
        """Bytes of a word, its checksum, and padding."""
        return self.beside + (self.numbers - 1) * self.width

    @property
    def check_bytes(self) -> int:
        """Bytes of the checksum; the position of a cell is a further check."""
        return min(MOST_CHECKED, self.code_bytes - self.text_bytes)

    @property
    def most(self) -> Any:
        """Upper bounds (exclusive) of the parts of a code."""
        return 1 << 8 * np.array([self.beside, *[self.width] * (self.numbers - 1)])

    def packed(self, table: Any) -> Any:
        """Pack counts and sums of codes (cells × 1 + numbers) into (cells × numbers)."""
        sums = table[:, 1:].copy()
        sums[:, 0] += table[:, 0] << self._above
        return sums

    def unpacked(self, total: Any) -> Any:
        """Unpack, also from a sum over parties."""
        sums = np.asarray(total, dtype=np.int64)
        first = sums[:, :1]
        return np.concatenate([first >> self._above, first & ((1 << self._above) - 1), sums[:, 1:]], axis=1)

    def as_numbers(self, payload: Any) -> Any:
        """Convert bytes (… × code_bytes) to the parts of a code (… × numbers)."""
        rest = payload[..., self.beside :].reshape(*payload.shape[:-1], self.numbers - 1, self.width)
        return np.concatenate([_joined(payload[..., None, : self.beside]), _joined(rest)], axis=-1)

    def as_bytes(self, codes: Any) -> Any:
        """Convert parts of codes (n × numbers) to bytes (n × code_bytes)."""
        first, rest = _apart(codes[:, :1], self.beside), _apart(codes[:, 1:], self.width)
        return np.concatenate([first, rest], axis=1)

    @property
    def _above(self) -> int:
        return EXACT_BITS - self.count_bits


def _joined(parts: Any) -> Any:
    """Join bytes along the last axis to one number, little-endian."""
    return (parts.astype(np.int64) << (8 * np.arange(parts.shape[-1]))).sum(axis=-1)


def _apart(numbers: Any, width: int) -> Any:
    parts = (numbers[..., None] >> (8 * np.arange(width))) & 255
    return parts.astype(np.uint8).reshape(len(numbers), numbers.shape[1] * width)


@dataclass(frozen=True, slots=True)
class DecodedWords:
    """Decoded words, the number of parties with each, sort keys, and whether all words were decoded.

    The sort keys are keyed hashes, so the order reveals nothing without the key.
    """

    words: list[bytes]
    holders: Any
    order: Any
    is_whole: bool


@dataclass(frozen=True, slots=True)
class EncodedWords:
    """For each word: its three cells (n × 3), its payload (n × bytes: text and checksum), and its sort key."""

    places: Any
    payload: Any
    order: Any

    def select(self, indices: list[int]) -> EncodedWords:
        """Select some of the words."""
        return EncodedWords(self.places[indices], self.payload[indices], self.order[indices])


@dataclass(frozen=True, slots=True)
class Cells:
    """3 · `size` cells in exchange `number`, for words of up to `longest` bytes (None: narrow words)."""

    number: int
    size: int
    longest: int | None
    parties: int

    @staticmethod
    def enough_for(words: float) -> int:
        """Return the size for about this many words; decoding needs at least 1.222 cells per word."""
        return int(1.26 * words + 8 * words**0.5 + 48) // COPIES

    @property
    def is_wide(self) -> bool:
        """Whether words are encoded in UTF-8."""
        return self.longest is not None

    @property
    def text_bytes(self) -> int:
        """Bytes of a word."""
        return NARROW_BYTES if self.longest is None else self.longest

    @property
    def packing(self) -> Packing:
        """The layout of a cell."""
        return Packing(self.text_bytes, self.parties)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a party's upload."""
        return COPIES * self.size, self.packing.numbers

    def filled(self, key: bytes, words: Sequence[bytes], names: Any) -> Any:
        """Return the upload of a party for its words with these names."""
        encoded = self._encode(key, words, names)
        table = np.zeros((self.shape[0], self.packing.numbers + 1), dtype=np.int64)
        codes = self.packing.as_numbers(encoded.payload[:, None, :] ^ self._pads(key)[encoded.places])
        self._add(table, encoded.places, codes, np.ones(len(words), dtype=np.int64))
        if table[:, 0].max(initial=0) > MOST_IN_A_CELL:
            raise PartyError(
                f"More than {MOST_IN_A_CELL} words of a party are in one cell, which is too unlikely to be chance. "
                "Nothing was sent. Check that all parties have the same key, and agree again with a new one."
            )
        return self.packing.packed(table)

    def read(self, key: bytes, total: Any, naming: Naming) -> DecodedWords:
        """Decode the words from the sum of all uploads; `naming` returns the names of words under the same key."""
        left = self.packing.unpacked(np.reshape(total, self.shape))
        pads = self._pads(key)
        words: list[bytes] = []
        holders, orders = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for found, encoded, counts in self._single_words(key, left, pads, naming):
            words += found
            holders.append(counts)
            orders.append(encoded.order)
            codes = self.packing.as_numbers(encoded.payload[:, None, :] ^ pads[encoded.places])
            self._add(left, encoded.places, codes, -counts)
            if len(words) > len(left):
                break
        return DecodedWords(words, np.concatenate(holders), np.concatenate(orders), not left.any())

    def _single_words(
        self, key: bytes, left: Any, pads: Any, naming: Naming
    ) -> Iterator[tuple[list[bytes], EncodedWords, Any]]:
        """Yield words that are alone in a cell, then those that are alone once these are removed, and so on."""
        changed = np.arange(len(left))
        while True:
            at = changed[left[changed, 0] > 0]
            at = at[(left[at, 1:] % left[at, :1] == 0).all(axis=1)]
            codes = left[at, 1:] // left[at, :1]
            fits = ((codes >= 0) & (codes < self.packing.most)).all(axis=1)
            at, payload = at[fits], self.packing.as_bytes(codes[fits]) ^ pads[at[fits]]
            words, are_words = decode_words(payload[:, : self.text_bytes], self.longest)
            at, payload = at[are_words], payload[are_words]
            encoded = self._encode(key, words, naming(words))
            genuine = (payload == encoded.payload).all(axis=1) & (encoded.places == at[:, None]).any(axis=1)
            first = list({words[index]: index for index in np.flatnonzero(genuine).tolist()}.values())
            if not first:
                return
            found = encoded.select(first)
            yield [words[index] for index in first], found, left[at[first], 0]
            changed = np.unique(found.places)

    def _encode(self, key: bytes, words: Sequence[bytes], names: Any) -> EncodedWords:
        numbers, checked = keyed_numbers(key, self._purpose, names, COPIES + 3), self.packing.check_bytes
        payload = np.zeros((len(words), self.packing.code_bytes), dtype=np.uint8)
        payload[:, : self.text_bytes] = encode_words(words, self.longest)
        check = np.ascontiguousarray(numbers[:, COPIES : COPIES + 1]).view(np.uint8)
        payload[:, self.text_bytes : self.text_bytes + checked] = check[:, :checked]
        order = np.ascontiguousarray(numbers[:, COPIES + 1 :]).view("<i8").reshape(-1)
        return EncodedWords(scale_below(numbers[:, :COPIES], self.size) + np.arange(COPIES) * self.size, payload, order)

    @property
    def _purpose(self) -> str:
        return f"{'wide' if self.is_wide else 'narrow'} cells {self.number}"

    def _pads(self, key: bytes) -> Any:
        cells, width = self.shape[0], self.packing.code_bytes
        return keystream(key, self._purpose, cells * width).reshape(cells, width)

    def _add(self, table: Any, places: Any, codes: Any, counts: Any) -> None:
        """Add each word's count, and count · code, to its three cells."""
        at = places.reshape(-1)
        np.add.at(table[:, 0], at, np.repeat(counts, COPIES))
        weighted = (codes * counts[:, None, None]).reshape(len(at), codes.shape[-1])
        for number in range(weighted.shape[1]):
            np.add.at(table[:, number + 1], at, weighted[:, number])
