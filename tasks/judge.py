"""What a tool's answer is worth, judged before anything of it may enter the state of a run.

It is as untrusted as anything else from outside: a result outside of its contract, of another
subject, too large, or whose postcondition does not hold is none. Never raises.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from handrail.agent.effects import Absent, Applied, NoAnswer, Pending
from handrail.agent.stage import Doubtful, End, Refused, Reply, Succeeded
from handrail.agent.tools import RunFacts, ToolContract
from handrail.canonical import Json, canonical
from handrail.errors import NotCanonical, ToolRefused, ToolUnclear
from handrail.tasks.calls import Called

log = logging.getLogger("handrail.tasks")
#: A longer reason for a refusal is cut: it goes into the trace and to the model.
MAX_REASON = 300
#: What becomes of a receipt that no record confirms.
NOT_CONFIRMED: Final = Doubtful("not-confirmed")


def judged(
    contract: ToolContract, arguments: Any, done: Called, run: RunFacts
) -> tuple[End, Reply | None]:
    """Judge what came back of a tool. A refusal that the tool raises is a reply; what is no result
    is of a read a failure, of a write a doubt.
    """
    said = done.value if done.error is None else done.error
    if isinstance(said, ToolRefused | Refused):
        # A refusal that the service has stored under the key would be all that the key ever gets.
        stored = contract.side_effect.writes and contract.stores_failures
        retryable, changed = bool(said.retryable), bool(said.changed)
        return End.RETURNED, Refused(
            reason_of(said.reason), retryable and not stored, changed and not stored
        )
    if isinstance(said, ToolUnclear | Doubtful):
        return End.RETURNED, Doubtful(reason_of(said.reason))
    if done.end is not End.RETURNED:
        return done.end, None
    problem = None
    value: Json = None
    text = ""
    try:
        value = contract.check_output(said.value if isinstance(said, Succeeded) else said)
        text = value if isinstance(value, str) else canonical(value)
        if isinstance(said, Succeeded):
            text = said.text
        if not isinstance(text, str):
            problem = "result-violates-contract"
        elif len(text) > contract.max_output_bytes:
            problem = "output-too-large"
        elif contract.belongs_to is not None and not contract.belongs_to(value, run):
            problem = "result-of-another-subject"
        elif contract.postcondition is not None and not contract.postcondition(arguments, value):
            problem = "postcondition-failed"
    except NotCanonical as error:
        log.info("tool %s: %s", contract.name, error)
        problem = "result-violates-contract"
    except BaseException as error:  # also what would end the event loop: it is sync code
        log.info("tool %s: a check of its contract raised %r", contract.name, error)
        problem = "result-violates-contract"
    if problem is None:
        return End.RETURNED, Succeeded(value, text)
    if contract.side_effect.writes:
        return End.RETURNED, Doubtful(problem)
    return End.RETURNED, Refused(problem)


def confirms(contract: ToolContract, arguments: Any, found: Called, run: RunFacts) -> bool:
    """Whether what a query has found confirms a receipt: a record that fits what was asked for."""
    said = found.value
    if found.end is not End.RETURNED or said is None:
        return False
    if isinstance(said, Absent | Pending | NoAnswer | Refused):
        return False
    if isinstance(said, Applied):
        said = said.value
    _, reply = judged(contract, arguments, Called(End.RETURNED, said), run)
    return isinstance(reply, Succeeded)


def reason_of(said: object) -> str:
    """A tool's own word on why: a text that can be stored, whatever it handed over."""
    return said[:MAX_REASON] if isinstance(said, str) else type(said).__name__
