"""The SQL of a step's path, once for each database.

The claim and the commit of a read-only round are one statement each, in autocommit where the
database allows (SQLite cannot write two tables in one statement, so its commit is a short
transaction). Every update names what it expects; zero rows is an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from handrail.agent.stage import OBSERVATION_WINDOW
from handrail.ledger.accept import REPUBLISH_MS
from handrail.ledger.columns import RUN
from handrail.ledger.session import PG_NOW

REPUBLISH_MAX_MS = 600_000


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where the two databases differ."""

    now: str  # the time, inside an UPDATE
    clock: str  # what an UPDATE needs in its FROM for that
    lock: str  # how a SELECT locks the row it reads
    skip_locked: str
    observations: str
    outputs: str
    allowances: str
    known: str  # whether this worker has the run's pinned workflow version
    least: str  # the smaller of two


_WINDOW = f"ORDER BY seq DESC LIMIT {OBSERVATION_WINDOW}"

POSTGRES = Dialect(
    now="c.now",
    clock=f"FROM (SELECT {PG_NOW} AS now) AS c",
    lock="FOR UPDATE",
    skip_locked="FOR UPDATE SKIP LOCKED",
    observations=(
        "(SELECT json_agg(json_build_array(o.source, o.text, o.digest) ORDER BY o.seq) FROM"
        f" (SELECT * FROM handrail_observation WHERE run_id = :id {_WINDOW}) AS o)"
    ),
    outputs=(
        "(SELECT json_agg(json_build_array(o.name, o.value) ORDER BY o.version)"
        " FROM handrail_output AS o WHERE o.run_id = :id)"
    ),
    allowances=(
        "(SELECT json_agg(json_build_array(a.tool, a.calls_left))"
        " FROM handrail_tool_allowance AS a WHERE a.run_id = :id)"
    ),
    known="r.workflow || '@' || r.workflow_version = ANY(:known)",
    least="LEAST",
)
SQLITE = Dialect(
    now=":now",
    clock="",
    lock="",  # the transaction began IMMEDIATE: it is the only writer
    skip_locked="",
    observations=(
        "(SELECT json_group_array(json_array(o.source, o.text, o.digest)) FROM"
        f" (SELECT * FROM (SELECT * FROM handrail_observation WHERE run_id = :id {_WINDOW})"
        " ORDER BY seq) AS o)"
    ),
    outputs=(
        "(SELECT json_group_array(json_array(o.name, o.value)) FROM"
        " (SELECT * FROM handrail_output WHERE run_id = :id ORDER BY version) AS o)"
    ),
    allowances=(
        "(SELECT json_group_array(json_array(a.tool, a.calls_left))"
        " FROM handrail_tool_allowance AS a WHERE a.run_id = :id)"
    ),
    known="r.workflow || '@' || r.workflow_version IN (SELECT value FROM json_each(:known))",
    least="min",
)


def dialect(postgres: bool) -> Dialect:
    """Return the differences of one database."""
    return POSTGRES if postgres else SQLITE


#: Of the run's row, what a step works with; naming more costs every step of every run.
_CLAIMED: Final = """id, tenant, workflow, workflow_version, goal, principal, input, budget, limits,
            traceparent, mode, status, traced_status, reason, epoch, claim_id, attempts, refusal,
            deadline_at, phase, steps_left, model_calls_left, tool_calls_left, tool_calls_reserved,
            compensations_reserved, tokens_left, cost_microusd_left, output_bytes_left, step,
            state_version, observation_count, trace_seq, levels, pending, told, answer, effect_id"""


