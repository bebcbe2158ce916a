"""What is taken out of the server's database is in none of its files, while others have it open."""

from __future__ import annotations

import secrets
import sqlite3
from contextlib import closing

import pytest

from partsong.federation.flower.server_process import MESSAGE_TABLES, OVERWRITES, purge_database

PRAGMAS = (("journal_mode", "WAL"), *OVERWRITES)


def connected(path, pragmas=PRAGMAS):
    """As Flower does."""
    connection = sqlite3.connect(path)
    for name, value in pragmas:
        connection.execute(f"PRAGMA {name} = {value}")
    return connection


def kept(folder, text):
    """Files in which some sixteen bytes of it are."""
    parts = [text[at : at + 16] for at in range(0, len(text) - 15, 1000)]
    return sorted(path.name for path in folder.iterdir() if any(part in path.read_bytes() for part in parts))


def put(connection, number, text):
    connection.execute("INSERT INTO objects VALUES (?, ?)", (number, text))
    connection.commit()


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "state.db"
    with closing(connected(path)) as flower:
        flower.execute("CREATE TABLE objects (number INTEGER PRIMARY KEY, content BLOB)")
        yield path, flower


@pytest.mark.parametrize("is_overwritten", [True, False])
def test_a_message_that_was_delivered_is_in_no_file_and_others_are(database, tmp_path, is_overwritten):
    path, flower = database
    flower.execute(f"PRAGMA secure_delete = {'ON' if is_overwritten else 'OFF'}")
    delivered, waiting = secrets.token_bytes(100_000), secrets.token_bytes(100_000)
    put(flower, 1, delivered)
    purge_database(path)
    put(flower, 2, waiting)
    flower.execute("DELETE FROM objects WHERE number = 1")
    flower.commit()
    assert kept(tmp_path, delivered)
    purge_database(path)
    assert bool(kept(tmp_path, delivered)) != is_overwritten
    assert kept(tmp_path, waiting) == ["state.db"]
    assert (tmp_path / "state.db-wal").stat().st_size == 0
    assert flower.execute("SELECT content FROM objects").fetchall() == [(waiting,)]


def test_when_the_server_ends_nothing_is_left_of_any_message(database, tmp_path):
    path, flower = database
    assert "objects" in MESSAGE_TABLES
    waiting = secrets.token_bytes(100_000)
    put(flower, 1, waiting)
    flower.execute("PRAGMA secure_delete = OFF")
    purge_database(path, entirely=True)
    assert not kept(tmp_path, waiting)
    assert flower.execute("SELECT count(*) FROM objects").fetchone() == (0,)


def test_a_purge_waits_for_nobody_and_what_is_no_database_is_left_alone(database, tmp_path):
    path, flower = database
    flower.execute("BEGIN IMMEDIATE")
    flower.execute("INSERT INTO objects VALUES (1, x'00')")
    purge_database(path)
    flower.commit()
    (tmp_path / "other.db").write_bytes(b"no database")
    purge_database(tmp_path / "other.db", entirely=True)
    assert (tmp_path / "other.db").read_bytes() == b"no database"
    purge_database(tmp_path / "none.db", entirely=True)
    assert not (tmp_path / "none.db").exists()
