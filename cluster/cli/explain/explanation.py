"""The words of `tandem explain`: where the time of a request went, by its RequestRecord."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from tandem.cluster.gateway.records.request_record import GroupAttempt, PromptRecord, RequestRecord
from tandem.workers.messages.course import Course, Phase

CAUSES = {
    "adapter": "its adapter was loaded",
    "kv": "KV of its prompt was copied from host memory or disk",
    "turn": "its adapter had no place in a step (--max-loras)",
    "alone": "a request that may have ended a group ran alone",
    "batch": "the batch before it (--batching-policy)",
    "grammar": "its grammar was compiled",
}
"""Causes of waits, by their word in Course."""
LOSSES = {
    "bystander": "it was lost",
    "unknown": "it was lost",
    "excused": "it was lost",
    "suspect": "it was lost while it ran this request, which then ran alone",
    "alone": "it was lost while it ran this request alone",
}
"""Reasons for which a group's part ended, by the word of its loss; codes of refusals are their own words."""
SHOWN_S = 0.0005


class TimeShare(NamedTuple):
    """A part of a request's time, in words."""

    seconds: float
    words: str


def explanation(record: RequestRecord) -> list[str]:
    """Returns the lines for one request."""
    shares = [share for share in _shares(record) if share.seconds >= SHOWN_S]
    rest_s = record.duration_s - sum(share.seconds for share in shares)
    if rest_s >= SHOWN_S:
        shares.append(TimeShare(rest_s, "not known"))
    lines = [_title(record), f"  {_subject(record)}"]
    for share in shares:
        part = share.seconds / max(record.duration_s, 1e-9)
        lines.append(f"  {share.seconds:9.3f} s {part:7.1%}  {share.words}")
    if shares:
        most = max(shares, key=lambda share: share.seconds)
        lines.append(f"  most of it: {most.words.partition(',')[0]}")
    return lines


def _title(record: RequestRecord) -> str:
    ended = record.outcome if record.code is None else f"{record.outcome} ({record.status} {record.code})"
    first = "" if record.first_token_s is None else f", first token after {record.first_token_s:.3f} s"
    return f"request {record.request_id}: {ended} after {record.duration_s:.3f} s{first}"


def _subject(record: RequestRecord) -> str:
    adapter = "" if record.adapter is None else f", adapter {record.adapter}"
    cached = f" ({record.cached_tokens} cached)" if record.cached_tokens else ""
    prompts = f" in {record.num_prompts} prompts" if record.num_prompts > 1 else ""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time_s))
    parts = [
        f"tenant {record.tenant or '-'}, model {record.model or '-'}{adapter}",
        f"{record.prompt_tokens} prompt tokens{cached}{prompts}, {record.completion_tokens} output tokens",
        f"came at {at}" + (f" to gateway {record.gateway}" if record.gateway else ""),
    ]
    if record.trace_id is not None:
        parts.append(f"trace {record.trace_id}")
    return ", ".join(parts)


def _shares(record: RequestRecord) -> Iterator[TimeShare]:
    """The parts of its time, in order; of several prompts those of the one that ended last."""
    if record.ready_s is None:
        yield TimeShare(record.duration_s, "gateway: it was refused before there was a prompt")
        return
    yield TimeShare(record.ready_s, "gateway: its body was read, its prompt rendered and tokenized")
    if record.admitted_s is None:
        yield TimeShare(record.duration_s - record.ready_s, "gateway: the limits of its tenant")
        return
    yield TimeShare(record.admitted_s - record.ready_s, "gateway: the limits of its tenant")
    known = [prompt for prompt in record.prompts if prompt.attempts]
    if not known:
        return
    prompt = max(known, key=lambda prompt: prompt.attempts[-1].ended_s)
    before_s = record.admitted_s
    for number, attempt in enumerate(prompt.attempts):
        words = "until it was sent again" if number else "until it was sent: the prompts before it"
        yield TimeShare(attempt.sent_s - before_s, f"gateway: {words}")
        is_again = any(earlier.begun_s is not None for earlier in prompt.attempts[:number])
        is_whole = record.num_prompts == 1 and not is_again and attempt is prompt.attempts[-1]
        yield from _attempt(prompt, attempt, record.completion_tokens if is_whole else None, is_again=is_again)
        before_s = attempt.ended_s
    yield TimeShare(record.duration_s - before_s, "gateway: to the client, which reads, and the end of the answer")


