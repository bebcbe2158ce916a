"""Client side of a masked sum: what a party draws, checks and answers in each phase.

    y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) − Σ_{v<u} PRG(s_uv)   mod 2⁶⁴

Party u draws the seed b_u itself. Only u and v can compute the secret s_uv. Both are used for this sum only. Party u
holds one share of b_v and one of v's mask key for every other party v, and reveals one of the two. The list of
survivors decides which one. The party answers one list only, and its answer can be read once t parties have answered
that list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong.core.interfaces import Message
from partsong.core.states import state
from partsong.privacy.randomness import Source
from partsong.secure_aggregation.crypto import (
    KEY_BYTES,
    SHARE_BYTES,
    KeyPair,
    add_mask,
    derive_key,
    generate_key_pair,
    pair_stream,
    public_key,
    seed_stream,
    shared_secrets,
    verifying_key,
)
from partsong.secure_aggregation.messages import (
    KEYS,
    SHARES,
    UNMASKING,
    UPLOAD,
    AdmittedParties,
    AdvertisedKeys,
    ProtocolParams,
    Roster,
    SetupGroup,
    SumContext,
    UploadHeader,
    admit,
    chunks,
    mask_transcript,
    parse_names,
    sign_message,
    split_relayed,
    survivors_transcript,
)
from partsong.secure_aggregation.secret_sharing import (
    KINDS,
    Route,
    Secrets,
    SurvivorList,
    build_answer,
    build_shares_body,
    open_shares,
    pair_secrets,
    sealing_keys,
    seed_commitment,
    split_among,
)


@state("secure.client-setup")
@dataclass(frozen=True, slots=True)
class ClientSetup:
    """What a party keeps after a set-up.

    `pairs` are the secrets that it shares with each other party. For each remaining sum, by round, `own` has the
    party's own secrets and `held` its shares of all parties' secrets, concatenated (seed, then key; dealer by dealer).
    """

    group: SetupGroup
    pairs: Mapping[str, bytes] = field(repr=False)
    own: Mapping[int, Secrets] = field(repr=False)
    held: Mapping[int, bytes] = field(repr=False)

    def shares(self, sum_context: SumContext, survivors: Sequence[str]) -> bytes:
        """Return one share for each party of the sum: of its seed if it survived, else of its key."""
        both = chunks(self.held[sum_context.params.index], len(KINDS) * SHARE_BYTES)
        held = dict(zip(self.group.dealers, both, strict=True))
        parts = {True: slice(0, SHARE_BYTES), False: slice(SHARE_BYTES, None)}
        return b"".join(held[name][parts[name in survivors]] for name in sum_context.params.participants)

    def after_round(self, index: int) -> ClientSetup | None:
        """Return the set-up without the secrets of sums up to this round; None if no sum remains."""
        own = {at: secrets for at, secrets in self.own.items() if at > index}
        return ClientSetup(self.group, self.pairs, own, {at: self.held[at] for at in own}) if own else None


@state("secure.client-identity")
@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """What a party keeps between sums: its signing key, the others' verifying keys and the last round it was in."""

    party: str
    signing: bytes = field(repr=False)
    roster: Roster
    is_pinned: bool
    last_round: int = -1
    setup: ClientSetup | None = None


@state("secure.client-upload")
@dataclass(frozen=True, slots=True)
class UploadDraft:
    """The vector that a party will add, and the protocol parameters it was asked with."""

    params: ProtocolParams
    header: UploadHeader
    vector: Any = field(repr=False)


@state("secure.client-keys")
@dataclass(frozen=True, slots=True)
class SetupDraft:
    """A set-up in progress: what the party has drawn, and what it keeps until the shares of all parties arrive."""

    share_key: KeyPair
    secrets: tuple[Secrets, ...] = field(repr=False)
    admitted: AdmittedParties | None = None
    pairs: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    keys: Mapping[Route, bytes] = field(default_factory=dict, repr=False)
    held: bytes = field(default=b"", repr=False)


@state("secure.client")
@dataclass(frozen=True, slots=True)
class ClientState:
    """A party during a sum. `phases` lists the phases it may be asked for next; it answers each once.

    `participants`: the parties with which it has masked; empty before.
    """

    identity: ClientIdentity
    draft: UploadDraft
    source: Source
    phases: tuple[int, ...] = (KEYS, UPLOAD)
    setup_draft: SetupDraft | None = None
    participants: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()

    @property
    def setup(self) -> ClientSetup:
        """The set-up that the sum belongs to."""
        assert self.identity.setup is not None
        return self.identity.setup

    @property
    def sum_context(self) -> SumContext:
        """The sum, once the party has masked its upload."""
        return self.setup.group.sum_context(self.draft.params.index, self.participants)


