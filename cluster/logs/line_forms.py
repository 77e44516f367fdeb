"""The forms of lines in log files: text for people, or JSON, one object a line, with the names that Ray's own JSON has.

    {"asctime": "2026-11-29 12:00:00.123", "levelname": "INFO", "message": "...", "name": "tandem.group",
     "filename": "group_log.py", "lineno": 47, "process": 4711, "timestamp_ns": 1795953600123000000}

A traceback is `exc_text`. What is given to a logger as `extra` is fields of its own, beside the message that says it in
words (cluster/gateway/records/request_log.py).
"""

import logging
import time
import traceback
from typing import Any

import msgspec

from tandem.configs.schema import LogFormat

TEXT = "%(asctime)s.%(msecs)03d %(levelname)s %(process)d %(name)s: %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
"""Attributes that every record has; others were given as `extra`."""


class LogLines(logging.Formatter):
    """The text form. In Serve's replicas `print`, with which logging itself writes tracebacks, is Serve's, which writes
    to files the tuple of its arguments."""

    def __init__(self) -> None:
        super().__init__(TEXT, TIME)
        self._second, self._time = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging. Does not take the traceback's text from another formatter."""
        if record.exc_info:
            record.exc_text = None
        return super().format(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Called by logging. Words each second once."""
        if (second := int(record.created)) != self._second:
            self._second, self._time = second, time.strftime(datefmt or TIME, time.localtime(second))
        return self._time

    def formatException(self, ei: Any) -> str:
        """Called by logging for a traceback."""
        return "".join(traceback.format_exception(*ei)).rstrip("\n")


class JsonLines(LogLines):
    """The JSON form."""

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging. Values that JSON has no form for are their text."""
        fields: dict[str, Any] = {
            "asctime": f"{self.formatTime(record)}.{int(record.msecs):03d}",
            "levelname": record.levelname,
            "message": record.getMessage(),
            "name": record.name,
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
            "timestamp_ns": int(record.created * 1e9),
        }
        if text := self._traceback(record):
            fields["exc_text"] = text
        more = {name: value for name, value in vars(record).items() if name not in _OWN and not name.startswith("_")}
        fields |= more  # names with an underscore are Ray's own
        return msgspec.json.encode(fields, enc_hook=str).decode()

    def _traceback(self, record: logging.LogRecord) -> str | None:
        return self.formatException(record.exc_info) if record.exc_info else record.exc_text


def lines_of(form: LogFormat) -> LogLines:
    """Returns what gives lines this form."""
    return JsonLines() if form == "json" else LogLines()
