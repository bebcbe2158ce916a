"""Every error that partsong raises on purpose: what is wrong, where, and the way out.

Each class also derives from the built-in a caller would expect (ValueError, TypeError, OSError, …), so that
code written for scikit-learn or for plain files keeps working.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar


class PartsongError(Exception):
    """Root of all errors of this library.

    `parameter` is the name in Python of the parameter that the error is about, such as "n_components", or None. The
    command line puts its option in the place of that name.
    """

    def __init__(self, message: str = "", *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class DataError(PartsongError, ValueError):
    """The values of a matrix cannot be factorized: NaN, infinite, negative, or nothing there at all."""


class ShapeError(PartsongError, ValueError):
    """Sizes that do not fit each other: one-dimensional data, other numbers of columns, factors of another rank."""


class FeatureError(PartsongError, ValueError):
    """Column names that are missing, duplicated, unknown, or in another order.

    Where columns of parties differ, `missing` and `unexpected` have all names by party; a message has the first few.
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
    """A setting outside its range."""


class DataTypeError(PartsongError, TypeError):
    """A value of the wrong kind: text where numbers belong, a complex matrix, an unknown container."""


class UnreadableError(DataTypeError, ValueError):
    """What cannot be read as a matrix of real numbers: text, complex values, rows of unequal length.

    A wrong type to Python, a ValueError to scikit-learn.
    """


class CompositionError(PartsongError, TypeError):
    """Parts that cannot work together; raised when they are put together, not after an hour."""


class FileError(PartsongError, OSError):
    """A file that is missing, unreadable, or cannot be written."""


class FormatError(FileError, ValueError):
    """A file whose contents are truncated, hostile, or not what its name says."""


class BrokenChain(FormatError):
    """A chained log was edited, or lines are missing; `line` is the first that does not fit, `last` the hash before."""

    def __init__(self, message: str = "", line: int = 0, last: str = "") -> None:
        super().__init__(message)
        self.line = line
        self.last = last


class DamagedState(FileError):
    """A file of our own cannot be read any more; take it from a copy, or begin anew."""


class MissingExtra(PartsongError, ImportError):
    """An optional dependency that this call needs is not installed."""


class PartyError(PartsongError, RuntimeError):
    """A party failed, or sent something that cannot be used, in a named round and stage."""


class SiteRefused(PartyError):
    """A site on its own machine has said no, with a code; the reason is in its log."""


class SiteLost(PartyError):
    """Nothing was heard of a site in time; the run can be resumed."""


class TooFewParties(PartyError):
    """Fewer parties than a sum needs in which each of them is hidden; it was not formed, and nothing was revealed."""


class BudgetSpent(PartyError):
    """A party has made as many noisy releases as its privacy budget allows; nothing more was computed or drawn."""


class UploadError(PartyError, ValueError):
    """A party's upload is not what its program said it would be, and was refused before it entered a sum."""


class DivergenceError(UploadError):
    """NaN or infinite numbers in an upload or a sum: in data that were checked, the iteration has run away."""


class IllPosedWarning(UserWarning):
    """The objective has no minimum: a penalty on one factor alone."""


class DivergenceWarning(UserWarning):
    """A fit ran away from its solution; the best model before that was kept."""


class PredictableMasks(UserWarning):
    """Masks that were not drawn from the operating system's randomness: nothing is hidden by them."""


Failure = TypeVar("Failure", bound=PartsongError)


def with_message(error: Failure, message: str) -> Failure:
    """The same error with another message; its class and what it carries stay."""
    again = type(error)(message)
    again.__dict__.update(error.__dict__)
    return again


def first_few(positions: object, total: int, noun: str) -> str:
    """Spell out a few positions and the count: 'rows 3, 17, 20 (and 41 more)'."""
    shown = [str(position) for position in positions]  # type: ignore[attr-defined]
    rest = total - len(shown)
    plural = noun if total == 1 else f"{noun}s"
    return f"{plural} {', '.join(shown)}" + (f" (and {rest} more)" if rest > 0 else "")
