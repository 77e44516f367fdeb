"""TraceContext: the place of a request in a distributed trace, as W3C's headers say it."""

from typing import NamedTuple


class TraceContext(NamedTuple):
    """The span of one request in this service. parent_id: the client's, in the same trace; None: it sent none. state:
    the header tracestate, empty: none."""

    trace_id: int
    span_id: int
    is_sampled: bool
    parent_id: int | None = None
    state: str = ""

    @property
    def trace_name(self) -> str:
        """The trace's id as people see it."""
        return f"{self.trace_id:032x}"

    def headers(self) -> dict[str, str]:
        """Headers for whoever does a part of the request."""
        parent = f"00-{self.trace_name}-{self.span_id:016x}-{int(self.is_sampled):02x}"
        return {"traceparent": parent} | ({"tracestate": self.state} if self.state else {})
