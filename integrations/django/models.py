"""Runs, effects, approvals and handoffs as Django sees them: to look at, never to write.

The tables are the ledger's, made by its own migrations; whatever changes a row goes through the
fleet, under the run's lock. Instants are milliseconds since the epoch.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from django.db import models

#: Without the stubs' plugin, which needs a project, the types of fields are not known.
_text: Any = models.TextField
_number: Any = models.BigIntegerField


class Run(models.Model):
    """One execution of a workflow for one goal and one principal."""

    id = _text("run", primary_key=True)
    tenant = _text()
    workflow = _text()
    workflow_version = _text("version")
    mode = _text()
    goal = _text()
    principal = _text()
    input = _text()
    status = _text()
    reason = _text(null=True)
    answer = _text(null=True)
    created_at = _number("created")
    deadline_at = _number("deadline", null=True)
    cancel_requested_at = _number("cancel wished", null=True)
    steps_left = _number()
    model_calls_left = _number()
    tool_calls_left = _number()

    class Meta:
        """Its table, and what a person may be allowed."""

        managed = False
        db_table = "handrail_run"
        default_permissions = ("view",)
        permissions: ClassVar = [("cancel_run", "Can cancel runs")]

    def __str__(self) -> str:
        return f"{self.workflow} {self.pk}"


class Effect(models.Model):
    """The record of one business intent, from plan to proof."""

    id = _text("effect", primary_key=True)
    tenant = _text()
    intent_key = _text()
    tool = _text()
    contract_version = _text()
    arguments = _text()
    status = _text()
    attempts = _number()
    owner_run_id = _text("run", null=True)
    created_at = _number("planned")
    first_dispatched_at = _number("first sent", null=True)
    unknown_since = _number(null=True)
    doubt_trigger = _text("in doubt by", null=True)
    queries_left = _number()
    result = _text(null=True)
    evidence = _text(null=True)

    class Meta:
        """Its table."""

        managed = False
        db_table = "handrail_effect"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.tool} {self.intent_key}"


class Approval(models.Model):
    """A request for a person's consent to one exact action."""

    id = _text("approval", primary_key=True)
    run_id = _text("run")
    tenant = _text()
    workflow = _text()
    tool = _text()
    contract_version = _text()
    intent_key = _text(null=True)
    arguments = _text()
    amount = _number(null=True)
    subject = _text("on behalf of")
    approvers = _number("approvers needed")
    status = _text()
    requested_at = _number("requested")
    expires_at = _number("expires")
    decided_at = _number("decided", null=True)
    decided_by = _text(null=True)

    class Meta:
        """Its table, and what a person may be allowed."""

        managed = False
        db_table = "handrail_approval"
        default_permissions = ("view",)
        permissions: ClassVar = [("approve_action", "Can approve or reject an exact action")]

    def __str__(self) -> str:
        return f"{self.tool} for {self.subject}"


class Handoff(models.Model):
    """A matter for a person: why, what is verified, what was about to be done, what is left."""

    id = _text("handoff", primary_key=True)
    run_id = _text("run")
    tenant = _text()
    workflow = _text()
    tool = _text(null=True)
    subject = _text("on behalf of")
    reason = _text()
    priority = _number()
    status = _text()
    opened_at = _number("opened")
    claimed_by = _text(null=True)
    assigned_to = _text(null=True)
    package = _text()
    resolution = _text(null=True)
    resolved_by = _text(null=True)
    resolved_reason = _text(null=True)

    class Meta:
        """Its table, and what a person may be allowed."""

        managed = False
        db_table = "handrail_handoff"
        default_permissions = ("view",)
        permissions: ClassVar = [("resolve_handoff", "Can claim and resolve handoffs")]

    def __str__(self) -> str:
        return f"{self.reason} {self.run_id}"


def _described(model: type[models.Model]) -> tuple[str, list[tuple[str, Any]], dict[str, Any]]:
    """A model as a migration describes it."""
    meta = model._meta
    options = {
        "managed": False,
        "db_table": meta.db_table,
        "default_permissions": meta.default_permissions,
        **({"permissions": meta.permissions} if meta.permissions else {}),
    }
    fields = [(field.name, field.clone()) for field in meta.local_fields]
    return model.__name__, fields, options


#: For the migrations: the tables are not Django's to make, so what it knows of them may move.
MODELS: Final = tuple(_described(model) for model in (Run, Effect, Approval, Handoff))
