from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """A disk that is as patient as tests are not; whether writes are in order does not depend on it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
