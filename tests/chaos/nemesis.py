"""The nemesis: it draws faults from a seed, lets them happen, overlapping, and undoes each.

What it draws is a plan, made before anything happens: kinds, instants, durations and a seed for
each fault's own choices. The kinds come as from a shuffled deck, so that none is missing by chance.
Durations are those of the default pace; a faster one shortens them.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
import redis

from handrail.broker.message import STEPS_QUEUE, StepMessage
from handrail.broker.publish import Publisher, PublishFailed
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.session import ConnectionLost
from tests.chaos.kinds import KINDS
from tests.chaos.provider import WAYS
from tests.chaos.proxy import Link
from tests.chaos.stack import BEATS, CLIENT, WORKERS, Stack
from tests.test_broker_worker import FORGED, NO_ENVELOPES

#: Between two faults pass 2 to 10 s by the draw, scaled so that they come this often on average.
MEAN_PAUSE_S: Final = 4.7
SHORT_PAUSE: Final = "a worker is paused"
LONG_PAUSE: Final = "a worker is paused beyond its lease"
AT_LEAST_LONG: Final = 2  # in five minutes

Log = Callable[[str], None]
#: What a fault does when it begins, says about itself in one line, and undoes when it ends.
Act = Callable[["Nemesis", random.Random, float], AbstractContextManager[str]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault as it was drawn. Its targets are drawn from `seed` when it happens."""

    number: int
    kind: str
    at_s: float
    lasts_s: float
    seed: int


# ---- the kinds -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault: how long it lasts, in seconds of the default pace, and what it does."""

    shortest_s: float
    longest_s: float
    act: Act
    only: str = ""  # a database


CATALOGUE: dict[str, FaultKind] = {}


def _fault(
    kind: str, shortest_s: float = 0.0, longest_s: float = 0.0, *, only: str = ""
) -> Callable[[Callable[..., Iterator[str]]], None]:
    def register(act: Callable[..., Iterator[str]]) -> None:
        CATALOGUE[kind] = FaultKind(shortest_s, longest_s, contextmanager(act), only)

    return register


@_fault("a worker is killed")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    name = draw.choice(WORKERS)
    yield f"{name}, process {nemesis.stack.signal(name, signal.SIGKILL)}"


@_fault("a worker is told to stop")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    name = draw.choice(WORKERS)
    yield f"{name}, process {nemesis.stack.signal(name, signal.SIGTERM)}"


@_fault(SHORT_PAUSE, 2, 9)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from nemesis.pausing(draw.choice(WORKERS))


@_fault(LONG_PAUSE, 32, 40)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    # One goes on, or nothing would happen at all for so long.
    paused = [name for name in WORKERS if name in nemesis.stack.paused()]
    free = [name for name in WORKERS if name not in paused]
    yield from nemesis.pausing(draw.choice(free if len(free) > 1 else paused))


@_fault("a beat is killed")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    name = draw.choice(BEATS)
    yield f"{name}, process {nemesis.stack.signal(name, signal.SIGKILL)}"


@_fault("a beat is paused", 5, 20)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from nemesis.pausing(draw.choice(BEATS))


@_fault("Valkey is killed and forgets", 0.5, 4)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    with nemesis.broker_guard:
        nemesis.stack.broker.stop()
        try:
            yield "away"
        finally:
            nemesis.stack.broker.start()


@_fault("Valkey is flushed")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    with redis.Redis.from_url(nemesis.stack.broker.url, socket_timeout=5) as client:
        client.flushall()
    yield "all keys"


@_fault("Valkey is frozen", 2, 6)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    pid = nemesis.stack.broker_pid()
    nemesis.stack.pause(pid)
    try:
        yield f"process {pid}"
    finally:
        nemesis.stack.resume(pid)


@_fault("PostgreSQL restarts at once", 0.5, 4, only="postgresql")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    store = nemesis.stack.store
    assert store is not None
    with nemesis.store_guard:
        store.crash()
        try:
            yield "every connection is dropped"
        finally:
            store.back()


