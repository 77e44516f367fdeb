"""RequestRecord: what is known of a request once it has ended: counts, names and times, never texts or keys."""

from typing import Any

import msgspec

from tandem.workers.messages.course import Course, Phase


class GroupAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One dispatch of a prompt to a group. Seconds count from the request's arrival at the gateway."""

    group: str = ""  # empty: none is known to have had it
    sent_s: float
    begun_s: float | None = None  # the gateway heard that it has a row; None: it never did
    ended_s: float
    why: str = ""  # code of the refusal or loss after which another group had it; empty: none had
    course: Course | None = None  # what the group says of it; None: it was lost, or refused it


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt of a request."""

    prompt_tokens: int
    n: int = 1
    attempts: list[GroupAttempt] = []


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Seconds count from its arrival at the gateway."""

    request_id: str  # as the client has it, in x-request-id
    time_s: float  # wall clock of its arrival
    tenant: str = ""  # empty: it had no valid key
    model: str = ""  # as it is served; empty: none was found
    adapter: str | None = None
    outcome: str  # stop, length, abort, error or rejected
    status: int | None = None  # of the error that ended it
    code: str | None = None  # the same
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's
    completion_tokens: int = 0
    first_token_s: float | None = None
    duration_s: float
    ready_s: float | None = None  # its body was read and its prompts tokenized
    admitted_s: float | None = None  # its tenant's limits let it pass
    num_prompts: int = 0
    prompts: list[PromptRecord] = []  # the first ones
    gateway: str = ""
    trace_id: str | None = None  # of its trace, if it has one and is sampled
    max_tokens: int | None = None  # of its sampling parameters
    temperature: float | None = None
    top_p: float | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the fields of its line, in order."""
        fields: dict[str, Any] = {"request_id": self.request_id, "outcome": self.outcome}
        if self.status is not None:
            fields["status"] = self.status
        for name in ("code", "tenant", "model", "adapter", "trace_id"):
            if value := getattr(self, name):
                fields[name] = value
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            fields[name] = getattr(self, name)
        if moves := sum(max(0, len(prompt.attempts) - 1) for prompt in self.prompts):
            fields["moves"] = moves
        if self.first_token_s is not None:
            fields["first_token_s"] = round(self.first_token_s, 6)
        fields["duration_s"] = round(self.duration_s, 6)
        return fields


def named(value: Any) -> Any:
    """Returns a record, or a part of one, with names in place of positions, for JSON that people read: as mappings and
    lists, without fields that say nothing."""
    if isinstance(value, msgspec.Struct):
        fields = {name: named(getattr(value, name)) for name in value.__struct_fields__}
        return {name: each for name, each in fields.items() if each not in (None, "", [], {})}
    return [named(each) for each in value] if isinstance(value, list) else value


def read_named(data: bytes) -> RequestRecord:
    """Reads what named() has made of a record, as JSON. msgspec.DecodeError."""
    fields = msgspec.json.decode(data, type=dict[str, Any])
    for prompt in fields.get("prompts", ()):
        for attempt in prompt.get("attempts", ()):
            if (course := attempt.get("course")) is not None:
                phases = {name: Phase(**course[name]) for name in ("prefill", "decode") if name in course}
                attempt["course"] = Course(**{**course, **phases})
    return msgspec.convert(fields, RequestRecord)