@lru_cache(maxsize=2)
def claim(postgres: bool) -> str:
    """Claim a due step: fence, lease and charge in one statement; the returned row is the run.

    Locks the run row. The conditions are those of `due`: status, no lease, no cancel wish, the
    message's epoch, due by the database's clock, and a workflow version that this worker has. What
    the phase costs is refused in a fixed order; a refused claim charges nothing, and its step
    commits the stop. A clock that stood still under a pause goes on.
    """
    d = dialect(postgres)
    deadline = f"COALESCE(deadline_at, {d.least}({d.now} + remaining_ms, expires_at))"
    refused = f"""CASE
        WHEN phase = 'decide' AND steps_left <= 0 THEN 'step-budget-exhausted'
        WHEN expires_at <= {d.now} THEN 'expired'
        WHEN {deadline} <= {d.now} THEN 'deadline-exhausted'
        WHEN phase = 'decide' AND model_calls_left <= 0 THEN 'model-call-budget-exhausted'
        WHEN phase = 'decide' AND tokens_left <= 0 THEN 'token-budget-exhausted'
        WHEN phase = 'decide' AND cost_microusd_left <= 0 THEN 'cost-budget-exhausted'
        WHEN phase = 'decide' AND output_bytes_left <= 0 THEN 'output-budget-exhausted'
        WHEN phase = 'read' AND tool_calls_left <= 0 THEN 'tool-call-budget-exhausted'
        END"""
    decides = f"(CASE WHEN phase = 'decide' AND ({refused}) IS NULL THEN 1 ELSE 0 END)"
    reserves = (
        f"(CASE WHEN phase IN ('decide', 'read') AND tool_calls_left > 0 AND ({refused}) IS NULL"
        " THEN 1 ELSE 0 END)"
    )
    return f"""
        UPDATE handrail_run AS r SET
            epoch = epoch + 1, claim_id = :claim_id, holder = :holder,
            lease_until = {d.now} + :lease_ms, wake_at = {d.now} + :lease_ms,
            attempts = attempts + 1, due_at = NULL,
            deadline_at = {deadline}, remaining_ms = NULL,
            status = CASE WHEN phase = 'write' THEN 'executing'
                WHEN status = 'queued' THEN 'running' ELSE status END,
            refusal = {refused},
            steps_left = steps_left - {decides},
            model_calls_left = model_calls_left - {decides},
            tool_calls_left = tool_calls_left - {reserves},
            tool_calls_reserved = {reserves}
        {d.clock}
        WHERE r.id = :id AND r.epoch = :epoch
            AND r.status IN ('queued', 'running', 'executing')
            AND r.lease_until IS NULL AND r.cancel_requested_at IS NULL
            AND r.due_at <= {d.now} AND {d.known}
        RETURNING {_CLAIMED}, {d.now} AS now, {d.observations} AS observations,
            {d.outputs} AS outputs, {d.allowances} AS allowances"""


#: The latest time that the ledger was set back, where that is not cleared.
_REWIND: Final = "(SELECT max(number) FROM handrail_rewind WHERE cleared_at IS NULL)"


@lru_cache(maxsize=2)
def read_run(postgres: bool, *, lock: bool = True) -> str:
    """Read one run with its window of observations and its outputs, and lock its row.

    The row is locked in a subquery, so that the clock is read after the wait for the lock.
    """
    d = dialect(postgres)
    now = PG_NOW if postgres else ":now"
    return f"""
        SELECT {RUN}, {now} AS now, {d.observations} AS observations, {d.outputs} AS outputs,
            {d.allowances} AS allowances, {_REWIND} AS rewind
        FROM (SELECT * FROM handrail_run WHERE id = :id {d.lock if lock else ""}) AS r"""


_COMMIT_SET = """
            status = :status, traced_status = :status, reason = :reason,
            lease_until = NULL, attempts = 0, publishes = 0, phase = :phase, refusal = NULL,
            tool_calls_left = tool_calls_left + :tool_calls_back, tool_calls_reserved = 0,
            output_bytes_left = output_bytes_left - :output_bytes,
            step = :step, state_version = :state_version, observation_count = :observation_count,
            trace_seq = :trace_seq, levels = :levels, pending = :pending, told = :told,
            answer = :answer"""


@lru_cache(maxsize=4)
def commit_run(postgres: bool, *, due: bool) -> str:
    """Write a step's end, fenced by claim and epoch, unless a cancel was wished meanwhile.

    `due`: the next step is due at once; otherwise the run has ended.
    """
    d = dialect(postgres)
    when = (
        f"due_at = {d.now}, wake_at = {d.now} + {REPUBLISH_MS}"
        if due
        else "due_at = NULL, wake_at = NULL"
    )
    return f"""
        UPDATE handrail_run AS r SET {_COMMIT_SET}, {when} {d.clock}
        WHERE r.id = :id AND r.epoch = :epoch AND r.claim_id = :claim_id
            AND r.lease_until IS NOT NULL AND r.cancel_requested_at IS NULL
        RETURNING id, {d.now} AS now"""


