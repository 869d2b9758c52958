"""What one sweep has done, in words and as an object."""

from __future__ import annotations

from typing import Any

from handrail.reconciler.sweep import Swept


def to_json(swept: Swept) -> dict[str, Any]:
    """A sweep as a JSON object."""
    counts = swept.counts
    return {
        "looked_at": swept.looked_at,
        "quiet": swept.quiet,
        "published": counts.get("published", 0),
        "unpublished": counts.get("unpublished", 0),
        "queries": _of(counts, "answer"),
        "moved": _of(counts, "moved"),
        "failed": counts.get("failed", 0),
    }


def lines(swept: Swept) -> list[str]:
    """A sweep in a few lines."""
    told = to_json(swept)
    asked = told["queries"]
    done = [
        f"looked at {told['looked_at']} runs",
        f"published {told['published']} steps",
        f"asked {sum(asked.values())} queries{_listed(asked)}",
        f"moved {sum(told['moved'].values())} runs{_listed(told['moved'])}",
    ]
    said = ["; ".join(done)]
    if told["unpublished"]:
        said.append(
            f"{told['unpublished']} steps could not be published: they stay due, and the next sweep"
            " that reaches the broker publishes them"
        )
    if told["failed"]:
        said.append(f"{told['failed']} runs could not be looked at: see the log above")
    if not swept.quiet:
        said.append("more is due: the time was over before all was done")
    return said


def _of(counts: Any, kind: str) -> dict[str, int]:
    begins = f"{kind}:"
    return {
        name.removeprefix(begins): count
        for name, count in sorted(counts.items())
        if name.startswith(begins)
    }


def _listed(counts: dict[str, int]) -> str:
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f" ({listed})" if listed else ""
