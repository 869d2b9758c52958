"""The intent lock in Redis: it keeps workers from piling up on one intent. It is a traffic light,
no wall.

Correctness rests on the ledger's unique key, the run's epoch and the effect's token; the lock may
be lost, stolen or flushed at any moment. Where it is taken or unreachable the write does not happen
now. Every key has a time to live.
"""

from __future__ import annotations

import secrets
from enum import Enum
from typing import Final, Protocol

import redis

_PREFIX: Final = "handrail:intent:"
_TIMEOUT_S: Final = 1.0
#: Deletes the key only if it still holds our token.
_RELEASE: Final = """
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


class Refusal(Enum):
    """Why a lock was not granted."""

    TAKEN = "lock-taken"
    UNREACHABLE = "lock-unreachable"


class IntentLock(Protocol):
    """What the step needs of a lock."""

    def acquire(self, effect_id: str, *, ttl_ms: int) -> str | Refusal:
        """Take the lock of an intent; return its token, or why it was not granted."""
        ...

    def release(self, effect_id: str, token: str) -> None:
        """Give the lock back, if it is still ours. Never raises."""
        ...


class RedisLock:
    """The lock on a Redis or Valkey server, by a client of its own: no retries, short timeouts.

    A client that repeats SET NX after a lost answer would see its own key and report failure; ours
    reads the key back instead.
    """

    def __init__(self, url: str, *, prefix: str = "") -> None:
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=None,
            retry_on_error=[],
            protocol=2,
            decode_responses=True,
        )
        self._prefix = prefix + _PREFIX

    def acquire(self, effect_id: str, *, ttl_ms: int) -> str | Refusal:
        """Take the lock; see `IntentLock`."""
        key, token = self._prefix + effect_id, secrets.token_hex(8)
        try:
            if self._client.set(key, token, nx=True, px=ttl_ms):
                return token
            return token if self._client.get(key) == token else Refusal.TAKEN
        except redis.RedisError:
            return Refusal.UNREACHABLE

    def release(self, effect_id: str, token: str) -> None:
        """Give the lock back; see `IntentLock`."""
        try:
            self._client.eval(_RELEASE, 1, self._prefix + effect_id, token)
        except redis.RedisError:
            return  # it runs out by itself

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()


class LocalLock:
    """A lock within one process, for runs that need no fleet."""

    def __init__(self) -> None:
        self._held: dict[str, str] = {}

    def acquire(self, effect_id: str, *, ttl_ms: int) -> str | Refusal:
        """Take the lock; see `IntentLock`."""
        if effect_id in self._held:
            return Refusal.TAKEN
        self._held[effect_id] = token = secrets.token_hex(8)
        return token

    def release(self, effect_id: str, token: str) -> None:
        """Give the lock back; see `IntentLock`."""
        if self._held.get(effect_id) == token:
            del self._held[effect_id]