INSERT_TRACE = """
    INSERT INTO handrail_trace (run_id, seq, count, writer, at, events)
    VALUES (:run_id, :seq, :count, :writer, :now, :events)"""
INSERT_OBSERVATION = """
    INSERT INTO handrail_observation (run_id, seq, source, text, digest)
    VALUES (:run_id, :seq, :source, :text, :digest)"""
#: What is no fact leaves the version as it was: of two consents at one version the later counts.
INSERT_OUTPUT = """
    INSERT INTO handrail_output (run_id, name, version, value)
    VALUES (:run_id, :name, :version, :value)
    ON CONFLICT (run_id, name, version) DO UPDATE SET value = excluded.value"""


@lru_cache(maxsize=16)
def commit_in_one(*, due: bool, traces: bool, observes: bool, outputs: int) -> str:
    """PostgreSQL: the whole commit of a step as one statement; nothing is written if the fence
    fails.
    """
    parts = [f"WITH run AS ({commit_run(True, due=due)})"]
    if traces:
        parts.append(""", traced AS (
            INSERT INTO handrail_trace (run_id, seq, count, writer, at, events)
            SELECT id, :seq, :count, :claim_id, now, :events FROM run)""")
    if observes:
        parts.append(""", observed AS (
            INSERT INTO handrail_observation (run_id, seq, source, text, digest)
            SELECT id, :observation_count, :source, :text, :digest FROM run)""")
    for number in range(outputs):
        parts.append(f""", output_{number} AS (
            INSERT INTO handrail_output (run_id, name, version, value)
            SELECT id, :name_{number}, :state_version, :value_{number} FROM run
            ON CONFLICT (run_id, name, version) DO UPDATE SET value = excluded.value)""")
    parts.append(" SELECT now FROM run")
    return "".join(parts)


@lru_cache(maxsize=2)
def due_for_sweep(postgres: bool) -> str:
    """Take what the sweep must look at, a batch of each kind at a time: one indexed statement where
    nothing is due.

    The two kinds are runs that go on by themselves, and runs in doubt, of which each costs a call
    outside: however many of these there are, none of the others waits for them. Locks the rows that
    it takes, skipping those that another sweep holds; postponing `wake_at` is the claim, so that a
    sweep that dies delays its batch and loses nothing.
    """
    d = dialect(postgres)
    # In a subquery: compared with a volatile function itself, the index would be read to its end.
    now = f"(SELECT {PG_NOW})" if postgres else ":now"

    def batch(kind: str, limit: str) -> str:
        return f"""SELECT id FROM handrail_run WHERE wake_at <= {now} AND {kind}
            ORDER BY wake_at LIMIT {limit} {d.skip_locked}"""

    goes_on = batch("status <> 'reconciling'", ":limit")
    in_doubt = batch("status = 'reconciling'", ":doubts")
    # An array is made once; a plain subquery PostgreSQL may run again for every row that it
    # compares, and each time it takes another batch.
    taken = (
        f"= ANY (ARRAY({goes_on}) || ARRAY({in_doubt}))"
        if postgres
        else f"IN (SELECT * FROM ({goes_on}) UNION ALL SELECT * FROM ({in_doubt}))"
    )
    return f"""
        UPDATE handrail_run AS r SET wake_at = {d.now} + :postpone_ms {d.clock}
        WHERE r.id {taken}
        RETURNING id, workflow, workflow_version, status, epoch, step, lease_until, due_at,
            deadline_at, remaining_ms,
            expires_at, cancel_requested_at, steps_left, model_calls_left,
            tool_calls_left, traceparent, {d.now} AS now, CASE WHEN status = 'reconciling'
                THEN (SELECT e.tool FROM handrail_effect AS e WHERE e.id = effect_id) END AS tool"""


