"""The server of a run over texts: sites agree on words first, in a run of its own that ends when they have.

FOLDER                      the run itself, over as many columns as words are left
FOLDER/words                the agreement, which can be killed and resumed as any run
FOLDER/words/steps.jsonl    a line for each of its steps, for people
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from partsong.core.interfaces import Message, Reduction, Round, Schedule
from partsong.errors import DataError, FileError, ParameterError
from partsong.federation.server.coordinator import Coordinator
from partsong.federation.server.progress import append_line
from partsong.federation.server.state import ArrivalsJournal, Journal
from partsong.federation.signing import bound_to, words_context_of
from partsong.federation.site.plan import Plan
from partsong.federation.text_rule import TextRule
from partsong.federation.texts import SUFFIX
from partsong.federation.wire import RUN
from partsong.topics.agreement.protocol import DONE, FREQUENCIES, MOST_EXCHANGES, TABLES, WORDS, Step, masks_for_words
from partsong.topics.fitting import require_words
from partsong.topics.shared_vocabulary import FEWEST_MASKED

FOLDER, STEPS = "words", "steps.jsonl"
Tell = Callable[[Mapping[str, Any]], None]
NEXT = {
    TABLES: "tables of hashes",
    WORDS: "the words",
    FREQUENCIES: "documents with each word",
    DONE: "nothing",
}


def agree_on_words(coordinator: Coordinator, rule: TextRule, plan: Plan, seed: int, tell: Tell) -> Reduction:
    """Have the sites agree on the words of a rule, unless the run has begun after that; returns the run's reduction.

    Sums of the agreement are masked whatever the run's own are, over all sites. Masks of the run are among sites that
    heard the same end of it. `tell` gets the line of each step.
    """
    folder, reduction = coordinator.folder / FOLDER, plan.reduction
    if not any(journal(coordinator.folder).path.exists() for journal in (Journal, ArrivalsJournal)):
        _agree(coordinator, folder, rule, plan, seed, tell)
    if not reduction.hides_uploads:
        return reduction
    agreed = Journal(folder).load()
    if agreed is None:
        raise FileError(
            f"{folder} has no record of the agreement on words, without which signatures of masked sums cannot be "
            "checked. Restore it from a backup, or begin a new run."
        )
    return bound_to(words_context_of(agreed.model["documents"], agreed.model["n_documents"][0]), reduction)


def _agree(coordinator: Coordinator, folder: Path, rule: TextRule, plan: Plan, seed: int, tell: Tell) -> None:
    parties, run = len(coordinator.transport.names()), coordinator.name
    if run.endswith(SUFFIX) or not RUN.fullmatch(f"{run}{SUFFIX}"):
        raise ParameterError(
            f"A run over texts has a name of at most {64 - len(SUFFIX)} letters, which does not end in {SUFFIX!r}; "
            f"got {run!r}. Choose another name."
        )
    if parties < FEWEST_MASKED:
        raise ParameterError(
            f"Sites agree on words by masked sums over at least {FEWEST_MASKED} of them, and there are {parties}: "
            "each of two would know what the other has. Admit more sites, or run over tables."
        )

    def require_enough(last: Message) -> None:
        documents = last["documents"]
        kept = rule.n_kept(documents, int(last["n_documents"][0]))
        if not kept:
            raise DataError(
                f"No word meets the rule: {len(documents)} are in at least {rule.min_documents} documents at each of "
                f"at least {rule.min_parties} sites, and none of them is in at most {rule.max_share:.0%} of all "
                "documents. Ask for less in the table words, and begin a new run; or check that all sites have texts "
                "of one language."
            )
        require_words(plan.program, kept)

    masks = masks_for_words(parties, getattr(plan.reduction, "roster", None))
    agreement: Any = rule.rounds
    words = replace(coordinator, folder=folder, name=f"{run}{SUFFIX}")
    for done in words.rounds(agreement, Schedule(MOST_EXCHANGES, seed), masks, require_enough):
        tell(note_step(folder / STEPS, done))


def note_step(path: Path, done: Round) -> dict[str, Any]:
    """Write the line of a step, which is on the disk already.

    A process that was killed between the two left the line before incomplete or missing; an incomplete one is replaced.
    """
    line = {
        "step": done.index + 1,
        "steps": MOST_EXCHANGES,
        "participants": list(done.participants),
        "refused": dict(done.refused),
        "bytes_up": dict(done.bytes_up),
        "bytes_down": int(done.bytes_down),
        "seconds": round(done.seconds, 3),
        "next": NEXT[Step.read(done.model["step"]).stage],
    }
    append_line(path, line)
    return line