def answer(phase: int, state: ClientState, reply: Message) -> tuple[ClientState, Message]:
    """Answer a phase. A phase that was answered or skipped is refused."""
    if phase not in state.phases:
        raise state.draft.params.message_context(phase).party_error(
            state.identity.party,
            f"it was asked for phase {phase} out of turn. A party answers each phase once, in order: two answers could "
            "reveal both secrets of a party.",
        )
    state, message = (_advertise, _share, _mask, _reveal)[phase](state, reply)
    return replace(state, phases=(phase + 1,) if phase < UNMASKING else ()), message


def _advertise(state: ClientState, reply: Message) -> tuple[ClientState, Message]:
    """Draw the keys and seeds for all sums of a batch, and advertise the public keys."""
    draw, params = state.source, state.draft.params
    share_key = generate_key_pair(draw)
    secrets = tuple(Secrets(draw(KEY_BYTES), draw(KEY_BYTES)) for _ in range(params.batch))
    state = replace(state, setup_draft=SetupDraft(share_key, secrets))
    body = _advertised_keys(state.identity, share_key, secrets).to_bytes()
    return state, sign_message(params.message_context(KEYS), state.identity.party, state.identity.signing, body)


def _share(state: ClientState, reply: Message) -> tuple[ClientState, Message]:
    """Split all secrets into shares for the parties whose keys arrived, sealed for each."""
    params, identity, setup_draft = state.draft.params, state.identity, _setup_draft(state)
    admitted = admit(params, identity.roster, split_relayed(reply), identity.is_pinned)
    own = admitted.adverts.get(identity.party)
    if own != _advertised_keys(identity, setup_draft.share_key, setup_draft.secrets):
        raise params.message_context(SHARES).party_error(
            identity.party, "the server relays other keys as those of this party."
        )
    holdings = split_among(admitted, params.threshold, state.source, setup_draft.secrets)
    secrets = pair_secrets(identity.party, setup_draft.share_key.private, admitted)
    keys = sealing_keys(identity.party, secrets, admitted.transcript)
    pairs = {name: derive_key(secret, "answers", admitted.transcript) for name, secret in secrets.items()}
    body = build_shares_body(identity.party, holdings, keys)
    message = sign_message(params.message_context(SHARES, admitted.transcript), identity.party, identity.signing, body)
    # All keys are derived from it now, so the private share key is not kept.
    setup_draft = SetupDraft(KeyPair(b"", b""), setup_draft.secrets, admitted, pairs, keys, holdings[identity.party])
    identity = replace(identity, roster={**identity.roster, **admitted.roster})
    return replace(state, setup_draft=setup_draft, identity=identity), message


def _mask(state: ClientState, reply: Message) -> tuple[ClientState, Message]:
    """Mask the vector, once the shares of all parties in the sum are held."""
    draft = state.draft
    if state.setup_draft is None:
        setup, participants = _existing_setup(state), draft.params.participants
    else:
        setup = _complete_setup(state, reply)
        participants = setup.group.dealers
    sum_context, identity = setup.group.sum_context(draft.params.index, participants), state.identity
    sum_context.params.require_enough(UPLOAD, participants, setup.group.dealers)
    own, transcript = setup.own[draft.params.index], mask_transcript(sum_context, draft.header.common)
    masked = draft.vector.copy()
    add_mask(masked, seed_stream(own.seed, transcript))
    publics = {name: sum_context.mask_key(name) for name in participants if name != identity.party}
    for other, secret in shared_secrets(own.key, publics).items():
        # Of two parties one adds the mask and the other subtracts it, so it cancels in the sum.
        add_mask(masked, pair_stream(secret, identity.party, other, transcript), negated=other < identity.party)
    message = sign_message(
        sum_context.message_context(UPLOAD), identity.party, identity.signing, masked, draft.header.to_bytes()
    )
    # Without its own secrets of this sum, the party cannot mask a second upload with them.
    kept = {index: one for index, one in setup.own.items() if index != draft.params.index}
    identity = replace(identity, setup=replace(setup, own=kept))
    emptied, names = replace(draft, vector=np.empty(0, np.uint64)), sum_context.params.participants
    return replace(state, identity=identity, draft=emptied, setup_draft=None, participants=names), message


