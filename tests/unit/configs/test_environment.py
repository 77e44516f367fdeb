"""Variables of the environment that processes set for themselves."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_waiting_threads_give_up_their_core_soon_unless_the_user_says_otherwise(
    given: dict[str, str], spins: str
) -> None:
    """OpenMP itself says what it has read."""
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", "import tandem.workers.offline, torch"],
        env={**unset, **given, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr, done.stderr
