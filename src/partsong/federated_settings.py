"""What `FederatedNMF` may be asked for, and the program, masks and accounts that this means."""

from __future__ import annotations

import math
from typing import Any

from partsong.aggregate.reduction import InTheOpen
from partsong.core import Program, Reduction
from partsong.errors import ParameterError
from partsong.leaving_out import FAULTY
from partsong.local.observed import ObservedRows
from partsong.methods import LOCAL_STEPS, MOST_ROUNDS, ONE_ROUND, PRIVATE_ROUNDS, alignment_for, start_of
from partsong.privacy.accounting import Accounts
from partsong.promises import Privacy, masks_for
from partsong.running import Stop
from partsong.settings import (
    MISSING,
    alignment_of,
    one_of,
    program_of,
    rank_of,
    require_method,
    require_privacy,
    require_verbosity,
    stop_of,
    whole_number,
)
from partsong.spending import SIMULATED, USUAL_DELTA, Spending


class FederatedSettings:
    """Settings of `FederatedNMF` by the names of its parameters."""

    n_components: int | None
    method: Any
    align: Any
    rounds: int | None
    local_steps: int | None
    start: str | None
    tol: float
    time_budget: float | None
    verbose: int
    n_jobs: int | None
    faulty: str
    missing: str
    privacy: Privacy | None
    masked: Any

    def _check_settings(self) -> Stop:
        """All that can be refused before any data are looked at."""
        require_method(self.method, align=self.align, start=self.start, local_steps=self.local_steps)
        if self.rounds is not None:
            whole_number("rounds", self.rounds)
        steps, budget = self.local_steps, self.time_budget
        require_privacy(self.privacy, self.masked, self.method, steps=steps, time_budget=budget)
        one_of("faulty", self.faulty, FAULTY)
        self._require_missing()
        require_verbosity(self.verbose)
        if self.n_jobs not in (None, -1):
            whole_number("n_jobs", self.n_jobs, " (None or -1: one per core)")
        return stop_of(self.tol, self.time_budget)

    def _require_missing(self) -> None:
        """Cells that are not known can be left out by games only."""
        plays = isinstance(getattr(self.method, "solver", None), ObservedRows) or self.method == "game"
        if one_of("missing", self.missing, MISSING) == "ignore" and not plays:
            raise ParameterError(
                'missing="ignore" is for method="game" and for Programs whose solver is ObservedRows, in which unknown '
                f"cells are not played; the method is {self.method!r}. Take a game, or fill the gaps."
            )

    def _program(self, shape: tuple[int, int]) -> Program:
        if not isinstance(self.method, str):
            rank = rank_of(self.method.rank, shape)
            if self.n_components is not None and self.n_components != rank:
                raise ParameterError(
                    f"n_components={self.n_components!r}, but the rank of the program is {rank}. "
                    "Leave n_components out, or make both the same."
                )
            return self.method
        return program_of(
            self.method,
            rank_of(self.n_components, shape),
            steps=self._steps(self.method),
            align=alignment_of(alignment_for(self.method, self.align)),
            start=start_of(self.method, self.start),
        )

    def _steps(self, method: str) -> int:
        return LOCAL_STEPS[method] if self.local_steps is None else int(self.local_steps)

    def _rounds(self) -> int:
        if isinstance(self.method, str) and self.method in ONE_ROUND:
            return 1
        usual = MOST_ROUNDS if self.privacy is None else PRIVATE_ROUNDS
        return usual if self.rounds is None else int(self.rounds)

    def _is_private(self) -> bool:
        """Whether what was released had noise, by the method or by `privacy`."""
        return self.privacy is not None or getattr(self.method, "release", None) is not None

    def _protected(self, program: Program, n_parties: int) -> tuple[Program, Spending | None]:
        """The program with the noise that was asked for, and the accounts of a program that has noise."""
        delta, before = USUAL_DELTA, Accounts()
        if self.privacy is not None:
            program = self.privacy.program(program, self._rounds(), n_parties, bool(self.masked))
            delta, before = self.privacy.delta, self.privacy.spent
        release = getattr(program, "release", None)
        most = getattr(program, "most", None)
        return program, None if release is None else Spending(release, delta, before, most)

    def _reduction(self, n_parties: int) -> Reduction:
        """Sums in the open, or masked."""
        masks: Reduction = masks_for(self.privacy, n_parties) if self.masked is True else self.masked or InTheOpen()
        return masks

    def _account(self, spending: Spending | None) -> None:
        """What the run has cost in privacy; what a simulation knows beside it is marked."""
        self.accounts_ = None if spending is None else spending.accounts
        self.epsilon_spent_ = math.inf if spending is None else spending.accounts.epsilon(spending.delta)
        self.privacy_report_: dict[str, Any] | None = None if spending is None else spending.told()
        self.simulated_ = SIMULATED if spending is not None else ()
