"""A site that moves to a new folder keeps what it has released: a budget is about rows, not about a folder.

Ledger and audit log go on where they were, and so does the policy; keys, runs and results do not come along.
"""

from __future__ import annotations

from pathlib import Path

from partsong.consortium.locking import is_held
from partsong.consortium.private_folder import make_private
from partsong.consortium.toml_text import write
from partsong.errors import FileError, ParameterError
from partsong.federation.chain import Chain

CHAINS = ("ledger.jsonl", "audit.jsonl")


def continue_from(old: Path, new: Path) -> int:
    """Copy the chains of one site's folder to another, verified, and site.toml; the number of releases in them.

    A folder that has lines of its own, which do not follow from the old ones, is left as it is.
    """
    if not (old / "state").is_dir() or old.resolve() == new.resolve():
        raise FileError(f"--continues {old}: that is not an earlier folder of this site. Give the one with its state/.")
    if is_held(old / "node.lock"):
        raise FileError(f"--continues {old}: its node still runs, and could release more. End it first.")
    found = {name: _whole_lines(old / "state" / name) for name in CHAINS}
    for name, lines in found.items():
        own = _whole_lines(new / "state" / name)
        if own and not own.startswith(lines):
            raise ParameterError(
                f"{new / 'state' / name} has lines of its own, which do not follow from those of {old}. A ledger is "
                "continued before the first start: join in a new folder."
            )
    for folder in (new, new / "state"):
        make_private(folder)
    for name, lines in found.items():
        if not _whole_lines(new / "state" / name):
            write(new / "state" / name, lines, private=True)
    if (old / "site.toml").exists() and not (new / "site.toml").exists():
        write(new / "site.toml", (old / "site.toml").read_bytes())
    return Chain(new / "state" / CHAINS[0]).head()[0]


def _whole_lines(path: Path) -> bytes:
    """All whole lines of a chain, after each was compared with the one before."""
    Chain(path).head()
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1]
