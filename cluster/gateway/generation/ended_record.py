"""The record of a generation that has ended (records/request_record.py), made once, of notes that exist."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.http.error_answers import as_refusal
from tandem.cluster.gateway.records.request_record import GroupAttempt, PromptRecord, RequestRecord
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.workers.messages.request import Usage

MOST_PROMPTS = 8
"""Prompts of a request whose courses are in its record."""


class RequestTimes(NamedTuple):
    """Moments of a request on the gateway's clock, and seconds from its arrival. None: it did not come so far. time_s:
    its arrival on the wall clock."""

    time_s: float
    began_s: float
    ready_s: float
    admitted_s: float | None
    first_token_after_s: float | None
    duration_s: float


def ended_record(
    bill: BillingRecord,
    parts: Sequence[RequestPart],
    outcome: str,
    usage: Usage,
    error: Exception | None,
    times: RequestTimes,
) -> RequestRecord:
    """Makes the record. outcome: the terminal state."""
    request = parts[0].request
    refusal = None if error is None else as_refusal(error)
    began_s, admitted_s = times.began_s, times.admitted_s
    return RequestRecord(
        request_id=request.public_id,
        time_s=times.time_s,
        tenant=bill.tenant,
        model=bill.model,
        adapter=None if request.adapter is None else request.adapter.name,
        outcome=outcome,
        status=None if refusal is None else refusal.status,
        code=None if refusal is None else refusal.code,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        first_token_s=times.first_token_after_s,
        duration_s=times.duration_s,
        ready_s=times.ready_s - began_s,
        admitted_s=None if admitted_s is None else admitted_s - began_s,
        max_tokens=request.sampling.max_tokens,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        num_prompts=len(parts),
        prompts=[_prompt(part, began_s) for part in parts[:MOST_PROMPTS]],
    )


def _prompt(part: RequestPart, began_s: float) -> PromptRecord:
    return PromptRecord(
        prompt_tokens=len(part.request.prompt_token_ids),
        n=part.request.sampling.n,
        attempts=[
            GroupAttempt(
                group=note.group,
                sent_s=note.sent_s - began_s,
                begun_s=None if note.begun_s is None else note.begun_s - began_s,
                ended_s=note.ended_s - began_s,
                why=note.why,
                course=note.course,
            )
            for note in part.attempts
        ],
    )
