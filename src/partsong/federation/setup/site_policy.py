"""site.toml as a first join writes it. From then on it belongs to the site, and is never written again."""

from __future__ import annotations

import codecs
from pathlib import Path

from partsong.errors import FileError

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

LEFT = ("joined.toml", "card.toml", "roster.toml", "results")


def is_used(folder: Path) -> bool:
    """Whether the site has joined here, or has ever answered. A first join that was cut off leaves keys and empty
    folders, and no more.
    """
    state = folder / "state"
    return any((folder / name).exists() for name in LEFT) or (state.is_dir() and any(state.iterdir()))


def has_policy(folder: Path) -> bool:
    """Whether site.toml says anything, were it a comment: an empty one would allow more than the usual policy."""
    place = folder / "site.toml"
    return place.exists() and bool(place.read_bytes().removeprefix(codecs.BOM_UTF8).strip())


def require_policy(folder: Path) -> None:
    """Refuse a folder that was used and has lost its site.toml: a new one would have no budget."""
    if not has_policy(folder) and is_used(folder):
        place = folder / "site.toml"
        raise FileError(
            f"{place} is {'empty' if place.exists() else 'missing'}, but this site has taken part before: what it "
            "allows, and its budget, are unknown. Restore your backup, or write a new policy there yourself."
        )


def with_rare_columns(policy: str, answer: str) -> str:
    """The text of a site.toml that also says what to do about columns that few rows use."""
    line, commented = f'rare_columns = "{answer}"', '# rare_columns = "refuse"'
    return policy.replace(commented, line, 1) if commented in policy else f"{line}\n{policy}"
