"""What a site's folder must not be without once it was used: its policy, its own keys, the one that sites share, the
pinned roster.

What is missing there is not made anew: a policy as it is made has no budget, other own keys are not those of the card
that everybody has, without the shared key hashes leave that a server can test, and a roster that comes along with a kit
may be an old one. Only a folder that was never used begins with what
a first join writes.

state/had.toml    at the end of a join, and when a shared key or a roster is taken: whether there was one, and whether a
                  join was over, so that there were own keys
"""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from partsong.core.parameters import only, read_toml
from partsong.errors import FileError, FormatError, ParameterError
from partsong.federation.setup import credentials
from partsong.federation.setup.credentials import SharedKey, make_private, toml_of, write

# ---- first policy -----------------------------------------------------------------------------------------------
#
# site.toml as it is made when a site joins; from then on it is the site's.

POLICY = """# What this site lets itself be asked for. It is read here alone, and no message can change it.
# Remove the # before a line to set it; an unknown key is an error.

# recipes = ["exact", "fedavg"]     # others are refused; without this line: all but secure-dsanls
# minimum_rows = 100                # without this line: twice the rank or more, where uploads are seen one by one;
                                    # not beside a budget about rows, which it would break
minimum_parties = 3                 # fewer in a sum are refused
maximum_rounds = 1000               # in one run
# maximum_runs = 20                 # over all time; without this line: any number
masked = true                       # the server sees sums alone
minimum_mask_bound = 1e6            # a smaller mask_bound is refused: with a refusal your numbers are compared with it
maximum_exposure = "membership"     # what may be computed from all sums that ever leave without noise: "guess",
                                    # "membership", "entries" or "rows" (docs/privacy.md). By default rounds × rank of
                                    # all runs together is at most half the rows that use the rarest column
# rare_columns = "refuse"           # "zero": columns that too few rows use are set to zero in runs
# other_rows_since = 120            # a line of state/ledger.jsonl, after which the rows are others than before
# directions_before = 0             # rounds × rank of runs by partsong 0.1.0, whose ledger does not say it
# columns = ["gene-*"]              # names or patterns of those that may leave; without this line: all
# tell_names = false                # without this line: a site of the roster that lacks columns, and knows the same
                                    # shared key, is told their names; sealed, so that the server cannot read them.
                                    # Not about words of texts: all sites learn those that they agree on

# [words]                           # of runs over texts
# allowed = true                    # false: none
# minimum_documents = 5             # an experiment that asks for words in fewer texts of a site is refused; else: 1
# minimum_parties = 3               # and at fewer sites; without this line: 2

# [privacy]                         # over everything that this site releases from now on
# epsilon = 3.0
# unit = "row"
# noiseless_before = 0              # releases without noise that there were before, which epsilon does not cover
"""


# ---- used folder ------------------------------------------------------------------------------------------------

RECORD = Path("state") / "had.toml"
KEY, ROSTER, JOINED = "shared_key", "roster", "joined"
FILES = {KEY: "shared.key", ROSTER: "roster.toml", JOINED: "joined.toml"}
LEFT = ("joined.toml", "card.toml", "roster.toml", "results")
CHAINS = ("ledger.jsonl", "audit.jsonl")


def is_used(folder: Path) -> bool:
    """Whether it has been joined, or holds anything of what a site has released. A first join that was cut off before
    it wrote site.toml has left keys and empty folders, and no more.
    """
    state = folder / "state"
    return any((folder / name).exists() for name in LEFT) or (state.is_dir() and any(state.iterdir()))


def has_joined(folder: Path) -> bool:
    """Whether a join was over there, and so has made its own keys. Ledger and audit log alone do not say so where
    had.toml knows better: of an earlier folder they are copied before keys are made.
    """
    has_chains = any((folder / "state" / name).exists() for name in CHAINS)
    was_over = bool(_written_down(folder).get(JOINED, has_chains))
    return was_over or any((folder / name).exists() for name in LEFT)


def has_policy(folder: Path) -> bool:
    """Whether there is a site.toml that says anything, were it a comment. An empty one is what a full disk leaves, and
    would allow more than the usual one.
    """
    try:
        return bool((folder / "site.toml").read_bytes().removeprefix(codecs.BOM_UTF8).strip())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # who reads it is told


def require_policy(folder: Path) -> None:
    """Refuse a folder that was used and has no site.toml, or an empty one; nothing is written."""
    place = folder / "site.toml"
    if has_policy(folder) or not is_used(folder):
        return
    lines = [line.partition("#")[0].strip() for line in POLICY.splitlines()]
    usual = "".join(f"{line}\\n" for line in lines if line)
    state = "empty" if place.exists() else "not there"
    raise FileError(
        f"{place} is {state}, and this folder was used: what the site has allowed, and which budget it has, is not "
        "known any more, and no other policy is made in its place. Put your own copy back. To begin with the usual one "
        f"on purpose, without a budget, write it yourself: printf {quote(usual)} > {quote(str(place))}"
    )


def has_had(folder: Path, what: str) -> bool:
    """Whether a shared key, or a roster, is there, or was, as far as was written down."""
    return _written_down(folder).get(what) is True or (folder / FILES[what]).exists()


