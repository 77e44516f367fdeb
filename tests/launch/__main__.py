"""Plays the launch files as they are shipped, on nodes of a lab, and says which of them launched.

    make launch                        # all of them; ARGS="local compose": those
    make launch ARGS=--fresh           # on machines with nothing installed, as the first time

What each player did and saw is printed, and kept in out/launch/NAME.txt. The exit status is 1 if one has failed or
could not be played here: what is absent is named with the command that installs it. Needs root on Linux.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

from tests.launch import play_aws, play_compose, play_image, play_kuberay, play_local, play_schemas, play_serve
from tests.launch.machines import WARM
from tests.launch.needs import NotHereError, check_needs
from tests.launch.record import LaunchError, Record
from tests.launch.wheels import PLACE
from tools.lab import LabError

PLAYERS: dict[str, tuple[Callable[[Record], None], tuple[str, ...]]] = {
    "schemas": (play_schemas.play, play_schemas.NEEDS),
    "local": (play_local.play, play_local.NEEDS),
    "aws": (play_aws.play, play_aws.NEEDS),
    "image": (play_image.play, play_image.NEEDS),
    "compose": (play_compose.play, play_compose.NEEDS),
    "serve": (play_serve.play, play_serve.NEEDS),
    "kuberay": (play_kuberay.play, play_kuberay.NEEDS),
}


def verdict(name: str) -> str:
    """Plays one; "" if it launched, else why not."""
    play, needs = PLAYERS[name]
    try:
        check_needs(needs)
        with Record(PLACE / f"{name}.txt") as record:
            play(record)
    except NotHereError as why:
        return f"not played: {why}"
    except (LaunchError, LabError, OSError, subprocess.SubprocessError) as error:
        return f"failed: {error}"
    return ""


def main() -> int:
    if "--fresh" in sys.argv:
        shutil.rmtree(WARM, ignore_errors=True)
    chosen = [word for word in sys.argv[1:] if word != "--fresh"] or list(PLAYERS)
    if strangers := [name for name in chosen if name not in PLAYERS]:
        print(f"launch: no such player: {', '.join(strangers)}; there are {', '.join(PLAYERS)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    verdicts = {name: verdict(name) for name in chosen}
    for name, why in verdicts.items():
        print(f"launch: {name}: {why or 'launched'}", flush=True)
    return int(any(verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
