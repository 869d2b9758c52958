"""The configuration of a Flask application, as the settings of a fleet. Light: no agent code."""

from __future__ import annotations

import difflib
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from flask import Flask, current_app, has_app_context

from handrail.settings import InvalidSettings, Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

_PREFIX: Final = "HANDRAIL_"
#: Which of Flask-SQLAlchemy's databases the ledger is in; unset: the default one.
BIND: Final = "HANDRAIL_BIND_KEY"


def given(app: Flask) -> dict[str, Any]:
    """The keys HANDRAIL_* of an application's configuration, without their prefix, in small
    letters. Raises `InvalidSettings` for a name that is none.
    """
    found = {name: value for name, value in app.config.items() if name.startswith(_PREFIX)}
    known = {f"{_PREFIX}{name.upper()}" for name in Settings.model_fields} | {BIND}
    unknown = sorted(found.keys() - known)
    if unknown:
        raise InvalidSettings(tuple(_problem(name, known) for name in unknown))
    return {name.removeprefix(_PREFIX).lower(): value for name, value in found.items()}


def read(app: Flask) -> Settings:
    """Read the settings of a fleet in this application; what its configuration does not say, the
    environment does. Raises `InvalidSettings`.
    """
    values = given(app)
    values.pop(BIND.removeprefix(_PREFIX).lower(), None)
    if not values.get("database_url"):
        engine = engine_of(app)
        if engine is not None:
            values["database_url"] = url_of(engine)
    if not os.environ.get("HANDRAIL_HOME"):
        values.setdefault("home", f"{app.instance_path}/handrail")
    return Settings.read(**values)


def engine_of(app: Flask) -> Engine | None:
    """The engine of Flask-SQLAlchemy's database in which the ledger is; None without one."""
    sqlalchemy = app.extensions.get("sqlalchemy")
    if sqlalchemy is None:
        return None
    bind = app.config.get(BIND)
    # A context of its own would end with the teardowns of a request.
    here = has_app_context() and current_app == app
    with nullcontext() if here else app.app_context():
        engine: Engine | None = sqlalchemy.engines.get(bind)
    if engine is None and bind is not None:
        raise InvalidSettings((f"{BIND}: SQLALCHEMY_BINDS has no {bind!r}",))
    return engine


def url_of(engine: Engine) -> str:
    """The address of an engine's database, for connections of the ledger's own."""
    url = engine.engine.url  # of a connection in its place, too, as tests put one there
    if url.get_backend_name() == "postgresql":
        url = url.set(drivername="postgresql")
    elif url.get_backend_name() == "sqlite":
        url = url.set(drivername="sqlite")
    return url.render_as_string(hide_password=False)


def _problem(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name} is no setting" + (f": do you mean {near[0]}?" if near else "")
