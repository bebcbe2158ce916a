"""`partsong federation join` with texts: how they are read, what is checked, and what will leave."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from partsong.errors import ParameterError

if TYPE_CHECKING:
    from partsong.consortium.joining import Joining

OF_TABLES = ("label", "transpose", "key", "header")
NO_SHARED_KEY_OF_WORDS = (
    "This site shares no key with the others, and will refuse every run over its texts: without one, whoever has a "
    "list of words could test them. One site makes a key (partsong federation secret), tells the others by a way that "
    "does not lead through the server, and all join with --shared-key."
)
LEAVES = """What leaves this site, and what does not:
  never    texts, weights of texts (W), names of files; words to the server
  a run    in masked sums over all sites, under the key that sites share: of which hashes it has words that are in as
           many of its texts as the experiment asks for ({documents} at least, by site.toml); then words at enough sites
           ({parties} at least) themselves, which all sites read and the server cannot; then in how many of its texts
           each of these is, and that there are {texts} texts; and the number type
  a round  what the recipe sends: sums or factors of k × agreed words, of all texts; masked where site.toml says so
           ({masked}), so that the server sees sums over at least {fewest} sites alone
  always   names of arrays, refusals as codes, and counts; the reasons stay here, and no word is in them
A site that passes the shared key to the server lets it test words that it thinks of, and read the agreed ones.
Every message is written to {audit} before it leaves.
{policy}"""


def reading_of(data: Path, reading: dict[str, Any]) -> dict[str, Any]:
    """How the data are read: as texts where a column of them is named, or where they can be nothing else."""
    from partsong.consortium.site_texts import USUAL_COLUMN, are_texts

    if "text_column" not in reading and not are_texts(data):
        if "encoding" in reading:
            raise ParameterError("--encoding is for texts. Name their column as well: --text-column text.")
        return reading
    for name in OF_TABLES:
        if name in reading:
            raise ParameterError(f"--{name} is for tables, and these data are texts. Leave it out.")
    return {"text_column": USUAL_COLUMN, **reading}


def check_texts(data: Path, reading: dict[str, Any]) -> None:
    """Whether they can be read, and how many of them are empty."""
    from partsong.consortium.site_texts import texts_at

    texts = texts_at(data, reading)
    empty = sum(not text.strip() for text in texts)
    if empty:
        typer.echo(f"Note: {empty} of {len(texts)} texts are empty. They are kept, with weights of zero.", err=True)


def leaves_of_texts(wished: Joining) -> str:
    """For people, before they join."""
    from partsong.consortium.site_texts import texts_at

    site, policy = wished.site, wished.policy()
    return LEAVES.format(
        documents=policy.words.minimum_documents,
        parties=policy.words.minimum_parties,
        texts=len(texts_at(site.data, dict(site.reading))),
        masked="it does" if policy.masked else "IT DOES NOT, so that the server may see each site's own",
        fewest=policy.minimum_parties,
        audit=site.path / "state" / "audit.jsonl",
        policy=where_policy_is(wished),
    )


def where_policy_is(wished: Joining) -> str:
    """Or will be: nothing is written before they have joined."""
    place = wished.site.path / "site.toml"
    is_there = f"is in {place}: look at it now."
    return f"What may be asked of this site {is_there if place.exists() else f'will be in {place}, for you to change.'}"
