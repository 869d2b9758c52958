"""What goes on after a process has died: other processes, on what it has left.

The client that got no answer asks again, the broker has lost what it held or delivers all of it
once more, workers and sweep go on. Nobody is told what has happened.
"""

from __future__ import annotations

from typing import Final

from tests.crash.bench import Bench, Stuck

#: Nothing may be left to do after this: every write has landed, every lease has run out.
LONG_MS: Final = 3_600_000
#: How long recovery may take, people not included: the lost lease (30 s), the stall that was
#: declared (20 s), the time to settle (5 s), a batch that a dead sweep has postponed (15 s), a step
#: that was lost with its message (10 s), and pauses between queries. Seen: 61 s.
BOUND_MS: Final = 90_000


def play(bench: Bench) -> None:
    """What the first process does."""
    bench.enqueue()
    bench.work()


def recover(bench: Bench, *, doubled: bool) -> int:
    """Bring everything to rest; returns how long that took without people. Raises `Stuck`."""
    began = bench.shared.now_ms
    if doubled:
        bench.queue.double()
    else:
        bench.queue.lose()
    bench.enqueue()
    bench.work()
    took_ms = bench.shared.now_ms - began - bench.people_ms
    bench.pass_time(LONG_MS)
    bench.service.land()
    bench.sweep()
    bench.work()
    if again := bench.overdue():
        raise Stuck(f"the sweep has work again and again: {again}")
    return took_ms
