"""The demo's payment provider as a real process: one key, one refund, and each fault on demand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from handrail.demo.provider import (
    BODY_LIMIT_BYTES,
    Fault,
    Faults,
    ProviderNotStarted,
    start_provider,
)
from handrail.demo.provider_client import (
    ProviderClient,
    ProviderRefused,
    ProviderUnclear,
    Receipt,
)

AMPLE_S = 30.0  # for answers that do come, on a machine that is busy
SHORT_S = 0.05  # for answers that do not
LATER_MS = 1000  # so much longer than SHORT_S that a stalled machine does not turn them round

numbers = count(1)


@pytest.fixture(scope="module")
def provider_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_provider(tmp_path_factory.mktemp("provider")) as provider:
        yield provider.url


@pytest.fixture
def client(provider_url: str) -> ProviderClient:
    client = ProviderClient(provider_url)
    client.clear_faults(AMPLE_S)
    return client


@pytest.fixture
def order_id() -> str:
    """An order of this test alone: the tests share one provider."""
    return f"HR-{next(numbers)}"


def refund(
    client: ProviderClient,
    order_id: str,
    *,
    cents: int = 4990,
    key: str = "",
    wait_s: float = AMPLE_S,
) -> Receipt:
    return client.refund(order_id, f"ch-{order_id}", cents, key or f"key-{order_id}", wait_s)


def refunded(client: ProviderClient, order_id: str) -> list[int]:
    return [receipt.amount_cents for receipt in client.refunds_of(order_id, AMPLE_S)]


def outcomes(client: ProviderClient, order_id: str) -> list[str]:
    requests = client.records(AMPLE_S)["requests"]
    return [request["outcome"] for request in requests if request["order_id"] == order_id]


def raw(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    """A request as another client would send it."""
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=AMPLE_S)) as connection:
        connection.request(method, path, body, {"Idempotency-Key": "raw", **headers})
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content) if content else None


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + AMPLE_S
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


# Refunds and their keys


def test_a_refund_has_a_receipt_that_the_query_finds_again(
    client: ProviderClient, order_id: str
) -> None:
    receipt = refund(client, order_id)

    assert (receipt.order_id, receipt.amount_cents) == (order_id, 4990)
    assert client.find_refund(receipt.key, AMPLE_S) == receipt
    assert receipt.as_json()["refund_id"] == receipt.refund_id


def test_what_was_never_asked_for_is_not_found(client: ProviderClient, order_id: str) -> None:
    assert client.find_refund("key-unheard-of", AMPLE_S) is None
    assert refunded(client, order_id) == []


def test_the_same_key_gets_the_same_refund_again(client: ProviderClient, order_id: str) -> None:
    first, again = refund(client, order_id), refund(client, order_id)

    assert first == again
    assert refunded(client, order_id) == [4990]
    assert outcomes(client, order_id) == ["applied", "repeated"]


def test_a_key_with_another_body_is_a_conflict(client: ProviderClient, order_id: str) -> None:
    refund(client, order_id)

    with pytest.raises(ProviderRefused) as conflict:
        refund(client, order_id, cents=5000)

    assert conflict.value.refusal == "key-conflict"
    assert refunded(client, order_id) == [4990]
    assert outcomes(client, order_id) == ["applied", "key-conflict"]


def test_parallel_requests_with_one_key_are_one_refund(
    client: ProviderClient, order_id: str
) -> None:
    with ThreadPoolExecutor(16) as callers:
        receipts = list(callers.map(lambda _: refund(client, order_id), range(64)))

    assert set(receipts) == {receipts[0]}
    assert refunded(client, order_id) == [4990]
    assert sorted(set(outcomes(client, order_id))) == ["applied", "repeated"]


def test_parallel_requests_with_many_keys_are_as_many_refunds(
    client: ProviderClient, order_id: str
) -> None:
    with ThreadPoolExecutor(16) as callers:
        receipts = list(
            callers.map(lambda n: refund(client, order_id, key=f"{order_id}-{n}"), range(48))
        )

    assert len({receipt.refund_id for receipt in receipts}) == 48
    assert len(refunded(client, order_id)) == 48


def test_any_text_may_be_a_key(client: ProviderClient, order_id: str) -> None:
    key = f"refund:{order_id}:ch/1?a=b&c=d%20#e"

    assert refund(client, order_id, key=key) == client.find_refund(key, AMPLE_S)


def test_the_records_hold_every_request_and_every_key(
    client: ProviderClient, order_id: str
) -> None:
    refund(client, order_id, key=f"{order_id}-a")
    refund(client, order_id, key=f"{order_id}-b")
    refund(client, order_id, key=f"{order_id}-a")

    records = client.records(AMPLE_S)

    asked = [r["key"] for r in records["requests"] if r["order_id"] == order_id]
    assert asked == [f"{order_id}-a", f"{order_id}-b", f"{order_id}-a"]
    assert [k for k in records["keys_seen"] if k.startswith(f"{order_id}-")] == asked[:2]
    assert [r["key"] for r in records["refunds"] if r["order_id"] == order_id] == asked[:2]


# Faults


def test_a_lost_response_leaves_a_refund_behind(client: ProviderClient, order_id: str) -> None:
    client.set_fault({"order_id": order_id, "lose_response": True}, AMPLE_S)

    with pytest.raises(ProviderUnclear):
        refund(client, order_id)

    found = client.find_refund(f"key-{order_id}", AMPLE_S)
    assert found is not None and found.amount_cents == 4990


def test_an_error_after_applying_leaves_a_refund_behind(
    client: ProviderClient, order_id: str
) -> None:
    client.set_fault({"order_id": order_id, "error_after_apply": True}, AMPLE_S)

    with pytest.raises(ProviderUnclear, match="500"):
        refund(client, order_id)

    assert refunded(client, order_id) == [4990]


def test_a_refusal_is_definite_and_moves_no_money(client: ProviderClient, order_id: str) -> None:
    client.set_fault({"order_id": order_id, "refuse": "card-closed"}, AMPLE_S)

    with pytest.raises(ProviderRefused) as refusal:
        refund(client, order_id)

    assert (refusal.value.code, refusal.value.refusal) == ("provider-refused", "card-closed")
    assert refunded(client, order_id) == []
    assert outcomes(client, order_id) == ["card-closed"]


def test_a_refusal_is_not_stored_under_the_key(client: ProviderClient, order_id: str) -> None:
    client.set_fault({"order_id": order_id, "next_requests": 1, "refuse": "try-later"}, AMPLE_S)
    with pytest.raises(ProviderRefused):
        refund(client, order_id)

    assert refund(client, order_id).amount_cents == 4990


def test_a_delayed_refund_happens_although_nobody_waits_for_it(
    client: ProviderClient, order_id: str
) -> None:
    client.set_fault({"order_id": order_id, "delay_ms": LATER_MS}, AMPLE_S)

    with pytest.raises(ProviderUnclear, match="timed out"):
        refund(client, order_id, wait_s=SHORT_S)

    eventually(lambda: refunded(client, order_id) == [4990])


def test_a_delayed_answer_reaches_who_waits(client: ProviderClient, order_id: str) -> None:
    client.set_fault({"order_id": order_id, "delay_ms": 1}, AMPLE_S)

    assert refund(client, order_id).amount_cents == 4990


def test_a_late_refund_is_applied_long_after_the_connection_was_closed(
    client: ProviderClient, order_id: str
) -> None:
    """The case in which "not found" must not be taken for "did not happen"."""
    client.set_fault({"order_id": order_id, "answer_late_ms": LATER_MS}, AMPLE_S)

    with pytest.raises(ProviderUnclear, match="RemoteDisconnected"):
        refund(client, order_id)

    eventually(lambda: client.find_refund(f"key-{order_id}", AMPLE_S) is not None)
    records = client.records(AMPLE_S)
    (asked,) = [r for r in records["requests"] if r["order_id"] == order_id]
    (paid,) = [r for r in records["refunds"] if r["order_id"] == order_id]
    assert paid["applied_at"] - asked["received_at"] >= LATER_MS


def test_a_provider_that_ignores_keys_pays_twice(client: ProviderClient, order_id: str) -> None:
    client.set_fault({"order_id": order_id, "ignore_keys": True}, AMPLE_S)

    first, second = refund(client, order_id), refund(client, order_id)

    assert first.refund_id != second.refund_id
    assert refunded(client, order_id) == [4990, 4990]


def test_a_query_that_is_down_proves_nothing(client: ProviderClient, order_id: str) -> None:
    receipt = refund(client, order_id)
    client.set_fault({"order_id": order_id, "next_requests": 2, "query_down": True}, AMPLE_S)

    for _ in range(2):
        with pytest.raises(ProviderUnclear, match="503"):
            client.find_refund(receipt.key, AMPLE_S)

    assert client.find_refund(receipt.key, AMPLE_S) == receipt


def test_faults_combine(client: ProviderClient, order_id: str) -> None:
    client.set_fault({"order_id": order_id, "ignore_keys": True}, AMPLE_S)
    client.set_fault({"order_id": order_id, "next_requests": 1, "lose_response": True}, AMPLE_S)

    with pytest.raises(ProviderUnclear):
        refund(client, order_id)
    refund(client, order_id)

    assert refunded(client, order_id) == [4990, 4990]


def test_a_fault_of_one_order_leaves_the_others_alone(
    client: ProviderClient, order_id: str
) -> None:
    client.set_fault({"order_id": "HR-another", "refuse": "no"}, AMPLE_S)

    assert refund(client, order_id).amount_cents == 4990


def test_a_fault_for_the_next_requests_is_used_up(client: ProviderClient, order_id: str) -> None:
    client.set_fault({"next_requests": 2, "refuse": "busy"}, AMPLE_S)

    for _ in range(2):
        with pytest.raises(ProviderRefused, match="busy"):
            refund(client, order_id)

    assert refund(client, order_id).amount_cents == 4990


def test_faults_are_gone_after_they_are_cleared(client: ProviderClient, order_id: str) -> None:
    client.set_fault({"refuse": "no"}, AMPLE_S)
    client.clear_faults(AMPLE_S)

    assert refund(client, order_id).amount_cents == 4990


def test_many_takers_use_a_counted_fault_up_exactly_once() -> None:
    faults = Faults()
    faults.add(Fault(refuse="busy", next_requests=10))

    with ThreadPoolExecutor(8) as takers:
        taken = list(takers.map(lambda _: faults.take("HR-1", query=False), range(40)))

    assert sum(fault.refuse == "busy" for fault in taken) == 10


@pytest.mark.parametrize(
    "fault",
    [
        {},
        {"order_id": "HR-1"},  # nothing is switched on
        {"explode": True},
        {"lose_response": "yes"},
        {"delay_ms": -1},
        {"next_requests": 0, "refuse": "no"},
        {"query_down": True, "refuse": "no"},  # counted by what: queries or refunds?
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(
    client: ProviderClient, order_id: str, fault: dict[str, Any]
) -> None:
    with pytest.raises(ProviderRefused, match="fault"):
        client.set_fault(fault, AMPLE_S)

    assert refund(client, order_id).amount_cents == 4990


# What does not belong


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"order_id": "HR-1", "charge_id": "ch-1"}',
        b'{"order_id": "HR-1", "charge_id": "ch-1", "amount_cents": "4990"}',
        b'{"order_id": "HR-1", "charge_id": "ch-1", "amount_cents": 0}',
        b'{"order_id": "HR-1", "charge_id": "ch-1", "amount_cents": true}',
        b'{"order_id": "HR-1", "charge_id": "ch-1", "amount_cents": 1, "approved": true}',
        b" " * (BODY_LIMIT_BYTES + 1),
    ],
)
def test_a_malformed_request_is_refused(client: ProviderClient, body: bytes) -> None:
    before = len(client.records(AMPLE_S)["requests"])

    assert raw(client.url, "POST", "/refunds", body) == (400, {"refused": "malformed-request"})
    assert len(client.records(AMPLE_S)["requests"]) == before


def test_a_request_without_a_key_is_refused(client: ProviderClient, order_id: str) -> None:
    body = json.dumps({"order_id": order_id, "charge_id": "ch-1", "amount_cents": 1}).encode()

    answer = raw(client.url, "POST", "/refunds", body, **{"Idempotency-Key": ""})

    assert answer == (400, {"refused": "key-required"})
    assert refunded(client, order_id) == []


@pytest.mark.parametrize("query", ["", "?key=a&order_id=b", "?key=a&key=b", "?amount=1"])
def test_a_query_names_one_key_or_one_order(client: ProviderClient, query: str) -> None:
    assert raw(client.url, "GET", f"/refunds{query}") == (400, {"refused": "malformed-query"})


@pytest.mark.parametrize(
    "method, path", [("GET", "/"), ("POST", "/refund"), ("DELETE", "/refunds")]
)
def test_there_is_nothing_elsewhere(client: ProviderClient, method: str, path: str) -> None:
    assert raw(client.url, method, path)[0] == 404


# Captured amounts


def test_a_provider_that_knows_the_captures_refuses_more_than_was_captured(tmp_path: Path) -> None:
    with start_provider(tmp_path, captured_cents={"ch-1": 5000}) as provider:
        client = ProviderClient(provider.url)
        client.refund("HR-1", "ch-1", 3000, "key-1", AMPLE_S)

        with pytest.raises(ProviderRefused, match="beyond-captured"):
            client.refund("HR-1", "ch-1", 2001, "key-2", AMPLE_S)
        with pytest.raises(ProviderRefused, match="unknown-charge"):
            client.refund("HR-1", "ch-2", 1, "key-3", AMPLE_S)
        client.refund("HR-1", "ch-1", 2000, "key-4", AMPLE_S)
        again = client.refund("HR-1", "ch-1", 3000, "key-1", AMPLE_S)

        assert again.amount_cents == 3000, "a repeated key is no further refund"
        assert refunded(client, "HR-1") == [3000, 2000]


# The process


def test_records_and_keys_outlive_the_process(tmp_path: Path) -> None:
    with start_provider(tmp_path) as provider:
        first = refund(ProviderClient(provider.url), "HR-1")

    with start_provider(tmp_path) as provider:
        assert refund(ProviderClient(provider.url), "HR-1") == first


def test_what_was_answered_outlives_sigkill(tmp_path: Path) -> None:
    with start_provider(tmp_path) as provider:
        first = refund(ProviderClient(provider.url), "HR-1")
        os.kill(provider.pid, signal.SIGKILL)

    with start_provider(tmp_path) as provider:
        assert ProviderClient(provider.url).find_refund(first.key, AMPLE_S) == first


def test_sigterm_ends_it_with_status_zero(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "handrail.demo.provider", "--database", str(tmp_path / "p.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        assert raw(url, "GET", "/records")[0] == 200

        process.terminate()

        assert process.wait(AMPLE_S) == 0
        assert process.stdout.read() == b"", "the URL is all that it prints"


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed with SIGKILL: it has no chance to stop anything."""
    program = (
        "import sys, pathlib, signal\n"
        "from handrail.demo.provider import start_provider\n"
        "with start_provider(pathlib.Path(sys.argv[1])) as provider:\n"
        "    print(provider.url, flush=True)\n"
        "    signal.pause()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert raw(url, "GET", "/records")[0] == 200
        parent.kill()

    eventually(lambda: is_refusing_connections(url))


def test_a_provider_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "provider.db").mkdir()  # no file can be opened there

    with (
        pytest.raises(ProviderNotStarted, match=r"provider\.log") as failed,
        start_provider(tmp_path),
    ):
        pass

    assert failed.value.code == "provider-not-started"
    assert "unable to open database file" in failed.value.log.read_text()


