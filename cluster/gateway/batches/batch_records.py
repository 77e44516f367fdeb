"""A batch: what was asked, how far it is, and how the API shows it."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from tandem.cluster.gateway.batches.batch_lines import ENDPOINTS
from tandem.cluster.gateway.http.body import printable
from tandem.cluster.gateway.schemas.reading import invalid, read
from tandem.workers.messages.errors import RequestRefused

LIVE: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""The statuses of a batch that is not over. The others: completed, failed, expired, cancelled."""
TIMED: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
"""The statuses whose beginning is shown."""
MAX_METADATA = 16
LEAST_WINDOW_S, MOST_WINDOW_S = 60, 7 * 86400
_WINDOW = re.compile(r"([0-9]{1,6})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """The life of an output file. anchor: "created_at"."""

    seconds: int
    anchor: str = "created_at"


class BatchBody(msgspec.Struct, kw_only=True):
    """The body of POST /v1/batches. completion_window: 24h, or another number of minutes (m), hours (h) or days (d)."""

    input_file_id: Annotated[str, Meta(max_length=128)]
    endpoint: str
    completion_window: str
    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    output_expires_after: ExpiresAfter | None = None


def read_batch(fields: dict[str, Any]) -> BatchBody:
    """A checked body. RequestRefused naming the field at fault."""
    body = read(fields, BatchBody, {})
    if body.endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"endpoint {printable(body.endpoint)} is not one of {', '.join(ENDPOINTS)}.")
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA or any(len(name) > 64 for name in metadata):
        raise invalid("metadata", f"metadata may have {MAX_METADATA} keys, of 64 characters each.")
    if body.output_expires_after is not None and body.output_expires_after.anchor != "created_at":
        raise invalid("output_expires_after.anchor", 'output_expires_after.anchor must be "created_at".')
    window_s(body.completion_window)
    return body


def window_s(window: str) -> int:
    """Seconds of a completion window. RequestRefused for what is none."""
    found = _WINDOW.fullmatch(window)
    seconds = 0 if found is None else int(found[1]) * _SECONDS[found[2]]
    if not LEAST_WINDOW_S <= seconds <= MOST_WINDOW_S:
        text = f'completion_window must be like "24h", from 1m to 7d, not {printable(window)}.'
        raise RequestRefused(text, code="invalid_value", param="completion_window")
    return seconds


class BatchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a batch that do not change. Times are seconds of the wall clock. life_s: of its record, output_life_s:
    of its files. output_file_id, error_file_id: of the files that it may write."""

    id: str
    tenant: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_s: int
    expires_s: int
    life_s: int
    output_life_s: int
    output_file_id: str
    error_file_id: str
    metadata: dict[str, str] | None = None


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch at one moment. times: of the beginning of each status of TIMED that it has had. ends_as: what it becomes
    behind "finalizing". errors: why it has failed, as BatchError objects."""

    facts: BatchFacts
    status: str
    times: Mapping[str, int]
    ends_as: str = "completed"
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    errors: list[dict[str, Any]] = []

    def shown(self) -> dict[str, Any]:
        """The batch as the API shows it."""
        facts = self.facts
        return {
            "id": facts.id,
            "object": "batch",
            "endpoint": facts.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": facts.input_file_id,
            "completion_window": facts.completion_window,
            "status": self.status,
            "output_file_id": facts.output_file_id if self.has_output else None,
            "error_file_id": facts.error_file_id if self.has_errors else None,
            "created_at": facts.created_s,
            "expires_at": facts.expires_s,
            **{f"{status}_at": self.times.get(status) for status in TIMED},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": facts.metadata,
        }
