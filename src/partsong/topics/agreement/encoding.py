"""The agreed words themselves, told to all parties by a sum: nobody learns who holds which, and the server no word.

A word goes into three cells, by keyed hash. What a holder adds to each: 1, and the word as numbers under a pad for this
cell that whoever has the key can compute. Of a cell with one word only, c holders leave (c, c·code): the word is read,
and taken out of its other two cells, and so on (an invertible Bloom lookup table; Goodrich and Mitzenmacher, 2011).

A word has one name of 128 bits, its keyed BLAKE2b (RFC 7693); from the name AES-256 (FIPS 197), which is fast on many
at once, makes numbers for each purpose: random to everybody who lacks the key, the same to all who have it. Short words
of plain letters are rows of bytes with five bits a letter, all others are in UTF-8. How many words are in a cell and
what they are goes into few whole numbers, whose sums over all parties stay exact.
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
"""Up to 11 letters from a to z, in five bits each."""
_NARROW = re.compile(rb"[a-z]{1,%d}" % LETTERS)
_SHIFTS = 5 * np.arange(LETTERS, dtype=np.uint64)
EXACT_BITS = 52
"""Whole numbers below 2⁵³ are exact in the float64 that sums come back in."""
MOST_IN_A_CELL = 32
"""Words of one party in one cell: two or three are there on average."""
MOST_CHECKED = 4
"""Bytes of a check, at most; one at least."""
Naming = Callable[[Sequence[bytes]], Any]
"""Words to their names (n × 16)."""
COPIES = 3


def fresh_key() -> bytes:
    """A key from the operating system; parties pass it on by a way that the server does not see."""
    return system_source(KEY_BYTES)


def key_from_seed(seed: int) -> bytes:
    """A key that whoever knows the seed knows too: for runs in one process that have to come out the same twice."""
    return b"".join(stream_key(seed, "words", half).to_bytes(16, "little") for half in range(2))


def require_key(key: bytes) -> bytes:
    """The key, if it is one."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ParameterError(f"The key of the words has {KEY_BYTES} bytes, such as fresh_key() gives; this has not.")
    return key


def session_key(key: bytes, seed: int, parties: Sequence[str]) -> bytes:
    """The key of one agreement, by its public seed and its parties."""
    text = repr((int(seed), tuple(parties))).encode()
    return hashlib.blake2b(text, key=key, digest_size=KEY_BYTES, person=b"agreement").digest()


def hash_names(key: bytes, texts: Sequence[bytes]) -> Any:
    """A name of 16 bytes for each text, as an array (n × 16)."""
    keyed = hashlib.blake2b(key=key, digest_size=NAME_BYTES, person=b"name")

    def name(text: bytes) -> bytes:
        one = keyed.copy()
        one.update(text)
        return one.digest()

    return np.frombuffer(b"".join(map(name, texts)), np.uint8).reshape(len(texts), NAME_BYTES)


