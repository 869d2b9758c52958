"""The cancel signal is heard when it can be, and is in nobody's way when it cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from handrail.broker.redis_client import redis_client
from handrail.broker.refusals import REFUSALS
from handrail.broker.signal import CHANNEL, CancelSignal

SECONDS = 20.0


@pytest.fixture
def signal(valkey_url: str) -> Iterator[CancelSignal]:
    signal = CancelSignal(valkey_url)
    yield signal
    signal.close()


def listening(signal: CancelSignal) -> SimpleQueue[str]:
    heard: SimpleQueue[str] = SimpleQueue()
    signal.listen(heard.put)
    assert signal.wait_until_listening(SECONDS)
    return heard


def test_a_cancel_sent_by_one_process_is_heard_by_another(
    signal: CancelSignal, valkey_url: str
) -> None:
    heard = listening(signal)
    sender = CancelSignal(valkey_url)
    assert sender.send("run-1")
    assert heard.get(timeout=SECONDS) == "run-1"
    sender.close()


def test_fleets_on_one_server_do_not_hear_each_other(signal: CancelSignal, valkey_url: str) -> None:
    heard = listening(signal)
    other = CancelSignal(valkey_url, key_prefix="other-")
    other.send("theirs")
    signal.send("ours")
    assert heard.get(timeout=SECONDS) == "ours"
    other.close()


def test_what_is_no_run_id_is_dropped_and_counted(signal: CancelSignal, valkey_url: str) -> None:
    heard = listening(signal)
    before = REFUSALS.counts().get("bad-signal", 0)
    for hostile in (b"", b"\xff", b"run 1", b"run-1\n", b"r" * 65, b"\x1b[2J"):
        redis_client(valkey_url).publish(CHANNEL, hostile)
    signal.send("run-2")
    assert heard.get(timeout=SECONDS) == "run-2"
    assert REFUSALS.counts()["bad-signal"] == before + 6


def test_a_listener_survives_what_its_callback_raises(signal: CancelSignal) -> None:
    heard: SimpleQueue[str] = SimpleQueue()

    def fail_first(run_id: str) -> None:
        heard.put(run_id)
        raise RuntimeError

    signal.listen(fail_first)
    assert signal.wait_until_listening(SECONDS)
    signal.send("run-1")
    signal.send("run-2")
    assert [heard.get(timeout=SECONDS), heard.get(timeout=SECONDS)] == ["run-1", "run-2"]


def test_a_listener_comes_back_after_the_server_dropped_it(
    signal: CancelSignal, valkey_url: str
) -> None:
    heard = listening(signal)
    server: Any = redis_client(valkey_url)
    assert server.client_kill_filter(_type="pubsub") >= 1
    for number in range(200):  # a hint that nobody hears is lost: say it until it is heard
        signal.send(f"run-{number}")
        with suppress(Empty):
            assert heard.get(timeout=0.1).startswith("run-")
            return
    pytest.fail("it did not come back")


def test_without_a_server_sending_says_so_and_listening_waits() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        signal = CancelSignal(f"redis://127.0.0.1:{taken.getsockname()[1]}/0")
        assert signal.send("run-1") is False
        signal.listen(print)
        assert not signal.is_listening
        assert not signal.is_healthy()
        signal.close()


def test_health_is_the_server_s_answer_and_the_listener_s_ear(signal: CancelSignal) -> None:
    assert signal.is_healthy()
    listening(signal)
    assert signal.is_healthy()
    signal.close()
    assert not signal.is_healthy()


def test_one_signal_has_one_listener(signal: CancelSignal) -> None:
    listening(signal)
    with pytest.raises(RuntimeError):
        signal.listen(print)
