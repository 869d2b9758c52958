"""People: approvers, operators and the owners of runs, each act on a strand of its own.

They use the desk as an application would, look before they act, take their time in between, and
try again where they were not answered. They tell what they see at the service; one in ten times
somebody is wrong about what nobody can check.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from handrail.agent.approvals import Approval
from handrail.agent.people import Role
from handrail.agent.resolution import Choice, Resolution
from handrail.agent.status import Reason
from handrail.agent.tools import Principal
from handrail.desk import Handoff
from handrail.errors import BadInput
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.session import ConnectionLost
from tests.simulator.actors import Asker
from tests.simulator.service import UNDO, Order

if TYPE_CHECKING:
    from tests.simulator.schedule import Schedule

_T = TypeVar("_T")


def _person(name: str, *roles: Role) -> Principal:
    return Principal(name, roles=frozenset(roles))


#: On whose behalf all runs are: asking for something is not consenting to it.
REQUESTER: Final = _person("anonymous", Role.APPROVER)
APPROVERS: Final = (_person("ann", Role.APPROVER), _person("bob", Role.APPROVER))
OPERATORS: Final = (_person("olga", Role.OPERATOR), _person("otto", Role.OPERATOR))
#: How long somebody thinks, in milliseconds, before deciding about what was seen.
THOUGHT_MS: Final = (0, 0, 0, 700, 2_500, 6_000, 31_000)
#: Working time that an operator grants to a run that goes on.
GRANTED_MS: Final = 600_000
_APPLIED: Final = (Resolution.COMPLETED, Resolution.RESUMED, Resolution.COMPENSATED)
_WEIGHTS: Final = {Resolution.TRY_AGAIN: 9, Resolution.ASK_AGAIN: 2}


class Person(Asker):
    """Somebody at the desk."""

    def __init__(self, name: str, schedule: Schedule, *, hurried: bool = False) -> None:
        super().__init__(name, schedule)
        self._desk = schedule.ground.fleet.desk
        self._hurried = hurried  # decides at once

    @property
    def _chance(self) -> random.Random:
        return self._schedule.chance

    def _tries(self, what: str, act: Callable[[], _T], times: int = 1) -> _T | None:
        """Do something, and say where it was refused; who got no answer tries again."""
        for _ in range(times):
            try:
                return act()
            except BadInput as error:
                self._schedule.tell(f"{what}: {error}"[:160])
                return None
            except (DatabaseUnavailable, ConnectionLost):
                self._schedule.tell(f"{what}: no answer")
        return None

    def _thinks(self) -> None:
        if not self._hurried and (ms := self._chance.choice(THOUGHT_MS)):
            self.rest(ms)

    # ---- approvers -------------------------------------------------------------------------------

    def consents(self, who: Principal, run_id: str | None = None) -> None:
        """Look at a request, ask for a token, and use it, perhaps more than once."""
        asked = self._asked(who, run_id)
        if asked is None:
            return
        to = who.subject if self._chance.random() < 0.3 else None
        token = self._tries(
            "token", lambda: self._desk.issue_token(asked.id, by=who, to=to), times=2
        )
        if token is None:
            return
        self._schedule.judge.people.issued(self.token_hash, asked, to)
        if not self._waits_until(asked.expires_at):
            self._thinks()
        for user in (who,) if self._hurried else self._users(who):
            self._tries("approve", lambda user=user: self._desk.approve(token, by=user))  # type: ignore[misc]

    def _users(self, who: Principal) -> tuple[Principal, ...]:
        """Who uses a token: its owner, and perhaps again, or somebody else after that."""
        others = [one for one in APPROVERS if one is not who]
        again = (who, *others, *others)
        return (who, self._chance.choice(again)) if self._chance.random() < 0.5 else (who,)

    def _waits_until(self, at: int) -> bool:
        """Perhaps wait until something is nearly too late, or a trifle longer; not for a day."""
        left_ms = at - self._ground.now_ms + self._chance.choice((-1, 0, 1, 40))
        if self._hurried or not 0 < left_ms < 600_000 or self._chance.random() < 0.5:
            return False
        self.rest(left_ms)
        return True

    def rejects(self, who: Principal, run_id: str | None = None) -> None:
        """Look at a request, and refuse it."""
        asked = self._asked(who, run_id)
        if asked is not None:
            self._thinks()
            self._tries("reject", lambda: self._desk.reject(asked.id, by=who, reason="no"))

    def _asked(self, who: Principal, run_id: str | None) -> Approval | None:
        asked = self._tries("look", lambda: self._desk.approvals(by=who, run=run_id))
        return self._chance.choice(asked) if asked else None

    # ---- operators -------------------------------------------------------------------------------

    def answers(self, who: Principal, run_id: str | None = None) -> None:
        """Answer a question."""
        row = self._open(who, run_id, questions=True)
        if row is None:
            return
        if not self._waits_until(row["expires_at"]):
            self._thinks()
        self._tries("answer", lambda: self._desk.answer(row["run_id"], "this one", by=who))

    def resolves(self, who: Principal, handoff_id: str | None = None) -> None:
        """Look at a matter, think, and resolve it; look again where it was refused."""
        if handoff_id is None:
            row = self._open(who)
            if row is None:
                return
            handoff_id = row["id"]
        for _ in range(3):
            matter = self._tries("look", lambda: self._desk.handoff(handoff_id, by=who))
            if matter is None or not matter.open or not matter.choices:
                return
            self._schedule.judge.people.looked(who.subject, matter)
            self._thinks()
            choice = self._chosen(matter)
            done = choice and self._tries(
                f"resolve as {choice.resolution}",
                lambda matter=matter, choice=choice: self._desk.resolve(  # type: ignore[misc]
                    handoff_id,
                    choice.resolution,
                    by=who,
                    reason="seen",
                    evidence="a look at the service" if choice.wants_evidence else "",
                    seen=matter.seen,
                    grant_ms=GRANTED_MS,
                ),
            )
            if done:
                return
            if not self._hurried:
                self.rest(self._chance.choice((2_000, 31_000)))

    def handles(self, who: Principal) -> None:
        """Take a matter, note something, put it aside or decide it, and give it back."""
        desk, id_ = self._desk, self._taken_up(who)
        if id_ is None:
            return
        self._tries("claim", lambda: desk.claim(id_, by=who, for_ms=60_000))
        self._thinks()
        self._tries("comment", lambda: desk.comment(id_, "looked at it", by=who))
        what = self._chance.random()
        if what < 0.3:
            self._tries("snooze", lambda: desk.snooze(id_, for_ms=30_000, by=who))
        elif what < 0.5:
            self._tries("assign", lambda: desk.assign(id_, OPERATORS[0].subject, by=who))
        elif what < 0.8:
            self.resolves(who, id_)
        self._tries("release", lambda: desk.release(id_, by=who))

    def _taken_up(self, who: Principal) -> str | None:
        """The id of a matter: the next in the queue, which is claimed by that, or any."""
        if self._chance.random() < 0.5:
            matter = self._tries("next", lambda: self._desk.next(by=who))
            return None if matter is None else matter.id
        row = self._open(who)
        return None if row is None else str(row["id"])

    def queries(self, who: Principal) -> None:
        """Ask the service about a matter now."""
        row = self._open(who)
        if row is not None:
            self._tries("query", lambda: self._desk.query(row["id"], by=who))

    def cancels(self, who: Principal, run_id: str) -> None:
        """Wish a run to be cancelled."""
        self._tries("cancel", lambda: self._ground.fleet.cancel(run_id, by=who))

    def _open(
        self, who: Principal, run_id: str | None = None, *, questions: bool = False
    ) -> dict[str, Any] | None:
        rows = self._tries("look", lambda: self._desk.handoffs(by=who, run=run_id)) or []
        question = Reason.CLARIFICATION_REQUIRED.value
        wanted = [row for row in rows if (row["reason"] == question) is questions]
        return self._chance.choice(wanted) if wanted else None

    # ---- what to choose --------------------------------------------------------------------------

    def _chosen(self, matter: Handoff) -> Choice | None:
        """One of what there is to choose. Where the service decides, anything: it is asked."""
        offered = [choice for choice in matter.choices if choice.obstacle is None]
        if not offered:
            return None
        honest = [c for c in offered if not c.wants_evidence or self._holds(matter, c.resolution)]
        drawn = honest if honest and self._chance.random() < 0.9 else offered
        return self._chance.choices(drawn, [_WEIGHTS.get(c.resolution, 1) for c in drawn])[0]

    def _holds(self, matter: Handoff, how: Resolution) -> bool:
        """Whether what a resolution states is so, as far as the service's records show."""
        records = self._schedule.service.records
        run = self._schedule.run_plan(matter.run_id)
        order: Order = (run.tenant, run.order)
        if "compensation" in matter.package and how is not Resolution.COMPENSATED:
            order = (run.tenant, UNDO + run.order)
            return order not in records
        return (order in records) is (how in _APPLIED)


