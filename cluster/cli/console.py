"""The entry point of the console script `tandem`.

It imports the command line while SIGINT has its default action, so that an early Ctrl-C ends it without a traceback.
"""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so for a script's `&`
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tandem.cluster.cli.main import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
