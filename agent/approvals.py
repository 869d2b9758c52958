"""Approvals: a person's consent to one exact action, and whether it still covers what is done.

What a person is shown, what is hashed and what is compared are the same canonical text. A consent
names that text by its digest: nothing that was not shown can be consented to, and whatever changes
afterwards (an argument, the contract, the state, the price) is not covered. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from handrail.agent.people import Role, same_person
from handrail.agent.tools import Principal, ToolContract, contract_hash
from handrail.canonical import Json, canonical, digest
from handrail.errors import BadInput


class ApprovalStatus(StrEnum):
    """Where a request for consent is."""

    PENDING = "pending"  # people are asked
    APPROVED = "approved"  # enough have agreed; the first dispatch consumes it
    REJECTED = "rejected"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"  # its run was cancelled, or asks for something else by now
    CONSUMED = "consumed"  # by the effect that was dispatched under it


@dataclass(frozen=True, slots=True)
class ApprovalTerms:
    """Who has to agree to an action, and to what text of its contract."""

    contract_hash: str
    amount: int | None = None
    approvers: int = 1
    requester_approves: bool = False

    @classmethod
    def of(cls, contract: ToolContract, arguments: Mapping[str, Json]) -> ApprovalTerms:
        """Take them from the contract of the tool that is to be called."""
        return cls(
            contract_hash=contract_hash(contract),
            amount=contract.amount_of(arguments),
            approvers=contract.approvers_for(arguments),
            requester_approves=contract.requester_approves,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the terms as a JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """A request for consent, as the ledger holds it. `consents` are the people who have agreed."""

    id: str
    run_id: str
    tenant: str
    workflow: str
    status: ApprovalStatus
    step: int
    state_version: int
    tool: str
    contract_version: str
    intent_key: str | None
    arguments: Mapping[str, Json]
    arguments_hash: str
    subject: str
    terms: ApprovalTerms
    requested_at: int
    expires_at: int
    consents: tuple[str, ...] = ()

    @property
    def shown(self) -> dict[str, Json]:
        """The exact action, as a person is shown it; all of it is bound by `digest`."""
        return {
            "approval": self.id,
            "run": self.run_id,
            "tenant": self.tenant,
            "workflow": self.workflow,
            "subject": self.subject,
            "tool": self.tool,
            "contract_version": self.contract_version,
            "contract_hash": self.terms.contract_hash,
            "intent_key": self.intent_key,
            "arguments": dict(self.arguments),
            "arguments_hash": self.arguments_hash,
            "amount": self.terms.amount,
            "step": self.step,
            "state_version": self.state_version,
            "role": Role.APPROVER.value,
            "approvers": self.terms.approvers,
            "expires_at": self.expires_at,
        }

    @property
    def text(self) -> str:
        """What is shown, in the form in which it is hashed."""
        return canonical(self.shown)

    @property
    def digest(self) -> str:
        """What a consent names."""
        return digest("approval", self.text)

    @property
    def missing(self) -> int:
        """How many people have yet to agree."""
        return max(0, self.terms.approvers - len(self.consents))


@dataclass(frozen=True, slots=True)
class Token:
    """What a signed token says, once its signature was checked: one approver's right to agree to
    one request, once. `hash` is how the ledger knows it; the token itself is stored nowhere.
    """

    approval_id: str
    digest: str
    role: str
    hash: str


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A token, as the ledger holds it."""

    hash: str
    approval_id: str
    issued_to: str | None  # the only person who may use it; None: any approver
    used_at: int | None = None


@dataclass(eq=False)
class ApprovalRefused(BadInput):
    """A consent does not count; nothing was changed, and nothing was called.

    `problem` is one of the stable words below, `detail` explains it.
    """

    code: ClassVar[str] = "approval-refused"
    problem: str
    detail: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.detail}"


def consent_problem(
    approval: Approval, token: Token, issued: IssuedToken | None, who: Principal, *, now: int
) -> ApprovalRefused | None:
    """Say why a person's consent does not count; None where it does."""
    if issued is None or issued.approval_id != approval.id or token.approval_id != approval.id:
        return ApprovalRefused("unknown-token", "no such token was issued for this request")
    if issued.used_at is not None:
        return ApprovalRefused("token-used", "a token counts once")
    if token.digest != approval.digest:
        return ApprovalRefused(
            "changed", "what the token was issued for is not what is to be done: look at it again"
        )
    if token.role not in who.roles:
        return ApprovalRefused("wrong-role", f"it takes the role {token.role}")
    if issued.issued_to is not None and not same_person(issued.issued_to, who.subject):
        return ApprovalRefused("wrong-person", "the token was issued to somebody else")
    if now >= approval.expires_at:
        return ApprovalRefused("expired", "the request is too old")
    return person_problem(approval, who)


def person_problem(approval: Approval, who: Principal) -> ApprovalRefused | None:
    """Say why a person may not decide about this request; None where it may."""
    if not who.sees(approval.tenant):
        return ApprovalRefused("wrong-tenant", "it belongs to another tenant")
    own = same_person(who.subject, approval.subject)
    if own and not approval.terms.requester_approves:
        return ApprovalRefused("own-request", "who asks for an action does not consent to it")
    if any(same_person(who.subject, other) for other in approval.consents):
        return ApprovalRefused("agreed-already", "it takes another person's consent")
    return None