@_fault("backends are terminated", only="postgresql")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    backends = nemesis.backends()
    chosen = [pid for pid in backends if draw.random() < 0.5]
    nemesis.terminate(chosen)
    yield f"{len(chosen)} of {len(backends)}"


@_fault("the database is locked", 2, 12, only="sqlite")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    with nemesis.stack.direct.transaction():
        yield "by another program"


@_fault("messages are duplicated")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield f"{nemesis.push_copies(draw)} copies of old and current ones"


@_fault("messages are reordered", 1, 4)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    with nemesis.catching(lasts_s) as caught:
        yield "caught, and pushed in another order"
    draw.shuffle(caught)
    nemesis.push_raw(caught)


@_fault("messages are lost", 1, 4)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    with nemesis.catching(lasts_s):
        yield "caught, and thrown away"


@_fault("messages are junk")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    junk = [*NO_ENVELOPES.values(), *(json.dumps(forged) for forged in FORGED.values())]
    draw.shuffle(junk)
    nemesis.push_raw(junk)
    yield f"{len(junk)} of them"


@_fault("answers of the database are lost", 2, 6, only="postgresql")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _on_links(nemesis, draw, "database", _loses_answers)


@_fault("the way to the database is half open", 3, 12, only="postgresql")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _on_links(nemesis, draw, "database", Link.half_open)


@_fault("the way to the database is slow", 3, 9, only="postgresql")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _on_links(nemesis, draw, "database", _is_slow)


@_fault("connections to the database are cut", only="postgresql")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _on_links(nemesis, draw, "database", Link.cut)


@_fault("answers of the broker are lost", 2, 6)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _on_links(nemesis, draw, "broker", _loses_answers)


@_fault("the way to the broker is half open", 3, 12)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _on_links(nemesis, draw, "broker", Link.half_open)


@_fault("a wall clock is wrong", 10, 40, only="postgresql")
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    # On SQLite a process's clock is the ledger's.
    name = draw.choice((*WORKERS, *BEATS))
    ahead_s = draw.choice((-1, 1)) * draw.choice((7, 61, 600, 7_200))
    nemesis.stack.set_clock(name, ahead_s)
    try:
        yield f"{name} by {ahead_s} s"
    finally:
        nemesis.stack.set_clock(name, 0.0)


@_fault("effects are late", 4, 15)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _misbehaves(nemesis, draw, "apply", "late")


@_fault("answers of the provider are lost", 4, 15)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _misbehaves(nemesis, draw, "apply", "lost")


@_fault("requests to the provider are lost", 4, 15)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _misbehaves(nemesis, draw, draw.choice(("apply", "look", "check")), "dropped")


@_fault("the provider is slow", 4, 15)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _misbehaves(nemesis, draw, draw.choice([*WAYS]), "slow")


@_fault("the provider refuses or does not know", 4, 10)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _misbehaves(nemesis, draw, "apply", draw.choice(("refused", "busy", "unclear")))


@_fault("queries fail", 2, 8)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    yield from _misbehaves(nemesis, draw, "find", "down")


@_fault("a tool is paused by a person", 3, 12)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    name = draw.choice(KINDS).name
    nemesis.insist(nemesis.stack.fleet.pause, "tool", name, reason="chaos")
    try:
        yield name
    finally:
        nemesis.insist(nemesis.stack.fleet.resume, "tool", name)


@_fault("the provider is frozen", 1, 4)
def _(nemesis: Nemesis, draw: random.Random, lasts_s: float) -> Iterator[str]:
    pid = nemesis.stack.provider_pid
    nemesis.stack.pause(pid)
    try:
        yield f"process {pid}"
    finally:
        nemesis.stack.resume(pid)


def _on_links(
    nemesis: Nemesis, draw: random.Random, server: str, act: Callable[[Link], None]
) -> Iterator[str]:
    """Harm one worker's way to a server; now and then every process's."""
    links = nemesis.stack.links(server)
    if draw.random() < 0.7:
        links = [draw.choice([link for link in links if not link.name.startswith(CLIENT)])]
    for link in links:
        act(link)
    try:
        yield ", ".join(link.name for link in links)
    finally:
        for link in links:
            link.whole()