def _attempt(prompt: PromptRecord, attempt: GroupAttempt, output: int | None, *, is_again: bool) -> Iterator[TimeShare]:
    """One attempt. output: tokens of the answer, None where it has those of other prompts or attempts too. is_again:
    another group may have begun it."""
    group, course, loss = attempt.group or "a group", attempt.course, LOSSES.get(attempt.why, attempt.why)
    if course is None or attempt.begun_s is None:
        total_s = attempt.ended_s - attempt.sent_s
        queue_s = 0.0 if course is None else min(course.queue_s, total_s)
        why = f", which ended its part: {loss}" if attempt.why else ""
        if course is not None:
            yield from _queue(course, queue_s)
        yield TimeShare(total_s - queue_s, f"with {group}{why}" if attempt.group else f"until {group} answered{why}")
        return
    to_s = attempt.begun_s - attempt.sent_s - course.queue_s
    yield TimeShare(max(0.0, to_s), f"until a group was there, chosen and reached: {attempt.group or '-'}")
    yield from _queue(course, course.queue_s)
    inside_s = 0.0
    for share in _phases(prompt, course, output, is_again=is_again):
        inside_s += share.seconds
        yield share
    late_s = attempt.ended_s - attempt.begun_s - inside_s
    why = f"; another group went on: {loss}" if attempt.why else ""
    yield TimeShare(max(0.0, late_s), f"network and gateway: its tokens, on their way{why}")


def _queue(course: Course, queue_s: float) -> Iterator[TimeShare]:
    for cause, seconds in course.waited_s.items():
        yield TimeShare(seconds, f"queue: {CAUSES.get(cause, cause)}")
    yield TimeShare(max(0.0, queue_s - sum(course.waited_s.values())), "queue: for a row and KV blocks")


def _phases(prompt: PromptRecord, course: Course, output: int | None, *, is_again: bool) -> Iterator[TimeShare]:
    notes = list(_notes(course))
    if course.prefill is not None:
        computed = prompt.prompt_tokens - course.cached_tokens
        cached = f" ({course.cached_tokens} in the prefix cache)" if course.cached_tokens else ""
        said = ", and what it had said by then" if is_again else ""
        words = f"prefill: {computed} of {prompt.prompt_tokens} prompt tokens{said}{cached}{_beside(course.prefill, 1)}"
        yield TimeShare(course.prefill.seconds, ", ".join([words, *notes] if course.decode is None else [words]))
    if course.decode is not None:
        tokens = " its tokens" if output is None else f" {output} tokens"
        words = f"decode:{tokens}{_beside(course.decode, prompt.n)}"
        yield TimeShare(course.decode.seconds, ", ".join([words, *notes]))


def _beside(phase: Phase, own: int) -> str:
    """The steps of a phase, and beside how much they were computed."""
    if not phase.steps:
        return ", in a step of its own"
    others = max(0.0, phase.rows / phase.steps - own)
    step_ms = 1000 * phase.device_s / phase.steps
    steps = "1 step" if phase.steps == 1 else f"{phase.steps} steps"
    more = phase.tokens - phase.rows
    company = [f"beside {others:.1f} others"] if others >= 0.05 else []
    company += [f"with {more} more tokens of prompts and drafts"] if more > 0 else []
    return ", ".join([f", {steps} of {step_ms:.1f} ms on the device", *company])


def _notes(course: Course) -> Iterator[str]:
    if course.num_drafts:
        yield f"{course.num_accepted} of {course.num_drafts} drafts accepted"
    if course.num_preemptions:
        yield f"preempted {course.num_preemptions} times"
    if course.paused_s >= SHOWN_S:
        yield f"{course.paused_s:.3f} s of all choices without a row"