def test_a_client_that_hangs_up_leaves_no_trace_in_the_log(tmp_path: Path) -> None:
    with start_provider(tmp_path) as provider:
        client = ProviderClient(provider.url)
        client.set_fault({"delay_ms": LATER_MS, "next_requests": 3}, AMPLE_S)
        for number in range(3):
            with pytest.raises(ProviderUnclear):
                refund(client, f"HR-{number}", wait_s=SHORT_S)
        eventually(lambda: len(client.records(AMPLE_S)["refunds"]) == 3)

    assert (tmp_path / "provider.log").read_text() == ""


def is_refusing_connections(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as connection:
        return connection.connect_ex((address.hostname, address.port)) != 0


# The client, against servers that lie


RECEIPT = {
    "refund_id": "re-1",
    "key": "key-1",
    "order_id": "HR-1",
    "charge_id": "ch-1",
    "amount_cents": 4990,
    "applied_at": 1,
}


@contextmanager
def answering(response: bytes) -> Iterator[ProviderClient]:
    """A server that gives one request these bytes, whatever it asks."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(response)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # to close with a request unread would reset the line
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve)
        serving.start()
        yield ProviderClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        serving.join()


def http(status: str, body: object) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"nonsense\r\n\r\n",
        http("200 OK", b""),
        http("200 OK", b"not json"),
        http("200 OK", b"\xff\xfe"),
        http("200 OK", {"status": "ok"}),  # a good status is no receipt
        http("200 OK", {**RECEIPT, "amount_cents": "4990"}),
        http("200 OK", {**RECEIPT, "amount_cents": 1}),  # a receipt for something else
        http("200 OK", {**RECEIPT, "order_id": "HR-2"}),
        http("200 OK", {**RECEIPT, "charge_id": "ch-2"}),
        http("200 OK", {**RECEIPT, "key": "key-2"}),
        http("200 OK", RECEIPT)[:-5],  # cut off
        http("302 Found", {"refused": "moved"}),
        http("403 Forbidden", b"<html>proxy</html>"),  # somebody on the way, not the provider
        http("403 Forbidden", {"error": "no"}),
        http("500 Oops", {"refused": "no"}),  # a 500 refuses nothing
    ],
)
def test_what_is_neither_receipt_nor_refusal_is_unclear(response: bytes) -> None:
    with answering(response) as client, pytest.raises(ProviderUnclear) as unclear:
        client.refund("HR-1", "ch-1", 4990, "key-1", AMPLE_S)

    assert unclear.value.code == "provider-unclear"
    assert "before anything is sent again" in str(unclear.value)


def test_the_right_receipt_is_taken_and_more_fields_do_not_hurt() -> None:
    with answering(http("201 Created", RECEIPT | {"fee_cents": 0})) as client:
        assert client.refund("HR-1", "ch-1", 4990, "key-1", AMPLE_S) == Receipt(**RECEIPT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer",
    [{"refunds": [{**RECEIPT, "key": "key-2"}]}, {"refunds": [{}]}, {"refunds": None}, [], None],
)
def test_a_query_is_believed_only_about_its_own_key(answer: object) -> None:
    with answering(http("200 OK", answer)) as client, pytest.raises(ProviderUnclear):
        client.find_refund("key-1", AMPLE_S)


def test_nobody_listening_is_unclear_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    with pytest.raises(ProviderUnclear):
        ProviderClient(url).find_refund("key-1", AMPLE_S)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_no_time_left_sends_nothing(
    client: ProviderClient, order_id: str, timeout_s: float
) -> None:
    with pytest.raises(ProviderUnclear):
        refund(client, order_id, wait_s=timeout_s)

    assert outcomes(client, order_id) == []
