"""`manage.py check`: what is unsafe or missing about Handrail in this project, and what to do.

`check --deploy` looks further: it imports the fleet, and asks the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from django.apps.config import AppConfig
from django.conf import settings as project
from django.core import checks
from django.core.checks import CheckMessage, Error, Warning
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections

from handrail.errors import HandrailError
from handrail.hosts import Transaction
from handrail.integrations.django import conf
from handrail.ledger.accept import qualified
from handrail.settings import InvalidSettings, Settings

_TAG: Final = "handrail"


def register() -> None:
    """Register all of them; the app does it when it is ready."""
    checks.register(check_settings, _TAG)
    checks.register(check_fleet, _TAG, deploy=True)
    checks.register(check_tables, _TAG, deploy=True)


def check_settings(app_configs: Sequence[AppConfig] | None = None, **_: Any) -> list[CheckMessage]:
    """Look at the settings alone: nothing is connected, and no agent code imported."""
    try:
        found = conf.read()
    except InvalidSettings as error:
        hint = "The names are those of the environment, without HANDRAIL_."
        return [Error(problem, hint=hint, id="handrail.E001") for problem in error.problems]
    return [*_database(found), *_broker(found), *_approvals(found)]


def _database(found: Settings) -> Iterator[CheckMessage]:
    connection = connections[conf.alias()]
    if conf.is_elsewhere():
        yield Warning(
            "The ledger is in none of the project's databases.",
            hint=(
                "A run is then accepted after the commit: a crash between the two loses it. Set"
                " HANDRAIL['DATABASE'] to the alias that your transactions use, if that is wrong."
            ),
            id="handrail.W002",
        )
        return
    if conf.alias() != DEFAULT_DB_ALIAS:
        yield Warning(
            f"The ledger is in the database {conf.alias()!r}, and not in the default one.",
            hint=(
                "In a transaction of the default database a run is accepted after the commit: a"
                " crash between the two loses it. Enqueue inside"
                f" transaction.atomic(using={conf.alias()!r}) where that matters."
            ),
            id="handrail.W003",
        )
    if connection.vendor != "sqlite":
        return
    options = connection.settings_dict.get("OPTIONS") or {}
    if str(options.get("transaction_mode", "")).upper() != "IMMEDIATE":
        yield Warning(
            "SQLite begins its transactions DEFERRED.",
            hint=(
                "A transaction that reads and then accepts a run fails at once with 'database is"
                " locked' where a worker writes at that moment. Since Django 5.1: OPTIONS ="
                " {'transaction_mode': 'IMMEDIATE'}. Then cancel and decide outside of"
                " transactions (and of ATOMIC_REQUESTS): they write on a connection of their own."
            ),
            id="handrail.W004",
        )


def _broker(found: Settings) -> Iterator[CheckMessage]:
    if not found.broker_url:
        if not project.DEBUG:
            yield Warning(
                "No broker is configured.",
                hint=(
                    "Set HANDRAIL['BROKER_URL']. Without one a run starts when the sweep finds it,"
                    " some seconds later."
                ),
                id="handrail.W005",
            )
        return
    for name, cache in (getattr(project, "CACHES", None) or {}).items():
        places = cache.get("LOCATION") or ()
        for place in [places] if isinstance(places, str) else places:
            if _server(str(place)) == _server(found.broker_url):
                yield Warning(
                    f"The cache {name!r} and the broker are on one Redis server.",
                    hint=(
                        "A cache needs a server that evicts, and a broker one that does not"
                        " (maxmemory-policy noeviction): give each its own."
                    ),
                    id="handrail.W006",
                )


def _server(url: str) -> tuple[str | None, int] | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("redis", "rediss"):
        return None
    return parts.hostname, port or 6379


def _approvals(found: Settings) -> Iterator[CheckMessage]:
    in_a_file = found.database.startswith("sqlite")
    if not found.approval_secret and not in_a_file:
        yield Warning(
            "No secret signs approvals: nobody can approve anything.",
            hint="Set HANDRAIL['APPROVAL_SECRET'] to 32 random characters, the same everywhere.",
            id="handrail.W007",
        )
    elif found.approval_secret and found.approval_secret in getattr(project, "SECRET_KEY", ""):
        yield Warning(
            "The secret that signs approvals is the project's SECRET_KEY.",
            hint="Whoever has that one can sign sessions, and would be able to approve, too.",
            id="handrail.W008",
        )


def check_fleet(app_configs: Sequence[AppConfig] | None = None, **_: Any) -> list[CheckMessage]:
    """Import the fleet, and look at the settings of its workers (with `--deploy`)."""
    try:
        found = conf.read()
    except InvalidSettings:
        return []  # that was said
    if not found.fleet:
        return [
            Error(
                "Nobody says where the fleet is.",
                hint="Set HANDRAIL['FLEET'] = 'yourapp.agents:fleet'.",
                id="handrail.E009",
            )
        ]
    from handrail.loading import load

    try:
        fleet = load(found.fleet)
        if found.broker_url:
            fleet.verify(worker=True)
    except HandrailError as error:
        lines = str(error).splitlines()
        return [
            Error(line, hint=f"[{error.code}] See 'manage.py handrail doctor'.", id="handrail.E010")
            for line in lines[-8:]
        ]
    return []


class _Qualified:
    """Statements whose tables are in the schema of the settings."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        schema = conf.read().database_schema if self._transaction.postgres else ""
        return self._transaction.run(qualified(sql, schema), params)


def check_tables(app_configs: Sequence[AppConfig] | None = None, **_: Any) -> list[CheckMessage]:
    """Ask the ledger's database whether it is migrated (with `--deploy`)."""
    from handrail.integrations.django.database import DjangoTransaction
    from handrail.ledger.schema import check_migrated

    try:
        if conf.is_elsewhere():
            return []
        check_migrated(_Qualified(DjangoTransaction(conf.alias(), elsewhere=False)))
    except HandrailError as error:
        if error.code != "database-not-migrated":
            return []
        hint = (
            "Run 'manage.py migrate'; where that has nothing to do, because our migrations were"
            " recorded there while the ledger was elsewhere, 'manage.py handrail db upgrade'."
        )
        return [Warning(str(error), hint=hint, id="handrail.W011")]
    except DatabaseError as error:
        problem = f"the ledger's database {conf.alias()!r} did not answer: {error}"
        return [Warning(problem, hint="Check it again once it is there.", id="handrail.W012")]
    return []
