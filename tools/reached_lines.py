"""Which tests reach which lines of a module: plugins of pytest, used by mutate.py."""

import json
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class Observer:
    """Notes which tests run which lines of a module, which libraries they load, and how long the slowest takes."""

    def __init__(self, path: Path, notes: Path) -> None:
        self._path, self._notes = str(path), notes
        self._lines: dict[str, set[int]] = {}
        self._now: set[int] = set()
        self._slowest_s = 0.0
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[[FrameType, str, Any], Any] | None:
        if not frame.f_code.co_filename.endswith(self._path):
            return None
        self._now.add(frame.f_lineno)
        return self._trace

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._now = self._lines[nodeid] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._slowest_s = max(self._slowest_s, report.duration)

    def pytest_sessionfinish(self) -> None:
        loaded = list(sys.modules.items())
        libraries = [name for name, m in loaded if (getattr(m, "__file__", None) or "").startswith(LIBRARIES)]
        lines = {name: sorted(numbers) for name, numbers in self._lines.items()}
        self._notes.write_text(json.dumps({"libraries": libraries, "lines": lines, "slowest_s": self._slowest_s}))


class ReachingFirst:
    """Tests that run a line come before the others. lines: by test."""

    def __init__(self, lines: dict[str, list[int]], line: int) -> None:
        self._first = {name for name, numbers in lines.items() if line in numbers}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.nodeid not in self._first)
