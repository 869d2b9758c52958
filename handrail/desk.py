"""The operators' desk: what people are asked, what they decide, and the record of it.

Whatever a command or a page does for a person is a function here: each says who does it, checks the
role, changes something only as it was seen, and leaves an audit entry in the same transaction.
Nothing here decides what may become of a write: `handrail.agent.resolution` does.
"""

from __future__ import annotations

import functools
import logging
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Protocol

from itsdangerous import URLSafeSerializer

from handrail import tokens
from handrail.agent import protocol, resolution
from handrail.agent.approvals import (
    Approval,
    ApprovalRefused,
    ApprovalStatus,
    person_problem,
)
from handrail.agent.effects import Answer, Effect, answer_to_json
from handrail.agent.people import (
    Act,
    AtMost,
    AuditEntry,
    InvalidWords,
    NotAllowed,
    Role,
    TooManyDecisions,
    audit_faults,
    checked_name,
    checked_words,
    must_be_allowed,
)
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.resolution import Choice, Decision, Resolution, ResolutionRefused
from handrail.agent.stage import InvokeTool
from handrail.agent.status import Reason
from handrail.agent.tools import Principal, SideEffect, ToolContract
from handrail.agent.workflow import Workflow
from handrail.canonical import Json
from handrail.errors import BadInput
from handrail.ledger.errors import UnknownRun
from handrail.ledger.ledger import DueStep, Ledger
from handrail.ledger.people import People
from handrail.runs import Run
from handrail.settings import Settings

log = logging.getLogger("handrail")

#: How long a claim of a handoff lasts, unless it is renewed by claiming again.
CLAIM_MS: Final = 15 * 60_000
MOST_SNOOZED_MS: Final = 30 * 24 * 3_600_000
MOST_LISTED: Final = 10_000
#: A customer may answer with a whole mail.
LONGEST_ANSWER: Final = 20_000
_DECISIONS: Final = (Act.APPROVE, Act.REJECT, Act.RESOLVE)
_MINUTE_MS: Final = 60_000
_QUESTION: Final = Reason.CLARIFICATION_REQUIRED.value
_ANCHOR: Final = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})")
_NARROWED_BY: Final = frozenset(
    {"run", "workflow", "tool", "tenant", "reason", "subject", "assigned_to", "older_than_ms"}
)


@dataclass(eq=False)
class UnknownMatter(BadInput):
    """There is no such request or handoff, or it is not for this person to see."""

    code: ClassVar[str] = "unknown-matter"
    kind: str
    id: str

    def __str__(self) -> str:
        plural = {"approval": "approvals", "handoff": "handoffs", "principal": "principals list"}
        return f"there is no {self.kind} {self.id!r}: list them with 'handrail {plural[self.kind]}'"


@dataclass(eq=False)
class NotYours(BadInput):
    """Somebody else is at a handoff, or it has been settled; nothing was changed."""

    code: ClassVar[str] = "handoff-taken"
    handoff_id: str
    problem: str

    def __str__(self) -> str:
        return f"handoff {self.handoff_id!r}: {self.problem}"


@dataclass(eq=False)
class InvalidRoles(BadInput):
    """Roles that there are not, or none."""

    code: ClassVar[str] = "invalid-roles"
    unknown: tuple[str, ...]
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.unknown) or 'nothing'}: give some of {', '.join(self.known)}"


@dataclass(eq=False)
class InvalidQuery(BadInput):
    """What a list is to be narrowed by cannot be used."""

    code: ClassVar[str] = "invalid-query"
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


