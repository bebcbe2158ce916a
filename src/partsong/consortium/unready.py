"""A site that cannot even be opened says so with a code, and goes on: there is a mistake in one of its files."""

from __future__ import annotations

import traceback

from partsong.errors import FileError, FormatError, PartsongError

UNSAID = "What it says could be words of texts, and is not written down. To see it: partsong federation join KIT"


def told_unready(error: Exception, *, hides_words: bool) -> tuple[str, str]:
    """The code that leaves the site, and the reason, which is for its own log."""
    code = "storage" if isinstance(error, FileError) and not isinstance(error, FormatError) else "settings"
    if hides_words:
        return code, f"{type(error).__name__}. {UNSAID}"
    return code, str(error) if isinstance(error, PartsongError) else "".join(traceback.format_exception(error))
