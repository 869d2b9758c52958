"""Commands and waiting events as JSON: how a checkpoint is stored and read back. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from handrail.agent.approvals import ApprovalTerms
from handrail.agent.capability import Capability
from handrail.agent.stage import (
    Answered,
    Approved,
    AskModel,
    Command,
    Event,
    InvokeTool,
    Park,
    ParkKind,
    Resolved,
    Verify,
)
from handrail.canonical import Json


def command_to_json(command: Command) -> dict[str, Json]:
    """Return a command that a run can rest on as a JSON object; others raise `TypeError`.

    Whoever takes the run up begins anew: attempts are not kept.
    """
    match command:
        case AskModel(model, tools):
            return {"do": "ask", "model": model, "tools": list(tools)}
        case InvokeTool():
            return {
                "do": "invoke",
                "tool": command.tool,
                "contract_version": command.contract_version,
                "arguments": dict(command.arguments),
                "arguments_hash": command.arguments_hash,
                "state_version": command.state_version,
                "capability": command.capability.to_json(),
                "timeout_ms": command.timeout_ms,
                "deadline_at": command.deadline_at,
                "intent_key": command.intent_key,
                "approval": command.approval,
                "fixed": command.fixed,
            }
        case Verify():
            return {
                "do": "verify",
                "claim": command.claim,
                "timeout_ms": command.timeout_ms,
                "cost_microusd": command.cost_microusd,
                "before_write": command.before_write,
            }
        case Park(kind, action, question, expires_ms, terms):
            return {
                "do": "park",
                "kind": kind.value,
                "action": command_to_json(action) if action else None,
                "question": question,
                "expires_ms": expires_ms,
                "terms": terms.to_json() if terms else None,
            }
    raise TypeError(f"a run cannot rest on {type(command).__name__}")


def command_from_json(value: Any) -> Command:
    """Read what `command_to_json` wrote."""
    fields = {k: v for k, v in value.items() if k != "do"}
    match value["do"]:
        case "ask":
            return AskModel(fields["model"], tuple(fields["tools"]))
        case "invoke":
            bound = {
                "arguments": MappingProxyType(fields["arguments"]),
                "capability": Capability(**fields["capability"]),
            }
            return InvokeTool(**fields | bound)
        case "verify":
            return Verify(**fields)
        case "park":
            read = {
                "kind": ParkKind(fields["kind"]),
                "action": fields["action"] and command_from_json(fields["action"]),
                "terms": fields["terms"] and ApprovalTerms(**fields["terms"]),
            }
            return Park(**fields | read)
    raise ValueError(f"not a stored command: {value['do']!r}")


def told_to_json(event: Event) -> dict[str, Json]:
    """Return an event that waits for a resting run's next claim as a JSON object."""
    match event:
        case Approved(approval_id, approvers):
            return {"told": "approved", "approval_id": approval_id, "approvers": [*approvers]}
        case Answered(text, author):
            return {"told": "answered", "text": text, "author": author}
        case Resolved(value, text, evidence):
            return {"told": "resolved", "value": value, "text": text, "evidence": evidence}
    raise TypeError(f"a run cannot be told later about {type(event).__name__}")


def told_from_json(value: Any) -> Event:
    """Read what `told_to_json` wrote."""
    fields = {k: v for k, v in value.items() if k != "told"}
    match value["told"]:
        case "approved":
            return Approved(fields["approval_id"], tuple(fields["approvers"]))
        case "answered":
            return Answered(**fields)
        case "resolved":
            return Resolved(**fields)
    raise ValueError(f"not a stored event: {value['told']!r}")
