"""What a site's folder must not be without once it was used: its policy, its own keys, the one that sites share, the
pinned roster.

What is missing there is not made anew: a policy as it is made has no budget, other own keys are not those of the card
that everybody has, without the shared key hashes leave that a server can test, and a roster that comes along with a kit
may be an old one. Only a folder that was never used begins with what
a first join writes.

state/had.toml    at the end of a first join, and when a shared key or a roster is taken: whether there was one
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from partsong.consortium.first_policy import POLICY
from partsong.consortium.private_folder import make_private
from partsong.consortium.toml_text import toml_of, write
from partsong.errors import FileError
from partsong.federation.keys import only, read_toml

RECORD = Path("state") / "had.toml"
KEY, ROSTER = "shared_key", "roster"
FILES = {KEY: "shared.key", ROSTER: "roster.toml"}
OWN_KEYS = ("secret", "node")
LEFT = ("joined.toml", "card.toml", "roster.toml", "results")


def is_used(folder: Path) -> bool:
    """Whether it has been joined, or holds anything of what a site has released. A first join that was cut off before
    it wrote site.toml has left keys and empty folders, and no more.
    """
    state = folder / "state"
    return any((folder / name).exists() for name in LEFT) or (state.is_dir() and any(state.iterdir()))


def require_policy(folder: Path) -> None:
    """Refuse a folder that was used and has no site.toml; nothing is written."""
    place = folder / "site.toml"
    if place.exists() or not is_used(folder):
        return
    lines = [line.partition("#")[0].strip() for line in POLICY.splitlines()]
    usual = "".join(f"{line}\\n" for line in lines if line)
    raise FileError(
        f"{place} is not there, and this folder was used: what the site has allowed, and which budget it has, is not "
        "known any more, and no other policy is made in its place. Put your own copy back. To begin with the usual one "
        f"on purpose, without a budget, write it yourself: printf {quote(usual)} > {quote(str(place))}"
    )


def require_own_keys(folder: Path) -> None:
    """Refuse a folder that has been joined, and whose own keys are gone: others know the site by them."""
    gone = [str(folder / name) for name in OWN_KEYS if not (folder / name).exists()]
    if gone and (folder / "joined.toml").exists():
        raise FileError(
            f"{' and '.join(gone)}: not there, and this site is known by it; with another one nobody takes its "
            "answers. Put your own copy back. If there is none, join in a new folder, with "
            f"--folder NEW --continues {quote(str(folder))}, and send the coordinator its card."
        )


def has_had(folder: Path, what: str) -> bool:
    """Whether a shared key, or a roster, is there, or was, as far as was written down."""
    place = folder / RECORD
    told = only(read_toml(place), tuple(FILES), str(place)) if place.exists() else {}
    return told.get(what) is True or (folder / FILES[what]).exists()


def require_key(folder: Path) -> None:
    """Refuse a folder that has had a shared key and has none now: hashes without one do not leave it."""
    place = folder / "shared.key"
    if not place.exists() and has_had(folder, KEY):
        raise FileError(
            f"{place} is not there, and this site has had a shared key: without it the server could test names of "
            "columns, or words, against the hashes that it is sent, so that none leave. Put your own copy back, or ask "
            "another site, not the coordinator, for the key, and join with --shared-key FILE."
        )


def record(folder: Path, *others: str) -> None:
    """Write down that it was used, and what it has, or has had; `others` as well."""
    make_private(folder / RECORD.parent)
    had = {what: what in others or has_had(folder, what) for what in FILES}
    write(folder / RECORD, toml_of(had), private=True)
