"""A reference's rows on the disk."""

from pathlib import Path

import pytest
import torch

from tandem.configs.errors import SettingsError
from tandem.workers.evaluation.kept_rows import KeptRows


def test_a_disk_that_others_fill_meanwhile_is_an_error_with_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptRows(tmp_path, 5)
    kept.append(torch.ones(2, 5))
    monkeypatch.setattr(kept, "_path", Path("/dev/full"))
    with pytest.raises(SettingsError, match="No space left on device; give fewer --tokens"):
        kept.append(torch.ones(2, 5))
