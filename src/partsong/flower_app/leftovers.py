"""What Flower's server leaves of messages in its files: nothing that was delivered more than some seconds ago.

Flower keeps messages in SQLite, and takes them out once they are delivered. SQLite leaves the bytes of what is taken
out where they were, and a copy in the write-ahead log. So they are overwritten when they are taken out, and the log is
emptied every few seconds. What was never fetched goes when the server ends, or is started again after it was killed: no
run of Flower's outlives it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

EVERY = 10.0
"""Seconds."""
OVERWRITES = (("secure_delete", "ON"),)
"""What every connection to the database is told first."""
MESSAGES = ("object_children", "run_objects", "objects", "message_res", "message_ins")
"""Flower's tables of them."""


@contextlib.contextmanager
def swept(database: Path, every: float = EVERY) -> Iterator[None]:
    """While the server runs, and around that."""
    overwrite_deleted()
    sweep(database, entirely=True)
    is_over = threading.Event()

    def keep_sweeping() -> None:
        while not is_over.wait(every):
            sweep(database)

    thread = threading.Thread(target=keep_sweeping, daemon=True, name="leftovers")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        sweep(database, entirely=True)


def overwrite_deleted() -> None:
    """From now on Flower's connections overwrite what they take out."""
    from flwr.supercore import sql_mixin

    sql_mixin.SQLITE_PRAGMAS = tuple(dict((*sql_mixin.SQLITE_PRAGMAS, *OVERWRITES)).items())


def sweep(database: Path, *, entirely: bool = False) -> None:
    """Empty the log, if nobody is in the middle of something. `entirely`: take out all messages before, and write the
    database anew, without gaps.
    """
    log = Path(f"{database}-wal")
    if not database.exists() or not (entirely or (log.exists() and log.stat().st_size)):
        return
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=5.0 if entirely else 0.2)) as own:
            for name, value in OVERWRITES:
                own.execute(f"PRAGMA {name} = {value}")
            if entirely:
                known = {row[0] for row in own.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                for table in (name for name in MESSAGES if name in known):
                    own.execute(f"DELETE FROM {table}")
                own.commit()
                own.execute("VACUUM")
            own.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        if entirely:
            sys.stderr.write(f"Messages of runs that are over may be left in {database}: {error}.\n")