def _reveal(state: ClientState, reply: Message) -> tuple[ClientState, Message]:
    """Reveal one share for each party of the sum, for the only list of survivors that this party answers."""
    sum_context, identity, setup = state.sum_context, state.identity, state.setup
    context, index = sum_context.message_context(UNMASKING), sum_context.params.index
    survivors = _survivors(state, sum_context, reply)
    masks = mask_transcript(sum_context, state.draft.header.common)
    listed = SurvivorList(sum_context, survivors, survivors_transcript(masks, survivors))
    body = build_answer(identity.party, setup.shares(sum_context, survivors), setup.pairs, listed, state.source)
    message = sign_message(context, identity.party, identity.signing, body)
    return replace(state, identity=replace(identity, setup=setup.after_round(index)), survivors=survivors), message


def _advertised_keys(identity: ClientIdentity, share_key: KeyPair, secrets: tuple[Secrets, ...]) -> AdvertisedKeys:
    keys, seeds = (public_key(one.key) for one in secrets), (seed_commitment(one.seed) for one in secrets)
    return AdvertisedKeys(verifying_key(identity.signing), share_key.public, b"".join(keys), b"".join(seeds))


def _setup_draft(state: ClientState) -> SetupDraft:
    assert state.setup_draft is not None
    return state.setup_draft


def _existing_setup(state: ClientState) -> ClientSetup:
    """Return the set-up of an earlier sum that this sum uses; raise PartyError if there is none."""
    params, identity = state.draft.params, state.identity
    setup, context = identity.setup, params.message_context(UPLOAD)
    if setup is None or params.index not in setup.own or params.settings != setup.group.params.settings:
        raise context.party_error(
            identity.party,
            "it was asked for a masked upload, but has no keys for this sum: it was in no set-up for this round, or "
            "this sum is already over. Nothing was sent. Start with keys (phase 0).",
        )
    strangers = sorted(set(params.participants) - set(setup.group.dealers))
    if strangers or identity.party not in params.participants:
        raise context.party_error(
            (strangers or [identity.party])[0],
            f"it cannot be in a sum with {identity.party!r} without a set-up that includes both. Nothing was sent.",
        )
    return setup


def _complete_setup(state: ClientState, reply: Message) -> ClientSetup:
    """Finish a set-up: open the relayed shares and check each against its dealer's commitments."""
    params, setup_draft, party = state.draft.params, _setup_draft(state), state.identity.party
    admitted = setup_draft.admitted
    assert admitted is not None
    bodies = {name: message["body"].tobytes() for name, message in split_relayed(reply).items()}
    strangers = sorted(bodies.keys() - admitted.adverts.keys())
    if strangers or party not in bodies:
        raise params.message_context(UPLOAD).party_error(
            (strangers or [party])[0], "the server relays shares of other parties than those whose keys it relayed."
        )
    params.require_enough(SHARES, bodies, admitted.adverts)
    context = params.message_context(SHARES, admitted.transcript)
    held = {
        name: setup_draft.held
        if name == party
        else open_shares(context, (name, party), body, admitted, setup_draft.keys[name, party])
        for name, body in bodies.items()
    }
    group = SetupGroup(params, admitted, tuple(bodies))
    by_sum = zip(*(chunks(shares, len(KINDS) * SHARE_BYTES) for shares in held.values()), strict=True)
    own = dict(zip(group.rounds, setup_draft.secrets, strict=True))
    return ClientSetup(group, setup_draft.pairs, own, dict(zip(group.rounds, map(b"".join, by_sum), strict=True)))


def _survivors(state: ClientState, sum_context: SumContext, reply: Message) -> tuple[str, ...]:
    """Return the server's list of survivors; raise an error if it would single out a party."""
    party, participants = state.identity.party, sum_context.params.participants
    context = sum_context.message_context(UNMASKING)
    try:
        survivors = tuple(sorted(parse_names(reply["survivors"])))
    except (KeyError, ValueError) as error:
        raise context.party_error(party, "the server's list of survivors is unreadable.") from error
    odd = sorted(set(survivors) - set(participants))
    if odd or len(set(survivors)) != len(survivors):
        raise context.party_error(
            (odd or survivors)[0], "it is listed as a survivor, but is not in this sum exactly once."
        )
    if party not in survivors:
        raise context.party_error(
            party,
            "the server lists this party as dropped, although it has sent its masked upload. The upload stays masked, "
            "and the party leaves this sum.",
        )
    sum_context.params.require_enough(UPLOAD, survivors, participants)
    return survivors
