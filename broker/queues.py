"""Our queues as they are declared: on RabbitMQ replicated ones, on Redis plain lists."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from kombu import Exchange, Queue

AMQP: Final = ("amqp", "amqps", "pyamqp")
#: A quorum queue survives the loss of a node. A message that kills its consumer is not delivered
#: for ever: the sweep publishes again what is due.
_QUORUM: Final[dict[str, Any]] = {"x-queue-type": "quorum", "x-delivery-limit": 5}


def queue(name: str, broker_url: str) -> Queue:
    """Declare one of our queues on a broker."""
    arguments = dict(_QUORUM) if urlsplit(broker_url).scheme in AMQP else None
    exchange = Exchange("handrail", type="direct")
    return Queue(name, exchange, routing_key=name, queue_arguments=arguments)
