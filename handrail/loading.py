"""Which fleet is meant: the user's own by its name, or a plain one where its code is not needed."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import ClassVar

from handrail.errors import BadInput, HandrailError
from handrail.fleet import Fleet


@dataclass(eq=False)
class NoFleet(BadInput):
    """The command needs the user's tools and workflows, and nobody said where they are."""

    code: ClassVar[str] = "no-fleet"

    def __str__(self) -> str:
        return (
            "say where your fleet is: --fleet yourmodule:fleet, or HANDRAIL_FLEET=yourmodule:fleet"
            " (without one of your own: 'handrail demo')"
        )


@dataclass(eq=False)
class FleetNotLoaded(BadInput):
    """The name of the fleet leads nowhere, or to something that is no fleet."""

    code: ClassVar[str] = "fleet-not-loaded"
    name: str
    problem: str

    def __str__(self) -> str:
        return f"fleet {self.name!r}: {self.problem}; it is written module:attribute"


def load(name: str | None) -> Fleet:
    """Import the fleet `module:attribute`. Raises `NoFleet`, `FleetNotLoaded`.

    What a definition in the module lacks is raised as it is: it says what to do by itself.
    """
    if not name:
        raise NoFleet
    module_name, _, attributes = name.partition(":")
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(
            0, os.getcwd()
        )  # a module beside the user is meant, as Celery's -A means it
    try:
        _make_django_ready()
        found: object = importlib.import_module(module_name)
        for attribute in (attributes or "fleet").split("."):
            found = getattr(found, attribute)
    except HandrailError:
        raise
    except Exception as error:
        raise FleetNotLoaded(name, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Fleet):
        raise FleetNotLoaded(name, f"a {type(found).__name__} is no Fleet")
    return found


def _make_django_ready() -> None:
    """Load a Django project's apps before a module that imports their models, as `manage.py` does;
    where none is named, or it is ready, this does nothing.
    """
    if not os.environ.get("DJANGO_SETTINGS_MODULE"):
        return
    try:
        import django
    except ModuleNotFoundError:  # the variable is another program's
        return
    from django.apps import apps

    if not (apps.ready or apps.app_configs):  # neither done nor under way
        django.setup()


def load_or_plain(name: str | None) -> Fleet:
    """The user's fleet where one is named; otherwise one that only knows the environment."""
    return load(name) if name else Fleet()