def _loses_answers(link: Link) -> None:
    link.loses_answers = 0.15


def _is_slow(link: Link) -> None:
    link.delay_s = 0.1


def _misbehaves(nemesis: Nemesis, draw: random.Random, verb: str, way: str) -> Iterator[str]:
    kinds = [kind.name for kind in KINDS if draw.random() < 0.6] or [KINDS[0].name]
    share = draw.choice((0.3, 0.6, 0.9))
    order = {
        "fault": str(draw.getrandbits(64)),
        "verbs": [verb],
        "kinds": kinds if verb in ("apply", "find") else None,
        "way": way,
        "share": share,
    }
    nemesis.stack.tell_provider({"verb": "behave", **order})
    try:
        yield f"{verb}: {way} for {share:.0%} of {', '.join(kinds) if order['kinds'] else 'all'}"
    finally:
        nemesis.stack.tell_provider({"verb": "relent", "fault": order["fault"]})


# ---- the plan ------------------------------------------------------------------------------------


def plan(seed: int, seconds: float, *, database: str, scale: float = 1.0) -> list[Fault]:
    """Draw the faults of a run, in their order."""
    draw = random.Random(seed)
    kinds = [kind for kind, known in CATALOGUE.items() if known.only in ("", database)]
    count = max(1, round(seconds / (MEAN_PAUSE_S * max(scale, 0.25))))
    pauses = [draw.uniform(2, 10) for _ in range(count)]
    drawn: list[str] = []
    while len(drawn) < count:
        deck = [*kinds]
        draw.shuffle(deck)
        drawn += deck
    faults: list[Fault] = []
    at_s = 0.0
    for number, (kind, pause) in enumerate(zip(drawn[:count], pauses, strict=True), start=1):
        at_s += pause * seconds / sum(pauses) * 0.98
        faults.append(_drawn(draw, number, kind, at_s, scale))
    return _with_long_pauses(draw, faults, seconds, scale)


def _drawn(draw: random.Random, number: int, kind: str, at_s: float, scale: float) -> Fault:
    known = CATALOGUE[kind]
    lasts_s = draw.uniform(known.shortest_s, known.longest_s) * scale
    return Fault(number, kind, at_s, lasts_s, draw.getrandbits(32))


def _with_long_pauses(
    draw: random.Random, faults: list[Fault], seconds: float, scale: float
) -> list[Fault]:
    """See to it that enough pauses outlast the lease: each must end before the peace begins."""
    latest_s = seconds - CATALOGUE[LONG_PAUSE].longest_s * scale
    kept = [
        _drawn(draw, fault.number, SHORT_PAUSE, fault.at_s, scale)
        if fault.kind == LONG_PAUSE and fault.at_s > latest_s
        else fault
        for fault in faults
    ]
    for share in (0.15, 0.6)[:AT_LEAST_LONG]:
        long = [fault.number for fault in kept if fault.kind == LONG_PAUSE]
        if latest_s <= 0 or len(long) >= AT_LEAST_LONG:
            break
        nearest = min(
            (fault for fault in kept if fault.number not in long),
            key=lambda fault: abs(fault.at_s - share * latest_s),
        )
        kept[nearest.number - 1] = _drawn(draw, nearest.number, LONG_PAUSE, nearest.at_s, scale)
    return kept


