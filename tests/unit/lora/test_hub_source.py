"""Adapters from a hub (hf://organisation/repository): through huggingface_hub to a server on loopback that answers as a
hub does, the three requests that reading a file takes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.workers.lora.peft.adapter_check import AdapterChecker
from tandem.workers.lora.peft.adapter_source import local_folder
from tandem.workers.lora.peft.peft_folder import CONFIG_FILE, WEIGHT_FILE, adapter_digest
from tandem.workers.messages.errors import AdapterUnreadable
from tandem.workers.messages.request import AdapterRef
from tandem.workers.models.spec.config.config_reader import load_spec
from tests.support.hub_server import Hub, running_hub

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
PIRATE = DEMO / "adapters" / "pirate"
DIGEST = adapter_digest(PIRATE)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With the pirate as team/pirate."""
    with running_hub(monkeypatch) as hub:
        hub.repositories["team/pirate@main"] = {
            name: (PIRATE / name).read_bytes() for name in (CONFIG_FILE, WEIGHT_FILE)
        }
        yield hub


def ref(source: str) -> AdapterRef:
    return AdapterRef(name="pirate", digest=DIGEST, source=source)


def test_a_repository_is_listed_and_read_by_ranks(hub: Hub, tmp_path: Path) -> None:
    check = AdapterChecker(load_spec(DEMO / "model"), 16, DEMO / "model", tmp_path / "gateway")
    assert check("hf://team/pirate") == DIGEST
    assert local_folder(ref("hf://team/pirate"), tmp_path / "rank") == tmp_path / "rank" / DIGEST


def test_a_revision_is_the_one_that_is_named(hub: Hub, tmp_path: Path) -> None:
    shout = {name: (PIRATE.parent / "shout" / name).read_bytes() for name in (CONFIG_FILE, WEIGHT_FILE)}
    hub.repositories["team/pirate@v2"] = shout
    check = AdapterChecker(load_spec(DEMO / "model"), 16, DEMO / "model", tmp_path)
    assert check("hf://team/pirate@v2") == adapter_digest(PIRATE.parent / "shout")
    assert check("hf://team/pirate") == DIGEST


def test_what_is_not_there_is_said_and_found_once_it_is(hub: Hub, tmp_path: Path) -> None:
    weights = hub.repositories["team/pirate@main"].pop(WEIGHT_FILE)
    with pytest.raises(AdapterUnreadable, match=f"there is no team/pirate/{WEIGHT_FILE}"):
        local_folder(ref("hf://team/pirate"), tmp_path)
    with pytest.raises(AdapterUnreadable, match=r"there is no team/other.* \(repository not found\)"):
        local_folder(ref("hf://team/other"), tmp_path)
    hub.repositories["team/pirate@main"][WEIGHT_FILE] = weights
    hub.repositories["team/other@main"] = hub.repositories["team/pirate@main"]
    assert local_folder(ref("hf://team/other"), tmp_path) == tmp_path / DIGEST, "nothing remembers what was missing"