# ---- acts ----------------------------------------------------------------------------------------

#: What people do, and how often: see the fault plan's F15 and F16.
ACTS: Final = {
    "consent": 6,
    "two consents": 4,
    "rejection": 2,
    "answer": 3,
    "resolution": 6,
    "two resolutions": 5,
    "handling": 3,
    "query": 2,
    "operator's cancel": 3,
}


def begin(schedule: Schedule, act: str) -> None:
    """Let people begin one of these acts."""
    chance = schedule.chance
    approvers, operators = chance.sample(APPROVERS, 2), chance.sample(OPERATORS, 2)
    run_id = chance.choice(schedule.plan.runs).run_id

    def goes(who: Principal, job: Callable[[Person], None]) -> None:
        person = Person(who.subject, schedule)
        schedule.begin(person, lambda: job(person))

    match act:
        case "consent":
            who = REQUESTER if chance.random() < 0.12 else approvers[0]
            goes(who, lambda p: p.consents(who))
        case "two consents":
            for one in approvers:
                goes(one, lambda p, one=one: p.consents(one))  # type: ignore[misc]
        case "rejection":
            goes(approvers[0], lambda p: p.rejects(approvers[0]))
        case "answer":
            goes(operators[0], lambda p: p.answers(operators[0]))
        case "resolution":
            goes(operators[0], lambda p: p.resolves(operators[0]))
        case "two resolutions":
            for one in operators:
                goes(one, lambda p, one=one: p.resolves(one))  # type: ignore[misc]
        case "handling":
            goes(operators[0], lambda p: p.handles(operators[0]))
        case "query":
            goes(operators[0], lambda p: p.queries(operators[0]))
        case "operator's cancel":
            goes(operators[0], lambda p: p.cancels(operators[0], run_id))


def decide(schedule: Schedule, run_id: str, *, agrees: bool) -> None:
    """Let as many people as it takes decide about what a run asks for, at once."""
    for who in APPROVERS[: schedule.plan.kind.approvers if agrees else 1]:
        person = Person(who.subject, schedule, hurried=True)
        act = person.consents if agrees else person.rejects
        schedule.begin(person, lambda act=act, who=who: act(who, run_id))  # type: ignore[misc]


def busy_ones(waiting: Sequence[dict[str, Any]]) -> list[str]:
    """What people have to do, of what waits for them: as acts."""
    reasons = {row["reason"] for row in waiting}
    question = Reason.CLARIFICATION_REQUIRED.value
    return [
        act
        for act, there in (
            ("answer", question in reasons),
            ("two resolutions", bool(reasons - {question, "approval"})),
            ("resolution", bool(reasons - {question, "approval"})),
            ("handling", bool(reasons - {question, "approval"})),
            ("query", bool(reasons - {question, "approval"})),
            ("consent", "approval" in reasons),
            ("two consents", "approval" in reasons),
        )
        if there
    ]
