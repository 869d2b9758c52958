"""A provider's own word about an intent: signed, timely, and counted once.

A webhook's adapter hands a report to `Fleet.report`. Its signature is checked against the secret of
the intent's tool, and what it says is judged as untrusted as a query's answer; only then does it
count as evidence. Whatever is refused has changed nothing. Tell its sender no more than that it was
refused: which refusal it is says what is known here.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from handrail.agent import protocol
from handrail.agent.effects import Absent, Answer, Effect, Pending, upstream_key
from handrail.agent.protocol import Locked, Reported, Ruling
from handrail.agent.tools import MAX_INTENT_CHARACTERS, Tool
from handrail.agent.workflow import Workflow
from handrail.canonical import Json, canonical, digest
from handrail.errors import BadInput, NotCanonical
from handrail.ledger.ledger import DueStep, Ledger
from handrail.reconciler.answers import read_answer

#: An older report is refused, so that one which was overheard is of no use later.
OLDEST_MS: Final = 300_000
#: How far a provider's clock may be ahead of the ledger's.
AHEAD_MS: Final = 30_000
MAX_EVIDENCE: Final = 64_000
_REPORT_ID: Final = re.compile(r"[!-~]{1,200}\Z")
_ANSWERS: Final = ("applied", "absent", "pending")


class ReportRefused(BadInput):
    """A report does not count; nothing was changed."""

    code: ClassVar[str] = "report-refused"


@dataclass(eq=False)
class InvalidReport(ReportRefused):
    """A report is not formed as it must be."""

    code: ClassVar[str] = "report-invalid"
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


@dataclass(eq=False)
class ReportNotSigned(ReportRefused):
    """The signature is missing, or made with another secret or over something else."""

    code: ClassVar[str] = "report-not-signed"

    def __str__(self) -> str:
        return (
            "the report's signature does not hold: sign it with the tool's report_secret, as"
            " handrail.sign_report does"
        )


@dataclass(eq=False)
class ReportTooOld(ReportRefused):
    """The report was sent too long ago."""

    code: ClassVar[str] = "report-too-old"
    age_ms: int

    def __str__(self) -> str:
        return (
            f"the report is {self.age_ms // 1000} s old: have it sent again, with a new sent_at and"
            f" signature, within {OLDEST_MS // 1000} s"
        )


@dataclass(eq=False)
class ReportFromTheFuture(ReportRefused):
    """The report says that it was sent later than now."""

    code: ClassVar[str] = "report-from-the-future"
    ahead_ms: int

    def __str__(self) -> str:
        return (
            f"the report was sent {self.ahead_ms} ms from now: let sent_at be milliseconds since"
            " the epoch, and see to the sender's clock"
        )


@dataclass(eq=False)
class UnknownIntent(ReportRefused):
    """Nothing was ever sent for this intent, in this tenant."""

    code: ClassVar[str] = "unknown-intent"
    intent_key: str
    tenant: str

    def __str__(self) -> str:
        return (
            f"nothing was ever sent for the intent {self.intent_key!r} of tenant {self.tenant!r}:"
            " see 'handrail show' for the intents of a run"
        )


@dataclass(eq=False)
class ToolNotHere(ReportRefused):
    """The intent's tool, in the version of its run, is not known in this process."""

    code: ClassVar[str] = "report-tool-not-here"
    tool: str
    workflow: str

    def __str__(self) -> str:
        return (
            f"the tool {self.tool!r} of {self.workflow} is not registered here: report where the"
            " workflow's code is"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a provider says. `evidence` is its record, where it says that the intent was applied."""

    intent_key: str
    answer: str
    evidence: Json
    tenant: str
    report_id: str
    sent_at: int

    def signed_text(self) -> bytes:
        """What is signed: all of it, under a name of its own, as canonical JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return canonical(["handrail-report-1", fields]).encode()

    def signature(self, secret: str) -> str:
        """Sign it: HMAC-SHA256, in hexadecimal digits."""
        return hmac.new(secret.encode(), self.signed_text(), "sha256").hexdigest()

    def is_signed(self, secret: str, signature: str) -> bool:
        """Whether a signature is that of this report, in a time that tells nothing."""
        given = signature.encode("utf-8", "replace")
        return hmac.compare_digest(self.signature(secret).encode(), given)

    @property
    def evidence_id(self) -> str:
        """Under which it counts once."""
        return digest("report", self.tenant, self.report_id)


def sign_report(
    secret: str,
    *,
    intent_key: str,
    answer: str,
    evidence: Json = None,
    tenant: str = "default",
    report_id: str,
    sent_at: int,
) -> str:
    """Sign a report as `Fleet.report` wants it; `sent_at` is in milliseconds since the epoch.

    For the adapter that has checked a provider's own signature, or for the provider itself.
    """
    report = checked(
        intent_key=intent_key,
        answer=answer,
        evidence=evidence,
        tenant=tenant,
        report_id=report_id,
        sent_at=sent_at,
    )
    return report.signature(secret)


def checked(**fields: Any) -> Report:
    """Read a report's fields, which may be anything. Raises `InvalidReport`."""
    _must_be_text("intent_key", fields["intent_key"], MAX_INTENT_CHARACTERS)
    _must_be_text("tenant", fields["tenant"], 128)
    if fields["answer"] not in _ANSWERS:
        raise InvalidReport("answer", f"give one of: {', '.join(_ANSWERS)}")
    report_id, sent_at = fields["report_id"], fields["sent_at"]
    if not isinstance(report_id, str) or not _REPORT_ID.match(report_id):
        raise InvalidReport("report_id", "give 1 to 200 printable ASCII characters, no blanks")
    if type(sent_at) is not int:
        raise InvalidReport("sent_at", "give whole milliseconds since the epoch")
    try:
        size = len(canonical(fields["evidence"]))
    except NotCanonical as error:
        raise InvalidReport("evidence", str(error)) from None
    if size > MAX_EVIDENCE:
        raise InvalidReport("evidence", f"it is longer than {MAX_EVIDENCE} characters")
    if fields["answer"] == "applied" and fields["evidence"] is None:
        raise InvalidReport("evidence", "give the record of what was applied")
    return Report(**fields)


def _must_be_text(field: str, value: object, most: int) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise InvalidReport(field, f"give a text of 1 to {most} characters")


def receive(
    report: Report,
    signature: object,
    *,
    ledger: Ledger,
    workflows: Mapping[str, Workflow],
    secrets: Iterable[str],
    max_stall_ms: int | None,
    send: Callable[[DueStep | None], None],
) -> Reported:
    """Check a report and let it count; raises a `ReportRefused` where it does not.

    `secrets` are all that are known here: nobody without one of them learns what intents there are.
    """
    effect = ledger.find_effect(upstream_key(report.tenant, report.intent_key))
    if effect is None or effect.owner_run_id is None:
        _must_be_signed(report, signature, secrets)
        raise UnknownIntent(report.intent_key, report.tenant)
    state = ledger.read(effect.owner_run_id)["state"]
    named = f"{state.workflow}@{state.workflow_version}"
    tool = _tool(workflows.get(named), effect.tool)
    if tool is None:
        _must_be_signed(report, signature, secrets)
        raise ToolNotHere(effect.tool, named)
    _must_be_signed(report, signature, [tool.report_secret] if tool.report_secret else [])
    age_ms = ledger.now() - report.sent_at
    if age_ms > OLDEST_MS:
        raise ReportTooOld(age_ms)
    if age_ms < -AHEAD_MS:
        raise ReportFromTheFuture(-age_ms)
    answer = _answer(report, tool, effect, state.facts)
    return _count(report, answer, effect, ledger=ledger, max_stall_ms=max_stall_ms, send=send)


def _must_be_signed(report: Report, signature: object, secrets: Iterable[str]) -> None:
    if not isinstance(signature, str) or not any(
        [report.is_signed(secret, signature) for secret in secrets]
    ):
        raise ReportNotSigned


def _tool(workflow: Workflow | None, name: str) -> Tool | None:
    tools = () if workflow is None else workflow.tools
    return next((tool for tool in tools if tool.name == name), None)


def _answer(report: Report, tool: Tool, effect: Effect, facts: Any) -> Answer:
    match report.answer:
        case "absent":
            return Absent()
        case "pending":
            return Pending()
    evidence = f"report:{report.evidence_id}"
    return read_answer(tool, report.evidence, effect, facts, evidence=evidence)


def _count(
    report: Report,
    answer: Answer,
    effect: Effect,
    *,
    ledger: Ledger,
    max_stall_ms: int | None,
    send: Callable[[DueStep | None], None],
) -> Reported:
    """Write what the report comes to, on the run that owns the effect by then."""
    detail: dict[str, Json] = {
        "report_id": report.report_id,
        "answer": report.answer,
        "record": report.evidence,
        "sent_at": report.sent_at,
    }
    come_to: list[Reported] = []

    def decide(locked: Locked) -> Ruling | None:
        ruling, what = protocol.reported(locked, answer, detail, max_stall_ms=max_stall_ms)
        come_to[:] = [what]
        return ruling

    run_id = effect.owner_run_id
    while True:
        assert run_id is not None
        ruled = ledger.rule(run_id, decide, effect_id=effect.id, once=report.evidence_id)
        if ruled.repeated:
            return Reported.REPEATED
        if ruled.ruling is not None:
            send(ruled.due)
            return come_to[0]
        assert ruled.locked.effect is not None
        run_id = ruled.locked.effect.owner_run_id  # has sent the intent again: its row decides
