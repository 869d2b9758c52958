"""Celery's Redis transport, made to survive what lies on its queues.

Whoever can write to a queue can push a list item that is not an envelope. Celery's worker ends on
one, and so do all workers, one after the other. Here such an item is counted and dropped.
Commands are sent once (a repeated push is a second message, a repeated pop a lost one) and with the
older protocol, which every Redis, Valkey and proxy speaks.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty
from typing import Any, Final

from kombu.transport import redis as kombu_redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from handrail.broker.message import RECONCILE_QUEUE
from handrail.broker.refusals import REFUSALS

#: A wish to sweep is as good as any other: while no worker takes them, the newest few are kept.
MOST_SWEEPS_WAITING: Final = 20

# What a broken connection raises, and an empty queue: Celery knows what to do. Without KeyError,
# which kombu counts among them, so that a message without a key makes a worker reconnect.
CELERYS_OWN: Final[tuple[type[Exception], ...]] = (
    Empty,
    *(
        kind
        for kind in (
            *kombu_redis.Transport.connection_errors,
            *kombu_redis.Transport.channel_errors,
        )
        if not issubclass(kind, LookupError)
    ),
)


class Channel(kombu_redis.Channel):
    """A channel that drops what is no envelope."""

    _in_poll: Any  # the connection on which a pop is under way

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[misc]  # unknown to its stubs
        except CELERYS_OWN:
            raise
        except Exception as error:  # of whatever kind: kombu's JSON makes Decimals, dates, UUIDs
            REFUSALS.note("bad-message", "transport", f"no envelope ({type(error).__name__})")
            return True

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        super()._put(queue, message, **options)
        if queue == RECONCILE_QUEUE:
            with self.conn_or_acquire() as client:  # which does not prefix the key of this command
                client.ltrim(f"{self.global_keyprefix}{queue}", 0, MOST_SWEEPS_WAITING - 1)

    def finish_pop(self) -> None:
        """Wait for the answer to a pop that is under way; what it brings goes back to its queue."""
        if self._in_poll:
            with suppress(Empty):
                self._brpop_read()

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        return {
            **super()._connparams(asynchronous),  # type: ignore[misc]  # unknown to its stubs
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }


class Transport(kombu_redis.Transport):
    """The transport for `redis://` and `rediss://`; to Celery it is still its Redis transport."""

    Channel = Channel
    channels: Any
    _callbacks: Any

    def finish_pops(self) -> None:
        """Let the server have no pop of ours under way; for a worker that consumes no more."""
        for channel in self.channels:
            channel.finish_pop()

    def _deliver(self, message: object, queue: str | None) -> None:
        if not is_envelope(message):
            REFUSALS.note("bad-message", "transport", "no envelope (shape)")
        elif queue in self._callbacks:
            super()._deliver(message, queue)
        elif self.channels:
            # Popped for a consumer that is cancelled. kombu's own way back, which reckons with
            # acknowledgements, leaves a body in bytes in the queue, which nobody can read.
            self.channels[0]._put(queue, message)


def is_envelope(message: object) -> bool:
    """Whether a queue's item has the parts that kombu reads from it without looking."""
    if not isinstance(message, dict):
        return False
    properties, headers = message.get("properties"), message.get("headers")
    return (
        isinstance(properties, dict)
        and isinstance(properties.get("delivery_tag"), str)
        and isinstance(properties.get("delivery_info"), dict | None)
        and properties.get("body_encoding") in (None, "base64", "utf-8")
        and isinstance(message.get("body"), str)
        and isinstance(headers, dict)
        and "compression" not in headers  # it would be unpacked unseen, to any size
    )