@lru_cache(maxsize=2)
def published(postgres: bool) -> str:
    """Count a publication of due steps and set when they are published again: doubling, up to a
    bound.

    What was claimed meanwhile, or is being claimed, needs neither.
    """
    d = dialect(postgres)
    least = "LEAST" if postgres else "min"
    power = "(1 << LEAST(r.publishes, 10)::int)" if postgres else "(1 << min(r.publishes, 10))"
    pause = f"{least}({REPUBLISH_MAX_MS}, 2 * {REPUBLISH_MS} * {power})"
    taken = (
        f"= ANY (ARRAY({unclaimed(True)} FOR UPDATE OF handrail_run SKIP LOCKED))"
        if postgres
        else f"IN ({unclaimed(False)})"
    )
    return f"""
        UPDATE handrail_run AS r SET publishes = publishes + 1, wake_at = {d.now} + {pause}
        {d.clock}
        WHERE r.id {taken}"""


@lru_cache(maxsize=2)
def unclaimed(postgres: bool) -> str:
    """Find which steps are still due as they were published: a claim raises the run's epoch."""
    as_sent = (
        """FROM handrail_run NATURAL JOIN
                unnest(:ids::text[], :epochs::bigint[]) AS sent(id, epoch) WHERE"""
        if postgres
        else """FROM handrail_run WHERE (id, epoch) IN (
                SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]')
                FROM json_each(:sent)) AND"""
    )
    return f"""SELECT id {as_sent}
            status IN ('queued', 'running', 'executing') AND lease_until IS NULL
            AND cancel_requested_at IS NULL AND due_at IS NOT NULL"""


RENEW_POSTGRES = f"""
    WITH mine AS (
        SELECT h.id, h.claim_id, asked.until
        FROM unnest(:ids::text[], :claims::text[], :untils::bigint[])
            AS asked(id, claim_id, until)
        JOIN handrail_run AS h ON h.id = asked.id AND h.claim_id = asked.claim_id
        WHERE h.lease_until IS NOT NULL),
    free AS (  -- one that somebody holds is not waited for: its turn comes again in time
        SELECT h.id, mine.until
        FROM mine JOIN handrail_run AS h ON h.id = mine.id AND h.claim_id = mine.claim_id
        WHERE h.lease_until IS NOT NULL FOR UPDATE OF h SKIP LOCKED),
    renewed AS (
        UPDATE handrail_run AS r SET
            lease_until = GREATEST(r.lease_until, LEAST(c.now + :lease_ms, v.until)),
            wake_at = GREATEST(r.lease_until, LEAST(c.now + :lease_ms, v.until))
        FROM free AS v, (SELECT {PG_NOW} AS now) AS c
        WHERE r.id = v.id
        RETURNING r.claim_id, r.cancel_requested_at)
    SELECT mine.claim_id, renewed.claim_id IS NOT NULL AS renewed, renewed.cancel_requested_at
    FROM mine LEFT JOIN renewed ON renewed.claim_id = mine.claim_id"""
RENEW_SQLITE = """
    UPDATE handrail_run AS r SET
        lease_until = max(r.lease_until, min(:now + :lease_ms,
            (SELECT json_extract(v.value, '$[2]') FROM json_each(:held) AS v
             WHERE json_extract(v.value, '$[0]') = r.id))),
        wake_at = max(r.lease_until, min(:now + :lease_ms,
            (SELECT json_extract(v.value, '$[2]') FROM json_each(:held) AS v
             WHERE json_extract(v.value, '$[0]') = r.id)))
    WHERE r.lease_until IS NOT NULL AND (r.id, r.claim_id) IN (
        SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(:held))
    RETURNING claim_id, 1 AS renewed, cancel_requested_at"""


