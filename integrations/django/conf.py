"""The `HANDRAIL` dictionary of a project's settings, as the settings of a fleet.

Its keys are the names of the environment variables without their prefix (`BROKER_URL`,
`APPROVAL_SECRET`, ...), and `DATABASE`, the alias of the database in which the ledger is. What the
dictionary does not say, the environment (`HANDRAIL_*`) does. Light: no agent code.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from django.conf import settings as project
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from handrail.settings import InvalidSettings, Settings

#: The key that names the database in which the ledger is.
ALIAS: Final = "DATABASE"
#: The name of a database that means itself in an address; an empty one is none.
_PLAIN: Final = re.compile(r"[\w.-]*\Z")
_ESCAPES: Final = re.compile(r"[?]|%[0-9A-Fa-f]{2}")
#: What libpq understands of a database's OPTIONS; the rest is Django's own.
_LIBPQ: Final = frozenset(
    {
        *("application_name", "channel_binding", "client_encoding", "connect_timeout"),
        *("gssencmode", "keepalives", "keepalives_count", "keepalives_idle"),
        *("keepalives_interval", "options", "passfile", "service", "sslcert", "sslcrl", "sslkey"),
        *("sslmode", "sslrootcert", "target_session_attrs", "tcp_user_timeout"),
    }
)


def given() -> dict[str, Any]:
    """The dictionary, with its names in small letters. Raises `InvalidSettings` for a name that is
    none.
    """
    found = getattr(project, "HANDRAIL", {})
    if not isinstance(found, Mapping):
        raise InvalidSettings(("HANDRAIL in the project's settings is no dictionary",))
    known = {name.upper() for name in Settings.model_fields} | {ALIAS}
    unknown = sorted(str(name) for name in found if name not in known)
    if unknown:
        raise InvalidSettings(tuple(_problem(name, known) for name in unknown))
    return {str(name).lower(): value for name, value in found.items()}


def alias() -> str:
    """The alias of the database in which the ledger is, or of the default one where the ledger is
    elsewhere.
    """
    name: str = given().get(ALIAS.lower()) or DEFAULT_DB_ALIAS
    return name


def is_elsewhere() -> bool:
    """Whether the ledger is in none of Django's databases."""
    return bool(given().get("database_url"))


def read() -> Settings:
    """Read the settings of a fleet in this project. Raises `InvalidSettings`."""
    values = given()
    name = values.pop(ALIAS.lower(), None) or DEFAULT_DB_ALIAS
    if not values.get("database_url"):
        if name not in connections.settings:
            raise InvalidSettings((f"HANDRAIL['{ALIAS}']: there is no database {name!r}",))
        values["database_url"] = url_of(connections[name])
    if not values.get("broker_url") and "HANDRAIL_BROKER_URL" not in os.environ:
        # What a project tells its own Celery app, as Celery's documentation has it.
        values["broker_url"] = getattr(project, "CELERY_BROKER_URL", None) or ""
    if "home" not in values and "HANDRAIL_HOME" not in os.environ:
        values["home"] = _home()
    return Settings.read(**values)


def url_of(connection: BaseDatabaseWrapper) -> str:
    """The address of a database of Django's, for connections of the ledger's own.

    Without SQLAlchemy, which a web process that only enqueues has no other use for.
    """
    options = connection.settings_dict
    if connection.vendor == "sqlite":
        name = str(options["NAME"])
        if connection.is_in_memory_db():  # type: ignore[attr-defined]  # SQLite's has it
            return "sqlite://"
        path = Path(name).absolute()
        if _ESCAPES.search(str(path)):  # how that is read has changed between releases
            raise InvalidSettings(
                (
                    f"HANDRAIL: the path {str(path)!r} cannot be written as an address: move the"
                    " file to one without ? and %, or name the ledger's own database with"
                    " HANDRAIL['DATABASE_URL']",
                )
            )
        return f"sqlite:///{path}"
    if connection.vendor != "postgresql":
        raise InvalidSettings(
            (
                f"HANDRAIL: the database {connection.alias!r} is {connection.display_name}, and a"
                " ledger needs PostgreSQL or SQLite: name another with HANDRAIL['DATABASE'], or one"
                " of its own with HANDRAIL['DATABASE_URL']",
            )
        )
    given_options: Mapping[str, Any] = options.get("OPTIONS") or {}
    query = {name: str(value) for name, value in given_options.items() if name in _LIBPQ}
    port, host = str(options.get("PORT") or ""), str(options.get("HOST") or "")
    if host.startswith("/"):  # the folder of a socket
        query["host"], host = host, ""
    name = str(options.get("NAME") or "")
    if not _PLAIN.match(name):  # how it would be written in a path has changed between releases
        query["dbname"], name = name, ""
    who = quote(str(options.get("USER") or ""), safe="")
    if who and options.get("PASSWORD"):
        who += f":{quote(str(options['PASSWORD']), safe='')}"
    place = f"[{host}]" if ":" in host else host
    return "".join(
        [
            "postgresql://",
            f"{who}@" if who else "",
            place,
            f":{int(port)}" if port else "",
            f"/{name}" if name else "",
            f"?{urlencode(sorted(query.items()))}" if query else "",
        ]
    )


def _home() -> Path:
    base = getattr(project, "BASE_DIR", None)
    return Path(base) / ".handrail" if base else Path(".handrail")


def _problem(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name.upper(), known, n=1)
    return f"HANDRAIL[{name!r}] is no setting" + (f": do you mean {near[0]!r}?" if near else "")
