"""A process that has loaded torch and Triton's interpreter, and forks one process after the other for tests there: each
of them would take seconds to load that.

A line of its standard input has pytest's arguments and the file for its output, as JSON; it answers with the status.
"""

import gc
import json
import os
import sys
from importlib import import_module

import pytest

LOADED = (
    "torch", "triton.language", "hypothesis", "tandem.workers.attention.triton_paged", "tandem.workers.models.decoder",
    "tests.support.attention_check", "tests.support.decoder_ranks", "tests.support.triton_steps",
)  # fmt: skip


def main() -> None:
    for name in LOADED:
        import_module(name)
    gc.freeze()  # what is loaded is shared with all of them
    for line in sys.stdin:
        arguments, output = json.loads(line)
        if not (child := os.fork()):
            with open(output, "wb") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            status = int(pytest.main(arguments))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
