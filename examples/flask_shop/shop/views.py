"""Four endpoints; none of them imports agent code before somebody acts on a run."""

from typing import Any

from flask import Blueprint, g, request

from handrail.integrations.flask import handrail
from shop import db
from shop.models import Order, RefundRequest

pages = Blueprint("refunds", __name__, url_prefix="/refunds")


@pages.post("")
def ask() -> tuple[dict[str, Any], int]:
    """Ask for a refund: the request and the run are one transaction."""
    asked = request.get_json(silent=True, force=True)
    if not isinstance(asked, dict) or type(asked.get("order_id")) is not int:
        return {"code": "invalid-request", "error": "give an order_id"}, 400
    order = db.first_or_404(db.select(Order).filter_by(id=asked["order_id"], customer=g.user.name))
    run_id = handrail.enqueue(
        "refund",
        goal=f"give back what was charged twice for order {order.id}",
        input={"order_id": order.id},
        principal=g.user.name,
        dedupe_key=f"refund:{order.id}",  # a double click is one run
    )
    note = str(asked.get("note", ""))
    if not db.session.query(RefundRequest).filter_by(run_id=run_id).first():
        db.session.add(RefundRequest(order_id=order.id, run_id=run_id, note=note))
    if len(note) > 1_000:  # found out late, as things are: neither row is kept
        db.session.rollback()
        return {"code": "note-too-long", "run": run_id}, 400
    db.session.commit()
    return {"run": run_id}, 202


@pages.get("/<run_id>")
def status(run_id: str) -> dict[str, Any]:
    """How it stands; of another's run nobody learns that there is one."""
    return dict(handrail.get(run_id, subject=g.user.name).to_json())


@pages.post("/<run_id>/cancel")
def cancel(run_id: str) -> dict[str, Any]:
    """The cancel button: nothing new is started, and what is in flight is found out."""
    handrail.get(run_id, subject=g.user.name)
    return {"status": handrail.cancel(run_id).status}


@pages.get("/<run_id>/approval")
def approval(run_id: str) -> tuple[dict[str, Any], int]:
    """The exact action that waits for consent."""
    waiting = handrail.desk.approvals(by=g.user.principal, run=run_id)
    if not waiting:
        return {"code": "nothing-waits"}, 404
    return {"digest": waiting[0].digest, "action": waiting[0].shown}, 200


@pages.post("/<run_id>/approval")
def approve(run_id: str) -> tuple[dict[str, Any], int]:
    """The consent to exactly what was shown."""
    desk, who = handrail.desk, g.user.principal
    waiting = desk.approvals(by=who, run=run_id)
    if not waiting:
        return {"code": "nothing-waits"}, 404
    if request.get_json(force=True)["digest"] != waiting[0].digest:
        return {"code": "another-action"}, 409
    token = desk.issue_token(waiting[0].id, by=who, to=who.subject)
    return {"status": desk.approve(token, by=who, run=run_id).status}, 200
