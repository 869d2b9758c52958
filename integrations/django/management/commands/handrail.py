"""`manage.py handrail ...`: the command line of Handrail, with the project's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from handrail.cli import app
from handrail.errors import HandrailError
from handrail.integrations.django import conf


class Command(BaseCommand):
    """Hands everything to `handrail`, whose exit code is that of `manage.py`."""

    help = "Controlled agents: workers, runs, approvals, handoffs. See `manage.py handrail --help`."
    requires_system_checks: Sequence[str] = ()  # type: ignore[assignment]  # a worker checks itself

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass on what follows `handrail`, options too: Django's own would be taken out of it."""
        try:
            settings = conf.read()
        except HandrailError as error:
            self.stderr.write(f"error[{error.code}]: {error}")
            raise SystemExit(2) from None
        os.environ.update(settings.to_environment())
        app(args=argv[2:], prog_name=f"{os.path.basename(argv[0])} handrail")

    def handle(self, *args: Any, **options: Any) -> None:
        """Not how it is called: its options are not Django's."""
        raise CommandError("run it as a command: manage.py handrail ...")
