"""The columns of the tables that are read as a whole, as this release knows them.

Every statement names its columns. PostgreSQL has prepared ours with the columns of that day, and a
newer release may add some while this one is at work; what it adds is nothing to us.
"""

from __future__ import annotations

from typing import Final

RUN: Final = (
    "id, tenant, workflow, workflow_version, goal, principal, input, budget, limits, dedupe_key, "
    "traceparent, mode, created_at, status, traced_status, reason, epoch, claim_id, holder, "
    "lease_until, attempts, refusal, due_at, wake_at, publishes, deadline_at, remaining_ms, "
    "expires_at, cancel_requested_at, phase, steps_left, model_calls_left, tool_calls_left, "
    "tool_calls_reserved, compensations_reserved, tokens_left, cost_microusd_left, "
    "output_bytes_left, step, state_version, observation_count, trace_seq, levels, pending, told, "
    "answer, effect_id, undoing_effect_id"
)
EFFECT: Final = (
    "id, tenant, intent_key, tool, contract_version, arguments, arguments_hash, terms, "
    "created_at, status, token, dispatcher, owner_run_id, attempts, doubt, first_dispatched_at, "
    "dispatch_deadline_at, unknown_since, doubt_trigger, queries_left, absences, next_query_at, "
    "result, evidence, approval_id, compensation, compensates, planned_by, rewind"
)
APPROVAL: Final = (
    "id, run_id, tenant, workflow, step, state_version, tool, contract_version, contract_hash, "
    "intent_key, arguments, arguments_hash, amount, subject, approvers, requester_approves, "
    "status, requested_at, expires_at, decided_at, decided_by, effect_id"
)
HANDOFF: Final = (
    "id, run_id, tenant, workflow, tool, subject, effect_id, reason, priority, package, status, "
    "version, opened_at, expires_at, escalates_at, escalated_at, claimed_by, claimed_until, "
    "assigned_to, snoozed_until, resolution, resolved_at, resolved_by, resolved_reason, "
    "resolved_evidence"
)
PRINCIPAL: Final = "subject, roles, tenants, admitted_at"
AUDIT: Final = (
    "seq, at, actor, roles, act, tenant, run_id, target, reason, before, after, previous, hash"
)
