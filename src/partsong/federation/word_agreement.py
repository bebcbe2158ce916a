"""The server of a run over texts: sites agree on words first, in a run of its own that ends when they have.

FOLDER/words     the agreement, as any run: it can be killed at any point, and goes on; steps.jsonl is for people
FOLDER           the run itself, over as many columns as words are left
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from partsong.core import Checkpoint, Message, Program, Reduction, Round, Schedule, Shard
from partsong.errors import DataError, FileError, ParameterError
from partsong.federation.arrivals_record import ArrivalsJournal
from partsong.federation.asking import Asked
from partsong.federation.asynchronous import AsynchronousCoordinator
from partsong.federation.coordinator import Coordinator, Setting
from partsong.federation.record import Journal, Record
from partsong.federation.told_alike import bound_to, words_context_of
from partsong.federation.wire import RUN
from partsong.federation.word_data import SUFFIX
from partsong.federation.word_progress import FILE, StepLines
from partsong.federation.word_rule import TextRule
from partsong.text.agreed import masks_for_words
from partsong.text.agreement import MOST_EXCHANGES
from partsong.topic_methods import require_words
from partsong.topic_vocabulary import FEWEST_MASKED

WORDS = "words"


@dataclass(frozen=True, slots=True)
class WordCoordinator(Coordinator):
    """Ends with the agreement, once every site has heard the end of it; there is none with a site less.

    `looks_at`: the last message, before sites are told of it.
    """

    looks_at: Callable[[Message], None] = lambda last: None

    def _is_over(self, setting: Setting, record: Record) -> bool:
        program: Any = setting.program
        return bool(program.is_over(record.server))

    def _finish(self, setting: Setting, record: Record) -> Asked:
        self.looks_at(record.model)
        asked = Coordinator._finish(self, setting, record)
        asked.require("the end of the agreement on words", record.index)
        return asked


@dataclass(frozen=True, slots=True)
class AgreeingFirst:
    """The engine of a run over texts: `rounds`, after sites have agreed on the words of a rule.

    Sums of the agreement are masked whatever the run's own are, over all sites. Where the run itself has begun, the
    agreement is not looked at again.
    """

    rounds: Coordinator | AsynchronousCoordinator
    rule: TextRule

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """Rounds of the run itself."""
        folder = self.rounds.folder
        if Journal(folder).load() is None and ArrivalsJournal(folder).load() is None:
            self._agree(program, schedule, getattr(reduction, "roster", None))
        if reduction.hides_uploads:
            reduction = bound_to(self._context(), reduction)
        yield from self.rounds.run(program, shards, schedule, reduction=reduction, resume=resume)

    def _context(self) -> str:
        """Of what the agreement has ended with, as all sites were told it."""
        place = self.rounds.folder / WORDS
        record = Journal(place).load()
        if record is None:
            raise FileError(
                f"{place} has no record of the agreement on words, without which signatures of masked sums cannot be "
                "checked. Put it back from a copy, or begin a new run."
            )
        return words_context_of(record.model["documents"], record.model["n_documents"][0])

    def _agree(self, program: Program, schedule: Schedule, roster: Any) -> None:
        base, parties = self.rounds, len(self.rounds.transport.names())
        name = f"{base.name}{SUFFIX}"
        if base.name.endswith(SUFFIX) or not RUN.fullmatch(name):
            raise ParameterError(
                f"A run over texts has a name of at most {64 - len(SUFFIX)} letters, which does not end in {SUFFIX!r}; "
                f"got {base.name!r}. Name it otherwise."
            )
        if parties < FEWEST_MASKED:
            raise ParameterError(
                f"Sites agree on words by masked sums over at least {FEWEST_MASKED} of them, and there are {parties}: "
                "each of two would know what the other has. Admit more sites, or run over tables."
            )
        own = (base.transport, base.folder / WORDS, name, base.experiment)

        def looks_at(last: Message) -> None:
            self._require_enough(program, last)

        words = WordCoordinator(*own, timeout=base.timeout, serials=base.serials, looks_at=looks_at)
        masks, plan = masks_for_words(parties, roster), Schedule(MOST_EXCHANGES, schedule.seed)
        agreement: Any = self.rule.rounds
        lines = StepLines(words.folder / FILE)
        for done in words.run(agreement, (), plan, reduction=masks):
            lines.note(done)

    def _require_enough(self, program: Program, last: Message) -> None:
        """Refuse to go on with no words, or fewer than components."""
        documents, total = last["documents"], int(last["n_documents"][0])
        kept = self.rule.n_kept(documents, total)
        if not kept:
            raise DataError(
                f"No word meets the rule: {len(documents)} are in at least {self.rule.min_documents} documents at each "
                f"of at least {self.rule.min_parties} sites, and none of them is in at most "
                f"{self.rule.rule.max_share:.0%} of all documents. Ask for less in the table words, and begin a new "
                "run; or check that all sites have texts of one language."
            )
        require_words(program, kept)
