"""The spans of one request, made of its record once it has ended. Names of attributes are vLLM's where it has them.

llm_request                     from its arrival to the end of its answer
    prepare, limits             in the gateway: body, prompt and tokens; the limits of its tenant
    attempt                     one dispatch to a group; several when it moved
        queue, prefill, decode  in the group, on the gateway's clock: they end and begin when it heard of the first row
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.cluster.gateway.records.request_record import GroupAttempt, RequestRecord
from tandem.workers.messages.course import Course, Phase

Attributes = dict[str, str | int | float]
ROOT = "llm_request"


@dataclass(frozen=True)
class SpanPlan:
    """A span. Seconds count from the request's arrival."""

    name: str
    begin_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    inside: tuple["SpanPlan", ...] = ()
    error: str | None = None


def span_plan(record: RequestRecord) -> SpanPlan:
    """Returns the spans of a request that has ended."""
    attempts = [(prompt, attempt) for prompt in record.prompts for attempt in prompt.attempts]
    inside = [*_in_gateway(record), *(_attempt(prompt.prompt_tokens, attempt) for prompt, attempt in attempts)]
    courses = [attempt.course for _, attempt in attempts if attempt.course is not None]
    failed = record.outcome in ("error", "rejected")
    return SpanPlan(
        ROOT,
        0.0,
        record.duration_s,
        _attributes(record, courses),
        tuple(inside),
        (record.code or record.outcome) if failed else None,
    )


def _attributes(record: RequestRecord, courses: list[Course]) -> Attributes:
    optional = {
        "gen_ai.response.model": record.model or None,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.temperature": record.temperature,
        "gen_ai.request.top_p": record.top_p,
        "gen_ai.request.n": record.prompts[0].n if record.prompts else None,
        "gen_ai.latency.time_to_first_token": record.first_token_s,
        "http.response.status_code": record.status,
        "error.type": record.code,
        "tandem.tenant": record.tenant or None,
        "tandem.adapter": record.adapter,
    }
    attributes: Attributes = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.latency.e2e": record.duration_s,
        "tandem.cached_tokens": record.cached_tokens,
        "tandem.outcome": record.outcome,
    }
    attributes |= {name: value for name, value in optional.items() if value is not None}
    if len(courses) == 1:  # of several there is no one time
        attributes |= _latencies(courses[0])
    return attributes


def _latencies(course: Course) -> Attributes:
    """The times of vLLM's spans."""
    phases = {"prefill": course.prefill, "decode": course.decode}
    times = {name: phase.seconds for name, phase in phases.items() if phase is not None}
    named: Attributes = {f"gen_ai.latency.time_in_model_{name}": seconds for name, seconds in times.items()}
    if times:
        named["gen_ai.latency.time_in_model_inference"] = sum(times.values())
    return {"gen_ai.latency.time_in_queue": course.queue_s, **named}


def _in_gateway(record: RequestRecord) -> Iterator[SpanPlan]:
    if record.ready_s is not None:
        yield SpanPlan("prepare", 0.0, record.ready_s)
        if record.admitted_s is not None:
            yield SpanPlan("limits", record.ready_s, record.admitted_s)


def _attempt(prompt_tokens: int, attempt: GroupAttempt) -> SpanPlan:
    attributes: Attributes = {"tandem.group": attempt.group} if attempt.group else {}
    inside: tuple[SpanPlan, ...] = ()
    if attempt.course is not None and attempt.begun_s is not None:
        inside = tuple(_in_group(prompt_tokens, attempt.course, attempt.begun_s))
    return SpanPlan("attempt", attempt.sent_s, attempt.ended_s, attributes, inside, attempt.why or None)


def _in_group(prompt_tokens: int, course: Course, begun_s: float) -> Iterator[SpanPlan]:
    waited: Attributes = {f"tandem.wait.{cause}_s": seconds for cause, seconds in course.waited_s.items()}
    yield SpanPlan("queue", begun_s - course.queue_s, begun_s, waited)
    end_s = begun_s
    if course.prefill is not None:
        begin_s, end_s = end_s, end_s + course.prefill.seconds
        tokens = {"tandem.prompt_tokens": prompt_tokens, "tandem.cached_tokens": course.cached_tokens}
        yield SpanPlan("prefill", begin_s, end_s, {**tokens, **_steps(course.prefill)})
    if course.decode is not None:
        more: Attributes = {
            "tandem.draft_tokens": course.num_drafts,
            "tandem.accepted_draft_tokens": course.num_accepted,
            "tandem.preemptions": course.num_preemptions,
            "tandem.paused_s": course.paused_s,
        }
        yield SpanPlan("decode", end_s, end_s + course.decode.seconds, {**_steps(course.decode), **more})


def _steps(phase: Phase) -> Attributes:
    """The steps of a phase; mean sequences and tokens in one of them."""
    steps = max(1, phase.steps)
    return {
        "tandem.steps": phase.steps,
        "tandem.sequences_per_step": phase.rows / steps,
        "tandem.tokens_per_step": phase.tokens / steps,
        "tandem.device_s": phase.device_s,
    }
