"""The record of a generation that has ended (records/request_record.py)."""

from collections.abc import Sequence

from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.http.error_answers import as_refusal
from tandem.cluster.gateway.records.request_record import RequestRecord
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.workers.messages.request import Usage


def ended_record(
    bill: BillingRecord,
    parts: Sequence[RequestPart],
    outcome: str,
    usage: Usage,
    error: Exception | None,
    *,
    time_s: float,
    first_token_s: float | None,
    duration_s: float,
) -> RequestRecord:
    """Makes the record. outcome: the terminal state. time_s: wall clock of its arrival; others count from there."""
    request = parts[0].request
    refusal = None if error is None else as_refusal(error)
    return RequestRecord(
        request_id=request.trace_ids.get("x-request-id", request.request_id),
        time_s=time_s,
        tenant=bill.tenant,
        model=bill.model,
        adapter=None if request.adapter is None else request.adapter.name,
        outcome=outcome,
        status=None if refusal is None else refusal.status,
        code=None if refusal is None else refusal.code,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        first_token_s=first_token_s,
        duration_s=duration_s,
    )
