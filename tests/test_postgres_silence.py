"""A server that says nothing: no thread waits for it for ever, and none holds up the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from handrail.ledger import database as module
from handrail.ledger import postgres
from handrail.ledger.database import Database
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.session import ConnectionLost
from tests.chaos.proxy import Link, Proxies

SILENCE_S = 0.6


@pytest.fixture
def way(postgres_url: str) -> Iterator[Link]:
    """The way to the database, which can be half open."""
    proxies = Proxies()
    server = Path(str(make_url(postgres_url).query["host"])) / ".s.PGSQL.5432"
    yield proxies.open("the way", server)
    proxies.close()


@pytest.fixture
def database(way: Link, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(postgres, "SILENCE_S", SILENCE_S)
    url = make_url(postgres_url)
    database = Database(
        url.set(host="127.0.0.1", port=way.port, query={"sslmode": "disable"}),
    )
    assert database.run("SELECT 1 AS one", {}) == [{"one": 1}]
    yield database
    way.whole()
    database.close()


def in_a_transaction(database: Database) -> object:
    with database.transaction() as tx:
        return tx.run("SELECT 1 AS one", {})


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda database: database.run("SELECT 1 AS one", {}), id="a known statement"),
        pytest.param(lambda database: database.run("SELECT 2 AS two", {}), id="a new statement"),
        pytest.param(
            lambda database: database.run_together([("SELECT 1 AS one", {})] * 2), id="together"
        ),
        pytest.param(in_a_transaction, id="a transaction"),
    ],
)
def test_a_statement_without_an_answer_is_given_up_and_the_process_goes_on_meanwhile(
    database: Database, way: Link, ask: Callable[[Database], object]
) -> None:
    way.half_open()
    began = time.monotonic()
    with others_at_work() as beats, pytest.raises(ConnectionLost, match="silent"):
        ask(database)
    took = time.monotonic() - began
    assert SILENCE_S <= took < SILENCE_S + 5
    assert len(beats) > 10, "the other threads stood still"


def test_after_the_silence_a_new_connection_is_made(database: Database, way: Link) -> None:
    way.half_open()
    with pytest.raises(ConnectionLost):
        database.run("SELECT 1 AS one", {})
    way.whole()
    assert database.run("SELECT 1 AS one", {}) == [{"one": 1}]


def test_only_one_of_many_waits_for_a_server_that_cannot_be_reached(
    database: Database, way: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who ask right after it are told at once, and soon somebody tries again."""
    monkeypatch.setattr(module, "_CONNECT_TIMEOUT_S", 2)
    way.half_open()
    with pytest.raises(ConnectionLost):
        database.run("SELECT 1 AS one", {})
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(DatabaseUnavailable):
            database.run("SELECT 1 AS one", {})
    assert time.monotonic() - began < 2 * 2, "several have waited"
    way.whole()
    began = time.monotonic()
    while time.monotonic() < began + 10:
        with suppress(DatabaseUnavailable):
            assert database.run("SELECT 1 AS one", {}) == [{"one": 1}]
            return
        time.sleep(0.05)
    pytest.fail("nobody has tried again")


@contextmanager
def others_at_work() -> Iterator[list[float]]:
    """Another thread of this process, which notes when it could do something."""
    beats: list[float] = []
    over = threading.Event()

    def beat() -> None:
        while not over.wait(SILENCE_S / 40):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield beats
    finally:
        over.set()
        thread.join()