def keyed_numbers(key: bytes, purpose: str, names: Any, count: int) -> Any:
    """`count` independent numbers below 2³² for each name, as an array (n × count); others for other purposes."""
    blocks = np.repeat(names[:, None, :], -(-count // LANES), axis=1)
    blocks[:, :, 0] ^= np.arange(blocks.shape[1], dtype=np.uint8)
    mixed = _encrypted(key, purpose, blocks.tobytes())
    return np.frombuffer(mixed, "<u4").reshape(len(names), LANES * blocks.shape[1])[:, :count]


def scale_below(numbers: Any, size: int) -> Any:
    """Numbers below 2³² to numbers below `size`; none has a probability above (1/size)·(1 + size/2³²)."""
    return ((numbers.astype(np.uint64) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)


def keystream(key: bytes, purpose: str, count: int) -> Any:
    """A stream of bytes that is used for one purpose, once."""
    counters = np.zeros((-(-count // NAME_BYTES), 2), dtype="<u8")
    counters[:, 0] = np.arange(len(counters))
    return np.frombuffer(_encrypted(key, f"pad {purpose}", counters.tobytes()), np.uint8)[:count]


def _encrypted(key: bytes, purpose: str, blocks: bytes) -> bytes:
    """Each block of 16 bytes by itself, under a key for this purpose."""
    try:
        crypto.require()
    except MissingExtra as error:
        raise MissingExtra(
            'An agreement on words needs the package cryptography, which is not installed: pip install "partsong'
            '[privacy]". Without it, take a public list of words, or hashes.'
        ) from error
    ciphers = import_module("cryptography.hazmat.primitives.ciphers")
    own = hashlib.blake2b(purpose.encode(), key=key, digest_size=KEY_BYTES, person=b"purpose").digest()
    return bytes(ciphers.Cipher(ciphers.algorithms.AES(own), ciphers.modes.ECB()).encryptor().update(blocks))


def are_wide(words: Sequence[bytes]) -> Any:
    """Which words are not short ones of plain letters."""
    return np.array([_NARROW.fullmatch(word) is None for word in words], dtype=bool)


def encode_words(words: Sequence[bytes], longest: int | None) -> Any:
    """Words as an array (n × bytes), zeros behind; None: for narrow words."""
    width = LETTERS if longest is None else longest
    letters = np.array(words, dtype=f"S{width}").view(np.uint8).reshape(len(words), width)
    if longest is not None:
        return letters
    coded = ((letters & 31).astype(np.uint64) << _SHIFTS).sum(axis=1, dtype=np.uint64)
    return coded.astype("<u8")[:, None].view(np.uint8)[:, :NARROW_BYTES]


def decode_words(rows: Any, longest: int | None) -> tuple[list[bytes], Any]:
    """The words again, and which rows look like one at all."""
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
    """A cell as numbers: the first has how many words are in it above some bytes of their codes, others have codes.

    Sums outgrow a code by `count_bits`, which are left free above each.
    """

    text_bytes: int
    parties: int

    @property
    def count_bits(self) -> int:
        """Bits of how many are in a cell, over all parties."""
        return (MOST_IN_A_CELL * self.parties).bit_length()

    @property
    def width(self) -> int:
        """Bytes of a code in a number of its own."""
        return (EXACT_BITS - self.count_bits) // 8

    @property
    def beside(self) -> int:
        """Bytes of a code in the first number."""
        return max(0, EXACT_BITS - 2 * self.count_bits) // 8

    @property
    def numbers(self) -> int:
        """Numbers of a cell."""
        return 1 + -(-max(0, self.text_bytes + 1 - self.beside) // self.width)

    @property
    def code_bytes(self) -> int:
        """Bytes of a word, of its check, and of nothing."""
        return self.beside + (self.numbers - 1) * self.width

    @property
    def check_bytes(self) -> int:
        """What is left for a check; whether a cell holds one word shows also in where it lies."""
        return min(MOST_CHECKED, self.code_bytes - self.text_bytes)

    @property
    def most(self) -> Any:
        """What each part of a code is below."""
        return 1 << 8 * np.array([self.beside, *[self.width] * (self.numbers - 1)])

    def packed(self, table: Any) -> Any:
        """From (cells × 1 + numbers), how many and sums of codes, to (cells × numbers)."""
        sums = table[:, 1:].copy()
        sums[:, 0] += table[:, 0] << self._above
        return sums

    def unpacked(self, total: Any) -> Any:
        """The way back, also from a sum over parties."""
        sums = np.asarray(total, dtype=np.int64)
        first = sums[:, :1]
        return np.concatenate([first >> self._above, first & ((1 << self._above) - 1), sums[:, 1:]], axis=1)

    def as_numbers(self, payload: Any) -> Any:
        """Bytes (… × code_bytes) as the parts of a code (… × numbers)."""
        rest = payload[..., self.beside :].reshape(*payload.shape[:-1], self.numbers - 1, self.width)
        return np.concatenate([_joined(payload[..., None, : self.beside]), _joined(rest)], axis=-1)

    def as_bytes(self, codes: Any) -> Any:
        """Parts of codes (n × numbers) as bytes (n × code_bytes)."""
        first, rest = _apart(codes[:, :1], self.beside), _apart(codes[:, 1:], self.width)
        return np.concatenate([first, rest], axis=1)

    @property
    def _above(self) -> int:
        return EXACT_BITS - self.count_bits


def _joined(parts: Any) -> Any:
    """Bytes along the last axis as one number, the lowest first."""
    return (parts.astype(np.int64) << (8 * np.arange(parts.shape[-1]))).sum(axis=-1)


def _apart(numbers: Any, width: int) -> Any:
    parts = (numbers[..., None] >> (8 * np.arange(width))) & 255
    return parts.astype(np.uint8).reshape(len(numbers), numbers.shape[1] * width)


@dataclass(frozen=True, slots=True)
class DecodedWords:
    """Words, at how many parties each is, numbers to sort them by, and whether these are all words.

    The order follows from keyed hashes, and says nothing to whoever lacks the key.
    """

    words: list[bytes]
    holders: Any
    order: Any
    is_whole: bool


@dataclass(frozen=True, slots=True)
class EncodedWords:
    """Of each word its three cells (n × 3), what is told of it (n × bytes: text and a check), and its order."""

    places: Any
    payload: Any
    order: Any

    def some(self, indices: list[int]) -> EncodedWords:
        """Of some of the words."""
        return EncodedWords(self.places[indices], self.payload[indices], self.order[indices])


@dataclass(frozen=True, slots=True)
class Cells:
    """Three times `size` cells in exchange `number`, for words of up to `longest` bytes; None: for narrow ones."""

    number: int
    size: int
    longest: int | None
    parties: int

    @staticmethod
    def enough_for(words: float) -> int:
        """The size for about so many words: fewer than 1.222 cells per word could not be read."""
        return int(1.26 * words + 8 * words**0.5 + 48) // COPIES

    @property
    def is_wide(self) -> bool:
        """Whether words are told letter by letter in bytes."""
        return self.longest is not None

    @property
    def text_bytes(self) -> int:
        """Bytes of a word."""
        return NARROW_BYTES if self.longest is None else self.longest

    @property
    def packing(self) -> Packing:
        """How a cell is written."""
        return Packing(self.text_bytes, self.parties)

    @property
    def shape(self) -> tuple[int, int]:
        """Of what a party adds."""
        return COPIES * self.size, self.packing.numbers

    def filled(self, key: bytes, words: Sequence[bytes], names: Any) -> Any:
        """What a party adds for its words, which have these names."""
        told = self._told(key, words, names)
        table = np.zeros((self.shape[0], self.packing.numbers + 1), dtype=np.int64)
        codes = self.packing.as_numbers(told.payload[:, None, :] ^ self._pads(key)[told.places])
        self._add(table, told.places, codes, np.ones(len(words), dtype=np.int64))
        if table[:, 0].max(initial=0) > MOST_IN_A_CELL:
            raise PartyError(
                f"More than {MOST_IN_A_CELL} words of a party met in one cell, which chance does not do. Nothing was "
                "sent. Check that all parties have the same key, and agree again with a fresh one."
            )
        return self.packing.packed(table)

    def read(self, key: bytes, total: Any, naming: Naming) -> DecodedWords:
        """The words in the sum of what was added; `naming` gives the names of words under the same key."""
        left = self.packing.unpacked(np.reshape(total, self.shape))
        pads = self._pads(key)
        words: list[bytes] = []
        holders, orders = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for found, told, counts in self._alone(key, left, pads, naming):
            words += found
            holders.append(counts)
            orders.append(told.order)
            self._add(left, told.places, self.packing.as_numbers(told.payload[:, None, :] ^ pads[told.places]), -counts)
            if len(words) > len(left):
                break
        return DecodedWords(words, np.concatenate(holders), np.concatenate(orders), not left.any())

    def _alone(
        self, key: bytes, left: Any, pads: Any, naming: Naming
    ) -> Iterator[tuple[list[bytes], EncodedWords, Any]]:
        """Words that are by themselves in a cell, then those in cells that others were taken out of, and so on."""
        changed = np.arange(len(left))
        while True:
            at = changed[left[changed, 0] > 0]
            at = at[(left[at, 1:] % left[at, :1] == 0).all(axis=1)]
            codes = left[at, 1:] // left[at, :1]
            fits = ((codes >= 0) & (codes < self.packing.most)).all(axis=1)
            at, payload = at[fits], self.packing.as_bytes(codes[fits]) ^ pads[at[fits]]
            words, are_words = decode_words(payload[:, : self.text_bytes], self.longest)
            at, payload = at[are_words], payload[are_words]
            told = self._told(key, words, naming(words))
            genuine = (payload == told.payload).all(axis=1) & (told.places == at[:, None]).any(axis=1)
            first = list({words[index]: index for index in np.flatnonzero(genuine).tolist()}.values())
            if not first:
                return
            found = told.some(first)
            yield [words[index] for index in first], found, left[at[first], 0]
            changed = np.unique(found.places)

    def _told(self, key: bytes, words: Sequence[bytes], names: Any) -> EncodedWords:
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
        """Add each word's count, and count times code, to its three cells."""
        at = places.reshape(-1)
        np.add.at(table[:, 0], at, np.repeat(counts, COPIES))
        weighted = (codes * counts[:, None, None]).reshape(len(at), codes.shape[-1])
        for number in range(weighted.shape[1]):
            np.add.at(table[:, number + 1], at, weighted[:, number])
