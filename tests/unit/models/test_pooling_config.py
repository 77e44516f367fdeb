"""How a model pools: from --pooler-config, from sentence-transformers' files, by default; what is refused, by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.workers.messages.request import Pool
from tandem.workers.models.spec.config.config_reader import spec_from_config
from tandem.workers.models.spec.config.pooling_config import PoolingFacts, read_pooling

SIZE = 64


def module(name: str, path: str = "") -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{name}"}


def folder_of(path: Path, modules: list[dict[str, Any]] | None = None, pooling: Any = None, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


PLAIN = [module("Transformer"), module("Pooling", "1_Pooling")]
NORMALIZED = [*PLAIN, module("Normalize", "2_Normalize")]
OLD = {"word_embedding_dimension": SIZE, "pooling_mode_cls_token": False, "include_prompt": True}


@pytest.mark.parametrize(
    ("modules", "pooling", "given", "wanted"),
    [
        (None, None, None, ("last", True)),
        (None, None, {"pooling_type": "MEAN"}, ("mean", True)),
        (None, None, {"seq_pooling_type": "MEAN", "use_activation": False}, ("mean", False)),
        (None, None, {"normalize": False}, ("last", False)),
        (NORMALIZED, {**OLD, "pooling_mode_lasttoken": True}, None, ("last", True)),
        (PLAIN, {**OLD, "pooling_mode_mean_tokens": True}, None, ("mean", False)),
        (NORMALIZED, {"pooling_mode": "mean"}, None, ("mean", True)),
        (NORMALIZED, {"pooling_mode": ["lasttoken"]}, None, ("last", True)),
        (PLAIN, {"pooling_mode": "mean"}, {"normalize": True}, ("mean", True)),
        (PLAIN, {"pooling_mode": "mean"}, {"pooling_type": "LAST"}, ("last", True)),
        (NORMALIZED, {"pooling_mode": "cls"}, {"pooling_type": "LAST", "normalize": None}, ("last", True)),
        ([module("Transformer")], None, None, ("last", False)),
    ],
)
def test_the_flag_wins_then_the_folder_then_the_last_token(
    tmp_path: Path, modules: Any, pooling: Any, given: Any, wanted: tuple[str, bool]
) -> None:
    facts = read_pooling(folder_of(tmp_path, modules, pooling), SIZE, {}, given)
    assert (facts.kind, facts.normalize, facts.size, facts.dimensions) == (*wanted, SIZE, None)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (PLAIN, {**OLD, "pooling_mode_cls_token": True}, "pooling mode cls_token is not supported"),
        (PLAIN, {"pooling_mode": "weightedmean"}, "pooling mode weightedmean is not supported"),
        (PLAIN, {"pooling_mode": ["mean", "max"]}, "pooling mode mean, max is not supported"),
        (PLAIN, {"pooling_mode": 5}, "pooling mode 5 is not supported"),
        (PLAIN, {"pooling_mode": [["mean"]]}, r"pooling mode \['mean'\] is not supported"),
        (PLAIN, OLD, "pooling mode none is not supported"),
        ([*PLAIN, module("Dense", "2_Dense")], {"pooling_mode": "mean"}, "module Dense is not supported"),
    ],
)
def test_other_pooling_is_refused_by_name_with_the_flag_that_helps(
    tmp_path: Path, modules: Any, pooling: Any, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as refused:
        read_pooling(folder_of(tmp_path, modules, pooling), SIZE, {})
    assert refused.value.flag == "--pooler-config" and str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pooling_type": "CLS"}, "pooling_type 'CLS' is not one of LAST, MEAN"),
        ({"pooling_type": ["MEAN"]}, r"pooling_type \['MEAN'\] is not one of LAST, MEAN"),
        ({"normalize": "yes"}, "normalize 'yes' must be true or false"),
        ({"enable_chunked_processing": True}, "enable_chunked_processing is not supported; supported: pooling_type"),
    ],
)
def test_a_wrong_flag_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        read_pooling(folder_of(tmp_path), SIZE, {}, given)
    assert refused.value.flag == "--pooler-config"


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path, PLAIN)
    with pytest.raises(SettingsError, match=r"cannot read .*1_Pooling"):
        read_pooling(tmp_path, SIZE, {})
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"modules\.json is not a JSON list"):
        read_pooling(tmp_path, SIZE, {})
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(SettingsError, match=r"modules\.json is not JSON"):
        read_pooling(tmp_path, SIZE, {})


@pytest.mark.parametrize(
    ("config", "overrides", "dimensions"),
    [
        ({}, {}, None),
        ({"is_matryoshka": True}, {}, ()),
        ({}, {"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [8, 16]}, {}, (8, 16)),
        ({"is_matryoshka": True}, {"is_matryoshka": False}, None),
    ],
)
def test_matryoshka(tmp_path: Path, config: Any, overrides: Any, dimensions: Any) -> None:
    assert read_pooling(folder_of(tmp_path, **config), SIZE, overrides).dimensions == dimensions


def test_matryoshka_dimensions_lie_within_the_model(tmp_path: Path) -> None:
    for wrong in ([], [0], [65], "8"):
        with pytest.raises(UnsupportedModelError, match="matryoshka_dimensions"):
            read_pooling(folder_of(tmp_path, matryoshka_dimensions=wrong), SIZE, {})
    with pytest.raises(UnsupportedModelError, match=r"^--hf-overrides: matryoshka_dimensions"):
        read_pooling(folder_of(tmp_path), SIZE, {"matryoshka_dimensions": [65]})


def test_a_request_asks_within_these_facts() -> None:
    facts = PoolingFacts(size=SIZE, kind="mean", normalize=False, dimensions=(8,))
    assert facts.pool() == Pool(kind="mean", normalize=False)
    assert facts.pool(dimensions=8, normalize=True) == Pool(kind="mean", normalize=True, dimensions=8)
    with pytest.raises(ValueError, match="this model has 8"):
        facts.pool(dimensions=9)
    with pytest.raises(ValueError, match="1 to 64"):
        PoolingFacts(size=SIZE, dimensions=()).pool(dimensions=65)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is an encoder: Tandem serves decoders"),
        ({"architectures": ["XLMRobertaModel"]}, "XLMRobertaModel is an encoder: Tandem serves decoders"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "is_causal False is not supported"),
    ],
)
def test_encoders_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config(config)
