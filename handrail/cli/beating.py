"""Celery's beat, as a fleet needs it: no file to remember anything in, and few words in trouble."""

from __future__ import annotations

import logging
from typing import Any

from celery.beat import ScheduleEntry, Scheduler

log = logging.getLogger("handrail.beat")


class PlainScheduler(Scheduler):
    """Sends what is due. What cannot be sent is not missed: the next sweep does its work too."""

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send one entry; never raises. Celery would log four tracebacks a tick."""
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except Exception as error:
            cause = type(error.__cause__ or error).__name__
            log.warning("%s was not sent (%s); the next one makes up for it", entry.name, cause)
