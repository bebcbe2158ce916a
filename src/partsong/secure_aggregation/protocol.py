"""Masked sums: the server learns the sum of the uploads and nothing of a single one (Bonawitz et al., CCS 2017)."""

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
"""Of a set-up: the shares of all of them are sent at once."""


@dataclass(frozen=True, slots=True)
class SecureSum:
    """Σ_p lift(upload_p) under masks that cancel: two exchanges for each sum (masked upload, unmasking), after two for
    the set-up of a `batch` of them (keys, shares); parties may drop out in each.

    `bound`, or `bounds` for arrays by name, and `weight_bound` are public: a party refuses to send a number beyond
    them. They are of lift(upload), which for weighted means is multiplied with the weight, and set the error,
    n·2^−(e+1) for n parties in the run, with the largest e for which n·bound·2^e < 2⁶² (see `error` and `told`).

    A secret is given back by t = ⌊majority·n⌋ + 1 of the n parties that are asked for a set-up. Less than t of them
    together with an honest-but-curious server learn the sum over the others and no more. So does a server that lies,
    with c parties, if t exceeds (n + c)/2: majority = 1/2 covers c = 0, and 2/3 covers c < n/3. The sum is over at
    least `fewest` parties. A set-up is made anew when its batch is used up, and for parties that were not in it.

    `roster`: everybody's verifying keys, agreed on beforehand; without it a party is known by the first key that it
    sends, which a server that lies from the beginning can exchange. `context`: what all parties must have been told
    alike beside that, as a hash; with another one there is no sum.
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
                f"majority must be from 0.5 to below 1; got {self.majority}. With less, two lists of survivors could "
                "both find enough signatures.",
                parameter="majority",
            )
        if not _is_whole(self.fewest) or self.fewest < 3:
            raise ParameterError(
                f"A masked sum is over a whole number of parties, 3 or more; got fewest={self.fewest!r}. Of two, each "
                "knows what the other has added.",
                parameter="fewest",
            )
        if not _is_whole(self.batch) or not 1 <= self.batch <= MAX_BATCH:
            raise ParameterError(
                f"A set-up is for a whole number of sums, from 1 to {MAX_BATCH}; got batch={self.batch!r}.",
                parameter="batch",
            )
        crypto.require_cryptography()
        if self.source is not system_source:
            warnings.warn(
                "These masks come from another source than the operating system's: whoever can repeat it can remove "
                "them all, and they hide nothing. For tests alone.",
                PredictableMasks,
                stacklevel=3,
            )

    def threshold(self, parties: int) -> int:
        """t = ⌊majority·n⌋ + 1."""
        return min(parties, math.floor(Fraction(self.majority).limit_denominator(10**6) * parties) + 1)

    def encoding(self, parties: int) -> Encoding:
        """How numbers become whole ones in a run of so many parties, whoever misses a sum of it."""
        return Encoding(lambda name: Grid(self.bound_of(name), parties), Grid(self.weight_bound, parties))

    def bound_of(self, name: str) -> float:
        """The largest number that a party adds in an array."""
        return self.bounds.get(name, self.bound)

    def error(self, name: str, parties: int) -> float:
        """How far an entry of the sum of an array can be off, before it is rounded to its number type."""
        return self.encoding(parties).grid_of(name).error

    def summary(self, names: Sequence[str], parties: int) -> str:
        """Bounds and errors, for people."""
        encoding = self.encoding(parties)
        grids = {**{name: encoding.grid_of(name) for name in names}, "weight": encoding.weight}
        return "\n".join(
            f"{name}: numbers within ±{grid.bound:g}, in steps of 2^{-grid.exponent}; a sum over {parties} parties is "
            f"off by at most {grid.error:.2g}, and by the rounding of its number type"
            for name, grid in grids.items()
        )

    def check(self, aggregation: Aggregation) -> None:
        """Only a sum can be formed of uploads that nobody sees."""
        if not isinstance(aggregation, Reducible):
            raise CompositionError(
                f"{type(aggregation).__name__} reads individual uploads, but SecureSum lets only sums through. Use "
                'Mean or WeightedMean (for FNMF: the method "fnmf-by-sums"), or no masks.'
            )

    def setup_party(self, party: str, secret: int, layout: Layout) -> ClientIdentity:
        """A party's signing key, from the secret of its shard, and whom it knows."""
        if len(layout.parties) < self.fewest:
            raise ParameterError(
                f"A masked sum needs at least {self.fewest} parties, and there are {len(layout.parties)}: "
                f"{', '.join(layout.parties)}. Each of two would know what the other has sent. Run without masks, or "
                "with more parties.",
                parameter="secure_aggregation",
            )
        if self.roster is not None and not secret:
            raise ParameterError(
                f"Party {party!r} has no secret, so that everybody could sign for it and its key in the roster means "
                "nothing. Give its shard a secret of 256 random bits."
            )
        signing = crypto.signing_key(secret, party)
        if self.roster is not None and self.roster.get(party) != crypto.verifying_key(signing):
            raise ParameterError(
                f"Party {party!r} is not in the roster with the key that follows from its secret. Make the roster from "
                "the keys that the parties have now."
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
        """Keys, shares, the masked upload, and one share of each party; a sum begins with keys or with the upload."""
        return client.answer(phase, state, reply)

    def finish_party(self, state: ClientState) -> ClientIdentity:
        """Whom it knows by now, that this round is over, and its place in the set-up; secrets of the sum are let go."""
        identity, index = state.identity, state.draft.params.index
        return replace(
            identity, last_round=index, setup=None if identity.setup is None else identity.setup.after_round(index)
        )

    def first_phase(self, state: KeyDirectory | None, context: ReductionContext) -> int:
        """The upload where the last set-up does for this sum, else keys."""
        return UPLOAD if state is not None and state.serves(self._params(context)) else KEYS

    def server_step(
        self,
        phase: int,
        inbox: Mapping[str, Message],
        state: ServerState | KeyDirectory | None,
        context: ReductionContext,
    ) -> tuple[ServerState, Message]:
        """Pass on, add up, remove masks; `state` is the register before a sum, and its desk within."""
        if not isinstance(state, ServerState):
            state = self._server_state(phase, state or KeyDirectory({}), context)
        return server.serve(phase, inbox, state)

    def result(
        self, state: ServerState, aggregation: Aggregation, context: ReductionContext
    ) -> tuple[KeyDirectory, Message, tuple[str, ...]]:
        """The aggregate, and whose uploads are in it; the register is kept. UploadError where it is no sum of uploads
        within their bounds.
        """
        assert isinstance(aggregation, Reducible)
        contents = [header.contents for header in state.headers.values()]
        try:
            summed = self.encoding(len(context.layout.parties)).decode(state.total, contents)
        except UploadError as error:
            raise UploadError(
                f"The masked sum of round {context.index} over {', '.join(state.survivors)} is none: {error} Ask them "
                "which partsong they run; begin anew, from another seed, without whom you do not trust."
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
                f"Only {len(participants)} parties ({', '.join(participants)}) were asked for the masked sum of round "
                f"{context.index}, and {self.fewest} are needed. Nothing was sent."
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
    """Everybody's verifying keys, where all shards are in one process; elsewhere each party tells its own."""
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
