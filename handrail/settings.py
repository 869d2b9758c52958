"""Settings from the environment, each with the prefix `HANDRAIL_`; the defaults need nothing
else running.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from handrail.errors import BadInput
from handrail.ledger.session import SCHEMA_NAME
from handrail.logs import LogFormat, LogLevel

#: A secret that could be tried out would let anybody approve.
SHORTEST_SECRET: Final = 32
SCHEMES: Final = (
    "redis",
    "rediss",
    "redis+socket",
    "sentinel",
    "amqp",
    "amqps",
    "pyamqp",
    "memory",
)


@dataclass(eq=False)
class InvalidSettings(BadInput):
    """A setting in the environment, or given to `Fleet`, cannot be used."""

    code: ClassVar[str] = "invalid-settings"
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "settings that cannot be used: " + "; ".join(self.problems)


def _stall(value: object) -> object:
    return None if value in ("unbounded", None) else value


def _address(value: str) -> str:
    """Refuse what no server can be reached under; a server that is away is another matter."""
    for url in filter(None, value.split(";")):
        try:
            parts = urlsplit(url)
            whole = parts.port is None or parts.port > 0
        except ValueError:
            whole = False
        if not whole or parts.scheme not in SCHEMES:
            raise ValueError(
                f"give an address as in redis://host:6379/0; known: {', '.join(SCHEMES)}"
            )
    return value


def _secrets(value: str) -> str:
    if any(len(one.strip()) < SHORTEST_SECRET for one in value.split(",") if value):
        raise ValueError(f"each secret takes at least {SHORTEST_SECRET} random characters")
    return value


def _schema(value: str) -> str:
    if value and not SCHEMA_NAME.fullmatch(value):
        raise ValueError("give a name of small letters, digits and _ that begins with no digit")
    return value


Address = Annotated[str, AfterValidator(_address)]


class Settings(BaseSettings):
    """What a deployment declares. Times are milliseconds unless the name says otherwise.

    `database_url`: `sqlite:///file` or `postgresql://...`; empty: an SQLite file in `home`.
    `database_schema` (PostgreSQL only): the schema that the ledger's tables are in; empty: whatever
    the search path says.
    `broker_url`: `redis://...` or `amqp://...`; empty: an embedded Valkey, started by the command.
    `max_stall_ms`: the longest time by which a request can still leave a worker after its dispatch
    deadline (a paused machine, a stalled network); `unbounded` means that nobody vouches for one.
    `sweep_in_workers`: each worker sweeps by a timer of its own, so that no beat is needed.
    `queries_at_once`: how many queries one sweep has under way; one tool gets half of them.
    `version_patience_s`: a run whose version of its workflow no worker has had for so long is
    handed to a person.
    `approval_secret` signs approval tokens: a random text, or several with commas between, the
    newest first. `decisions_per_minute`: so many a person may make, 0: any number.
    `escalate_after_s`: a handoff that nobody has resolved by then is escalated.
    `max_open_handoffs`: while so many handoffs of one subject are open, nothing new of it is
    dispatched; 0: any number may be.
    `max_open_unknowns`: so many unknown effects of one tool pause it by themselves; 0: they never
    do.
    """

    model_config = SettingsConfigDict(env_prefix="HANDRAIL_", extra="ignore", frozen=True)

    home: Path = Path(".handrail")
    database_url: str = ""
    broker_url: Address = ""
    redis_url: Address = (
        ""  # for the intent lock and the cancel signal; empty: the broker's, if it is Redis
    )
    key_prefix: str = ""
    fleet: str = ""
    tenant: str = "default"
    database_schema: Annotated[str, AfterValidator(_schema)] = ""
    lease_ms: Annotated[int, Field(ge=1_000)] = 30_000
    max_stall_ms: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_stall)] = 20_000
    max_attempts: Annotated[int, Field(ge=1)] = 5
    max_open_unknowns: Annotated[int, Field(ge=0)] = 1_000
    max_open_handoffs: Annotated[int, Field(ge=0)] = 100
    in_flight: Annotated[int, Field(ge=1)] = 256
    drain_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    sweep_every_s: Annotated[float, Field(gt=0)] = 2.0
    sweep_in_workers: bool = False
    queries_at_once: Annotated[int, Field(ge=1)] = 16
    version_patience_s: Annotated[float, Field(gt=0)] = 900.0
    approval_secret: Annotated[str, AfterValidator(_secrets)] = Field(default="", repr=False)
    decisions_per_minute: Annotated[int, Field(ge=0)] = 60
    escalate_after_s: Annotated[float, Field(gt=0)] = 4 * 3_600.0
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    pool: Literal["loop", "threads", "solo", "prefork"] = "loop"

    @classmethod
    def read(cls, **given: object) -> Settings:
        """Read the environment; what is given by name wins. Raises `InvalidSettings`."""
        values = {name: value for name, value in given.items() if value is not None}
        try:
            return cls(**values)  # type: ignore[arg-type]  # pydantic checks them
        except ValidationError as error:
            problems = tuple(
                f"HANDRAIL_{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}"
                for e in error.errors(include_url=False, include_input=False)
            )
            raise InvalidSettings(problems) from None

    def to_environment(self) -> dict[str, str]:
        """Write the settings as the variables that `read` reads, for a command in this process."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            f"HANDRAIL_{name.upper()}": "unbounded" if value is None else str(value)
            for name, value in values.items()
            if value != ""
        }

    @property
    def database(self) -> str:
        """The database's URL, the embedded default included."""
        return self.database_url or f"sqlite:///{(self.home / 'ledger.db').absolute()}"

    @property
    def redis(self) -> str:
        """The Redis URL of lock and signal; empty where there is none."""
        if self.redis_url:
            return self.redis_url
        return self.broker_url if self.broker_url.startswith(("redis", "rediss")) else ""
