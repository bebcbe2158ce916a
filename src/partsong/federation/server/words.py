"""The server of a run over texts: sites agree on words first, in a run of its own that ends when they have.

FOLDER                      the run itself, over as many columns as words are left
FOLDER/words                the agreement, which can be killed and resumed as any run
FOLDER/words/steps.jsonl    a line for each of its steps, for people
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.core.interfaces import Message, Program, Reduction, Round, Schedule
from partsong.errors import DataError, FileError, ParameterError
from partsong.federation.server.coordinator import Coordinator
from partsong.federation.server.progress import append_line
from partsong.federation.server.site_client import Responses, SiteClient
from partsong.federation.server.state import ArrivalsJournal, Journal, RunState
from partsong.federation.signing import bound_to, words_context_of
from partsong.federation.text_rule import TextRule
from partsong.federation.texts import SUFFIX
from partsong.federation.wire import RUN
from partsong.secure_aggregation.messages import Roster
from partsong.topics.agreement.protocol import DONE, FREQUENCIES, MOST_EXCHANGES, TABLES, WORDS, Step, masks_for_words
from partsong.topics.fitting import require_words
from partsong.topics.shared_vocabulary import FEWEST_MASKED

FOLDER, STEPS = "words", "steps.jsonl"
NEXT = {
    TABLES: "tables of hashes",
    WORDS: "the words",
    FREQUENCIES: "documents with each word",
    DONE: "nothing",
}


def run_over_texts(
    rounds: Coordinator, rule: TextRule, program: Program, schedule: Schedule, reduction: Reduction
) -> Iterator[Round]:
    """Rounds of a run, after sites have agreed on the words of a rule; if it has begun, the agreement is over.

    Sums of the agreement are masked whatever the run's own are, over all sites.
    """
    if Journal(rounds.folder).load() is None and ArrivalsJournal(rounds.folder).load() is None:
        _agree(rounds, rule, program, schedule, getattr(reduction, "roster", None))
    if reduction.hides_uploads:
        reduction = bound_to(_context_in(rounds.folder / FOLDER), reduction)
    yield from rounds.run(program, schedule, reduction)


@dataclass(frozen=True, slots=True)
class WordCoordinator(Coordinator):
    """Runs an agreement, whose end every site has to answer. `check` sees the last message before sites do."""

    check: Callable[[Message], None] = lambda last: None

    def finish(self, program: Program, run: RunState, client: SiteClient) -> Responses:
        """Require an answer of every site."""
        self.check(run.model)
        responses = Coordinator.finish(self, program, run, client)
        responses.require("the end of the agreement on words", run.index)
        return responses


def _agree(rounds: Coordinator, rule: TextRule, program: Program, schedule: Schedule, roster: Roster | None) -> None:
    parties, name = len(rounds.transport.names()), f"{rounds.name}{SUFFIX}"
    if rounds.name.endswith(SUFFIX) or not RUN.fullmatch(name):
        raise ParameterError(
            f"A run over texts has a name of at most {64 - len(SUFFIX)} letters, which does not end in {SUFFIX!r}; "
            f"got {rounds.name!r}. Choose another name."
        )
    if parties < FEWEST_MASKED:
        raise ParameterError(
            f"Sites agree on words by masked sums over at least {FEWEST_MASKED} of them, and there are {parties}: "
            "each of two would know what the other has. Admit more sites, or run over tables."
        )

    def check(last: Message) -> None:
        _require_enough(rule, program, last)

    own = (rounds.transport, rounds.folder / FOLDER, name, rounds.experiment)
    words = WordCoordinator(*own, timeout=rounds.timeout, serials=rounds.serials, check=check)
    agreement: Any = rule.rounds
    for done in words.run(agreement, Schedule(MOST_EXCHANGES, schedule.seed), masks_for_words(parties, roster)):
        note_step(words.folder / STEPS, done)


def _require_enough(rule: TextRule, program: Program, last: Message) -> None:
    """Refuse to go on with no words, or with fewer than components."""
    documents, total = last["documents"], int(last["n_documents"][0])
    kept = rule.n_kept(documents, total)
    if not kept:
        raise DataError(
            f"No word meets the rule: {len(documents)} are in at least {rule.min_documents} documents at each of at "
            f"least {rule.min_parties} sites, and none of them is in at most {rule.rule.max_share:.0%} of all "
            "documents. Ask for less in the table words, and begin a new run; or check that all sites have texts of "
            "one language."
        )
    require_words(program, kept)


def _context_in(folder: Path) -> str:
    """The context of masks that follows from the end of the agreement, which all sites were sent."""
    run = Journal(folder).load()
    if run is None:
        raise FileError(
            f"{folder} has no record of the agreement on words, without which signatures of masked sums cannot be "
            "checked. Restore it from a backup, or begin a new run."
        )
    return words_context_of(run.model["documents"], run.model["n_documents"][0])


def note_step(path: Path, done: Round) -> None:
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
