"""What `make test` leaves out of Triton's kernels in its interpreter (tests/left_to.py), in `make parity`."""

from pathlib import Path

import pytest

from tests.left_to import PARITY
from tests.support.interpreted import ROOT, run_in_interpreter, starts

FILES = sorted(
    {
        name.partition("::")[0]
        for name in PARITY
        if "test_in_the_interpreter" not in name
        and "run_in_interpreter(" in (ROOT / "tests" / name.partition("::")[0]).read_text()
    }
)


@starts
@pytest.mark.parity
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str) -> None:
    pytest.importorskip("triton")
    run_in_interpreter(str(Path(ROOT) / "tests" / file), "-m", "parity")
