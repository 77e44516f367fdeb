"""Where the console script `tandem` begins: Ctrl-C while Python imports the rest ends it without a traceback."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so for a script's `&`
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cluster.cli import main as run

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
