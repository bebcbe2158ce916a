"""A request that the node does not know any more ends with an error, and does not end the node's process."""

import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
httpx = pytest.importorskip("httpx")

from partsong.federation.flower.site_process import heartbeat, retrying  # noqa: E402


@pytest.fixture
def signals(monkeypatch):
    found = []
    monkeypatch.setattr("os.kill", lambda process, number: found.append(number))
    monkeypatch.setattr(signal, "raise_signal", found.append)
    return found


def refusal(code):
    request = httpx.Request("POST", "http://127.0.0.1/v1/runtime/pull-object")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(code, request=request))


def test_an_unknown_request_is_an_error(signals):
    def unknown():
        raise refusal(401)

    with pytest.raises(httpx.HTTPStatusError):
        retrying().invoke(unknown)
    assert signals == []


def test_what_may_pass_is_tried_again():
    answers = [refusal(503), httpx.ConnectError("gone"), None]

    def call():
        if (error := answers.pop(0)) is not None:
            raise error
        return "done"

    assert retrying().invoke(call) == "done"


@pytest.mark.parametrize(
    ("outcome", "is_told"),
    [(SimpleNamespace(success=False), True), (refusal(401), True), (httpx.ConnectError("gone"), False)],
)
def test_a_heart_beats_on_whatever_is_thought_of_it(signals, outcome, is_told):
    def beat(_):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert heartbeat(SimpleNamespace(SendTaskHeartbeat=beat))() is is_told
    assert signals == []
