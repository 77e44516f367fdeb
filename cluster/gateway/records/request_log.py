"""Lines about requests, in a file of their own: one for each HTTP answer, and one for each request that has ended.

    127.0.0.1:40312 - "POST /v1/completions HTTP/1.1" 200 0.431 s 6f2ab1...                    access line
    request_id=6f2ab1... outcome=stop tenant=acme model=demo prompt_tokens=21 ...              request line

Nothing of a query, a body or a header but x-request-id is in either. In the JSON form the parts are fields too. Written
once a request, by the HTTP server's task and by the owner of the generation; none is made for a token.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.types import Scope

from tandem.cluster.gateway.records.request_record import RequestRecord
from tandem.cluster.logs.log_files import REQUESTS
from tandem.cluster.wire.service_facts import ServiceFacts, open_requests_log_of
from tandem.configs.schema import LogSettings

log = logging.getLogger(REQUESTS)
MOST_PATH = 256
_UNPRINTABLE = re.compile(r"[^!#-~]")
OnRecord = Callable[[RequestRecord], None]
_PLAIN = vars(logging.makeLogRecord({"name": REQUESTS, "levelno": logging.INFO, "levelname": "INFO"}))


class Line(logging.LogRecord):
    """One line. logging would look up who writes it, on which thread and in which task, which takes most of its time
    and says nothing here. fields: those of the JSON form, beside the text."""

    def __init__(self, text: str, fields: Mapping[str, Any]) -> None:
        now_s = time.time()
        own = {"msg": text, "created": now_s, "msecs": now_s % 1 * 1000, "process": os.getpid()}
        self.__dict__ = {**_PLAIN, **own, **fields}


def write_line(text: str, fields: Mapping[str, Any]) -> None:
    """Writes one line to who listens to lines about requests."""
    if log.isEnabledFor(logging.INFO):
        log.handle(Line(text, fields))


class AccessLog:
    """Writes access lines, but for some paths. quiet: those, such as /health."""

    def __init__(self, *, is_on: bool = False, quiet: frozenset[str] = frozenset()) -> None:
        self.is_on = is_on
        self._quiet = quiet

    def answered(self, scope: Scope, status: int | None, seconds: float) -> None:
        """Writes the line of an answer that is complete, or whose client has left. status: None when it had none by
        then."""
        if not self.is_on or scope["path"] in self._quiet:
            return
        host, port = scope.get("client") or ("-", 0)
        client = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        method, path = shown(scope["method"]), shown(scope["path"]) + ("?..." if scope.get("query_string") else "")
        version, request_id = scope.get("http_version", "1.1"), scope.get("tandem.request_id", "-")
        code = "-" if status is None else status
        fields = {
            "client": client,
            "method": method,
            "path": path,
            "http_version": version,
            "status": status,
            "duration_s": round(seconds, 6),
            "request_id": request_id,
        }
        write_line(f'{client} - "{method} {path} HTTP/{version}" {code} {seconds:.3f} s {request_id}', fields)


def shown(text: str) -> str:
    """A part of a request line, without what would break the line, and not too long."""
    return _UNPRINTABLE.sub("?", text[:MOST_PATH]) + ("..." if len(text) > MOST_PATH else "")


def write_request_line(record: RequestRecord) -> None:
    """Writes the line of a request that has ended."""
    fields = record.fields()
    write_line(" ".join([f"{name}={value}" for name, value in fields.items()]), fields)


class RequestLines(NamedTuple):
    """The lines that one gateway writes."""

    access_log: AccessLog
    on_record: OnRecord


NO_LINES = RequestLines(AccessLog(), lambda record: None)


def open_request_lines(facts: ServiceFacts, gateway: str, settings: LogSettings) -> RequestLines:
    """Opens the file of a gateway's lines about requests, if the settings ask for any."""
    has_access = not settings.disable_uvicorn_access_log and facts.logs is not None and facts.logs.has_access_lines
    if not (has_access or settings.enable_log_requests) or not open_requests_log_of(facts, f"requests-{gateway}"):
        return NO_LINES
    named = (settings.disable_access_log_for_endpoints or "").split(",")
    quiet = frozenset(path.strip() for path in named if path.strip())
    on_record = write_request_line if settings.enable_log_requests else NO_LINES.on_record
    return RequestLines(AccessLog(is_on=has_access, quiet=quiet), on_record)
