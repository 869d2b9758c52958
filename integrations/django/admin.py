"""Admin pages to look at runs, effects, approvals and handoffs, and to act on them.

Nothing is edited here. What a person may do is on a page of its own, which says what it would do,
behind a Django permission; it goes through the fleet's desk, under the run's lock, and into the
audit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_protect

from handrail.errors import BadInput, HandrailError
from handrail.integrations.django import people
from handrail.integrations.django.models import Approval, Effect, Handoff, Run
from handrail.integrations.django.web import client
from handrail.legible import visible

_Admin: Any = admin.ModelAdmin  # generic in its stubs alone
_CANCELLING: Final = (
    "Nothing new is started. What is in flight is found out, not denied, and a write that proves to"
    " have happened is undone where its tool says how."
)


class NotConfirmed(BadInput):
    """What a person has to type before something final was typed otherwise; nothing was done."""

    code = "not-confirmed"

    def __str__(self) -> str:
        return "type the intent exactly as it is shown: what you agree to cannot be taken back"


def instant(name: str, title: str) -> Callable[[Any, Model], str]:
    """A column that shows an instant as people read it."""

    def shown(_: Any, row: Model) -> str:
        at = getattr(row, name)
        if at is None:
            return ""
        return datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    shown.short_description = title  # type: ignore[attr-defined]
    shown.admin_order_field = name  # type: ignore[attr-defined]
    return shown


def words(name: str, title: str = "") -> Callable[[Any, Model], str]:
    """A column of text that a model, a tool or a customer may have written: nothing in it acts,
    hides or passes for something else.
    """

    def shown(_: Any, row: Model) -> str:
        value = getattr(row, name)
        if value is None:
            return ""
        try:
            text = json.loads(f'"{value}"')  # it is kept with its escapes
        except ValueError:
            text = value
        return visible(text)

    shown.short_description = title or name.replace("_", " ")  # type: ignore[attr-defined]
    return shown


class ReadOnly(_Admin):  # type: ignore[misc]
    """A page that shows rows, and offers what may be done about one of them."""

    change_form_template = "handrail/look.html"
    show_full_result_count = False
    list_per_page = 50
    list_select_related = False
    acts: ClassVar[tuple[tuple[str, str, str], ...]] = ()  # address, title, permission

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Where the tables are elsewhere, or in a schema of their own, Django does not see them."""
        return _is_seen() and bool(super().has_module_permission(request))

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """As Django's own, where it sees the tables."""
        return _is_seen() and bool(super().has_view_permission(request, obj))

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are the ledger's."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Rows are the ledger's."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Rows are the ledger's."""
        return False

    def get_queryset(self, request: HttpRequest) -> Any:
        """The rows, in the database in which the ledger is."""
        from handrail.integrations.django import conf

        return super().get_queryset(request).using(conf.alias())

    def get_urls(self) -> list[URLPattern]:
        """The pages of the acts, beside those of the admin."""
        own = [
            path(
                f"<path:pk>/{address}/",
                # What a person does is a transaction of its own: one of the request's would hold
                # up SQLite's only writer.
                transaction.non_atomic_requests(self.admin_site.admin_view(getattr(self, address))),
                name=f"handrail_{self.opts.model_name}_{address}",
            )
            for address, _, _ in self.acts
        ]
        return [*own, *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show a row, its trace, and the acts that this user may do."""
        offered = [
            (reverse(f"admin:handrail_{self.opts.model_name}_{address}", args=[object_id]), title)
            for address, title, permission in self.acts
            if _may(request, permission)
        ]
        context = {"acts": offered, "title": self.opts.verbose_name, **self.beside(object_id)}
        return super().change_view(  # type: ignore[no-any-return]
            request, object_id, form_url, {**context, **(extra_context or {})}
        )

    def beside(self, object_id: str) -> dict[str, Any]:
        """What else is shown with a row."""
        return {}

    def act(
        self,
        request: HttpRequest,
        pk: str,
        *,
        permission: str,
        title: str,
        facts: Callable[[], dict[str, object]],
        do: Callable[[dict[str, str]], str],
        choices: Callable[[], list[dict[str, object]]] = list,
        asks: tuple[str, ...] = ("reason",),
    ) -> HttpResponse:
        """A page that says what an act would do, and a POST that does it."""
        if not _may(request, permission):
            raise PermissionDenied
        if request.method == "POST":
            try:
                said = do({name: str(value) for name, value in request.POST.items()})
                messages.success(request, visible(said))
                return HttpResponseRedirect(self._page(pk))
            except HandrailError as error:
                messages.error(request, visible(f"[{error.code}] {error}"))
        try:
            shown = {name: _said(value) for name, value in facts().items() if value is not None}
            offered = choices()
        except HandrailError as error:
            messages.error(request, visible(f"[{error.code}] {error}"))
            return HttpResponseRedirect(self._page(pk))
        context = {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "back": self._page(pk),
            "facts": shown,
            "choices": offered,
            "asks": asks,
        }
        return TemplateResponse(request, "handrail/act.html", context)

    def _page(self, pk: str) -> str:
        return reverse(f"admin:handrail_{self.opts.model_name}_change", args=[pk])


def _is_seen() -> bool:
    from handrail.integrations.django import conf

    return not conf.is_elsewhere() and not conf.read().database_schema


def _may(request: HttpRequest, permission: str) -> bool:
    user: Any = request.user
    return bool(user.has_perm(permission))


def _said(value: object) -> str:
    return visible(value if isinstance(value, str) else json.dumps(value, indent=2, default=str))


def _must_be_typed(wanted: str | None, said: dict[str, str]) -> None:
    if wanted is not None and said.get("confirm", "").strip() != wanted:
        raise NotConfirmed


@admin.register(Run)
class RunAdmin(ReadOnly):
    """Runs, the newest first."""

    acts = (("cancel", "Cancel this run", people.CANCEL),)
    created, deadline = instant("created_at", "created"), instant("deadline_at", "deadline")
    goal_, input_, answer_ = words("goal"), words("input"), words("answer")
    list_display = ("id", "workflow", "status", "reason", "goal_", "created")
    list_filter = ("status", "workflow", "mode", "tenant")
    search_fields = ("=id",)
    ordering = ("-created_at",)
    fields = (
        *("id", "tenant", "workflow", "workflow_version", "mode", "goal_", "principal", "input_"),
        *("status", "reason", "answer_", "created", "deadline", "cancel_requested_at"),
        *("steps_left", "model_calls_left", "tool_calls_left"),
    )
    readonly_fields = fields

    def beside(self, object_id: str) -> dict[str, Any]:
        """The run's trace."""
        try:
            trace = client.fleet.trace(object_id)
        except HandrailError:
            trace = []
        shown = [(one["seq"], one["type"], visible(json.dumps(one["detail"]))) for one in trace]
        return {"trace": shown}

    @method_decorator(csrf_protect)
    def cancel(self, request: HttpRequest, pk: str) -> HttpResponse:
        """Wish a run to be cancelled."""

        def facts() -> dict[str, object]:
            run = client.get(pk)
            return {
                "run": run.run_id,
                "workflow": run.workflow,
                "goal": run.goal,
                "status": run.status,
                "what happens": _CANCELLING,
            }

        def do(said: dict[str, str]) -> str:
            who = people.principal_of(request.user)
            run = people.acting_fleet().cancel(pk, by=who, reason=said.get("reason", ""))
            return f"The run is {run.status}."

        title = "Cancel a run"
        return self.act(request, pk, permission=people.CANCEL, title=title, facts=facts, do=do)


@admin.register(Effect)
class EffectAdmin(ReadOnly):
    """Effects, the newest first."""

    planned, sent = instant("created_at", "planned"), instant("first_dispatched_at", "first sent")
    since = instant("unknown_since", "in doubt since")
    intent_, arguments_ = words("intent_key", "intent"), words("arguments")
    result_, evidence_ = words("result"), words("evidence")
    list_display = ("id", "tool", "intent_", "status", "attempts", "owner_run_id", "planned")
    list_filter = ("status", "tool", "tenant")
    search_fields = ("=id", "=intent_key", "=owner_run_id")
    ordering = ("-created_at",)
    fields = (
        *("id", "tenant", "tool", "contract_version", "intent_", "arguments_", "status"),
        *("attempts", "owner_run_id", "planned", "sent", "since", "doubt_trigger"),
        *("queries_left", "result_", "evidence_"),
    )
    readonly_fields = fields


@admin.register(Approval)
class ApprovalAdmin(ReadOnly):
    """Requests for consent, the newest first."""

    acts = (("decide", "Approve or reject", people.APPROVE),)
    requested, expires = instant("requested_at", "requested"), instant("expires_at", "expires")
    intent_, arguments_ = words("intent_key", "intent"), words("arguments")
    list_display = ("id", "tool", "subject", "amount", "status", "requested", "expires")
    list_filter = ("status", "tool", "workflow", "tenant")
    search_fields = ("=id", "=run_id")
    ordering = ("-requested_at",)
    fields = (
        *("id", "run_id", "tenant", "workflow", "tool", "contract_version", "intent_"),
        *("arguments_", "amount", "subject", "approvers", "status", "requested", "expires"),
        *("decided_by",),
    )
    readonly_fields = fields

    @method_decorator(csrf_protect)
    def decide(self, request: HttpRequest, pk: str) -> HttpResponse:
        """Agree to exactly what is shown, or refuse it."""

        def desk() -> Any:
            return people.acting_fleet().desk

        def facts() -> dict[str, object]:
            approval = desk().approval(pk, by=people.principal_of(request.user))
            return dict(approval.shown)

        def choices() -> list[dict[str, object]]:
            who = people.principal_of(request.user)
            problem = desk().may_approve(desk().approval(pk, by=who), by=who)
            agree: dict[str, object] = {
                "value": "approve",
                "title": "Approve exactly this",
                "consequence": "The action is executed, once.",
                "obstacle": visible(problem or ""),
            }
            refuse: dict[str, object] = {
                "value": "reject",
                "title": "Reject it",
                "consequence": "The tool is not called, and the run stops.",
                "obstacle": "",
            }
            return [agree, refuse]

        def do(said: dict[str, str]) -> str:
            who = people.principal_of(request.user)
            reason = said.get("reason", "")
            if said.get("choice") == "reject":
                run = desk().reject(pk, by=who, reason=reason)
            elif said.get("choice") == "approve":
                _must_be_typed(desk().to_type(desk().approval(pk, by=who)), said)
                token = desk().issue_token(pk, by=who, to=who.subject)
                run = desk().approve(token, by=who, comment=reason)
            else:
                return "Nothing was chosen, and nothing was done."
            return f"The run is {run.status}."

        return self.act(
            request,
            pk,
            permission=people.APPROVE,
            title="Approve or reject an exact action",
            facts=facts,
            do=do,
            choices=choices,
            asks=("confirm", "reason"),
        )


@admin.register(Handoff)
class HandoffAdmin(ReadOnly):
    """Matters for a person, the most urgent first."""

    acts = (
        ("claim", "Claim", people.RESOLVE),
        ("query", "Ask the service now", people.RESOLVE),
        ("resolve", "Resolve", people.RESOLVE),
    )
    opened = instant("opened_at", "opened")
    package_, why = words("package"), words("resolved_reason", "because")
    list_display = ("id", "reason", "workflow", "tool", "subject", "status", "claimed_by", "opened")
    list_filter = ("status", "reason", "workflow", "tool", "tenant")
    search_fields = ("=id", "=run_id")
    ordering = ("status", "priority", "opened_at")
    fields = (
        *("id", "run_id", "tenant", "workflow", "tool", "subject", "reason", "priority", "status"),
        *("opened", "claimed_by", "assigned_to", "package_", "resolution", "resolved_by", "why"),
    )
    readonly_fields = fields

    def _facts(self, request: HttpRequest, pk: str) -> dict[str, object]:
        matter = people.acting_fleet().desk.handoff(pk, by=people.principal_of(request.user))
        row = matter.row
        return {
            "handoff": row["id"],
            "run": row["run_id"],
            "reason": row["reason"],
            "status": row["status"],
            "claimed by": row["claimed_by"],
            "package": dict(matter.package),
            "evidence": [dict(one) for one in matter.evidence],
        }

    @method_decorator(csrf_protect)
    def claim(self, request: HttpRequest, pk: str) -> HttpResponse:
        """Take a matter, so that nobody else resolves it."""

        def do(_: dict[str, str]) -> str:
            people.acting_fleet().desk.claim(pk, by=people.principal_of(request.user))
            return "It is yours for now."

        return self.act(
            request,
            pk,
            permission=people.RESOLVE,
            title="Claim a handoff",
            facts=lambda: self._facts(request, pk),
            do=do,
            asks=(),
        )

    @method_decorator(csrf_protect)
    def query(self, request: HttpRequest, pk: str) -> HttpResponse:
        """Ask the service whether the write took effect; its answer is kept as evidence."""

        def do(_: dict[str, str]) -> str:
            answer = people.acting_fleet().desk.query(pk, by=people.principal_of(request.user))
            return f"The service answers: {answer}"

        return self.act(
            request,
            pk,
            permission=people.RESOLVE,
            title="Ask the service now",
            facts=lambda: self._facts(request, pk),
            do=do,
            asks=(),
        )

    @method_decorator(csrf_protect)
    def resolve(self, request: HttpRequest, pk: str) -> HttpResponse:
        """Resolve a matter as one of what is offered."""

        def choices() -> list[dict[str, object]]:
            matter = people.acting_fleet().desk.handoff(pk, by=people.principal_of(request.user))
            return [
                {
                    "value": choice.resolution.value,
                    "title": choice.resolution.value,
                    "consequence": visible(choice.consequence),
                    "obstacle": visible(choice.obstacle or ""),
                    "seen": matter.seen,
                }
                for choice in matter.choices
            ]

        def do(said: dict[str, str]) -> str:
            if not said.get("choice"):
                return "Nothing was chosen, and nothing was done."
            who = people.principal_of(request.user)
            matter = people.acting_fleet().desk.handoff(pk, by=who)
            chosen = people.acting_fleet().desk.chosen(
                matter, said["choice"], by=who, evidence=said.get("evidence", "")
            )
            _must_be_typed(matter.to_type if chosen.final else None, said)
            run = people.acting_fleet().desk.resolve(
                pk,
                said["choice"],
                by=who,
                reason=said.get("reason", ""),
                evidence=said.get("evidence", ""),
                seen=said.get("seen") or None,
            )
            return f"The run is {run.status}."

        return self.act(
            request,
            pk,
            permission=people.RESOLVE,
            title="Resolve a handoff",
            facts=lambda: self._facts(request, pk),
            do=do,
            choices=choices,
            asks=("confirm", "reason", "evidence"),
        )