@dataclass(eq=False)
class InvalidTime(BadInput):
    """An amount of time that cannot be given to a matter; nothing was changed."""

    code: ClassVar[str] = "invalid-time"
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """A matter for a person: why it came, what is known, what there is to choose.

    `row` is the queue's entry (who is at it, how old it is, ...), `package` what the run knew when
    it was handed over, `seen` the version that a decision names, `choices` what each resolution
    would do as things stand now. `to_type` is what a person types before a choice that is final:
    the intent key, where the write cannot be taken back or moves money. `yours_already` says that
    `next` has found nothing which nobody is at.
    """

    row: Mapping[str, Any]
    package: Mapping[str, Any]
    run_status: str
    seen: str
    choices: tuple[Choice, ...]
    sent_as: Mapping[str, Json] | None = None
    evidence: tuple[Mapping[str, Any], ...] = ()
    remaining_ms: int = 0  # the working time that its run has left
    to_type: str | None = None
    yours_already: bool = False

    @property
    def id(self) -> str:
        """The handoff's id."""
        return str(self.row["id"])

    @property
    def run_id(self) -> str:
        """The run that it is about."""
        return str(self.row["run_id"])

    @property
    def open(self) -> bool:
        """Whether nobody has resolved it yet."""
        return bool(self.row["status"] == "open")

    def to_json(self) -> dict[str, Any]:
        """Return the matter as one JSON object."""
        return {
            **self.row,
            "package": dict(self.package),
            "run_status": self.run_status,
            "seen": self.seen,
            "remaining_ms": self.remaining_ms,
            "sent_as": None if self.sent_as is None else dict(self.sent_as),
            "choices": [choice.to_json() for choice in self.choices],
            "evidence": [dict(one) for one in self.evidence],
            "to_type": self.to_type,
            "yours_already": self.yours_already,
        }


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What a look at the whole audit has found. `head` is what to note down elsewhere."""

    entries: int
    head: str
    faults: tuple[str, ...]

    @property
    def intact(self) -> bool:
        """Whether nothing was edited, lost or put in."""
        return not self.faults


class Deployment(Protocol):
    """What the desk needs of a fleet."""

    @property
    def ledger(self) -> Ledger: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def own_secret(self) -> str: ...

    workflows: dict[str, Workflow]

    def contracts_of(self, tool: str) -> list[ToolContract]: ...
    def get(self, run_id: str | Run) -> Run: ...
    def send_due(self, due: DueStep | None) -> None: ...
    def query_now(self, locked: Locked, effect: Effect) -> tuple[Answer, int]: ...


class Desk:
    """What people do with a fleet; see the module. `by` is a `Principal` whose roles the caller
    vouches for, or the name of one that an admin has admitted.
    """

    def __init__(self, fleet: Deployment) -> None:
        self._fleet = fleet

    @property
    def _people(self) -> People:
        return self._fleet.ledger.people

    # ---- who -------------------------------------------------------------------------------------

    def who(self, by: Principal | str) -> Principal:
        """Return who this is, with the roles it has. Raises `NotAllowed`, `InvalidWords`."""
        if isinstance(by, Principal):
            return _vouched(by)
        if not isinstance(by, str):
            raise NotAllowed(str(by), "do anything", "give a Principal, or the name of one")
        found = self._people.principal(by)
        if found is None:
            name = shlex.quote(by)
            problem = f"an admin has to admit it: handrail principals admit {name} --role operator"
            if not self.staffed:
                problem = (
                    "nobody was admitted yet: handrail principals admit"
                    f" {name} --role admin --role operator --role approver"
                )
            raise NotAllowed(by, "do anything", problem)
        return found

    @property
    def staffed(self) -> bool:
        """Whether anybody was admitted yet; until then the first admin needs nobody's leave."""
        return bool(self._people.principals())

    def on_duty(self, by: Principal | str) -> Principal:
        """Return who stops and starts things: as `who` does, or, while nobody was admitted, anybody
        as an operator, since anybody could admit itself.
        """
        if isinstance(by, str) and not self.staffed:
            return Principal(by, roles=frozenset({Role.OPERATOR}))
        return self.who(by)

    def _allowed(self, by: Principal | str, act: Act, tenant: str | None = None) -> Principal:
        who = self.who(by)
        must_be_allowed(who, act, tenant=tenant)
        return who

    def admit(
        self,
        subject: str,
        roles: Sequence[str],
        *,
        by: Principal | str | None = None,
        tenants: Sequence[str] | None = None,
        reason: str = "",
    ) -> Principal:
        """Give a person these roles, instead of any before. The first to be admitted, an admin,
        needs nobody's leave: `by=None`.
        """
        name = checked_name(subject)
        admitted = Principal(name, roles=_roles(roles), tenants=_some_tenants(tenants))
        who = admitted if by is None else self._allowed(by, Act.ADMIT)
        before = self._people.principal(name)
        entry = AuditEntry.by(
            who,
            Act.ADMIT,
            f"principal:{name}",
            reason=checked_words("reason", reason, needed=False),
            before={"roles": [*sorted(before.roles)] if before else []},
            after={
                "roles": [*sorted(admitted.roles)],
                "tenants": None if admitted.tenants is None else [*sorted(admitted.tenants)],
            },
        )
        for reached in (admitted, before):
            if reached is not None:
                _must_reach(who, Act.ADMIT, reached)
        if by is None and (Role.ADMIN not in admitted.roles or admitted.tenants is not None):
            problem = "the first to be admitted has to be an admin, and of all tenants"
            raise NotAllowed(name, Act.ADMIT.value, problem)
        if not self._people.admit(admitted, entry, first=by is None):
            raise NotAllowed(name, Act.ADMIT.value, "there are admins: say which one you are")
        return admitted

    def dismiss(self, subject: str, *, by: Principal | str, reason: str = "") -> None:
        """Take all roles from a person."""
        who = self._allowed(by, Act.DISMISS)
        checked_words("subject", subject)
        before = self._people.principal(subject)
        if before is not None:
            _must_reach(who, Act.DISMISS, before)
        entry = AuditEntry.by(
            who,
            Act.DISMISS,
            f"principal:{subject}",
            reason=checked_words("reason", reason, needed=False),
            before={"roles": [*sorted(before.roles)] if before else []},
        )
        if not self._people.dismiss(subject, entry):
            raise UnknownMatter("principal", subject)

    def principals(self, *, by: Principal | str) -> list[Principal]:
        """List the people who have roles, where this person has to do with anything."""
        who = self._allowed(by, Act.LOOK)
        return [one for one in self._people.principals() if _share_a_tenant(who, one)]

    # ---- approvals -------------------------------------------------------------------------------

    def approvals(
        self,
        *,
        by: Principal | str,
        run: str | Run | None = None,
        workflow: str | None = None,
        tool: str | None = None,
        tenant: str | None = None,
        older_than_ms: int = 0,
        limit: int = 100,
    ) -> list[Approval]:
        """List what waits for consent, oldest first, each with the exact action."""
        who = self._allowed(by, Act.LOOK)
        return self._people.approvals(
            run_id=None if run is None else _run_id(run),
            tenants=_tenants(who, tenant),
            workflow=_name("workflow", workflow),
            tool=_name("tool", tool),
            older_than_ms=_natural("older_than_ms", older_than_ms),
            limit=_limit(limit),
        )

    def approval(self, approval_id: str, *, by: Principal | str) -> Approval:
        """Read one request, whatever has become of it. Raises `UnknownMatter`."""
        who = self._allowed(by, Act.LOOK)
        return self._seen_approval(approval_id, who)

    def _seen_approval(self, approval_id: str, who: Principal) -> Approval:
        found = self._people.approval(approval_id) if _is_id(approval_id) else None
        if found is None or not who.sees(found.tenant):
            raise UnknownMatter("approval", str(approval_id))
        return found

    def issue_token(self, approval_id: str, *, by: Principal | str, to: str | None = None) -> str:
        """Sign a token by which one approver may agree to exactly this request, once.

        It names what is shown by its digest, so that it stands for nothing else. `to` binds it to
        one person; whoever uses it has to have the role as well. An application that sends tokens
        to approvers asks for them as a `Principal` with that role.
        """
        who = self._allowed(by, Act.REQUEST_TOKEN)
        approval = self._seen_approval(approval_id, who)
        if approval.status is not ApprovalStatus.PENDING:
            raise ApprovalRefused("not-pending", f"it is {approval.status.value} already")
        named = None if to is None else checked_name(to)
        token, token_hash = tokens.new_token(approval, self._signer())
        entry = AuditEntry.by(
            who,
            Act.REQUEST_TOKEN,
            f"approval:{approval.id}",
            tenant=approval.tenant,
            run_id=approval.run_id,
            after={"digest": approval.digest, "issued_to": named},
        )
        if not self._people.issue_token(approval.id, token_hash, to=named, entry=entry):
            raise ApprovalRefused("not-pending", "nothing waits for it any more")
        return token

    def approve(
        self,
        token: str,
        *,
        by: Principal | str,
        run: str | Run | None = None,
        comment: str = "",
    ) -> Run:
        """Agree to the exact action that a token was issued for.

        The run goes on with the time that it had left, once as many have agreed as it takes; no
        model is asked. With `run` the token has to be for that one. Raises `ApprovalRefused`.
        """
        who = self._allowed(by, Act.APPROVE)
        said = checked_words("comment", comment, needed=False)
        read = tokens.read_token(token, self._signer())
        approval = self._people.approval(read.approval_id)
        if approval is None:
            raise ApprovalRefused("unknown-token", "no such token was issued")
        if run is not None and approval.run_id != _run_id(run):
            raise ApprovalRefused("another-run", "the token was issued for another run")
        return self._decide(
            approval.run_id,
            lambda locked: protocol.approve(locked, who=who, token=read, comment=said),
            token_hash=read.hash,
        )

    def reject(self, approval_id: str, *, by: Principal | str, reason: str) -> Run:
        """Refuse a request: the tool is not called, and the run that waits for it stops."""
        who = self._allowed(by, Act.REJECT)
        said = checked_words("reason", reason)
        approval = self._seen_approval(approval_id, who)
        return self._decide(
            approval.run_id,
            lambda locked: protocol.reject(locked, approval_id=approval.id, who=who, reason=said),
        )

    def may_approve(self, approval: Approval, *, by: Principal | str) -> str | None:
        """Say what keeps a person from agreeing to a request; None where nothing does."""
        who = self.who(by)
        if Role.APPROVER not in who.roles:
            return f"it takes the role {Role.APPROVER.value}"
        problem = person_problem(approval, who)
        return None if problem is None else problem.detail

    def must_be_approver(self, approval: Approval, *, by: Principal | str) -> Principal:
        """Refuse who may not agree to a request, before it is asked whether it does. Raises
        `NotAllowed`, `ApprovalRefused`.
        """
        who = self._allowed(by, Act.APPROVE)
        problem = person_problem(approval, who)
        if problem is not None:
            raise problem
        if approval.status is not ApprovalStatus.PENDING:
            raise ApprovalRefused("not-pending", f"it is {approval.status.value} already")
        return who

    def to_type(self, approval: Approval) -> str | None:
        """What a person types to agree to a request: the intent key, where the write cannot be
        taken back or moves money; None: a yes is enough.
        """
        return self._to_type(approval.tool, approval.intent_key, approval.terms.amount)

    def _to_type(self, tool: str, intent_key: str | None, amount: int | None) -> str | None:
        """A tool that is not known here counts as one whose writes cannot be taken back."""
        contracts = self._fleet.contracts_of(tool)
        final = any(one.side_effect is SideEffect.IRREVERSIBLE for one in contracts)
        money = amount is not None or any(one.amount is not None for one in contracts)
        return intent_key if final or money or not contracts else None

    def must_sign(self) -> None:
        """Refuse where approval tokens cannot be signed. Raises `NoSecret`, `UnusableKey`."""
        self._signer()

    def _signer(self) -> URLSafeSerializer:
        fleet = self._fleet
        given = fleet.settings.approval_secret
        return tokens.signer(tokens.secrets_of(given, fleet.ledger.database, fleet.own_secret))

    # ---- questions -------------------------------------------------------------------------------

    def answer(self, run: str | Run, text: str, *, by: Principal | str) -> Run:
        """Answer the question that a run has asked; it goes on with the time that it had left.

        On behalf of a customer an application answers, as a `Principal` with the role operator.
        """
        who = self._allowed(by, Act.ANSWER)
        said = checked_words("text", text, most=LONGEST_ANSWER)
        must_see(who, self._fleet.get(run))

        def decide(locked: Locked) -> Ruling | ApprovalRefused | ResolutionRefused:
            asked = locked.handoff
            if asked is not None and asked.held_by_other(who.subject, locked.now):
                return resolution.held_by(asked.claimed_by)
            ruling = protocol.answer(locked, text=said, who=who)
            if ruling is None:
                status = locked.state.status.value
                return ApprovalRefused("not-asked", f"the run is {status}, and asks nothing")
            return ruling

        return self._decide(_run_id(run), decide)

    def _decide(
        self,
        run_id: str,
        decide: Callable[[Locked], Ruling | ApprovalRefused | ResolutionRefused],
        *,
        token_hash: str | None = None,
    ) -> Run:
        refused: list[ApprovalRefused | ResolutionRefused] = []

        @functools.wraps(decide)  # a decision under lock is known by the function that makes it
        def ruled(locked: Locked) -> Ruling | None:
            refused.clear()
            made = decide(locked)
            if isinstance(made, ApprovalRefused | ResolutionRefused):
                refused.append(made)
                return None
            return self._counted(made)

        done = self._fleet.ledger.rule(run_id, ruled, token_hash=token_hash)
        if refused:
            _changed_nothing(done.locked, refused[0])
            raise refused[0]
        if done.ruling is not None:
            if done.ruling.audit is None:  # it came too late: the run has stopped for that
                reason = done.ruling.state.reason or Reason.EXPIRED
                raise ApprovalRefused("expired", f"it came too late: the run is {reason.value}")
            self._fleet.send_due(done.due)
        return self._fleet.get(run_id)

    # ---- handoffs --------------------------------------------------------------------------------

    def handoffs(
        self,
        *,
        by: Principal | str,
        run: str | Run | None = None,
        workflow: str | None = None,
        tool: str | None = None,
        tenant: str | None = None,
        reason: str | None = None,
        subject: str | None = None,
        assigned_to: str | None = None,
        mine: bool = False,
        free: bool = False,
        older_than_ms: int = 0,
        snoozed: bool = True,
        limit: int = 100,
        resolved: bool = False,
    ) -> list[dict[str, Any]]:
        """List the queue: the most urgent first, and of these the oldest. `mine`: what the person
        is at, or was given; `free`: what nobody is at, and it could take up now.
        """
        who = self._allowed(by, Act.LOOK)
        return self._people.handoffs(
            status="resolved" if resolved else "open",
            run_id=None if run is None else _run_id(run),
            tenants=_tenants(who, tenant),
            workflow=_name("workflow", workflow),
            tool=_name("tool", tool),
            reason=_name("reason", reason),
            subject=_name("subject", subject),
            assigned_to=_name("assigned_to", assigned_to),
            mine=who.subject if mine else None,
            free_for=who.subject if free else None,
            older_than_ms=_natural("older_than_ms", older_than_ms),
            snoozed=snoozed,
            limit=_limit(limit),
        )

    def digest(self, *, by: Principal | str, limit: int = 100) -> list[dict[str, Any]]:
        """Count the open handoffs by reason, workflow and tool: what a flood looks like from
        above.
        """
        who = self._allowed(by, Act.LOOK)
        return self._people.handoff_counts(tenants=_tenants(who, None), limit=_limit(limit))

    def handoff(self, handoff_id: str, *, by: Principal | str) -> Handoff:
        """Look at one matter, as it is now. Raises `UnknownMatter`."""
        who = self._allowed(by, Act.LOOK)
        return self._look(handoff_id, who)[0]

    def next(self, *, by: Principal | str, **filters: Any) -> Handoff | None:
        """Claim the most urgent matter that nobody is at. Where there is none: the first of those
        that the person is at already (`Handoff.yours_already`), or None.

        A question is none: it is answered by whom it was asked. `filters` are those of `handoffs`.
        """
        who = self._allowed(by, Act.CLAIM)
        for name in filters.keys() - _NARROWED_BY:
            raise InvalidQuery(name, f"narrow it by {', '.join(sorted(_NARROWED_BY))}")
        for row in self.handoffs(by=who, free=True, **filters):
            try:
                self.claim(row["id"], by=who)
            except NotYours:
                continue
            return self.handoff(row["id"], by=who)
        for row in self.handoffs(by=who, mine=True, **filters):
            if row["claimed_by"] == who.subject and row["reason"] != _QUESTION:
                return replace(self.handoff(row["id"], by=who), yours_already=True)
        return None

    def claim(
        self, handoff_id: str, *, by: Principal | str, for_ms: int = CLAIM_MS
    ) -> dict[str, Any]:
        """Take a matter: nobody else resolves it until `for_ms` is over. Claiming it again renews
        that.
        """
        _time("for_ms", for_ms, least=1, most=MOST_SNOOZED_MS)
        return self._move(
            handoff_id,
            by,
            Act.CLAIM,
            lambda row, who, now: {"claimed_by": who.subject, "claimed_until": now + for_ms},
        )

    def release(self, handoff_id: str, *, by: Principal | str) -> dict[str, Any]:
        """Give a matter back to the queue."""
        return self._move(
            handoff_id,
            by,
            Act.RELEASE,
            lambda row, who, now: {"claimed_by": None, "claimed_until": None},
        )

    def assign(self, handoff_id: str, to: str | None, *, by: Principal | str) -> dict[str, Any]:
        """Say who is to look at a matter; None: anybody."""
        name = None if to is None else checked_name(to)
        if name is not None and self.staffed and self._people.principal(name) is None:
            raise UnknownMatter("principal", name)
        return self._move(handoff_id, by, Act.ASSIGN, lambda row, who, now: {"assigned_to": name})

    def snooze(self, handoff_id: str, *, for_ms: int, by: Principal | str) -> dict[str, Any]:
        """Put a matter aside; it comes back by itself. Its run and its age are as they were."""
        _time("for_ms", for_ms, least=1, most=MOST_SNOOZED_MS)
        return self._move(
            handoff_id, by, Act.SNOOZE, lambda row, who, now: {"snoozed_until": now + for_ms}
        )

    def comment(self, handoff_id: str, text: str, *, by: Principal | str) -> dict[str, Any]:
        """Note something for whoever looks at the matter later."""
        who = self._allowed(by, Act.COMMENT)
        said = checked_words("text", text)
        row = self._row(handoff_id, who)
        entry = self._entry(who, Act.COMMENT, row, reason=said)
        self._people.comment(row["id"], who=who.subject, text=said, entry=entry)
        return self._row(handoff_id, who)

    def query(self, handoff_id: str, *, by: Principal | str) -> Answer:
        """Ask the service now whether the write took effect; its answer is kept as evidence.

        It settles nothing by itself. Raises `ResolutionRefused` where it cannot be asked.
        """
        who = self._allowed(by, Act.QUERY)
        matter, locked = self._look(handoff_id, who)
        if not matter.open:
            raise ResolutionRefused("not-open", f"it was resolved: {matter.row['resolution']}")
        return self._asked(matter, locked, who)[0]

    def _asked(self, matter: Handoff, locked: Locked, who: Principal) -> tuple[Answer, int]:
        """Ask the service, and keep its answer whatever is made of it: who asked, and when."""
        answer, asked_at = self._ask(locked)
        entry = self._entry(who, Act.QUERY, matter.row, after=_in_short(answer))

        def keep(again: Locked) -> Ruling | None:
            if again.effect is None:
                return None
            nothing = Ruling(state=again.state, lease="keep")
            return replace(protocol.with_evidence(nothing, answer, asked_at), audit=entry)

        self._fleet.ledger.rule(locked.state.run_id, keep, handoff_id=matter.id)
        return answer, asked_at

    def chosen(
        self, matter: Handoff, how: Resolution | str, *, by: Principal | str, evidence: str = ""
    ) -> Choice:
        """Return the choice of a resolution, before anybody is asked to confirm it.

        Raises `NotAllowed`, and `ResolutionRefused` where it cannot be chosen as things stand.
        """
        who = self._allowed(by, Act.RESOLVE)
        if not who.sees(matter.row["tenant"]):
            raise UnknownMatter("handoff", matter.id)
        wanted, row = _resolution(how), matter.row
        if not matter.open:
            raise ResolutionRefused("not-open", f"it was resolved: {row['resolution']}")
        now = row["opened_at"] + row["age_ms"]
        if row["claimed_by"] not in (None, who.subject) and row["claimed_until"] > now:
            raise resolution.held_by(row["claimed_by"])
        choice = resolution.chosen(matter.choices, wanted, evidence)
        if isinstance(choice, ResolutionRefused):
            raise choice
        return choice

    def resolve(
        self,
        handoff_id: str,
        how: Resolution | str,
        *,
        by: Principal | str,
        reason: str,
        evidence: str = "",
        seen: str | None = None,
        grant_ms: int = 0,
    ) -> Run:
        """Resolve a matter. Where the service can be asked, it is, and its answer has to fit.

        `seen` is `Handoff.seen` of what the person looked at: if it has moved since, nothing is
        done. `grant_ms` is working time for a run that goes on. Raises `ResolutionRefused`, with
        nothing changed.
        """
        who = self._allowed(by, Act.RESOLVE)
        wanted = _resolution(how)
        decision = Decision(
            who=who,
            resolution=wanted,
            reason=checked_words("reason", reason),
            evidence=checked_words("evidence", evidence, needed=False),
            seen=seen,
            grant_ms=_time("grant_ms", grant_ms, least=0, most=resolution.MOST_GRANTED_MS),
        )
        matter, locked = self._look(handoff_id, who)
        if seen is None:
            decision = replace(decision, seen=matter.seen)  # what the answer will be about
        if not matter.open:
            raise ResolutionRefused("not-open", f"it was resolved: {matter.row['resolution']}")
        self._not_too_fast(who)
        choice = next((one for one in matter.choices if one.resolution is wanted), None)
        if choice is not None and choice.asks_tool and choice.obstacle is None:
            answer, asked_at = self._asked(matter, locked, who)
            decision = replace(decision, answer=answer, asked_at=asked_at)
        return self._resolve(handoff_id, locked, decision)

    def _resolve(self, handoff_id: str, locked: Locked, decision: Decision) -> Run:
        refused: list[ResolutionRefused] = []
        contract = self._contract(locked)

        def decide(again: Locked) -> Ruling | None:
            refused.clear()
            made = resolution.resolve(
                again,
                decision,
                max_stall_ms=self._fleet.settings.max_stall_ms,
                contract=contract,
            )
            if isinstance(made, ResolutionRefused):
                refused.append(made)
                return None
            return self._counted(made)

        done = self._fleet.ledger.rule(locked.state.run_id, decide, handoff_id=handoff_id)
        if refused:
            _changed_nothing(done.locked, refused[0])
            raise refused[0]
        assert done.ruling is not None
        if done.ruling.park is not None:
            asked = self._people.approvals(run_id=locked.state.run_id, limit=1)
            which = f"approval {asked[0].id}" if asked else "an approval"  # decided meanwhile
            detail = f"{which} of it is asked for: try again once it is given"
            raise ResolutionRefused("approval-needed", detail)
        self._fleet.send_due(done.due)
        return self._fleet.get(locked.state.run_id)

    def _look(self, handoff_id: str, who: Principal) -> tuple[Handoff, Locked]:
        row = self._row(handoff_id, who)
        ledger, max_stall_ms = self._fleet.ledger, self._fleet.settings.max_stall_ms
        locked = ledger.look(row["run_id"], row["id"])
        offered: tuple[Choice, ...] = ()
        asks = row["reason"] == _QUESTION
        if row["status"] == "open" and not asks:
            offered = resolution.choices(locked, max_stall_ms=max_stall_ms)
        pending = locked.state.pending
        about = row["effect_id"]
        matter = Handoff(
            row={name: value for name, value in row.items() if name != "package"},
            package=row["package"],
            run_status=locked.state.status.value,
            seen=resolution.seen_of(locked),
            choices=offered,
            sent_as=pending.arguments if isinstance(pending, InvokeTool) else None,
            evidence=tuple(ledger.evidence(about)) if about else (),
            remaining_ms=max(0, locked.left_ms),
            to_type=self._typed_of(row["package"].get("effect")),
        )
        return matter, locked

    def _typed_of(self, effect: Mapping[str, Any] | None) -> str | None:
        return self._to_type(effect["tool"], effect["intent_key"], None) if effect else None

    def _row(self, handoff_id: str, who: Principal) -> dict[str, Any]:
        row = self._people.handoff(handoff_id) if _is_id(handoff_id) else None
        if row is None or not who.sees(row["tenant"]):
            raise UnknownMatter("handoff", str(handoff_id))
        return row

    def _move(
        self,
        handoff_id: str,
        by: Principal | str,
        act: Act,
        changes: Callable[[Mapping[str, Any], Principal, int], dict[str, Any]],
    ) -> dict[str, Any]:
        who = self._allowed(by, act)
        self._row(handoff_id, who)
        held: list[str] = []

        def decide(row: Mapping[str, Any], now: int) -> tuple[dict[str, Any], AuditEntry] | None:
            held.clear()
            holder = row["claimed_by"]
            if holder not in (None, who.subject) and row["claimed_until"] > now:
                held.append(holder)
                return None
            made = changes(row, who, now)
            before = {name: row[name] for name in made}
            return made, self._entry(who, act, row, before=before, after=made)

        if not self._people.move_handoff(handoff_id, decide):
            problem = f"{held[0]!r} is at it" if held else "it was resolved"
            raise NotYours(handoff_id, problem)
        return self._row(handoff_id, who)

    def _entry(self, who: Principal, act: Act, row: Mapping[str, Any], **rest: Any) -> AuditEntry:
        return AuditEntry.by(
            who,
            act,
            f"handoff:{row['id']}",
            tenant=row["tenant"],
            run_id=row["run_id"],
            **rest,
        )

    def _ask(self, locked: Locked) -> tuple[Answer, int]:
        effect = resolution.asked_effect(locked)
        if effect is None:
            raise ResolutionRefused("no-query", "there is nothing that the service could be asked")
        return self._fleet.query_now(locked, effect)

    def _contract(self, locked: Locked) -> ToolContract | None:
        pending, state = locked.state.pending, locked.state
        workflow = self._fleet.workflows.get(f"{state.workflow}@{state.workflow_version}")
        if workflow is None or not isinstance(pending, InvokeTool):
            return None
        return workflow.tool_named(pending.tool).contract

    def _not_too_fast(self, who: Principal) -> None:
        most = self._fleet.settings.decisions_per_minute
        if most and self._people.acts_since(who.subject, _DECISIONS, within_ms=_MINUTE_MS) >= most:
            raise TooManyDecisions(who.subject, most)

    def _counted(self, ruling: Ruling) -> Ruling:
        """A decision that its own transaction refuses where the person decides too fast."""
        most = self._fleet.settings.decisions_per_minute
        if ruling.audit is None or ruling.audit.act not in _DECISIONS or not most:
            return ruling
        bound = AtMost(most, _DECISIONS, _MINUTE_MS)
        return replace(ruling, audit=replace(ruling.audit, at_most=bound))

    # ---- the audit -------------------------------------------------------------------------------

    def audit(
        self,
        *,
        by: Principal | str,
        actor: str | None = None,
        act: str | None = None,
        run: str | Run | None = None,
        tenant: str | None = None,
        since_ms: int | None = None,
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        """List what people did, the latest first."""
        who = self._allowed(by, Act.LOOK)
        return self._people.audit(
            actor=_name("actor", actor),
            act=_name("act", act),
            run_id=None if run is None else _run_id(run),
            tenants=_tenants(who, tenant),
            since_ms=None if since_ms is None else _natural("since_ms", since_ms),
            limit=_limit(limit),
        )

    def verify_audit(self, *, anchor: str | None = None) -> AuditReport:
        """Look at the whole audit: nothing was edited, nothing is missing, nothing was put in.

        `anchor` is the `head` of an earlier report, noted down where nobody can rewrite it who can
        write to the database.
        """
        noted = None if anchor is None else _anchor(anchor)
        end = self._people.audit_end()
        head = self._people.audit_head()  # people go on meanwhile: it is as far as `end` at least
        faults = audit_faults(self._people.audit_links(up_to=head[0]), head, noted)
        if end > head[0]:
            faults.append(f"it has {end} entries, and {head[0]} were written")
        return AuditReport(head[0], f"{head[0]}:{head[1]}", tuple(faults))


def _resolution(how: object) -> Resolution:
    try:
        return Resolution(str(how))
    except ValueError:
        offered = ", ".join(Resolution)
        raise ResolutionRefused("not-offered", f"{how!r} is none of: {offered}") from None


def _anchor(text: str) -> tuple[int, str]:
    found = _ANCHOR.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidQuery("anchor", "give it as it was printed: number:hash")
    return int(found[1]), found[2]


def _tenants(who: Principal, wanted: str | None) -> list[str] | None:
    """The tenants that a list is narrowed to: those that the person has to do with, at most."""
    if wanted is None:
        return None if who.tenants is None else [*sorted(who.tenants)]
    _name("tenant", wanted)
    return [wanted] if who.sees(wanted) else []


def _changed_nothing(locked: Locked, refused: ApprovalRefused | ResolutionRefused) -> None:
    state = locked.state
    what = "run %s: a person's decision changed nothing, the run is %s (%s)"
    log.info(what, state.run_id, state.status, refused.problem)


def _must_reach(who: Principal, act: Act, whom: Principal) -> None:
    """Refuse to say who has which role where this admin has nothing to do with."""
    if who.tenants is None or (whom.tenants is not None and whom.tenants <= who.tenants):
        return
    problem = f"{whom.subject!r} would have to have to do with your tenants alone"
    raise NotAllowed(who.subject, act.value, problem)


def _share_a_tenant(who: Principal, other: Principal) -> bool:
    if who.tenants is None or other.tenants is None:
        return True
    return not who.tenants.isdisjoint(other.tenants)


def _vouched(who: Principal) -> Principal:
    """Refuse a principal that an application has not made as it has to be."""
    checked_name(who.subject)
    if not isinstance(who.roles, frozenset) or not isinstance(who.tenants, frozenset | None):
        raise InvalidWords("roles", "give a principal's roles and tenants as frozensets")
    _some_tenants(who.tenants)
    return who


def _roles(roles: Sequence[str]) -> frozenset[str]:
    """The roles that somebody is given. Raises `InvalidRoles`."""
    given = [roles] if isinstance(roles, str) or not isinstance(roles, Iterable) else [*roles]
    unknown = [str(role) for role in given if role not in tuple(Role)]
    if unknown or not given or isinstance(roles, str):
        raise InvalidRoles(tuple(unknown), tuple(Role))
    return frozenset(given)


def _some_tenants(tenants: Collection[str] | None) -> frozenset[str] | None:
    """Refuse what names no tenants: a single text would be taken for its letters."""
    if tenants is None:
        return None
    if isinstance(tenants, str) or not isinstance(tenants, Collection):
        raise InvalidWords("tenants", "give a list of names, or None for all tenants")
    if not all(isinstance(one, str) and one and one.isprintable() for one in tenants):
        raise InvalidWords("tenants", "each is a name of printable characters")
    return frozenset(tenants)


def must_see(who: Principal, run: Run) -> None:
    """Refuse as one that is not there what is another tenant's. Raises `UnknownRun`."""
    if not who.sees(run.tenant):
        raise UnknownRun(run.run_id)


def _run_id(run: str | Run) -> str:
    run_id = run.run_id if isinstance(run, Run) else run
    if not _is_id(run_id):
        raise UnknownRun(str(run_id))
    return run_id


def _is_id(text: object) -> bool:
    """Whether it can be an id at all: not every database can be asked about every text."""
    return isinstance(text, str) and text.isascii() and text.isprintable()


def _name(field: str, value: str | None) -> str | None:
    if value is not None and not (isinstance(value, str) and value.isprintable()):
        raise InvalidQuery(field, "give a name")
    return value


def _natural(field: str, value: int, *, least: int = 0, most: int = 2**52) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidQuery(field, f"give a whole number of {least} to {most}")
    return value


def _time(field: str, value: int, *, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidTime(field, f"give {least} to {most} milliseconds")
    return value


def _limit(value: int) -> int:
    return _natural("limit", value, least=1, most=MOST_LISTED)


def _in_short(answer: Answer) -> dict[str, Json]:
    """What the audit notes of an answer; the record itself is among the evidence."""
    said = answer_to_json(answer)
    return {name: said[name] for name in ("answer", "problem") if name in said}


__all__ = [
    "AuditReport",
    "Desk",
    "Handoff",
    "InvalidQuery",
    "InvalidRoles",
    "InvalidTime",
    "NotYours",
    "TooManyDecisions",
    "UnknownMatter",
]
