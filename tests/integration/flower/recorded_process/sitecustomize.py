"""First on a process's path: whatever it reads from TLS connections, decrypted, is also in a file of its number.

The folder is in PARTSONG_TEST_RECORD; child processes, which inherit the path, have files of their own.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

FOLDER = os.environ.get("PARTSONG_TEST_RECORD", "")


def recorded(read):
    """Of asyncio's connections (SSLObject) and of plain ones (SSLSocket): both hand out bytes, or fill a buffer."""

    def wrapped(self, *args, **kwargs):
        found = read(self, *args, **kwargs)
        buffer = kwargs.get("buffer", args[1] if len(args) > 1 else None)
        content = found if buffer is None else bytes(memoryview(buffer)[:found])
        with (Path(FOLDER) / f"{os.getpid()}").open("ab") as file:
            file.write(content)
        return found

    return wrapped


if FOLDER:
    for kind in (ssl.SSLObject, ssl.SSLSocket):
        kind.read = recorded(kind.read)
