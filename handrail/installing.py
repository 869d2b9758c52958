"""Handrail inside a Celery app that exists already.

    app = Celery("shop")
    app.config_from_object("django.conf:settings", namespace="CELERY")
    handrail.install(app, "shop.agents:fleet")

The app gets two tasks, their queues and routes, and one entry in its beat schedule; every other
setting stays as it is. A worker of the app that consumes one of our queues refuses to start where a
setting could break a promise; a worker of other queues never does. Nothing is imported of the fleet
before a worker needs it: a web process that imports the app stays light.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlsplit

from celery import Celery
from celery.signals import (
    beat_init,
    celeryd_init,
    import_modules,
    worker_init,
    worker_process_shutdown,
    worker_ready,
    worker_shutdown,
)

from handrail.broker.app import HOST_TASK, register_step, sweep_entry
from handrail.broker.message import RECONCILE_QUEUE, STEP_TASK, STEPS_QUEUE, SWEEP_TASK, StepMessage
from handrail.broker.queues import AMQP, queue
from handrail.broker.verify import UnsafeConfiguration, UnsafeSetting, verify_guest
from handrail.errors import BadInput, HandrailError
from handrail.settings import Settings

if TYPE_CHECKING:  # heavy
    from handrail.fleet import Fleet

log = logging.getLogger("handrail")

OURS: Final = frozenset({STEPS_QUEUE, RECONCILE_QUEUE})
#: Under which name an app holds what was installed in it.
_HELD: Final = "_handrail_installed"
_SWEEP: Final = "handrail-sweep"


@dataclass(eq=False)
class AlreadyInstalled(BadInput):
    """An app has one fleet."""

    code: ClassVar[str] = "already-installed"
    name: str

    def __str__(self) -> str:
        return f"another fleet ({self.name}) is in this app already: make one fleet of both"


def install(
    app: Celery,
    fleet: Fleet | str | None = None,
    *,
    settings: Callable[[], Settings] = Settings.read,
) -> None:
    """Let an app's workers run the steps of a fleet, and its beat the sweep.

    `fleet` is the fleet, or where it is (`module:attribute`; None: where `HANDRAIL_FLEET` says):
    then it is imported by the first worker that needs it, and `settings` reads what is needed
    before. Doing it twice is doing it once. Raises `AlreadyInstalled` for a second fleet.
    """
    held: _Installed | None = getattr(app, _HELD, None)
    if held is not None:
        if held.named != fleet:
            raise AlreadyInstalled(str(held.named))
        return
    installed = _Installed(app, fleet, settings)
    setattr(app, _HELD, installed)
    state: Any = app  # whose stubs do not know how far it has come
    if state.configured:
        installed.configure(app)
    # Also after that: an app whose settings are given anew forgets what was added to the old ones.
    app.on_after_configure.connect(lambda sender, **_: installed.configure(sender), weak=False)
    if state.finalized:
        installed.finalize(app)
    else:
        app.on_after_finalize.connect(lambda sender, **_: installed.finalize(sender), weak=False)
    import_modules.connect(installed.process_begins, weak=False)
    celeryd_init.connect(installed.worker_is_made, weak=False)
    beat_init.connect(installed.beat_begins, weak=False)
    worker_init.connect(installed.worker_begins, weak=False)
    worker_ready.connect(installed.worker_is_ready, weak=False)
    worker_shutdown.connect(installed.process_ends, weak=False)
    worker_process_shutdown.connect(installed.process_ends, weak=False)


class _Installed:
    """What an app holds of us."""

    def __init__(
        self, app: Celery, fleet: Fleet | str | None, settings: Callable[[], Settings]
    ) -> None:
        self.named = fleet
        self._app = app
        self._settings = settings
        self._fleet: Fleet | None = None
        self._at_work: int | None = None  # the process that has begun to work
        self._consumes = False
        self._uses_queues = False

    @property
    def fleet(self) -> Fleet:
        """The fleet, imported when it is first needed; without a broker of its own it has the
        app's.
        """
        if self._fleet is None:
            if self.named is None or isinstance(self.named, str):
                from handrail.loading import load

                self._fleet = load(self.named or self._settings().fleet)
            else:
                self._fleet = self.named
            if not self._fleet.settings.broker_url:
                found = {"broker_url": self._url(), "key_prefix": self._prefix()}
                self._fleet.settings = self._fleet.settings.model_copy(update=found)
        return self._fleet

    def _url(self) -> str:
        url = self._app.conf.broker_write_url or self._app.conf.broker_url
        return str(url if isinstance(url, str) else url[0])

    def _prefix(self) -> str:
        return str((self._app.conf.broker_transport_options or {}).get("global_keyprefix", ""))

    # ---- the app ---------------------------------------------------------------------------------

    def configure(self, app: Celery) -> bool:
        """Add our routes, and our entry in the schedule, to those that are there; returns whether
        any of it was missing.
        """
        ours: dict[str, Any] = {
            STEP_TASK: {"queue": STEPS_QUEUE},
            "handrail.reconcile.*": {"queue": RECONCILE_QUEUE},
        }
        theirs = app.conf.task_routes
        listed = theirs if isinstance(theirs, list | tuple) else [theirs] if theirs else []
        entries = app.conf.beat_schedule or {}
        missing = ours not in listed or _SWEEP not in entries
        if ours not in listed:
            app.conf.task_routes = [ours, *listed]
        named = self.named
        known = self._settings() if named is None or isinstance(named, str) else named.settings
        app.conf.beat_schedule = {**entries, _SWEEP: sweep_entry(known.sweep_every_s)}
        return missing

    def finalize(self, app: Celery) -> None:
        """Add our tasks, and our queues to those that a worker without -Q consumes."""
        register_step(app, self._handle, **HOST_TASK)
        declare: Any = app.task(
            name=SWEEP_TASK, shared=False, ignore_result=True, max_retries=0, **HOST_TASK
        )
        declare(self._sweep_task())
        amqp: Any = app.amqp
        if "queues" in vars(amqp):
            self._add_queues(amqp.queues)
            return
        make = amqp.Queues

        def with_ours(*given: Any, **options: Any) -> Any:
            return self._add_queues(make(*given, **options))

        amqp.Queues = with_ours  # asked when they are first needed: `task_queues` may yet be set

    def _add_queues(self, queues: Any) -> Any:
        """Add ours, on RabbitMQ only where they are used: Celery sends an app's delayed tasks in
        another way, and fixes its workers' prefetch counts, wherever it knows of a quorum queue.
        """
        if self._uses_queues or urlsplit(self._url()).scheme not in AMQP:
            for name in sorted(OURS):
                queues.select_add(queue(name, self._url()))
        return queues

    def _use_queues(self) -> None:
        self._uses_queues = True
        self._add_queues(self._app.amqp.queues)

    def _sweep_task(self) -> Callable[[], None]:
        def sweep() -> None:  # no method: Celery counts its `self` among a message's arguments
            self._begin()
            self.fleet.sweep_now()

        return sweep

    async def _handle(self, message: StepMessage) -> None:
        self._begin()
        await self.fleet.handle_step(message)

    # ---- its workers, and its beat ---------------------------------------------------------------

    def process_begins(self, sender: Any, **_: object) -> None:
        """Add our part again where settings that came later have replaced it: a beat without our
        entry would leave lost steps and doubts alone.
        """
        if sender is self._app and self.configure(self._app):
            conf = self._app.conf
            conf.update(task_routes=conf.task_routes)  # this has them read anew; assigning does not
            log.warning(
                "[settings-replaced] task_routes or beat_schedule was assigned after"
                " handrail.install had added to it; our part is there again. Assign them before,"
                " or add to them: app.conf.beat_schedule.update(...)"
            )

    def worker_is_made(self, instance: Any, options: Any, **_: object) -> None:
        """Declare our queues in a worker that may consume them, before it selects its own."""
        named = options.get("queues")
        chosen = named.split(",") if isinstance(named, str) else named
        if instance.app is self._app and (not chosen or OURS & set(chosen)):
            self._use_queues()

    def beat_begins(self, sender: Any, **_: object) -> None:
        """Declare our queues where the sweep's messages are published."""
        if sender.app is self._app:
            self._use_queues()

    def worker_begins(self, sender: Any, **_: object) -> None:
        """Refuse to start a worker that would consume our queues with unsafe settings."""
        if sender.app is not self._app:
            return
        self._consumes = bool(OURS & set(self._app.amqp.queues.consume_from))
        if not self._consumes:
            return
        try:
            unsafe = [*verify_guest(self._app, pool=sender.pool_cls), *self._other_broker()]
            if unsafe:
                raise UnsafeConfiguration(tuple(unsafe))
            self.fleet.announce()
        except HandrailError as error:
            raise SystemExit(f"error[{error.code}]: {error}") from None
        finally:
            if self._fleet is not None:  # the children of a prefork pool begin with nothing open
                self._fleet.close()

    def worker_is_ready(self, sender: Any, **_: object) -> None:
        """Begin to work where this process runs the steps itself; a forked child does when it gets
        its first.
        """
        if self._consumes and sender.app is self._app and not _forks(sender.pool):
            self._begin()

    def process_ends(self, **_: object) -> None:
        """Give back what this process holds."""
        if self._at_work == os.getpid():
            self._at_work = None
            self.fleet.end_work()

    def _begin(self) -> None:
        if self._at_work != os.getpid():
            self._at_work = os.getpid()
            self.fleet.begin_work()

    def _other_broker(self) -> list[UnsafeSetting]:
        """Steps that are published on another broker than this app's would reach nobody here."""
        found = self.fleet.settings.broker_url
        if found == self._url() and self.fleet.settings.key_prefix == self._prefix():
            return []
        return [
            UnsafeSetting(
                "another-broker",
                "HANDRAIL_BROKER_URL or HANDRAIL_KEY_PREFIX",
                "not the app's own",
                "the broker and the global_keyprefix of the app",
                "Leave both unset to use the app's, or run the fleet with 'handrail worker'.",
            )
        ]


def _forks(pool: Any) -> bool:
    return type(pool).__module__ == "celery.concurrency.prefork"
