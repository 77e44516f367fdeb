"""The entry point of the console script `tandem`.

It imports the command line while SIGINT has its default action, so that an early Ctrl-C ends it without a traceback.
A script's `tandem serve ... &` inherits SIGINT as ignored; it is heard all the same, as who sends it to a pid means it.
"""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tandem.cluster.cli.main import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
