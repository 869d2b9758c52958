"""Four endpoints; none of them imports agent code."""

import base64
import json
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib.auth import authenticate
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from handrail.errors import HandrailError, TryLater
from handrail.integrations.django import client
from handrail.integrations.django.people import name_of, principal_of
from shop.models import Order, RefundRequest

View = Callable[..., HttpResponse]
STATUS = {"not-allowed": 403, "unknown-run": 404, "invalid-run": 400}


def api(view: View) -> View:
    """Who it is, by basic authentication; no cookie, so nothing that another site could forge."""

    @csrf_exempt
    @wraps(view)
    def answer(request: HttpRequest, *args: Any, **options: Any) -> HttpResponse:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        name, _, password = base64.b64decode(given or b"").decode().partition(":")
        user = authenticate(request, username=name, password=password)
        if kind != "Basic" or user is None:
            return JsonResponse({"code": "not-logged-in"}, status=401)
        request.user = user
        try:
            return view(request, *args, **options)
        except HandrailError as error:
            status = 503 if isinstance(error, TryLater) else STATUS.get(error.code, 409)
            return JsonResponse({"code": error.code, "error": str(error)}, status=status)

    return answer


@api
@require_POST
def ask(request: HttpRequest) -> HttpResponse:
    """Ask for a refund: the request and the run are one transaction."""
    try:
        asked = json.loads(request.body)
        order_id, note = int(asked["order_id"]), str(asked.get("note", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return JsonResponse({"code": "invalid-request", "error": "give an order_id"}, status=400)
    with transaction.atomic():
        order = get_object_or_404(Order, pk=order_id, customer=request.user)
        run_id = client.enqueue(
            "refund",
            goal=f"give back what was charged twice for order {order.pk}",
            input={"order_id": order.pk},
            principal=name_of(request.user),
            dedupe_key=f"refund:{order.pk}",  # a double click is one run
        )
        RefundRequest.objects.get_or_create(order=order, run_id=run_id, defaults={"note": note})
        if len(note) > 1_000:  # found out late, as things are: neither row is kept
            transaction.set_rollback(True)
            return JsonResponse({"code": "note-too-long", "run": run_id}, status=400)
    return JsonResponse({"run": run_id}, status=202)


@api
@require_GET
def status(request: HttpRequest, run_id: str) -> HttpResponse:
    """How it stands; of another's run nobody learns that there is one."""
    return JsonResponse(client.get(run_id, subject=name_of(request.user)).to_json())


@api
@require_POST
def cancel(request: HttpRequest, run_id: str) -> HttpResponse:
    """The cancel button: nothing new is started, and what is in flight is found out."""
    client.get(run_id, subject=name_of(request.user))
    return JsonResponse({"status": client.cancel(run_id).status})


@api
@require_http_methods(["GET", "POST"])
def approval(request: HttpRequest, run_id: str) -> HttpResponse:
    """The exact action that waits for consent, and the consent to exactly that."""
    who = principal_of(request.user)
    desk = client.fleet.desk
    waiting = desk.approvals(by=who, run=run_id)
    if not waiting:
        return JsonResponse({"code": "nothing-waits"}, status=404)
    if request.method == "GET":
        return JsonResponse({"digest": waiting[0].digest, "action": waiting[0].shown})
    if json.loads(request.body)["digest"] != waiting[0].digest:
        return JsonResponse({"code": "another-action"}, status=409)
    token = desk.issue_token(waiting[0].id, by=who, to=who.subject)
    return JsonResponse({"status": desk.approve(token, by=who, run=run_id).status})
