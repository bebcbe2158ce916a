"""Server side of a masked sum: relay keys and sealed shares, add masked uploads, remove the masks.

Σ_u x_u  =  Σ_u y_u − Σ_u PRG(b_u) − Σ_u Σ_v ± PRG(s_uv)   mod 2⁶⁴,   u over the survivors, v over the dropped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong.core.interfaces import Message
from partsong.core.states import state
from partsong.errors import UploadError
from partsong.secure_aggregation.crypto import (
    KEY_BYTES,
    SHARE_BYTES,
    add_mask,
    combine,
    pair_stream,
    public_key,
    seed_stream,
    shared_secrets,
    weights_at_zero,
)
from partsong.secure_aggregation.messages import (
    NO_WEIGHT,
    SHARES,
    UNMASKING,
    UPLOAD,
    AdmittedParties,
    MessageContext,
    ProtocolParams,
    Roster,
    SetupGroup,
    SumContext,
    UploadHeader,
    admit,
    have_same_shapes,
    header_bytes,
    mask_transcript,
    names_as_array,
    parse_share,
    relay,
    shapes_of,
    survivors_transcript,
    vector_length,
    verify_message,
)
from partsong.secure_aggregation.secret_sharing import (
    KEY,
    KINDS,
    SEED,
    SurvivorList,
    commitments_in,
    read_answers,
    seed_commitment,
    share_commitment,
)


@state("secure.key-directory")
@dataclass(frozen=True, slots=True)
class KeyDirectory:
    """What the server keeps between sums: known keys, and the last set-up.

    Of the set-up these are its `group`, the parties that hold all shares (`present`), and all commitments by dealer.
    """

    roster: Roster
    group: SetupGroup | None = None
    present: tuple[str, ...] = ()
    commitments: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def serves(self, params: ProtocolParams) -> bool:
        """Whether the last set-up can be used for a sum."""
        group = self.group
        if group is None or params.index not in group.rounds[1:] or params.settings != group.params.settings:
            return False
        is_enough = len(params.participants) >= group.params.required_parties(UPLOAD)
        return is_enough and set(params.participants) <= set(self.present)


@state("secure.server")
@dataclass(frozen=True, slots=True)
class ServerState:
    """The server during a sum: the survivors, the headers of their uploads, and the sum so far."""

    directory: KeyDirectory
    params: ProtocolParams
    is_pinned: bool
    admitted: AdmittedParties | None = None
    sum_context: SumContext | None = None
    headers: Mapping[str, UploadHeader] = field(default_factory=dict)
    total: Any = field(default=None, repr=False)

    @property
    def current_sum(self) -> SumContext:
        """The sum and its parties, which are known from phase 2 on."""
        assert self.sum_context is not None
        return self.sum_context

    @property
    def survivors(self) -> tuple[str, ...]:
        """The parties whose uploads are in the sum."""
        return tuple(self.headers)


def serve(phase: int, inbox: Mapping[str, Message], state: ServerState) -> tuple[ServerState, Message]:
    """Process the messages of a phase, and return the reply to all parties."""
    return (_relay_keys, _relay_shares, _add_uploads, _unmask)[phase](inbox, state)


def _relay_keys(inbox: Mapping[str, Message], state: ServerState) -> tuple[ServerState, Message]:
    admitted = admit(state.params, state.directory.roster, inbox, state.is_pinned)
    return replace(state, admitted=admitted), relay(inbox)


def _relay_shares(inbox: Mapping[str, Message], state: ServerState) -> tuple[ServerState, Message]:
    params, admitted = state.params, state.admitted
    assert admitted is not None
    context = params.message_context(SHARES, admitted.transcript)
    params.require_enough(SHARES, inbox, admitted.adverts)
    commitments = {}
    for name, body in _verified_bodies(context, inbox, tuple(admitted.adverts), admitted.roster).items():
        try:
            # A copy: the view would keep the whole body in memory, and in the stored state.
            commitments[name] = commitments_in(body, admitted, params.batch).copy()
        except ValueError as error:
            raise context.party_error(name, f"its shares are unreadable: {error}.") from error
    group = SetupGroup(params, admitted, tuple(commitments))
    directory = KeyDirectory({**state.directory.roster, **admitted.roster}, group, (), commitments)
    return replace(state, directory=directory, sum_context=group.sum_context(params.index, group.dealers)), relay(inbox)


def _add_uploads(inbox: Mapping[str, Message], state: ServerState) -> tuple[ServerState, Message]:
    sum_context = state.current_sum
    context, participants = sum_context.message_context(UPLOAD), sum_context.params.participants
    sum_context.params.require_enough(UPLOAD, inbox, participants)
    bodies = _verified_bodies(context, inbox, participants, sum_context.group.admitted.roster)
    headers = {name: _parse_header(context, name, inbox[name]) for name in bodies}
    _check_consistency(context, headers)
    total = np.zeros(vector_length(next(iter(headers.values())).contents), np.uint64)
    for name, body in bodies.items():
        if len(body) != total.nbytes:
            raise context.party_error(name, f"its upload has {len(body)} bytes, not {total.nbytes}.")
        # uint64 wraps around, which is addition modulo 2⁶⁴, as for the masks.
        total += np.frombuffer(body, "<u8")
    directory = state.directory
    if sum_context.slot == 0:
        directory = replace(directory, present=tuple(bodies))
    state = replace(state, directory=directory, headers=headers, total=total)
    return state, Message({"survivors": names_as_array(state.survivors)}, NO_WEIGHT)


def _unmask(inbox: Mapping[str, Message], state: ServerState) -> tuple[ServerState, Message]:
    sum_context, survivors = state.current_sum, state.survivors
    context, admitted = sum_context.message_context(UNMASKING), sum_context.group.admitted
    sum_context.params.require_enough(UNMASKING, inbox, survivors)
    bodies = _verified_bodies(context, inbox, survivors, admitted.roster)
    masks = mask_transcript(sum_context, next(iter(state.headers.values())).common)
    # Any t answers reconstruct the same secrets; the shares of the others are only checked.
    holders = list(bodies)[: sum_context.params.threshold]
    numbers = admitted.numbers
    weights = weights_at_zero([numbers[name] for name in holders])
    answers = read_answers(
        bodies, SurvivorList(sum_context, survivors, survivors_transcript(masks, survivors)), weights
    )
    revealed = {name: _check_shares(state, name, shares) for name, shares in answers.items()}
    # A copy: if a check below fails, the phase can be served again from the same state.
    total = state.total.copy()
    for dealer in sum_context.params.participants:
        shares = {numbers[name]: revealed[name][dealer] for name in holders}
        secret = combine(shares, weights).to_bytes(SHARE_BYTES, "big")[-KEY_BYTES:]
        # First: removing the mask of a wrong secret would turn the sum into random numbers.
        _check_secret(state, dealer, secret)
        if dealer in survivors:
            add_mask(total, seed_stream(secret, masks), negated=True)
        else:
            _remove_pairs(state, (dealer, secret), masks, total)
    return replace(state, total=total), Message({}, NO_WEIGHT)


def _remove_pairs(state: ServerState, dropped: tuple[str, bytes], masks: bytes, total: Any) -> None:
    """Remove the pairwise masks between the survivors and a dropped party from the sum."""
    party, private = dropped
    publics = {name: state.current_sum.mask_key(name) for name in state.survivors}
    for name, secret in shared_secrets(private, publics).items():
        add_mask(total, pair_stream(secret, name, party, masks), negated=name < party)


def _verified_bodies(
    context: MessageContext, inbox: Mapping[str, Message], participants: Sequence[str], roster: Roster
) -> dict[str, bytes]:
    """Return the bodies of a phase in name order; the senders must be in the sum and have signed them."""
    for name in inbox:
        if name not in participants:
            raise context.party_error(name, "it dropped out of this sum before. What it sends now stays masked.")
    return {name: verify_message(context, name, roster[name], inbox[name]) for name in sorted(inbox)}


def _check_shares(state: ServerState, holder: str, texts: Sequence[bytes]) -> dict[str, int]:
    """Return a holder's shares by dealer, checked against the commitments."""
    sum_context = state.current_sum
    context, slot = sum_context.message_context(UNMASKING), sum_context.slot
    place = sum_context.group.admitted.numbers[holder] - 1
    shares = {}
    for dealer, text in zip(sum_context.params.participants, texts, strict=True):
        kind = SEED if dealer in state.survivors else KEY
        commitment = state.directory.commitments[dealer][slot, place, KINDS.index(kind)].tobytes()
        if share_commitment(kind, slot, (dealer, holder), text) != commitment:
            raise context.party_error(holder, f"its share of a secret of {dealer!r} is not the one that it received.")
        try:
            shares[dealer] = parse_share(text)
        except ValueError as error:
            raise context.party_error(
                dealer, f"it dealt an invalid share to {holder!r}, which did not report it."
            ) from error
    return shares


