"""The table [words] of site.toml: whether texts of this site may be worked on, and how common a word has to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partsong.errors import ParameterError
from partsong.federation.keys import only, whole
from partsong.federation.refusals import Denied

if TYPE_CHECKING:
    from partsong.federation.word_rule import TextRule

KEYS = ("allowed", "minimum_documents", "minimum_parties")


@dataclass(frozen=True, slots=True)
class WordPolicy:
    """A rule that asks for words in fewer documents, or at fewer sites, than these is refused."""

    allowed: bool = True
    minimum_documents: int = 1
    minimum_parties: int = 2

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> WordPolicy:
        """From the table of a file; an unknown key is an error."""
        only(table, KEYS, "The table words of site.toml")
        allowed = table.get("allowed", True)
        if not isinstance(allowed, bool):
            raise ParameterError(f"words.allowed is true or false; got {allowed!r}.")
        return WordPolicy(allowed, whole(table, "minimum_documents", 1), whole(table, "minimum_parties", 2))

    def require(self, rule: TextRule) -> None:
        """Refuse a rule that asks for less than this."""
        if not self.allowed:
            raise Denied("words", "site.toml does not allow runs over texts (words.allowed).")
        for name, asked, least in (
            ("documents", rule.min_documents, self.minimum_documents),
            ("parties", rule.min_parties, self.minimum_parties),
        ):
            if asked < least:
                raise Denied(
                    "words", f"min_{name} = {asked} is asked for; site.toml asks for {least} (words.minimum_{name})."
                )
