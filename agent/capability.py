"""What a command may be used for: one tool, one resource range, on behalf of one subject, and until
when.

The range is the narrowest there is: the exact arguments and, of a write, the intent. Whoever
executes a command holds it against its capability first, so that one which was changed, swapped or
kept for later is refused. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from handrail.canonical import Json, digest, dumps


@dataclass(frozen=True, slots=True)
class Capability:
    """The right to make one call. `expires_at` is the run's deadline, by the ledger's clock."""

    subject: str
    tool: str
    resource: str  # a hash, see `resource_of`
    expires_at: int | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the capability as a JSON object."""
        return {
            "subject": self.subject,
            "tool": self.tool,
            "resource": self.resource,
            "expires_at": self.expires_at,
        }

    @property
    def hashed(self) -> str:
        """What a trace shows of it: the same for the same right, whenever it ends."""
        return digest("capability", self.subject, self.tool, self.resource)

    def lacks(
        self,
        *,
        subject: str,
        tool: str,
        arguments: Mapping[str, Json],
        intent_key: str | None,
        now: int,
    ) -> str | None:
        """Say why this use is not covered; None where it is."""
        if self.subject != subject:
            return "the capability is another subject's"
        if self.tool != tool:
            return "the capability is for another tool"
        if self.resource != resource_of(tool, arguments, intent_key):
            return "the capability is for another resource"
        if self.expires_at is not None and now >= self.expires_at:
            return "the capability has expired"
        return None


def resource_of(tool: str, arguments: Mapping[str, Json], intent_key: str | None) -> str:
    """Identify what a call is about: its exact arguments and, of a write, its intent."""
    return digest("resource", tool, dumps(dict(arguments)), intent_key or "")
