"""The intent lock, on a real server, on the one that the simulator has instead, and on fakeredis:
all three answer alike.
"""

from __future__ import annotations

import itertools
import random
import time
from types import SimpleNamespace
from typing import Any, cast

import fakeredis
import pytest

from handrail.ledger.lock import RedisLock, Refusal
from tests.simulator.ports import LockServer, SimLock

LONG_MS = 60_000
SERVERS = ("a real server", "fakeredis", "the simulator's")


@pytest.fixture(params=SERVERS)
def lock(request: pytest.FixtureRequest) -> RedisLock:
    if request.param == "a real server":
        return RedisLock(request.getfixturevalue("valkey_url"), prefix=f"{request.node.name}:")
    if request.param == "fakeredis":
        locks = RedisLock("redis://nowhere")
        locks._client = fakeredis.FakeRedis(decode_responses=True)
        return locks
    return simulated()


def simulated() -> SimLock:
    clock = itertools.count()  # each look is a millisecond later
    quiet = SimpleNamespace(at_lock=lambda point, side: None)
    ground = SimpleNamespace(lock_server=LockServer(lambda: next(clock)), schedule=quiet)
    return SimLock(cast(Any, ground))


def test_an_intent_is_locked_once(lock: RedisLock) -> None:
    assert isinstance(lock.acquire("effect", ttl_ms=LONG_MS), str)

    assert lock.acquire("effect", ttl_ms=LONG_MS) is Refusal.TAKEN
    assert isinstance(lock.acquire("another", ttl_ms=LONG_MS), str)


def test_the_servers_answer_alike_whatever_is_asked(valkey_url: str) -> None:
    """A thousand random calls: the same keys are taken, held and given back everywhere.

    Nothing runs out meanwhile: when it does is asked of each server by itself.
    """
    real, fake = RedisLock(valkey_url, prefix="alike:"), RedisLock("redis://nowhere")
    fake._client = fakeredis.FakeRedis(decode_responses=True)
    locks, chance = (real, fake, simulated()), random.Random(7)
    held: dict[str, list[str]] = {}
    for _ in range(1_000):
        name = chance.choice("abc")
        if chance.random() < 0.5:
            got = [lock.acquire(name, ttl_ms=1_000 * LONG_MS) for lock in locks]
            granted = [token for token in got if isinstance(token, str)]
            assert len(granted) in (0, 3) and bool(granted) is (name not in held), got
            held |= {name: granted} if granted else {}
        else:
            tokens = held.pop(name, [""] * 3) if chance.random() < 0.6 else ["another's"] * 3
            for lock, token in zip(locks, tokens, strict=True):
                lock.release(name, token)


def test_only_who_holds_a_lock_gives_it_back(lock: RedisLock) -> None:
    token = lock.acquire("effect", ttl_ms=LONG_MS)
    assert isinstance(token, str)

    lock.release("effect", "somebody else's")
    assert lock.acquire("effect", ttl_ms=LONG_MS) is Refusal.TAKEN

    lock.release("effect", token)
    assert isinstance(lock.acquire("effect", ttl_ms=LONG_MS), str)


def test_a_lock_runs_out_by_itself(lock: RedisLock) -> None:
    assert isinstance(lock.acquire("effect", ttl_ms=20), str)

    give_up_at = time.monotonic() + 20
    while lock.acquire("effect", ttl_ms=LONG_MS) is Refusal.TAKEN:
        assert time.monotonic() < give_up_at


def test_a_server_that_cannot_be_reached_grants_nothing() -> None:
    nobody = RedisLock("redis://127.0.0.1:1")

    assert nobody.acquire("effect", ttl_ms=LONG_MS) is Refusal.UNREACHABLE
    nobody.release("effect", "a token")
