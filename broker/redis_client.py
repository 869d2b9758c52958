"""Our own clients for Redis: no retries, short timeouts, an explicit protocol.

redis-py repeats a command whose answer was lost, which makes one push two messages, and its
defaults change between versions. Nothing here relies on a default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:  # a web process that only publishes needs no Celery
    from celery import Celery

TIMEOUT_S: Final = 1.0
REDIS_SCHEMES: Final = ("redis", "rediss", "redis+socket")


def is_redis(app: Celery) -> bool:
    """Whether an app's messages go through Redis, in whatever arrangement."""
    url = app.conf.broker_write_url or app.conf.broker_url
    return urlsplit(url if isinstance(url, str) else url[0]).scheme in (*REDIS_SCHEMES, "sentinel")


def redis_url(app: Celery) -> str | None:
    """The address of an app's one Redis server; None for any other broker, and for several."""
    url = app.conf.broker_write_url or app.conf.broker_url
    return url if isinstance(url, str) and is_one_redis(url) else None


def is_one_redis(url: str) -> bool:
    """Whether a broker's address is that of one Redis server."""
    return ";" not in url and urlsplit(url).scheme in REDIS_SCHEMES


def redis_client(url: str, *, timeout_s: float = TIMEOUT_S, **options: Any) -> redis.Redis:
    """A thread-safe, fork-safe client for `url`, which is written as Celery takes it.

    `timeout_s` bounds connecting and each answer. Further options are redis-py's, for TLS. A
    malformed address raises `ValueError`.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    over_tcp = {"socket_connect_timeout": timeout_s, "socket_keepalive": True}
    if parts.scheme == "redis+socket":
        # What Celery calls redis+socket:///path?virtual_host=1, redis-py calls unix:///path?db=1.
        database = query.pop("virtual_host", "0")
        url, over_tcp = f"unix://{parts.netloc}{parts.path}?db={database}", {}
    elif "ssl_cert_reqs" in query:
        from kombu.utils.url import parse_ssl_cert_reqs

        options["ssl_cert_reqs"] = parse_ssl_cert_reqs(query.pop("ssl_cert_reqs"))
        url = urlunsplit(parts._replace(query=urlencode(query)))
    sending_once = {"protocol": 2, "retry": Retry(NoBackoff(), 0), "socket_timeout": timeout_s}
    pool = redis.ConnectionPool.from_url(url, **{**sending_once, **over_tcp, **options})
    return redis.Redis.from_pool(pool)


def ssl_options(app: Celery) -> dict[str, Any]:
    """What an app says about TLS beside its URL, as redis-py takes it."""
    options = app.conf.broker_use_ssl
    return dict(options) if isinstance(options, dict) else {}