@lru_cache(maxsize=2)
def give_back(postgres: bool) -> str:
    """Give leases back when a worker stops: no attempt is counted, the holder is fenced off.

    `unused` are the claims whose reserved tool call was not started. A claim over a dispatched
    effect is not given back: its outcome is its sender's to tell.
    """
    d = dialect(postgres)
    held = "r.claim_id IN (SELECT value FROM json_each(:claims))"
    if postgres:  # one that somebody holds keeps the others waiting no longer: its lease runs out
        held = """r.id = ANY (ARRAY(SELECT id FROM handrail_run WHERE claim_id = ANY(:claims)
                FOR UPDATE SKIP LOCKED)) AND r.claim_id = ANY(:claims)"""
    unused = "= ANY(:unused)" if postgres else "IN (SELECT value FROM json_each(:unused))"
    return f"""
        UPDATE handrail_run AS r SET
            epoch = epoch + 1, lease_until = NULL,
            due_at = {d.now}, wake_at = {d.now} + {REPUBLISH_MS}, publishes = 0,
            attempts = attempts - 1, status = traced_status,
            tool_calls_left = tool_calls_left
                + CASE WHEN r.claim_id {unused} THEN tool_calls_reserved ELSE 0 END,
            tool_calls_reserved = 0
        {d.clock}
        WHERE {held} AND r.holder = :holder AND r.lease_until IS NOT NULL
            AND r.status IN ('running', 'executing') AND r.cancel_requested_at IS NULL
            AND NOT EXISTS (SELECT 1 FROM handrail_effect AS e WHERE e.id = r.effect_id
                AND e.owner_run_id = r.id AND e.status IN ('dispatched', 'unknown'))
        RETURNING id, epoch, step, deadline_at, remaining_ms, steps_left, model_calls_left,
            tool_calls_left, traceparent, {d.now} AS now"""


#: What keeps a write from being dispatched: the widest pause that it is under, how much of its tool
#: is in doubt, and how much of its subject is with people, counted no further than it matters; and
#: whether the ledger was set back.
PAUSED: Final = f"""
    SELECT (SELECT scope || ':' || name FROM handrail_pause
            WHERE (scope = 'fleet' AND name = '') OR (scope = 'tenant' AND name = :tenant)
                OR (scope = 'workflow' AND name = :workflow) OR (scope = 'tool' AND name = :tool)
            ORDER BY CASE scope WHEN 'fleet' THEN 0 WHEN 'tenant' THEN 1 WHEN 'workflow' THEN 2
                ELSE 3 END
            LIMIT 1) AS paused,
        (SELECT count(*) FROM (SELECT 1 FROM handrail_effect
            WHERE tool = :tool AND unknown_since IS NOT NULL LIMIT :most) AS doubts) AS doubtful,
        (SELECT count(*) FROM (SELECT 1 FROM handrail_handoff WHERE tenant = :tenant
            AND subject = :subject AND status = 'open' LIMIT :most_open) AS matters) AS open,
        {_REWIND} AS rewind"""
#: What the ledger has lost, in all the times that it was set back and not cleared.
LOST: Final = """
    SELECT max(number) AS number, min(lost_from) AS lost_from, max(lost_until) AS lost_until
    FROM handrail_rewind WHERE cleared_at IS NULL"""


@lru_cache(maxsize=2)
def set_going(postgres: bool) -> str:
    """Make the runs due that wait on a pause: those that are due later while their clock stands.

    Finds them by when the sweep would have looked; one that is locked is being looked at anyway.
    """
    d = dialect(postgres)
    now = f"(SELECT {PG_NOW})" if postgres else ":now"
    waiting = f"""(SELECT id FROM handrail_run
            WHERE wake_at <= {now} + :within_ms AND status <> 'reconciling'
                AND due_at IS NOT NULL AND deadline_at IS NULL {d.skip_locked})"""
    return f"""
        UPDATE handrail_run AS r SET due_at = {d.now}, wake_at = {d.now} {d.clock}
        WHERE r.id {f"= ANY (ARRAY{waiting})" if postgres else f"IN {waiting}"}"""


@lru_cache(maxsize=2)
def hurry_undoing(postgres: bool) -> str:
    """Have the sweep look at once at the compensations that may wait on a pause.

    One that waits for something else is looked at early, and goes on waiting.
    """
    d = dialect(postgres)
    now = f"(SELECT {PG_NOW})" if postgres else ":now"
    waiting = f"""(SELECT id FROM handrail_run
            WHERE wake_at <= {now} + :within_ms AND status = 'reconciling'
                AND undoing_effect_id IS NOT NULL {d.skip_locked})"""
    return f"""
        UPDATE handrail_run AS r SET wake_at = {d.now} {d.clock}
        WHERE r.id {f"= ANY (ARRAY{waiting})" if postgres else f"IN {waiting}"}"""


