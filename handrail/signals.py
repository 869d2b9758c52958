"""Hooks for the host: a mail or a chat message when a person is needed, or when a run is over.

    from handrail.signals import handoff_opened

    @handoff_opened.connect
    def tell(fleet, notice):
        chat.post(f"{notice.workflow}: run {notice.run_id} needs you ({notice.reason})")

A receiver is called in a thread of its own, after what it is told of is committed, in the process
that has committed it, a forked child included: connect receivers in the module that makes the
fleet. Whatever it raises is logged; however long it takes, no run waits for it. News are no outbox:
a process that dies right after its commit has told nobody, and the queues (`handrail handoffs`,
`handrail approvals`) hold what there is.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import Final
from weakref import WeakSet

from blinker import Namespace

from handrail.agent.notices import News, Notice

log = logging.getLogger("handrail.signals")
#: So many pieces of news may wait for slow receivers before the next ones are dropped, and said so.
MOST_WAITING: Final = 10_000
FINISH_S: Final = 5.0

_signals = Namespace()
approval_needed = _signals.signal("approval-needed", "A run waits for consent to an exact action.")
question_asked = _signals.signal("question-asked", "A run waits for an answer.")
handoff_opened = _signals.signal("handoff-opened", "A matter waits for a person.")
handoff_escalated = _signals.signal("handoff-escalated", "A matter has waited for too long.")
run_stopped = _signals.signal("run-stopped", "A run has ended.")

_OF: Final = {
    News.APPROVAL_NEEDED: approval_needed,
    News.QUESTION_ASKED: question_asked,
    News.HANDOFF_OPENED: handoff_opened,
    News.HANDOFF_ESCALATED: handoff_escalated,
    News.RUN_STOPPED: run_stopped,
}


class Messenger:
    """Takes news of a fleet to the receivers, one after the other, beside whatever the process
    does.
    """

    def __init__(self, fleet: object) -> None:
        self._fleet = fleet
        self.begin()
        _messengers.add(self)

    def begin(self) -> None:
        """Start with nothing to tell and nobody who tells it: no thread and no held lock outlives a
        fork, and what waits there is the parent's to tell.
        """
        self._waiting: queue.Queue[Notice | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def tell(self, notice: Notice) -> None:
        """Have it told; returns at once, and never raises."""
        if not _OF[notice.news].receivers:
            return
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._deliver, name="handrail-signals", daemon=True
                )
                self._thread.start()
        try:
            self._waiting.put_nowait(notice)
        except queue.Full:
            log.error("%s of run %s is dropped: receivers are too slow", notice.news, notice.run_id)

    def close(self) -> None:
        """Let what waits be told, within a few seconds."""
        if self._thread is None or not self._thread.is_alive():
            return
        give_up_at = time.monotonic() + FINISH_S
        while not self._waiting.empty() and time.monotonic() < give_up_at:
            time.sleep(0.01)
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            log.error("%d pieces of news are dropped", self._waiting.qsize())
            return
        self._thread.join(max(0.0, give_up_at - time.monotonic()))

    def _deliver(self) -> None:
        while (notice := self._waiting.get()) is not None:
            for receiver in _OF[notice.news].receivers_for(self._fleet):
                try:
                    receiver(self._fleet, notice=notice)
                except BaseException:  # a receiver that exits ends nothing but itself
                    log.exception("a receiver of %s failed, for run %s", notice.news, notice.run_id)


_messengers: WeakSet[Messenger] = WeakSet()


def _begin_anew() -> None:
    for messenger in list(_messengers):
        messenger.begin()


os.register_at_fork(after_in_child=_begin_anew)


__all__ = [
    "News",
    "Notice",
    "approval_needed",
    "handoff_escalated",
    "handoff_opened",
    "question_asked",
    "run_stopped",
]
