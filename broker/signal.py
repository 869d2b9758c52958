"""The cancel signal: a hint, over Redis pub/sub, that a run's cancel wish was recorded.

The wish is a row, and the lease renewal reads it once a second; that is the guarantee. This only
makes a worker hear of it sooner, so nothing here retries, stores, or raises into a caller's work.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Any, Final

import redis

from handrail.broker.message import RUN_ID_PATTERN
from handrail.broker.pool import log_crash
from handrail.broker.redis_client import TIMEOUT_S, redis_client
from handrail.broker.refusals import REFUSALS

logger = logging.getLogger("handrail.broker")

CHANNEL: Final = "handrail:cancel"
POLL_S: Final = 1.0  # how soon `close` is noticed
SILENCE_S: Final = 10  # of silence, after which the server must answer a ping, or is left
BACK_OFF_S: Final = (0.1, 0.5, 1.0, 5.0)
_RUN_ID: Final = re.compile(RUN_ID_PATTERN.rstrip("$") + r"\Z")


class CancelSignal:
    """Sends and hears run ids whose cancel wish was recorded. Thread-safe.

    Options are redis-py's, for TLS. `key_prefix` keeps fleets on one server apart.
    """

    def __init__(self, url: str, *, key_prefix: str = "", **options: Any) -> None:
        self._url, self._options = url, options
        self._channel = key_prefix + CHANNEL
        self._client = redis_client(url, **options)
        self._closing = threading.Event()
        self._listening = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, run_id: str) -> bool:
        """Tell whoever listens. False: it could not be sent, and the lease renewal will tell."""
        try:
            self._client.publish(self._channel, run_id)
        except (redis.RedisError, OSError):
            return False
        return True

    def listen(self, callback: Callable[[str], None]) -> None:
        """Call `callback(run_id)` for each signal, in a daemon thread, until `close`.

        The thread reconnects for ever, and what the callback raises is logged.
        """
        if self._thread is not None:
            raise RuntimeError("this signal has a listener: make another CancelSignal")
        self._thread = threading.Thread(
            target=self._listen, args=(callback,), name="handrail-cancel", daemon=True
        )
        self._thread.start()

    def wait_until_listening(self, timeout_s: float) -> bool:
        """Wait for the subscription; False when there is none yet."""
        return self._listening.wait(timeout_s)

    @property
    def is_listening(self) -> bool:
        """Whether signals are being heard now, as far as this side can know."""
        return self._listening.is_set()

    def is_healthy(self) -> bool:
        """Whether the server answers within its timeout, and a listener, if any, hears it."""
        try:
            self._client.ping()
        except (redis.RedisError, OSError):
            return False
        return self._thread is None or self.is_listening

    def close(self) -> None:
        """Stop listening, and close the connections."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(POLL_S + 2 * TIMEOUT_S)
        self._client.close()

    def _listen(self, callback: Callable[[str], None]) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                self._hear(callback)
            except (redis.RedisError, OSError) as error:
                if self._listening.is_set():
                    failures = 0
                    logger.warning("cancel signals are not heard (%s)", type(error).__name__)
                self._listening.clear()
                self._closing.wait(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
                failures += 1
        self._listening.clear()

    def _hear(self, callback: Callable[[str], None]) -> None:
        client: Any = redis_client(self._url, **self._options)  # redis-py leaves pub/sub untyped
        with client, client.pubsub() as channel:
            channel.subscribe(self._channel)
            silence_s = 0.0
            while not self._closing.is_set():
                heard = channel.get_message(timeout=POLL_S)
                silence_s = 0.0 if heard else silence_s + POLL_S
                if heard and heard["type"] == "subscribe":
                    self._listening.set()
                elif heard and heard["type"] == "message":
                    _call(callback, heard["data"])
                elif silence_s == SILENCE_S:
                    channel.ping()
                elif silence_s >= 2 * SILENCE_S:
                    raise redis.ConnectionError("no answer to a ping")


def _call(callback: Callable[[str], None], data: bytes) -> None:
    run_id = data.decode("ascii", "replace")
    if not _RUN_ID.match(run_id):
        REFUSALS.note("bad-signal", CHANNEL, "not a run id")
        return
    try:
        callback(run_id)
    except Exception as error:
        log_crash("cancel signal", error)