@lru_cache(maxsize=2)
def put_off(postgres: bool) -> str:
    """Put runs that wait on a pause off, while it is in force and no limit of theirs is over.

    One whose write was proved meanwhile has nothing more to dispatch, and goes on.
    """
    d = dialect(postgres)
    ids = "IN (SELECT value FROM json_each(:ids))"
    if postgres:  # what is locked is being looked at: to wait for it could be for ever
        free = "SELECT id FROM handrail_run WHERE id = ANY(:ids) FOR UPDATE SKIP LOCKED"
        ids = f"= ANY (ARRAY({free}))"
    crowded = "= ANY(:crowded)" if postgres else "IN (SELECT value FROM json_each(:crowded))"
    effect = "FROM handrail_effect AS e WHERE e.id = r.effect_id"
    return f"""
        UPDATE handrail_run AS r
        SET due_at = {d.now} + :pause_ms, wake_at = {d.now} + :pause_ms {d.clock}
        WHERE r.id {ids} AND r.due_at IS NOT NULL AND r.deadline_at IS NULL
            AND r.lease_until IS NULL AND r.cancel_requested_at IS NULL
            AND r.expires_at > {d.now} AND r.phase = 'write' AND (
                EXISTS (SELECT 1 FROM handrail_pause AS p WHERE p.scope = 'fleet'
                    OR (p.scope = 'tenant' AND p.name = r.tenant)
                    OR (p.scope = 'workflow' AND p.name = r.workflow)
                    OR (p.scope = 'tool' AND p.name = (SELECT e.tool {effect})))
                OR EXISTS (SELECT 1 {effect} AND e.tool {crowded} AND e.status <> 'unknown'))
        RETURNING id"""


def _counted(table: str, where: str) -> str:
    """Count, no further than it matters; each condition is that of a partial index."""
    return f"(SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {where} LIMIT :most) AS counted)"


#: How much the sweep and people have before them, and since when.
FIGURES: Final = f"""
    SELECT {_counted("handrail_run", "wake_at <= :now AND status <> 'reconciling'")} AS due,
        {_counted("handrail_run", "wake_at <= :now AND status = 'reconciling'")} AS in_doubt,
        (SELECT min(wake_at) FROM handrail_run
            WHERE wake_at IS NOT NULL AND status <> 'reconciling') AS oldest_due,
        (SELECT min(wake_at) FROM handrail_run
            WHERE wake_at IS NOT NULL AND status = 'reconciling') AS oldest_doubt,
        {_counted("handrail_effect", "unknown_since IS NOT NULL")} AS unknown,
        (SELECT min(unknown_since) FROM handrail_effect
            WHERE unknown_since IS NOT NULL) AS unknown_since,
        {_counted("handrail_handoff", "status = 'open' AND priority < 4")} AS handoffs,
        {_counted("handrail_handoff", "status = 'open' AND priority = 4")} AS questions"""

#: Runs that are not over, by status: those that the sweep will look at, and those that a person has
#: to.
RUNS_UNDER_WAY: Final = """
    SELECT status, count(*) AS runs FROM (SELECT status FROM handrail_run
        WHERE wake_at IS NOT NULL AND status <> 'reconciling' AND status <> 'handed_off'
        LIMIT :most) AS r GROUP BY status
    UNION ALL SELECT 'reconciling', count(*) FROM (SELECT 1 FROM handrail_run
        WHERE wake_at IS NOT NULL AND status = 'reconciling' LIMIT :most) AS r
    UNION ALL SELECT 'handed_off', count(*) FROM (SELECT 1 FROM handrail_run
        WHERE status = 'handed_off' AND id IN
            (SELECT run_id FROM handrail_handoff WHERE status = 'open') LIMIT :most) AS r"""
