"""What all tests share."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard():
    """Ctrl-C works as in a terminal, also where tests run in the background of a shell that has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
