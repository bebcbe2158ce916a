"""A byte order mark, which some editors put before UTF-8, changes nothing in files that people write."""

from __future__ import annotations

import json

import pytest

from partsong.federation.commands.server import _names_in
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.setup.credentials import SharedKey
from partsong.io.party_folder import FORMAT, LISTING, VERSION, read_listing
from partsong.topics.tokenizer import stop_words_of
from partsong.topics.vocabulary import Vocabulary

MARK = b"\xef\xbb\xbf"
PARTS = {"format": FORMAT, "version": VERSION, "parties": [{"name": "a", "file": "a.npz", "rows": 3}]}
KEY = SharedKey(bytes(range(16)))
READERS = {
    "experiment.toml": (Experiment.read, 'method = "exact"\r\nrank = 2\r\nrounds = 3\r\nseed = 5\r\n'),
    "site.toml": (Policy.read, "minimum_rows = 50\nsecure_aggregation = true\n"),
    "sites.key": (lambda path: SharedKey.read(path.read_text(encoding="utf-8")), KEY.text + "\n"),
    "names.txt": (_names_in, "alpha\nbeta\n"),
    LISTING: (lambda path: read_listing(path.parent), json.dumps(PARTS)),
    "words.txt": (lambda path: Vocabulary.of_file(path).words, "cat\ndog\n"),
    "stop.txt": (stop_words_of, "the\nof\n"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_mark_changes_nothing(name, tmp_path):
    read, text = READERS[name]
    (tmp_path / name).write_bytes(text.encode())
    without = read(tmp_path / name)
    (tmp_path / name).write_bytes(MARK + text.encode())
    assert read(tmp_path / name) == without


def test_a_mark_changes_no_fingerprint_of_a_roster_and_no_key_of_a_card(tmp_path):
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from partsong.federation.setup.credentials import Card, Listed

    roster = Listed("liver", {"east": bytes(32), "north": bytes(range(32))}, b"c" * 32, "authority")
    (tmp_path / "roster.toml").write_bytes(MARK + roster.written())
    found = Listed.read(tmp_path / "roster.toml")
    assert (found, found.fingerprint) == (roster, roster.fingerprint)
    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    node_key = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    card = Card("liver", "east", node_key, bytes(32).hex())
    card.save(tmp_path / "card.toml")
    (tmp_path / "card.toml").write_bytes(MARK + (tmp_path / "card.toml").read_bytes())
    assert Card.read(tmp_path / "card.toml") == card


def test_a_mark_within_a_key_is_no_letter_of_it():
    with pytest.raises(ValueError, match="Not a shared key"):
        SharedKey.read(KEY.text[:5] + "\ufeff" + KEY.text[5:])
