"""Secure aggregation by masked sums: the server learns the sum of the uploads and no single one.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from partsong.core.interfaces import Aggregation, Layout, Message, Reducible, ReductionContext, Shard
from partsong.errors import CompositionError, ParameterError, PartyError, PredictableMasks, TooFewParties, UploadError
from partsong.privacy.randomness import Source, system_source
from partsong.secure_aggregation import client, crypto, server
from partsong.secure_aggregation.client import ClientIdentity, ClientState, UploadDraft
from partsong.secure_aggregation.fixed_point import Encoding, Grid
from partsong.secure_aggregation.messages import (
    KEYS,
    PHASES,
    UPLOAD,
    ProtocolParams,
    Roster,
    UploadHeader,
    describe_contents,
)
from partsong.secure_aggregation.server import KeyDirectory, ServerState

MAX_BATCH = 1024
"""Largest batch of a set-up, whose shares are all sent at once."""


@dataclass(frozen=True, slots=True)
class SecureSum:
    """Σ_p lift(upload_p) under masks that cancel; parties may drop out in every phase.

    Each sum takes two exchanges (masked upload, unmasking). The set-up of a `batch` of sums takes two more (keys,
    shares).

    `bound`, `bounds` for single arrays by name, and `weight_bound` are public: a party refuses to send a number beyond
    them. They apply to lift(upload), which is multiplied by the weight in a weighted mean. They set the error,
    n·2^−(e+1) for n parties in the run, with the largest e for which n·bound·2^e < 2⁶² (see `error` and `summary`).

    t = ⌊majority·n⌋ + 1 of the n parties of a set-up can reconstruct a secret. Fewer than t of them together with an
    honest-but-curious server learn the sum over the others and no more. The same holds for a malicious server with c
    parties if t exceeds (n + c)/2: majority = 1/2 covers c = 0, and 2/3 covers c < n/3. The sum is over at least
    `fewest` parties. A new set-up is made when the batch is used up, or for parties that were not in the last one.

    `roster`: the verifying keys of all parties, agreed on beforehand. Without it a party is trusted on first use, and a
    server that is malicious from the start can replace keys. `context`: a hash of what else all parties must have
    received alike; with different hashes there is no sum.
    Adversaries and proofs: docs/reference/secure-aggregation.md.
    """

    bound: float = 1e9
    bounds: Mapping[str, float] = field(default_factory=dict)
    weight_bound: float = 1e9
    majority: float = 0.5
    fewest: int = 3
    batch: int = 16
    roster: Roster | None = None
    context: bytes = b""
    source: Source = system_source
    phases: int = field(default=len(PHASES), init=False)
    hides_uploads: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        for bound in (self.bound, self.weight_bound, *self.bounds.values()):
            Grid(bound, 1)
        if not 0.5 <= self.majority < 1:
            raise ParameterError(
                f"majority must be at least 0.5 and below 1; got {self.majority}. With less, two lists of survivors "
                "could both get enough answers.",
                parameter="majority",
            )
        if not _is_whole(self.fewest) or self.fewest < 3:
            raise ParameterError(
                f"fewest must be an integer, 3 or more; got fewest={self.fewest!r}. In a sum of two parties, each "
                "knows what the other has added.",
                parameter="fewest",
            )
        if not _is_whole(self.batch) or not 1 <= self.batch <= MAX_BATCH:
            raise ParameterError(
                f"batch must be an integer from 1 to {MAX_BATCH}; got batch={self.batch!r}.",
                parameter="batch",
            )
        crypto.require_cryptography()
        if self.source is not system_source:
            warnings.warn(
                "The masks do not come from the operating system's random source. Anyone who can repeat the source can "
                "remove them, so they hide nothing. Use this in tests only.",
                PredictableMasks,
                stacklevel=3,
            )

    def threshold(self, parties: int) -> int:
        """Return t = ⌊majority·n⌋ + 1."""
        # 2/3 as a float is slightly below 2/3: the floor of its exact product with 3 would be 1.
        return min(parties, math.floor(Fraction(self.majority).limit_denominator(10**6) * parties) + 1)

    def encoding(self, parties: int) -> Encoding:
        """Return the fixed-point encoding of a run of this many parties; it does not depend on absences."""
        return Encoding(lambda name: Grid(self.bound_of(name), parties), Grid(self.weight_bound, parties))

    def bound_of(self, name: str) -> float:
        """Return the largest number that a party adds in an array."""
        return self.bounds.get(name, self.bound)

    def error(self, name: str, parties: int) -> float:
        """Return the largest error of an entry in the sum of an array, before it is rounded to its number type."""
        return self.encoding(parties).grid_of(name).error

    def summary(self, names: Sequence[str], parties: int) -> str:
        """Return the bounds and errors as text."""
        encoding = self.encoding(parties)
        grids = {**{name: encoding.grid_of(name) for name in names}, "weight": encoding.weight}
        return "\n".join(
            f"{name}: numbers within ±{grid.bound:g}, in steps of 2^{-grid.exponent}; a sum over {parties} parties is "
            f"off by at most {grid.error:.2g}, plus the rounding of its number type"
            for name, grid in grids.items()
        )

    def check(self, aggregation: Aggregation) -> None:
        """Refuse an aggregation that is not a sum: single uploads are hidden."""
        if not isinstance(aggregation, Reducible):
            raise CompositionError(
                f"{type(aggregation).__name__} reads individual uploads, but SecureSum reveals only sums. Use Mean or "
                'WeightedMean (for FNMF: the method "fnmf-by-sums"), or turn off secure aggregation.'
            )

    def setup_party(self, party: str, secret: int, layout: Layout) -> ClientIdentity:
        """Return a party's signing key, derived from the secret of its shard, and the keys of the roster."""
        if len(layout.parties) < self.fewest:
            raise ParameterError(
                f"A masked sum needs at least {self.fewest} parties, and there are {len(layout.parties)}: "
                f"{', '.join(layout.parties)}. With two, each would know what the other has sent. Use more parties, or "
                "turn off secure aggregation.",
                parameter="secure_aggregation",
            )
        if self.roster is not None and not secret:
            raise ParameterError(
                f"Party {party!r} has no secret, so anyone could sign for it and its key in the roster means nothing. "
                "Pass its shard a secret of 256 random bits."
            )
        signing = crypto.signing_key(secret, party)
        if self.roster is not None and self.roster.get(party) != crypto.verifying_key(signing):
            raise ParameterError(
                f"Party {party!r} is not in the roster with the key that follows from its secret. Make a new roster "
                "from the parties' present keys."
            )
        return ClientIdentity(party, signing, dict(self.roster or {}), self.roster is not None)

    def start(
        self, party_state: ClientIdentity, upload: Message, aggregation: Aggregation, context: ReductionContext
    ) -> ClientState:
        params, party = self._params(context), party_state.party
        if context.index <= party_state.last_round:
            raise PartyError(
                f"Party {party!r} was asked for a masked sum of round {context.index} after that of round "
                f"{party_state.last_round}. A round is summed once: two sums of it over different parties would differ "
                "by single uploads."
            )
        assert isinstance(aggregation, Reducible)
        lifted = aggregation.lift(upload)
        vector = self.encoding(len(context.layout.parties)).encode(party, lifted)
        header = UploadHeader(_model_fingerprint(context.model), describe_contents(lifted))
        return ClientState(party_state, UploadDraft(params, header, vector), self.source)

    def client_step(self, phase: int, state: ClientState, reply: Message) -> tuple[ClientState, Message]:
        """Send keys, shares, the masked upload, and one share of each party; a sum starts with keys or the upload."""
        return client.answer(phase, state, reply)

    def finish_party(self, state: ClientState) -> ClientIdentity:
        """Keep the known keys, the round and the set-up; drop the secrets of the sum."""
        identity, index = state.identity, state.draft.params.index
        return replace(
            identity, last_round=index, setup=None if identity.setup is None else identity.setup.after_round(index)
        )

    def first_phase(self, state: KeyDirectory | None, context: ReductionContext) -> int:
        """Return the upload phase if the last set-up can be used for this sum, else the keys phase."""
        return UPLOAD if state is not None and state.serves(self._params(context)) else KEYS

    def server_step(
        self,
        phase: int,
        inbox: Mapping[str, Message],
        state: ServerState | KeyDirectory | None,
        context: ReductionContext,
    ) -> tuple[ServerState, Message]:
        """Relay, add up, remove masks; `state` is a KeyDirectory before a sum and a ServerState during it."""
        if not isinstance(state, ServerState):
            state = self._server_state(phase, state or KeyDirectory({}), context)
        return server.serve(phase, inbox, state)

    def result(
        self, state: ServerState, aggregation: Aggregation, context: ReductionContext
    ) -> tuple[KeyDirectory, Message, tuple[str, ...]]:
        """Return the key directory to keep, the aggregate, and the parties whose uploads are in it.

        Raise UploadError if uploads within their bounds cannot add up to it.
        """
        assert isinstance(aggregation, Reducible)
        contents = [header.contents for header in state.headers.values()]
        try:
            summed = self.encoding(len(context.layout.parties)).decode(state.total, contents)
        except UploadError as error:
            raise UploadError(
                f"The masked sum of round {context.index} over {', '.join(state.survivors)} is invalid: {error} Check "
                "that all of them run the same version of partsong. Then start a new run from another seed, without "
                "parties that you do not trust."
            ) from error
        return state.directory, aggregation.lower(summed), state.survivors

    def _server_state(self, phase: int, directory: KeyDirectory, context: ReductionContext) -> ServerState:
        params, is_pinned = self._params(context), self.roster is not None
        if phase == UPLOAD and directory.group is not None:
            return ServerState(
                directory, params, is_pinned, sum_context=directory.group.sum_context(params.index, params.participants)
            )
        known = directory.roster if self.roster is None else self.roster
        return ServerState(KeyDirectory(dict(known)), params, is_pinned)

    def _params(self, context: ReductionContext) -> ProtocolParams:
        participants = tuple(sorted(set(context.participants)))
        if len(participants) < self.fewest:
            raise TooFewParties(
                f"The masked sum of round {context.index} needs at least {self.fewest} parties, and has "
                f"{len(participants)} ({', '.join(participants)}). Nothing was sent."
            )
        settings = crypto.fingerprint(
            *(f"{float(bound)!r}" for bound in (self.bound, self.weight_bound, self.majority, self.fewest)),
            *(f"{name}: {float(bound)!r}" for name, bound in sorted(self.bounds.items())),
            context.layout.seed,
            self.context,
            *context.layout.parties,
        )
        threshold = self.threshold(len(participants))
        return ProtocolParams(context.index, participants, threshold, self.fewest, settings, operator.index(self.batch))


def build_roster(shards: Sequence[Shard]) -> dict[str, bytes]:
    """Return the verifying keys of all parties in one process; across processes each party sends its own."""
    return {s.name: crypto.verifying_key(crypto.signing_key(s.secret, s.name)) for s in shards}


def _is_whole(number: Any) -> bool:
    try:
        operator.index(number)
    except TypeError:
        return False
    return True


def _model_fingerprint(model: Message) -> bytes:
    parts: list[bytes | str | int] = [float(model.weight).hex()]
    for name, array in sorted(model.arrays.items()):
        numbers: Any = array.detach().cpu().double().numpy() if hasattr(array, "detach") else np.asarray(array)
        parts += [name, str(numbers.dtype), str(numbers.shape), np.ascontiguousarray(numbers).tobytes()]
    return crypto.fingerprint("model", *parts)
