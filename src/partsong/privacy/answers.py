"""Answers to a list of survivors that can be read once t parties have answered the same list, and not before.

Party v seals its shares with a fresh key k_v = f_v(0), a polynomial of degree t − 1, and sends beside them

    f_v(v),   and for each other survivor w   seal(c_vw, f_v(w))   and   c_wv

where c_vw = HKDF(secret of v and w; v, w, list) can be computed by v and w alone, and is told by w alone. So k_v needs
the answers of t parties, v among them, that were shown this one list. Nobody answers two. Proof: docs/masked-sums.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from partsong.privacy.admission import Gathering
from partsong.privacy.envelopes import UNMASKING, chunks, share_bytes, share_of
from partsong.privacy.key_agreement import KEY_BYTES, SEAL_BYTES, derived, seal, unseal
from partsong.privacy.randomness import Source
from partsong.privacy.shamir import SHARE_BYTES, combine, split

PAIR_BYTES = SHARE_BYTES + SEAL_BYTES + KEY_BYTES
"""What an answer has for each other survivor."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of survivors of a sum, and the fingerprint of all that an answer to it is for."""

    gathering: Gathering
    survivors: tuple[str, ...]
    transcript: bytes

    @property
    def answer_bytes(self) -> int:
        """The size of an answer: 33·|P| + 16 + 33 + 81·(|U| − 1)."""
        shares = SHARE_BYTES * len(self.gathering.terms.participants) + SEAL_BYTES
        return shares + SHARE_BYTES + PAIR_BYTES * (len(self.survivors) - 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """One party's answer, read as far as it can be by itself."""

    sealed: bytes = field(repr=False)
    own: bytes = field(repr=False)
    parts: Mapping[str, bytes] = field(repr=False)
    tokens: Mapping[str, bytes] = field(repr=False)


def token(secret: bytes, route: tuple[str, str], listed: Listed) -> bytes:
    """c_vw for the route (v, w): what w tells, so that a part of v's key can be read."""
    return derived(secret, "answer", listed.transcript, *route)


def answered(party: str, shares: bytes, pairs: Mapping[str, bytes], listed: Listed, source: Source) -> bytes:
    """An answer with one share for each party of the sum."""
    circle, others = listed.gathering.circle, [name for name in listed.survivors if name != party]
    key, numbers = source(KEY_BYTES), circle.admitted.numbers
    points = split(int.from_bytes(key, "big"), len(numbers), circle.terms.threshold, source)
    parts = {name: share_bytes(points[numbers[name] - 1]) for name in listed.survivors}
    pieces = [seal(key, shares), parts[party]]
    for name in others:
        pieces += [seal(token(pairs[name], (party, name), listed), parts[name])]
        pieces += [token(pairs[name], (name, party), listed)]
    return b"".join(pieces)


def shares_in(bodies: Mapping[str, bytes], listed: Listed, weights: Mapping[int, int]) -> dict[str, list[bytes]]:
    """The shares of all who have answered, each for all parties of the sum; whoever spoils them is named.

    `weights` are those of t who have answered, by their numbers.
    """
    scene, numbers = listed.gathering.scene(UNMASKING), listed.gathering.circle.admitted.numbers
    answers = {name: _read(name, body, listed) for name, body in bodies.items()}
    holders = [name for name in answers if numbers[name] in weights]
    points = _points(answers, holders, listed)
    found = {}
    for name, answer in answers.items():
        try:
            known = {numbers[holder]: share_of(points[name, holder]) for holder in holders}
            key = combine(known, weights).to_bytes(SHARE_BYTES, "big")
            text = unseal(key[-KEY_BYTES:], answer.sealed)
            if key[0] or text is None:
                raise ValueError("its key does not fit them")
        except ValueError as error:
            raise scene.trouble(name, f"its shares cannot be read ({error}). No upload was revealed.") from error
        found[name] = chunks(text, SHARE_BYTES)
    return found


def _points(answers: Mapping[str, Answer], holders: Sequence[str], listed: Listed) -> dict[tuple[str, str], bytes]:
    """f_v(w) for all v and the holders w; where two do not fit, the one with whom most do not is named."""
    found: dict[tuple[str, str], bytes] = {}
    apart: list[tuple[str, str]] = []
    for name, answer in answers.items():
        for holder in holders:
            part = answer.own if holder == name else unseal(answers[holder].tokens[name], answer.parts[holder])
            if part is None:
                apart.append((name, holder))
            else:
                found[name, holder] = part
    if apart:
        counts = Counter(name for pair in apart for name in set(pair))
        worst = max(counts, key=lambda name: (counts[name], name in dict(apart)))
        others = sorted({name for pair in apart if worst in pair for name in pair} - {worst})
        raise listed.gathering.scene(UNMASKING).trouble(
            worst,
            f"its answer and that of {', '.join(map(repr, others[:5]))} do not fit each other: they were shown other "
            "lists of survivors, or one of them is spoiled. No upload was revealed.",
        )
    return found


def _read(name: str, body: bytes, listed: Listed) -> Answer:
    if len(body) != listed.answer_bytes:
        raise listed.gathering.scene(UNMASKING).trouble(
            name, f"its answer has {len(body)} bytes, not {listed.answer_bytes}. No upload was revealed."
        )
    others = [other for other in listed.survivors if other != name]
    cut = len(body) - PAIR_BYTES * len(others)
    sealed, own, pairs = body[: cut - SHARE_BYTES], body[cut - SHARE_BYTES : cut], chunks(body[cut:], PAIR_BYTES)
    parts = {other: pair[:-KEY_BYTES] for other, pair in zip(others, pairs, strict=True)}
    return Answer(sealed, own, parts, {other: pair[-KEY_BYTES:] for other, pair in zip(others, pairs, strict=True)})
