"""Two rules that a Linux process sets for itself: it adopts orphans, or it ends with its parent.

Other systems have neither; the functions do nothing there.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends. Children do not inherit the rule."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Ends this process with SIGKILL once the thread of `parent` that started it has ended; at once if it has already.

    parent: its process id. Safe between fork and exec.
    """
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
