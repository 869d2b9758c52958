"""What a service says about an intent, read as untrusted as anything else from outside.

A record that violates the tool's contract, is another subject's or does not fit what was asked for
proves nothing, whoever brings it: a query, a provider's report or a person.
"""

from __future__ import annotations

import logging
from typing import Any

from handrail.agent.effects import Absent, Answer, Applied, Effect, NoAnswer, Pending
from handrail.agent.tools import RunFacts, Tool
from handrail.canonical import normal
from handrail.errors import NotCanonical

log = logging.getLogger("handrail.reconciler")


def read_answer(tool: Tool, found: Any, effect: Effect, run: RunFacts, *, evidence: str) -> Answer:
    """Judge what was found about an effect: a record, an `Answer`, or None for "no trace of it".

    `evidence` is what the record is referred to by, unless an `Applied` names a reference itself.
    Never raises: what cannot be judged is no answer.
    """
    if found is None or isinstance(found, Absent):
        return Absent()
    if isinstance(found, Pending | NoAnswer):
        return found
    if isinstance(found, Applied):
        evidence, found = found.evidence, found.value
    contract = tool.contract
    try:
        value = contract.check_output(found)
        arguments = contract.revive(dict(effect.arguments))
        if contract.belongs_to is not None and not contract.belongs_to(value, run):
            return NoAnswer("record-of-another-subject")
        if contract.postcondition is not None and not contract.postcondition(arguments, value):
            return NoAnswer("record-does-not-fit")
        return Applied(normal(value), evidence)
    except NotCanonical:
        return NoAnswer("record-violates-contract")
    except BaseException as error:  # also what would end the sweep: it is the workflow's own code
        log.info("the record of %s could not be judged: %r", effect.id, error)
        return NoAnswer("record-not-judged")
