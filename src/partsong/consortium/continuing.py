"""A site that moves to a new folder keeps what it has released: a budget is about rows, not about a folder.

Ledger and audit log go on where they were, with the count of refusals, and so do the policy and the key that sites
share; its own keys, runs and results do not come along.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from partsong.consortium.locking import held, is_held
from partsong.consortium.private_folder import make_private
from partsong.consortium.roster import Card
from partsong.consortium.shared_key import SharedKey
from partsong.consortium.site_folder import SiteFolder
from partsong.consortium.toml_text import write
from partsong.consortium.used_folder import CHAINS, KEY, has_had, has_policy, record, require_policy, shared_key_in
from partsong.errors import FileError, ParameterError
from partsong.federation.chain import Chain
from partsong.federation.ledger import SiteLedger
from partsong.federation.policy import Policy
from partsong.federation.refusal_count import FILE as REFUSALS

LEDGER, AUDIT = CHAINS


def require_earlier(old: Path, site: SiteFolder) -> None:
    """Refuse a folder that is not an earlier one of this site, or not over; and one that the new one cannot follow,
    because it has lines of its own or another policy. Nothing is written.
    """
    new = site.path
    if not (old / "state").is_dir() or old.resolve() == new:
        raise FileError(f"--continues {old}: that is not an earlier folder of this site. Give the one with its state/.")
    before = _whose(old)
    if (before.federation, before.site) != (site.federation, site.site):
        raise ParameterError(
            f"--continues {old}: that is the folder of {before.site!r} in {before.federation!r}, and this kit is for "
            f"{site.site!r} in {site.federation!r}. Give the earlier folder of {site.site!r}."
        )
    for place, what in ((old, "could release more"), (new, "works with what is there")):
        if is_held(place / "node.lock"):
            raise FileError(f"--continues {old}: the node of {place} runs, and {what}. End it first.")
    for name in (LEDGER, AUDIT):
        lines, own = _whole_lines(old / "state" / name), _whole_lines(new / "state" / name)
        if own and not own.startswith(lines):
            raise ParameterError(
                f"{new / 'state' / name} has lines of its own, which do not follow from those of {old}. A ledger is "
                "continued before the first start: join in a new folder."
            )
    require_policy(new)  # of a folder that was used the old one does not take the place
    if not _whole_lines(new / "state" / AUDIT):
        require_policy(old)
        _require_same_policy(old, new)


def key_going_on(old: Path, site: SiteFolder) -> SharedKey | None:
    """The shared key of an earlier folder, where the new one never had one; FileError where it is gone there."""
    return None if has_had(site.path, KEY) else shared_key_in(old)


def continue_from(old: Path, site: SiteFolder) -> int:
    """Copy the chains of an earlier folder, verified, the count of refusals, site.toml and the shared key.

    Policy and key come first, so that no folder with a ledger is without them. The audit log comes last: who was killed
    before has no line of it, and copies all the rest again. Returns the number of releases.
    """
    require_earlier(old, site)
    new = site.path
    for folder in (new, new / "state"):
        make_private(folder)
    with held(site.lock, f"The node of {new} has just been started. End it first"):
        if not has_policy(new):
            write(new / "site.toml", (old / "site.toml").read_bytes())
        if not has_had(new, KEY) and (old / "shared.key").exists():
            write(new / "shared.key", (old / "shared.key").read_bytes(), private=True)
        record(new, *([KEY] if has_had(old, KEY) else []))
        is_first = not _whole_lines(new / "state" / AUDIT)
        if is_first and (old / "state" / REFUSALS).exists():
            write(new / "state" / REFUSALS, (old / "state" / REFUSALS).read_bytes(), private=True)
        for name in (LEDGER, AUDIT):
            if not _whole_lines(new / "state" / name):
                write(new / "state" / name, _whole_lines(old / "state" / name), private=True)
    return SiteLedger(new / "state" / LEDGER).serial


def _whose(old: Path) -> SiteFolder | Card:
    """What says of which site a folder is: joined.toml, or its card where that is gone."""
    if (old / "joined.toml").exists():
        return SiteFolder.at(old)
    if (old / "card.toml").exists():
        return Card.read(old / "card.toml")
    raise FileError(
        f"--continues {old}: nothing in it says of which site it is: joined.toml and card.toml are gone. Put one of "
        f"them back; the coordinator has the card too, as sites/NAME.toml: it goes to {old / 'card.toml'}."
    )


def _require_same_policy(old: Path, new: Path) -> None:
    """What a site has promised about rows holds in the new folder too, until it is changed there by hand later on."""
    there = Policy.read(old / "site.toml")
    here = Policy.read(new / "site.toml") if has_policy(new) else there
    differing = [field.name for field in fields(Policy) if getattr(there, field.name) != getattr(here, field.name)]
    if differing:
        told = "; ".join(f"{name}: {_told(there, name)} there, {_told(here, name)} here" for name in differing)
        raise ParameterError(
            f"{new / 'site.toml'} is not the policy of {old / 'site.toml'} ({told}), and what was promised there is "
            f"about the same rows. Make the two say the same: edit one, or copy the old one over the new."
        )


def _told(policy: Policy, name: str) -> str:
    value: Any = getattr(policy, name)
    return "none" if value is None else str(value)


def _whole_lines(path: Path) -> bytes:
    """All whole lines of a chain, after each was compared with the one before."""
    Chain(path).head()
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1]
