"""A hub id is served from the hub's cache, as a download would leave it; nothing is fetched here."""

import shutil
from pathlib import Path

import pytest

from tandem.cluster.deploy.model_source import DEMO, find_model, resolve_settings
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo model in a cache as org/name, branch main."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(find_model(DEMO, None, "MODEL"), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return snapshot


def test_a_hub_id_is_found_in_the_cache(cached: Path) -> None:
    assert find_model("org/name", None, "MODEL") == cached.resolve()
    assert find_model("org/name", COMMIT, "MODEL") == cached.resolve()


def test_settings_of_a_hub_id_name_the_id_and_hold_the_folder(cached: Path) -> None:
    model = resolve_settings(build_settings("org/name", {})).engine.model
    assert model.served_model_name == ("org/name",) and Path(model.model) == cached.resolve()


def test_a_revision_is_of_the_hub_and_found_once(cached: Path) -> None:
    with pytest.raises(SettingsError, match="demo is a folder") as caught:
        resolve_settings(build_settings("demo", {"revision": "main"}))
    assert caught.value.flag == "--revision"
    found = resolve_settings(build_settings("org/name", {"revision": COMMIT}))
    assert resolve_settings(found) == found and Path(found.engine.model.model) == cached.resolve()
