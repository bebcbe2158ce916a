"""A site that joins: its folder as it would be, which people look at; nothing is written before they have agreed."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from partsong.consortium.continuing import continue_from, require_earlier
from partsong.consortium.first_policy import POLICY
from partsong.consortium.kit import Kit
from partsong.consortium.shared_key import SharedKey
from partsong.consortium.site_folder import SiteFolder
from partsong.consortium.used_folder import has_policy
from partsong.federation.policy import Policy


@dataclass(frozen=True, slots=True)
class Joining:
    """`site`: the folder as it would be. `shared`: a key that it would keep; None: the one that it has stays.
    `earlier`: the folder whose ledger and audit log would go on there.
    """

    site: SiteFolder
    kit: Kit
    shared: SharedKey | None = None
    earlier: Path | None = None

    def __post_init__(self) -> None:
        self.site.require_idle(self.shared)
        if self.earlier is not None:
            require_earlier(self.earlier, self.site)

    def policy(self) -> Policy:
        """The one that is there, comes along, or would be made."""
        places = [self.site.path] if self.earlier is None else [self.site.path, self.earlier]
        found = [place / "site.toml" for place in places if has_policy(place)]
        return Policy.read(found[0]) if found else Policy.from_table(tomllib.loads(POLICY))

    def shared_key(self) -> SharedKey | None:
        """The one that would be used."""
        return self.shared or self.site.shared_key()

    def agreed(self) -> int:
        """Write all of it down; how many releases there were in the folder that goes on here."""
        releases = 0 if self.earlier is None else continue_from(self.earlier, self.site)
        self.site.make(self.kit.authority, self.shared)
        return releases
