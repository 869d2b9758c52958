"""Celery's consumer, quieter and harder to break.

It refuses to start with an unsafe configuration, takes no part in gossip, mingle and heartbeats
between workers, and drops what it cannot read without repeating it in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar, Final

from celery.worker.consumer import Consumer
from kombu import Connection
from kombu.common import ignore_errors

from handrail.broker.refusals import REFUSALS
from handrail.broker.transport import Transport
from handrail.broker.verify import (
    NEVER,
    UnsafeConfiguration,
    UnsafeSetting,
    verify_app,
    verify_server,
)

logger = logging.getLogger("handrail.broker")

_Blueprint: Any = Consumer.Blueprint  # a variable in its stubs
_DELAYS: Final = ":DelayedDelivery"
#: So long an idle worker may go without looking whether it is to stop. A signal ends no wait of its
#: event loop, and where the broker pushes, nothing else would for ten seconds.
LOOK_UP_S: Final = 1.0
AUTOSCALED: Final = UnsafeSetting(
    code="pool",
    setting="--autoscale",
    found="given",
    wanted="a fixed size",
    next_step="Drop it: a worker would take more messages than it can run.",
)


class StepConsumer(Consumer):
    """The consumer of an app that `make_app` made. Raises `UnsafeConfiguration` at start-up."""

    connection_errors: tuple[type[Exception], ...]
    controller: Any

    class Blueprint(_Blueprint):  # type: ignore[misc]
        """Celery's steps but one: nothing of ours waits at the broker, so that no queues for
        delayed messages are wanted there.
        """

        default_steps: ClassVar[list[str]] = [
            step for step in _Blueprint.default_steps if not step.endswith(_DELAYS)
        ]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        quiet = {"without_mingle": True, "without_gossip": True, "without_heartbeat": True}
        kwargs["worker_options"] = {**(kwargs.get("worker_options") or {}), **quiet}
        super().__init__(*args, **kwargs)
        unsafe = verify_app(self.app, pool=type(self.pool))
        if getattr(self.controller, "autoscale", None):
            unsafe.append(AUTOSCALED)
        if unsafe:
            raise UnsafeConfiguration(tuple(unsafe))

    def connect(self) -> Connection:
        """Connect, waiting for the broker as Celery does, and at first refuse one that evicts."""
        connection = super().connect()
        if self.restart_count == 0:
            found = verify_server(self.app)
            if unsafe := tuple(setting for setting in found if setting.code in NEVER):
                raise UnsafeConfiguration(unsafe)
        return connection

    def register_with_event_loop(self, hub: Any) -> None:
        """Let the loop wake now and then."""
        super().register_with_event_loop(hub)
        hub.call_repeatedly(LOOK_UP_S, _nothing)

    def stop(self) -> None:
        """Consume no more, with no pop left under way at the server.

        The pool stops next and publishes what it gives back: such a pop would fetch a step of that
        for this process, and nobody would run it before the process has ended.
        """
        super().stop()
        connection: Connection | None = self.connection
        if connection is not None and isinstance(connection.transport, Transport):
            ignore_errors(connection, connection.transport.finish_pops)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        """Contain what forged headers raise: Celery lets it end the worker."""
        receive = super().create_task_handler(*args, **kwargs)
        broken_connection = tuple(
            kind for kind in self.connection_errors if not issubclass(kind, LookupError)
        )

        def contained(message: Any) -> None:
            try:
                receive(message)
            except broken_connection:
                raise
            except Exception as error:
                self._drop(message, "bad-message", f"unreadable ({type(error).__name__})")

        return contained

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._drop(message, "bad-message", f"its body cannot be decoded ({type(exc).__name__})")

    def on_unknown_message(self, body: object, message: Any) -> None:
        self._drop(message, "bad-message", "no task is named")

    def on_invalid_task(self, body: object, message: Any, exc: Exception) -> None:
        self._drop(message, "bad-message", f"not a task ({type(exc).__name__})")

    def on_unknown_task(self, body: object, message: Any, exc: Exception) -> None:
        name = repr(message.headers.get("task"))[:80]
        self._drop(message, "unknown-task", f"no task {name} is registered here")

    def _drop(self, message: Any, code: str, problem: str) -> None:
        if not message.acknowledged:
            message.ack_log_error(logger, self.connection_errors)
        REFUSALS.note(code, "consumer", problem)


def _nothing() -> None:
    """What there is to do when the loop wakes: it looks by itself whether it is to stop."""