# ---- the nemesis ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Nemesis:
    """Carries a plan out. `happened` counts what really took place, by kind."""

    stack: Stack
    faults: Sequence[Fault]
    log: Log
    happened: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    broker_guard: threading.Lock = field(default_factory=threading.Lock)
    store_guard: threading.Lock = field(default_factory=threading.Lock)
    _peace: threading.Event = field(default_factory=threading.Event)

    def rage(self, seconds: float) -> None:
        """Let all faults happen, and undo the last of them when the time is over."""
        began = time.monotonic()
        threads: list[threading.Thread] = []
        try:
            for fault in self.faults:
                time.sleep(max(0.0, began + fault.at_s - time.monotonic()))
                thread = threading.Thread(
                    target=self._happen, args=(fault, began), name=fault.kind, daemon=True
                )
                thread.start()
                threads.append(thread)
            time.sleep(max(0.0, began + seconds - time.monotonic()))
        finally:
            self._peace.set()
            for thread in threads:
                thread.join()

    def _happen(self, fault: Fault, began: float) -> None:
        kind = CATALOGUE[fault.kind]

        def say(what: str) -> None:
            self.log(f"{time.monotonic() - began:7.2f} s  #{fault.number} {fault.kind}: {what}")

        try:
            with kind.act(self, random.Random(fault.seed), fault.lasts_s) as what:
                self.happened[fault.kind] += 1
                say(f"{what} for {fault.lasts_s:.1f} s" if fault.lasts_s else what)
                self._peace.wait(fault.lasts_s)
            if fault.lasts_s:
                say("over")
        except (redis.RedisError, psycopg.Error, DatabaseUnavailable, ConnectionLost, OSError) as e:
            # What it needed was away by another fault. Nothing of it may be left undone.
            say(f"came to nothing ({type(e).__name__})")
        except Exception as error:
            self.failed.append(f"#{fault.number} {fault.kind}: {error!r}")
            raise

    def insist(self, act: Callable[..., object], *args: Any, **options: Any) -> None:
        """Do something although the database may be away for a while."""
        give_up_at = time.monotonic() + 60
        while True:
            try:
                act(*args, **options)
                return
            except (DatabaseUnavailable, ConnectionLost):
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.3)

    # ---- what several kinds need -----------------------------------------------------------------

    def pausing(self, name: str) -> Iterator[str]:
        """Stop a slot's process for as long as the fault lasts."""
        pid = self.stack.slots[name].pid
        if not pid:
            raise ProcessLookupError(f"{name} is just being started")
        self.stack.pause(pid)
        try:
            yield f"{name}, process {pid}"
        finally:
            self.stack.resume(pid)

    def backends(self) -> list[int]:
        """The server's processes that serve the fleet."""
        rows = self.stack.direct.run(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'handrail'"
            " AND pid <> pg_backend_pid()",
            {},
        )
        return sorted(row["pid"] for row in rows)

    def terminate(self, pids: Sequence[int]) -> None:
        """End some of them."""
        for pid in pids:
            self.stack.direct.run("SELECT pg_terminate_backend(:pid)", {"pid": pid})

    def push_copies(self, draw: random.Random) -> int:
        """Announce steps of runs that are not over, as they are, as they were, and as they will
        be.
        """
        rows = self.stack.direct.run(
            "SELECT id, step, epoch FROM handrail_run WHERE wake_at IS NOT NULL", {}
        )
        chosen = draw.sample(rows, min(len(rows), 40))
        copies = [
            StepMessage(run_id=row["id"], step=row["step"], epoch=max(0, row["epoch"] + off))
            for row in chosen
            for off in (-1, 0, 0, 0, 1)
        ]
        draw.shuffle(copies)
        publisher = Publisher(self.stack.fleet.celery)
        with suppress(PublishFailed):  # some may have been published
            publisher.publish(copies)
        publisher.close()
        return len(copies)

    def push_raw(self, items: Sequence[str | bytes]) -> None:
        """Put items on the queue of steps as they are."""
        if items:
            with redis.Redis.from_url(self.stack.broker.url, socket_timeout=5) as client:
                client.lpush(STEPS_QUEUE, *items)

    @contextmanager
    def catching(self, seconds: float) -> Iterator[list[str | bytes]]:
        """Take messages away from the workers, as many as can be got."""
        caught: list[str | bytes] = []
        over = threading.Event()

        def catch() -> None:
            with redis.Redis.from_url(self.stack.broker.url, socket_timeout=5) as client:
                while not over.is_set():
                    with suppress(redis.RedisError):
                        taken: Any = client.brpop([STEPS_QUEUE], timeout=0.2)
                        if taken:
                            caught.append(taken[1])

        catchers = [threading.Thread(target=catch, daemon=True) for _ in range(4)]
        for catcher in catchers:
            catcher.start()
        try:
            yield caught
        finally:
            over.set()
            for catcher in catchers:
                catcher.join()
