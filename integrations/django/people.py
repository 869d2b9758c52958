"""Who a Django user is to the fleet: a principal whose roles follow from Django's permissions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from handrail.errors import BadInput
from handrail.integrations.django import conf
from handrail.integrations.django.web import client

if TYPE_CHECKING:
    from handrail.agent.tools import Principal
    from handrail.fleet import Fleet

_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,128}\Z")
CANCEL: Final = "handrail.cancel_run"
APPROVE: Final = "handrail.approve_action"
RESOLVE: Final = "handrail.resolve_handoff"
_SHOWN: Final = ("run", "effect", "approval", "handoff")


class UnknownPerson(BadInput):
    """A Django user who cannot be named in the audit."""

    code = "unknown-person"

    def __str__(self) -> str:
        return "log in first: whatever a person does is recorded under a name"


def name_of(user: Any) -> str:
    """The name under which a user's runs and acts are recorded: what a view gives `enqueue` as
    `principal`, so that whoever asks for something is known to be who agrees to it.

    It is the user's, in the form that the audit takes: of another one what it cannot hold is
    written as `.`, and `:` with the key of the user follows, which no name contains. Raises
    `UnknownPerson` for an anonymous user.
    """
    if not getattr(user, "is_authenticated", False):
        raise UnknownPerson
    name = str(user.get_username())
    if not _NAME.match(name):
        name = f"{re.sub('[^A-Za-z0-9_.:@-]', '.', name)[:100]}:{user.pk}"
    return name


def principal_of(user: Any) -> Principal:
    """Who a user is. A viewer may look (any of Django's `view` permissions), an operator cancel
    runs and resolve handoffs (`handrail.cancel_run`, `handrail.resolve_handoff`), an approver agree
    to exact actions (`handrail.approve_action`). The name is `name_of` the user.
    """
    from handrail.agent.people import Role
    from handrail.agent.tools import Principal

    name = name_of(user)
    granted = {
        Role.VIEWER: any(user.has_perm(f"handrail.view_{one}") for one in _SHOWN),
        Role.OPERATOR: user.has_perm(CANCEL) or user.has_perm(RESOLVE),
        Role.APPROVER: user.has_perm(APPROVE),
    }
    return Principal(name, roles=frozenset(role.value for role, has in granted.items() if has))


def acting_fleet() -> Fleet:
    """The fleet through which people act: the project's own where it is named, since a tool that is
    in doubt is asked by its code; else one without tools.
    """
    name = conf.read().fleet
    if not name:
        return client.fleet
    from handrail.loading import load

    return load(name)
