"""Where the console script `tandem` begins: Ctrl-C while Python imports the rest ends it without a traceback."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cluster.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()
