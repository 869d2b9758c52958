"""Handrail in a Django project: `INSTALLED_APPS += ["handrail.integrations.django"]`.

`client` accepts runs inside the transaction that is open on Django's own connection, and imports no
agent code. `Fleet` is for the module that declares tools and workflows, which workers import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.integrations.django.celery_app import install
    from handrail.integrations.django.fleet import Fleet
    from handrail.integrations.django.web import client

__all__ = ["Fleet", "client", "install"]

_HOME = {
    "Fleet": "handrail.integrations.django.fleet",
    "client": "handrail.integrations.django.web",
    "install": "handrail.integrations.django.celery_app",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for: Django imports this before its apps are ready."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
