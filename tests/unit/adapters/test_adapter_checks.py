"""Sources are checked whole against the base model before they are listed: the bundled adapters, and broken copies."""

import shutil
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from tandem.cluster.adapters.checks import base_facts, check_modules, checker_of
from tandem.cluster.adapters.entries import BaseFacts
from tandem.cluster.deploy.preflight import check_adapters
from tandem.configs.errors import SettingsError, TandemError
from tandem.configs.load import build_settings
from tandem.configs.schema import ServiceSettings
from tandem.workers.lora.peft.peft_folder import adapter_digest
from tandem.workers.messages.errors import AdapterRefused
from tests.support.adapters import save_random_adapter
from tests.support.tiny_models import TinyModel, save_tiny_model

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
PIRATE = DEMO / "adapters" / "pirate"
WEIGHTS = "adapter_model.safetensors"


def settings(*modules: str, **more: object) -> ServiceSettings:
    values = {"served_model_name": ["demo"], "enable_lora": True, "lora_modules": list(modules), **more}
    return build_settings(str(DEMO / "model"), values)


def test_a_good_folder_has_its_digest() -> None:
    check = checker_of(base_facts(settings()))
    assert check(str(PIRATE)) == adapter_digest(PIRATE)


def test_all_names_of_the_model_are_announced() -> None:
    assert base_facts(settings(served_model_name=["demo", "other"])).names == ("demo", "other")
    older = msgspec.msgpack.encode({"folder": "/m", "max_rank": 8})
    assert msgspec.msgpack.decode(older, type=BaseFacts).names == ()


def test_a_url_is_fetched_and_checked_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check = checker_of(base_facts(settings()))
    assert check(f"file://{PIRATE}") == adapter_digest(PIRATE)
    with pytest.raises(TandemError, match="cannot be read"):
        check(f"file://{tmp_path}/nothing")


def test_a_rank_above_the_services_is_refused() -> None:
    check = checker_of(base_facts(settings(max_lora_rank=4)))
    with pytest.raises(TandemError, match="--max-lora-rank is 4"):
        check(str(PIRATE))


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and an adapter of its tables, beside which PEFT has saved a copy of them."""
    base = save_tiny_model(TinyModel("tables", "llama"), tmp_path)
    adapter = save_random_adapter(base, tmp_path / "adapter", rank=4, modules=("embed_tokens", "lm_head"))
    return base, adapter


def test_a_table_that_is_not_the_models_own_is_not_listed(tables: tuple[Path, Path]) -> None:
    base, adapter = tables
    check = checker_of(base_facts(build_settings(str(base), {"enable_lora": True})))
    assert check(str(adapter)) == adapter_digest(adapter)
    tensors = load_file(adapter / WEIGHTS)
    name = "base_model.model.lm_head.base_layer.weight"
    save_file(tensors | {name: tensors[name] * 1.05}, adapter / WEIGHTS)
    with pytest.raises(AdapterRefused, match=f"tensor {name} is not this model's table"):
        check(str(adapter))
    without_weights = build_settings(str(base), {"enable_lora": True, "load_format": "dummy"})
    assert checker_of(base_facts(without_weights))(str(adapter)) == adapter_digest(adapter), "nothing to compare with"
    (base / "model.safetensors").unlink()
    assert check_elsewhere(base, adapter) == adapter_digest(adapter), "the ranks have the files, and will compare"


def check_elsewhere(base: Path, adapter: Path) -> str:
    return checker_of(BaseFacts(folder=str(base), max_rank=16))(str(adapter))


def test_modules_are_said_or_refused_by_flag_and_name(tmp_path: Path) -> None:
    (line,) = check_modules(settings(f"pirate={PIRATE}"))
    assert line == f"adapter pirate@{adapter_digest(PIRATE)[:12]} from {PIRATE}"
    assert check_adapters(settings()) == []
    cut = shutil.copytree(PIRATE, tmp_path / "cut")
    (cut / WEIGHTS).write_bytes((cut / WEIGHTS).read_bytes()[:-1])
    for module, words in (
        (f"cut={cut}", f"cut: {cut}: adapter_model.safetensors holds"),
        (f"none={tmp_path}/none", f"none: {tmp_path}/none: it is not a folder"),
        (f"demo={PIRATE}", "the model itself"),
    ):
        with pytest.raises(SettingsError, match=words) as caught:
            check_adapters(settings(f"pirate={PIRATE}", module))
        assert caught.value.flag == "--lora-modules"
