"""The Triton kernels that are compiled after the start of this process's ranks: there should be none.

A start launches, before a rank is ready, every variant of a kernel that a step may launch. One that is compiled later
makes all rows of a step wait for a second or more, so it is logged. Imports Triton when it is asked to watch.
"""

import logging
import threading
from typing import Any, Final

log = logging.getLogger(__name__)


class LateKernels:
    """Watches the compiler, for all threads, while no rank of the process starts. names: of the variants found."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._is_watching = False

    def pause(self) -> None:
        """Lets a rank start."""
        self._is_watching = False

    def watch(self) -> None:
        """Begins once a rank is ready."""
        import triton

        triton.knobs.runtime.jit_post_compile_hook = self._note
        self._is_watching = True

    def _note(self, *, repr: str, **_: Any) -> None:
        if self._is_watching:
            self.names.append(repr)
            thread = threading.current_thread().name
            log.warning("a kernel was compiled after the start, in thread %s: %s", thread, repr)


LATE: Final = LateKernels()
"""The watch of this process."""