def _check_secret(state: ServerState, dealer: str, secret: bytes) -> None:
    sum_context, has_survived = state.current_sum, dealer in state.survivors
    announced = sum_context.seed(dealer) if has_survived else sum_context.mask_key(dealer)
    if (seed_commitment(secret) if has_survived else public_key(secret)) != announced:
        raise sum_context.message_context(UNMASKING).party_error(
            dealer,
            "the shares that it dealt do not reconstruct the secret that it committed to, so its masks cannot be "
            "removed. The sum is lost, and no upload was revealed. Leave this party out.",
        )


def _parse_header(context: MessageContext, name: str, message: Message) -> UploadHeader:
    try:
        return UploadHeader.from_bytes(header_bytes(message))
    except (ValueError, UploadError) as error:
        raise context.party_error(name, f"the header of its upload is unreadable ({error}).") from error


def _check_consistency(context: MessageContext, headers: Mapping[str, UploadHeader]) -> None:
    """Require one model, and arrays that can be added; an error names a party that differs from the majority."""
    usual_model = _most_common(headers, lambda header: header.model)
    usual_shapes = _most_common(headers, lambda header: shapes_of(header.contents))
    usual_arrays = _format_arrays(headers[usual_shapes])
    for name, header in headers.items():
        if header.model != headers[usual_model].model:
            raise context.party_error(
                name,
                f"it received another model than {usual_model!r}, and a sum over different models can single out a "
                "party. Its masks do not cancel, and all uploads stay masked. Send one model to all.",
            )
        if not have_same_shapes(header.contents, headers[usual_shapes].contents):
            raise context.party_error(
                name,
                f"it would add {_format_arrays(header)}, but {usual_shapes!r} {usual_arrays}. All uploads stay masked. "
                "All parties must run the same program on the same columns.",
            )


def _most_common(headers: Mapping[str, UploadHeader], of: Callable[[UploadHeader], Hashable]) -> str:
    """Return the first party with the most common value."""
    said = {name: of(header) for name, header in headers.items()}
    most = Counter(said.values()).most_common(1)[0][0]
    return next(name for name, what in said.items() if what == most)


def _format_arrays(header: UploadHeader) -> str:
    return ", ".join(f"{info.name} {'×'.join(map(str, info.shape))}" for info in header.contents) or "nothing"