def require_key(folder: Path) -> None:
    """Refuse a folder that has had a shared key and has none now: hashes without one do not leave it."""
    place = folder / "shared.key"
    if not place.exists() and has_had(folder, KEY):
        raise FileError(
            f"{place} is not there, and this site has had a shared key: without it the server could test names of "
            "columns, or words, against the hashes that it is sent, so that none leave. Put your own copy back, or ask "
            "another site, not the coordinator, for the key, and join with --shared-key FILE."
        )


def shared_key_in(folder: Path) -> SharedKey | None:
    """The shared key; None where there never was one. FileError where it is gone, or damaged."""
    require_key(folder)
    return key_there(folder)


def key_there(folder: Path) -> SharedKey | None:
    """The shared key, where there is one now; FormatError where it is damaged."""
    place = folder / "shared.key"
    if not place.exists():
        return None
    try:
        return SharedKey.read(place.read_text(encoding="utf-8", errors="replace"))
    except FormatError as error:
        error.add_note(f"It is in {place}.")
        raise


def record(folder: Path, *others: str) -> None:
    """Write down that it was used, and what it has, or has had; `others` as well."""
    make_private(folder / RECORD.parent)
    had = {what: what in others or has_had(folder, what) for what in (KEY, ROSTER)}
    write(folder / RECORD, toml_of({**had, JOINED: has_joined(folder)}), private=True)


def _written_down(folder: Path) -> Mapping[str, Any]:
    """What had.toml says; FormatError where it is damaged: nobody knows then what the folder has lost."""
    place = folder / RECORD
    if not place.exists():
        return {}
    try:
        told = only(read_toml(place), tuple(FILES), str(place))
    except (FileError, ParameterError) as error:
        raise FormatError(_damaged(place)) from error
    if not {KEY, ROSTER} <= set(told) or not all(isinstance(value, bool) for value in told.values()):
        raise FormatError(_damaged(place))
    return told


def _damaged(place: Path) -> str:
    lines = "".join(f"{what} = true\\n" for what in FILES)
    return (
        f"{place} is damaged. It says whether this site has, or has had, a shared key and a roster, and whether it has "
        "joined: what it has lost is not made anew. Put your own copy back, or write it, with false for a shared key "
        f"or a roster that there never was: printf {quote(lines)} > {quote(str(place))}"
    )


# ---- own keys ---------------------------------------------------------------------------------------------------
#
# A site's own keys: the secret behind its streams and signatures, and the key of its node. Others know it by them.
#
# They are made once, by a first join. What is gone or damaged in a folder that has joined is not made anew: nobody
# would
# take its answers. Nothing here is sent but the public parts, in the site's card.

SECRET_BYTES = 32
OWN_KEYS = ("secret", "node")
BACK = (
    "Put your own copy back. If there is none, join in a new folder, which makes new keys, and send the coordinator "
    "its card: {}"
)
PUBLIC_BACK = "Put your own copy back: its text is node_key in card.toml, which the coordinator has as well."


def make_own_keys(folder: Path) -> None:
    """Those that are there stay."""
    if not (folder / "secret").exists():
        write(folder / "secret", secrets.token_bytes(SECRET_BYTES), private=True)
    if not (folder / "node").exists():
        made = credentials.new_node_key()
        write(folder / "node.pub", made.certificate)
        write(folder / "node", made.key, private=True)


def require_own_keys(folder: Path, elsewhere: str) -> None:
    """Refuse a folder that has joined and has lost one of them, and keys that are not whole. `elsewhere`: the command
    that joins in a new folder. Nothing is written.
    """
    gone = [str(folder / name) for name in OWN_KEYS if not (folder / name).exists()]
    if has_joined(folder) and gone:
        raise FileError(
            f"{' and '.join(gone)}: not there, and this site is known by it; with another one nobody takes its "
            f"answers. {BACK.format(elsewhere)}"
        )
    if (folder / "secret").exists():
        secret_in(folder, elsewhere)
    if (folder / "node").exists():
        _require_node_pair(folder, elsewhere)


def secret_in(folder: Path, elsewhere: str) -> int:
    """The secret, as a number; FileError where it is gone, FormatError where it is not whole."""
    place = folder / "secret"
    try:
        found = place.read_bytes()
    except OSError as error:
        raise FileError(f"{place} cannot be read: {error.strerror or error}. {BACK.format(elsewhere)}") from error
    if len(found) != SECRET_BYTES:
        raise FormatError(f"{place} has {len(found)} bytes, and a secret has {SECRET_BYTES}. {BACK.format(elsewhere)}")
    return int.from_bytes(found, "little")


def _require_node_pair(folder: Path, elsewhere: str) -> None:
    """FileError where `node` is no private key, or `node.pub` is not its public part."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as forms

    private, public = folder / "node", folder / "node.pub"
    try:
        own = forms.load_ssh_private_key(private.read_bytes(), None).public_key()
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FormatError(f"{private} is not the key of a node: {error}. {BACK.format(elsewhere)}") from error
    try:
        told = forms.load_ssh_public_key(public.read_bytes())
    except FileNotFoundError as error:
        raise FileError(f"{public} is not there. {PUBLIC_BACK}") from error
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise FormatError(f"{public} is not the public key of a node: {error}. {PUBLIC_BACK}") from error
    if told != own:
        raise FormatError(f"{public} is not the public part of {private}. {PUBLIC_BACK} {BACK.format(elsewhere)}")
