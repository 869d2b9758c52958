"""News of runs as signals of Django's: what `handrail.signals` tells, told to Django's receivers.

    from django.dispatch import receiver
    from handrail.integrations.django.signals import handoff_opened

    @receiver(handoff_opened)
    def tell(sender, notice, **kwargs):
        mail_admins("A run needs you", f"{notice.workflow}: {notice.run_id} ({notice.reason})")

`sender` is the fleet, `notice` a `handrail.signals.Notice`. A receiver is called after the commit,
in the process that has committed, beside the run: it may use the ORM, and what it raises is logged.
Light: a web process that connects receivers imports no agent code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from django.db import close_old_connections
from django.dispatch import Signal

if TYPE_CHECKING:  # heavy
    from handrail.signals import Notice

approval_needed = Signal()
question_asked = Signal()
handoff_opened = Signal()
handoff_escalated = Signal()
run_stopped = Signal()

_OF: Final = {
    "approval-needed": approval_needed,
    "question-asked": question_asked,
    "handoff-opened": handoff_opened,
    "handoff-escalated": handoff_escalated,
    "run-stopped": run_stopped,
}


def relay() -> None:
    """Let Django's receivers hear what is told from now on; each fleet of a project does it."""
    from handrail import signals

    known = (
        *(signals.approval_needed, signals.question_asked),
        *(signals.handoff_opened, signals.handoff_escalated, signals.run_stopped),
    )
    for signal in known:
        signal.connect(_forward)


def _forward(fleet: object, notice: Notice) -> None:
    """Tell Django's receivers, in a thread whose connections are looked after as a request's."""
    close_old_connections()
    try:
        _OF[notice.news.value].send_robust(sender=fleet, notice=notice)
    finally:
        close_old_connections()


__all__ = [
    "approval_needed",
    "handoff_escalated",
    "handoff_opened",
    "question_asked",
    "run_stopped",
]
