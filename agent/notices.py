"""What an application may want to hear of: that a person is needed, or that a run is over. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class News(StrEnum):
    """What has happened."""

    APPROVAL_NEEDED = "approval-needed"
    QUESTION_ASKED = "question-asked"
    HANDOFF_OPENED = "handoff-opened"
    HANDOFF_ESCALATED = "handoff-escalated"
    RUN_STOPPED = "run-stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One piece of news: names and ids alone. `id` is that of the approval or the handoff."""

    news: News
    run_id: str
    tenant: str
    workflow: str
    subject: str
    status: str
    reason: str | None = None
    id: str | None = None
