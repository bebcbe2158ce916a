"""Exceptions and warnings of partsong. A message says what is wrong, where, and what to do.

Each class also derives from the built-in exception that a caller would expect (ValueError, TypeError, OSError, …), so
that code written for scikit-learn or for plain files keeps working.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar


class PartsongError(Exception):
    """Base class of all errors of this library.

    `parameter` is the Python name of the parameter that the error is about, such as "n_components", or None. The
    command line shows its own option instead of that name.
    """

    def __init__(self, message: str = "", *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class DataError(PartsongError, ValueError):
    """The values of a matrix cannot be factorized: NaN, infinite, negative, or no values at all."""


class ShapeError(PartsongError, ValueError):
    """Shapes that do not match: one-dimensional data, a different number of columns, factors of different rank."""


class FeatureError(PartsongError, ValueError):
    """Column names that are missing, duplicated, unknown, or in a different order.

    Where the columns of parties differ, `missing` and `unexpected` list all names by party; the message shows the
    first few.
    """

    def __init__(
        self,
        message: str = "",
        *,
        missing: Mapping[str, tuple[str, ...]] | None = None,
        unexpected: Mapping[str, tuple[str, ...]] | None = None,
        parameter: str | None = None,
    ) -> None:
        super().__init__(message, parameter=parameter)
        self.missing = dict(missing or {})
        self.unexpected = dict(unexpected or {})


class ParameterError(PartsongError, ValueError):
    """A parameter outside its range."""


class DataTypeError(PartsongError, TypeError):
    """A value of the wrong type: text instead of numbers, a complex matrix, an unknown container."""


class UnreadableError(DataTypeError, ValueError):
    """Input that cannot be read as a matrix of real numbers: text, complex values, rows of unequal length.

    Both a TypeError, as Python expects, and a ValueError, as scikit-learn expects.
    """


class CompositionError(PartsongError, TypeError):
    """Components that cannot work together; raised when they are combined, before anything is computed."""


class FileError(PartsongError, OSError):
    """A file that is missing, cannot be read, or cannot be written."""


class FormatError(FileError, ValueError):
    """A file whose contents are truncated, malicious, or not of the format that its name says."""


class BrokenChain(FormatError):
    """A hash-chained log was edited or lacks lines: `line` is the first that does not fit, `last` the hash before."""

    def __init__(self, message: str = "", line: int = 0, last: str = "") -> None:
        super().__init__(message)
        self.line = line
        self.last = last


class DamagedState(FileError):
    """A partsong state file is unreadable. Restore it from a backup or start a new run."""


class MissingExtra(PartsongError, ImportError):
    """An optional dependency that this call needs is not installed."""


class PartyError(PartsongError, RuntimeError):
    """A party failed or sent an invalid message; the message names the round and the stage."""


class SiteRefused(PartyError):
    """A site refused a request, with a refusal code; the reason is in the log of the site."""


class SiteLost(PartyError):
    """A site did not answer in time. The run can be resumed."""


class TooFewParties(PartyError):
    """Too few parties for a secure sum. The sum was not computed and nothing was revealed."""


class BudgetSpent(PartyError):
    """The privacy budget of a party allows no further release. Nothing was computed and no noise was drawn."""


class UploadError(PartyError, ValueError):
    """A party's upload does not match the upload spec of its program; it was rejected before it entered a sum."""


class DivergenceError(UploadError):
    """NaN or infinite values in an upload or a sum. The data were checked, so the iteration diverged."""


class IllPosedWarning(UserWarning):
    """The objective has no minimum: only one factor is penalized."""


class DivergenceWarning(UserWarning):
    """A fit diverged; the best model so far is kept."""


class InvisibleComponents(UserWarning):
    """A private model has more components than its noise lets see."""


class PredictableMasks(UserWarning):
    """Masks from another source than the operating system's random numbers: they hide nothing."""


Failure = TypeVar("Failure", bound=PartsongError)


def with_message(error: Failure, message: str) -> Failure:
    """Return the same error with another message; its class and attributes stay."""
    again = type(error)(message)
    again.__dict__.update(error.__dict__)
    return again


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: '1 row', '3 rows'; `plural` where it is not the noun with an s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def first_few(positions: object, total: int, noun: str) -> str:
    """Format the first positions and the number of the rest: 'rows 3, 17, 20 (and 41 more)'."""
    shown = [str(position) for position in positions]  # type: ignore[attr-defined]
    rest = total - len(shown)
    plural = noun if total == 1 else f"{noun}s"
    return f"{plural} {', '.join(shown)}" + (f" (and {rest} more)" if rest > 0 else "")
