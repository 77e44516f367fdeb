"""Whether a checkpoint's head is the embedding's table: what is compared, and that bytes are predicted by it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.parallel.mesh import Mesh
from tandem.parallel.stored import equal_values
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.planner import Memory, plan_group
from tandem.workers.planning.sizes import rank_weights
from tandem.workers.planning.start_notes import model_notes, warn_of_model
from tandem.workers.planning.stored_model import open_checkpoint
from tests.support.own_heads import save_own_head
from tests.support.tiny_models import BY_NAME
from tests.unit.models.test_sizes import rank_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_own_head(BY_NAME["llama-gqa"], tmp_path)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> Tensors:
    """Replaces tensors, by `head` and `embedding`; None takes one away."""
    names = {"head": HEAD, "embedding": EMBEDDING}
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        tensors.pop(names[key], None)
        if value is not None:
            tensors[names[key]] = value.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def halves(folder: Path) -> None:
    """Cuts the checkpoint into two files with an index, one table in each."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"b.safetensors": {HEAD: tensors.pop(HEAD)}, "a.safetensors": tensors}
    for name, part in parts.items():
        save_file(part, folder / name)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def is_tied(folder: Path) -> bool:
    spec = load_spec(folder)
    assert spec.tie_word_embeddings == (not spec.remarks)
    return spec.tie_word_embeddings


def test_only_an_equal_head_is_tied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_values, "PIECE_ELEMENTS", 1000)
    table = load_file(folder / "model.safetensors")[EMBEDDING].to(torch.bfloat16)
    last = table.clone()
    last[-1, -1] += 1
    zeros = torch.zeros_like(table)
    heads = {"same": table, "as float32": table.float(), "last number": last, "other rows": table.roll(1, 0)}
    rewrite(folder, embedding=table)
    found = {}
    for name, head in heads.items():
        rewrite(folder, head=head)
        found[name] = is_tied(folder)
    assert found == {"same": True, "as float32": True, "last number": False, "other rows": False}
    rewrite(folder, embedding=zeros, head=-zeros)
    assert is_tied(folder), "numbers are compared, not bytes"


def test_files_as_they_are_published(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    assert not is_tied(folder), "names without the prefix of the base model"
    save_file(tensors, folder / "model.safetensors")
    halves(folder)
    assert not is_tied(folder), "in files of their own"
    (folder / "b.safetensors").unlink()
    assert is_tied(folder), "as config.json says where weights are not all here"
    with pytest.raises(SettingsError, match=r"cannot read .*b\.safetensors"):
        open_checkpoint(folder, load_spec(folder))


def test_one_table_alone_serves_as_both(folder: Path) -> None:
    for missing in ("head", "embedding"):
        rewrite(folder, **{missing: None})
        assert is_tied(folder) and open_checkpoint(folder, load_spec(folder))
        rewrite(folder, head=torch.ones(203, 64), embedding=torch.zeros(203, 64))


def test_a_head_of_another_shape_is_refused(folder: Path) -> None:
    rewrite(folder, head=torch.ones(200, 64))
    with pytest.raises(SettingsError, match=r"tensor lm_head.weight has shape \[200, 64\], config.json makes it"):
        open_checkpoint(folder, load_spec(folder))


def test_no_head_where_config_says_there_is_one_is_refused(folder: Path) -> None:
    rewrite(folder, head=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(SettingsError, match=r"tensor lm_head\.weight is in none of its safetensors files"):
        open_checkpoint(folder, load_spec(folder))


@pytest.mark.parametrize(
    ("mesh", "quantization"), [(Mesh(), None), (Mesh(2, 1, 1), None), (Mesh(1, 2, 1), "int8")], ids=str
)
def test_plan_counts_the_bytes_that_are_held(folder: Path, mesh: Mesh, quantization: Any) -> None:
    spec = load_spec(folder, quantization=quantization)
    held = rank_of(spec, folder, mesh, torch.float16).weight_bytes
    assert rank_weights(spec, mesh, 2, packs=False).total_bytes == held


def plan_notes(folder: Path, spec: ArchSpec) -> tuple[str, ...]:
    settings = build_settings(str(folder), {}).engine
    return plan_group(settings, spec, Memory("cpu", 2**33), "bfloat16", "bfloat16", 256).notes


def test_the_start_and_the_plan_say_so_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings, spec = build_settings(str(folder), {}).engine, load_spec(folder)
    [line] = model_notes(settings, spec)
    assert line.startswith("lm_head.weight is stored with other values than model.embed_tokens.weight: the model keeps")
    assert plan_notes(folder, spec) == (line,)
    warn_of_model(settings, spec, logging.getLogger("test"))
    assert caplog.messages == [line]
