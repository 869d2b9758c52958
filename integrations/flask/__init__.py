"""Handrail in a Flask application.

    from handrail.integrations.flask import handrail

    def create_app():
        app = Flask(__name__)
        handrail.init_app(app)
        return app

`handrail.enqueue(...)` in a view accepts a run in the transaction of Flask-SQLAlchemy's session.
Importing this imports no agent code; `Fleet` is for the module that declares tools and workflows.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.integrations.flask.extension import Handrail, handrail
    from handrail.integrations.flask.workers import Fleet

__all__ = ["Fleet", "Handrail", "handrail"]

_HOME = {
    "Fleet": "handrail.integrations.flask.workers",
    "Handrail": "handrail.integrations.flask.extension",
    "handrail": "handrail.integrations.flask.extension",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for: a web process needs no `Fleet`."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
