"""The budget and the time limits of one run: its workflow's own, lowered or, if allowed, raised."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from handrail.agent.budget import Budget, BudgetLeft, CallLimits
from handrail.canonical import dumps, normal
from handrail.errors import InvalidBudget
from handrail.ledger.accept import NewRow
from handrail.ledger.rows import left_columns

#: What a principal needs to ask for more than its workflow grants.
MAY_RAISE: Final = "budget:raise"


def chosen_budget(
    default: Budget,
    given: Budget | Mapping[str, Any] | None,
    *,
    tools: Collection[str],
    permissions: Collection[str],
) -> Budget:
    """Return what is asked for instead of the workflow's budget; `tools` are the names that may
    have a limit of their own. Raises `InvalidBudget`.
    """
    if given is None:
        return default
    if not isinstance(given, Budget | Mapping):
        raise InvalidBudget("budget", given, "a Budget, or a mapping from name to limit")
    chosen = given if isinstance(given, Budget) else default.altered(given)
    known = set(tools) | default.per_tool.keys()
    for tool in chosen.per_tool.keys() - known:
        wanted = f"a tool of the workflow: {', '.join(sorted(known))}"
        raise InvalidBudget(f"per_tool.{tool}", chosen.per_tool[tool], wanted)
    raised = chosen.raised_over(default)
    if raised and MAY_RAISE not in permissions:
        raise InvalidBudget(
            raised[0],
            getattr(chosen, raised[0], chosen.per_tool),
            _at_most(getattr(default, raised[0], "limit")),
        )
    return chosen


def chosen_limits(
    default: CallLimits,
    given: CallLimits | Mapping[str, Any] | None,
    *,
    permissions: Collection[str],
) -> CallLimits:
    """Return what is asked for instead of the workflow's time limits. Raises `InvalidBudget`."""
    if given is None:
        return default
    try:
        chosen = given if isinstance(given, CallLimits) else replace(default, **given)
    except TypeError:
        raise InvalidBudget("limits", given, "model_ms and tool_ms") from None
    for name, value in chosen.to_json().items():
        own = getattr(default, name)
        if value > own and MAY_RAISE not in permissions:
            raise InvalidBudget(name, value, _at_most(own))
    return chosen


def bounded(
    row: NewRow,
    prepared: Mapping[str, Any],
    budget: Budget | Mapping[str, Any] | None,
    limits: CallLimits | Mapping[str, Any] | None,
    *,
    permissions: Collection[str],
) -> NewRow:
    """Give a run that was prepared another budget or other time limits than its workflow's."""
    chosen = chosen_budget(
        Budget.from_json(prepared["accepted"]["budget"]),
        budget,
        tools=prepared["tools"],
        permissions=permissions,
    )
    calls = chosen_limits(
        CallLimits(**json.loads(row.columns["limits"])), limits, permissions=permissions
    )
    columns = {
        **row.columns,
        "budget": dumps(chosen.to_json()),
        "limits": dumps(dict(calls.to_json())),
        **left_columns(BudgetLeft.full(chosen)),
    }
    if not chosen.concurrency:  # it never asks anything at once
        columns |= prepared["at_rest"]
    (event,) = json.loads(row.events)
    event["detail"]["budget"] = normal(chosen.to_json())
    return NewRow(
        columns=columns,
        events=dumps([event]),
        per_tool=dumps(dict(chosen.per_tool)),
        working_ms=min(chosen.deadline_ms, chosen.expires_ms),
        expires_ms=chosen.expires_ms,
    )


def _at_most(own: object) -> str:
    return (
        f"at most the workflow's own {own} (or let the principal have the permission {MAY_RAISE})"
    )
