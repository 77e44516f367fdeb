"""A PEFT folder is taken whole or refused with a reason that names the tensor or the field (FT-12)."""

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tandem.workers.lora.peft import peft_folder
from tandem.workers.lora.peft.adapter_check import AdapterChecker
from tandem.workers.lora.peft.peft_config import matches, parse_config
from tandem.workers.lora.peft.peft_folder import (
    CONFIG_FILE,
    WEIGHT_FILE,
    adapted_linears,
    adapter_digest,
    read_adapter,
)
from tandem.workers.messages.errors import AdapterRefused
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "down_proj"],
    "base_model_name_or_path": "somebody/else",
}
MAX_RANK = 8
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def spec() -> ArchSpec:
    return load_spec(DEMO / "model")


def tensors_for(spec: ArchSpec, rank: int = 4, targets: tuple[str, ...] = ("q_proj", "down_proj")) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in adapted_linears(spec).items():
        if name.endswith(targets):
            tensors[f"base_model.model.{name}.lora_A.weight"] = rng.normal(size=(rank, shape.inputs)).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_B.weight"] = rng.normal(size=(shape.outputs, rank)).astype(
                np.float32
            )
    return tensors


def write(folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / WEIGHT_FILE)
    return folder


@pytest.fixture
def folder(tmp_path: Path, spec: ArchSpec) -> Path:
    return write(tmp_path / "adapter", tensors_for(spec))


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the header of the weight file, the data as it is."""
    data = (folder / WEIGHT_FILE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / WEIGHT_FILE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def refusal(folder: Path, spec: ArchSpec) -> str:
    with pytest.raises(AdapterRefused) as refused:
        read_adapter(folder, spec, MAX_RANK)
    return str(refused.value)


# ---- what is taken ----


def test_the_bundled_adapters_are_fine(spec: ArchSpec) -> None:
    for name, rank in (("pirate", 8), ("shout", 16)):
        facts = read_adapter(DEMO / "adapters" / name, spec, 16).facts
        assert len(facts.modules) == 7 * spec.num_layers and {module.rank for module in facts.modules} == {rank}
        assert facts.base_model == "tandem-demo" and {module.scale for module in facts.modules} == {2.0}


def test_facts_have_the_content(folder: Path, spec: ArchSpec) -> None:
    adapter = read_adapter(folder, spec, MAX_RANK)
    facts = adapter.facts
    assert [module.name for module in facts.modules[:2]] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
    ]
    module = facts.modules[0]
    assert (module.rank, module.scale, module.a.shape, module.b.shape) == (4, 2.0, (4, 256), (256, 4))
    assert adapter.bytes_of(module.a).tobytes() == tensors_for(spec)[Q0.format("A")].tobytes()
    assert facts.weight_bytes == sum(tensor.nbytes for tensor in tensors_for(spec).values())
    assert facts.digest == adapter_digest(folder) and len(facts.digest) == 64


def test_the_digest_is_of_what_decides_numbers(folder: Path, spec: ArchSpec) -> None:
    before = adapter_digest(folder)
    write(folder, tensors_for(spec), base_model_name_or_path="other", peft_version="9", lora_alpha=8.0)
    assert adapter_digest(folder) == before
    for change in ({"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1}}):
        write(folder, tensors_for(spec), **change)
        assert adapter_digest(folder) != before, change
    write(folder, tensors_for(spec))
    data = bytearray((folder / WEIGHT_FILE).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHT_FILE).write_bytes(bytes(data))
    assert adapter_digest(folder) != before


@pytest.mark.parametrize(
    ("pattern", "module", "fits"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("self_attn.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("_proj", "model.layers.0.self_attn.q_proj", False),
        ("^self_attn.q_proj", "model.layers.0.self_attn.q_proj", False),
        ("^model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", True),
        (r".*\.q_proj", "model.layers.0.self_attn.q_proj", True),
        (".*_proj", "model.layers.0.self_attn.q_proj", True),
        ("layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", False),
    ],
)
def test_patterns_match_as_peft_matches_them(pattern: str, module: str, fits: bool) -> None:
    from peft.utils.other import get_pattern_key

    assert matches(pattern, module) == fits
    assert (get_pattern_key([pattern], module) == pattern) == fits


# ---- files ----


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, spec: ArchSpec, kept: int) -> None:
    data = (folder / WEIGHT_FILE).read_bytes()
    (folder / WEIGHT_FILE).write_bytes(data[:kept])
    assert WEIGHT_FILE in refusal(folder, spec)


def test_a_longer_file_is_refused(folder: Path, spec: ArchSpec) -> None:
    with (folder / WEIGHT_FILE).open("ab") as file:
        file.write(b"\0")
    assert "its header names" in refusal(folder, spec)


@pytest.mark.parametrize("length", [2**62, 2**32, 10**8])
def test_a_huge_header_is_refused_unread(folder: Path, spec: ArchSpec, length: int) -> None:
    data = (folder / WEIGHT_FILE).read_bytes()
    (folder / WEIGHT_FILE).write_bytes(struct.pack("<Q", length) + data[8:])
    os.truncate(folder / WEIGHT_FILE, 10**9)  # sparse: room for such a header, if anyone believed it
    assert f"claims a header of {length}" in refusal(folder, spec)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"r": NaN}', b'{"r": 1, "r": 2}', b"[" * 100_000, b"\xff", b'"x"'])
def test_json_that_is_none_is_refused(folder: Path, spec: ArchSpec, text: bytes) -> None:
    weights = (folder / WEIGHT_FILE).read_bytes()
    (folder / WEIGHT_FILE).write_bytes(struct.pack("<Q", len(text)) + text + weights)
    assert "JSON" in refusal(folder, spec)
    (folder / WEIGHT_FILE).write_bytes(weights)
    (folder / CONFIG_FILE).write_bytes(text)
    assert "JSON" in refusal(folder, spec)


def test_other_files_are_refused_by_name(folder: Path, spec: ArchSpec) -> None:
    (folder / WEIGHT_FILE).rename(folder / "adapter_model.bin")
    assert refusal(folder, spec) == "adapter_model.bin is a pickle: only adapter_model.safetensors is read"
    (folder / "adapter_model.bin").unlink()
    assert refusal(folder, spec) == "it holds no adapter_model.safetensors"
    os.mkfifo(folder / WEIGHT_FILE)
    assert refusal(folder, spec) == f"{WEIGHT_FILE} is not a regular file"
    (folder / CONFIG_FILE).unlink()
    assert refusal(folder, spec) == "it holds no adapter_config.json"
    assert refusal(folder / "none", spec).endswith("is not a folder")


# ---- tensors ----


def test_every_flipped_size_or_offset_is_refused(folder: Path, spec: ArchSpec) -> None:
    name, before = Q0.format("A"), (folder / WEIGHT_FILE).read_bytes()
    changes: list[Callable[[dict[str, Any]], None]] = [
        lambda header: header[name].update(shape=[256, 4]),
        lambda header: header[name].update(shape=[4, 255]),
        lambda header: header[name].update(shape=[4, 256, 1]),
        lambda header: header[name].update(shape=[2**40, 2**40]),
        lambda header: header[name].update(shape=[-4, -256]),
        lambda header: header[name].update(shape=[4.0, 256]),
        lambda header: header[name].update(dtype="F16"),
        lambda header: header[name].update(dtype="F64"),
        lambda header: header[name].update(data_offsets=[0, 4096]),
        lambda header: header[name].update(data_offsets=[-4096, 0]),
        lambda header: header[name].pop("dtype"),
        lambda header: header.update({name: None}),
        lambda header: header.pop(name),
    ]
    for number, change in enumerate(changes):
        (folder / WEIGHT_FILE).write_bytes(before)
        edit_header(folder, change)
        assert "tensor" in refusal(folder, spec), number


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_not_finite_is_refused(tmp_path: Path, spec: ArchSpec, value: float, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    tensors = {name: torch.from_numpy(t).to(getattr(torch, dtype)) for name, t in tensors_for(spec).items()}
    folder = write(tmp_path / "adapter", tensors_for(spec))
    save_torch(tensors, folder / WEIGHT_FILE)
    read_adapter(folder, spec, MAX_RANK)
    tensors[Q0.format("B")][255, 3] = value
    save_torch(tensors, folder / WEIGHT_FILE)
    assert refusal(folder, spec) == f"tensor {Q0.format('B')} holds NaN or infinity"


def test_names_and_pairs(tmp_path: Path, spec: ArchSpec) -> None:
    whole = tensors_for(spec)
    a = Q0.format("A")

    def of(change: Callable[[dict[str, Any]], Any], **config: Any) -> str:
        tensors = dict(whole)
        change(tensors)
        return refusal(write(tmp_path / "adapter", tensors, **config), spec)

    assert of(lambda t: t.pop(a)) == f"tensor {Q0.format('B')} has no A beside it"
    assert "not the A or B" in of(lambda t: t.update({a.replace("lora_A", "lora_magnitude_vector"): t[a]}))
    assert "adapters of experts are not supported" in of(
        lambda t: t.update({a.replace("q_proj", "experts.3.w1"): t[a]})
    )
    assert "layers.9" in of(lambda t: t.update({a.replace("layers.0", "layers.9"): t[a]}))
    assert "embed_tokens" in of(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[a]}))
    assert "has no tensors" not in of(lambda t: t.update({a: t[a][:3]}))
    assert "of rank 3" in of(lambda t: t.update({a: t[a][:3], Q0.format("B"): t[Q0.format("B")][:, :3].copy()}))
    both = (a, Q0.format("B"))
    assert "has no tensors for it" in of(lambda t: [t.pop(name) for name in both])
    assert "does not target it" in of(lambda t: None, target_modules=["q_proj"])
    wide = tensors_for(spec, rank=9)
    assert "--max-lora-rank is 8" in refusal(write(tmp_path / "adapter", wide, r=9), spec)


def test_another_base_is_refused_by_its_shapes(tmp_path: Path, spec: ArchSpec) -> None:
    tensors = tensors_for(spec)
    tensors[Q0.format("A")] = np.zeros((4, 128), np.float32)
    words = refusal(write(tmp_path / "adapter", tensors), spec)
    assert "[4, 128]" in words and "256 inputs and 256 outputs" in words


# ---- the configuration ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("peft_type", "LOHA"),
        ("modules_to_save", ["lm_head"]),
        ("alora_invocation_tokens", [1, 2]),
        ("use_bdlora", {"nblocks": 2}),
        ("ensure_weight_tying", True),
        ("use_a_trick_of_tomorrow", True),
        ("tomorrow_config", {"depth": 2}),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("target_parameters", ["x"]),
        ("use_qalora", True),
        ("r", 0),
        ("r", True),
        ("r", "4"),
        ("lora_alpha", None),
        ("lora_alpha", 10**400),
        ("use_rslora", "yes"),
        ("rank_pattern", [1]),
        ("rank_pattern", {"(a+)+b": 4}),
        ("alpha_pattern", {"q_proj": "x"}),
        ("target_modules", [1]),
        ("layers_to_transform", ["0"]),
        ("base_model_name_or_path", 5),
    ],
)
def test_fields_that_mean_something_else_are_refused_by_name(
    folder: Path, spec: ArchSpec, field: str, value: Any
) -> None:
    write(folder, tensors_for(spec), **{field: value})
    assert field in refusal(folder, spec) or "(a+)+b" in refusal(folder, spec)


TASKS = ("FEATURE_EXTRACTION", "SEQ_2_SEQ_LM", "TOKEN_CLS", "SEQ_CLS", "QUESTION_ANS", None, "absent")


@pytest.mark.parametrize("task", TASKS)
def test_adapters_of_any_task_are_taken_if_their_tensors_are(task: str | None, folder: Path, spec: ArchSpec) -> None:
    expected = read_adapter(folder, spec, MAX_RANK).facts
    config = {key: value for key, value in CONFIG.items() if key != "task_type"}
    (folder / CONFIG_FILE).write_text(json.dumps(config if task == "absent" else {**config, "task_type": task}))
    assert read_adapter(folder, spec, MAX_RANK).facts == expected
    save_file(
        tensors_for(spec) | {"base_model.model.score.weight": np.zeros((2, 256), np.float32)}, folder / WEIGHT_FILE
    )
    assert refusal(folder, spec) == "tensor base_model.model.score.weight is not the A or B of a layer of this model"


def test_unknown_fields_are_not_read_and_named(folder: Path, spec: ArchSpec, caplog: pytest.LogCaptureFixture) -> None:
    """Those of ms-swift, and others of tools that write their settings there; empty ones are no word worth."""
    before = read_adapter(folder, spec, MAX_RANK).facts
    swift = {"lora_dtype": "float16", "lorap_emb_lr": 1e-6, "lorap_lr_ratio": None, "a_field_of_tomorrow": 3}
    write(folder, tensors_for(spec), **swift, monteclora_config=None, use_bdlora=None, fan_in_fan_out=True)
    found = read_adapter(folder, spec, MAX_RANK).facts
    assert (found.digest, found.modules, before.note) == (before.digest, before.modules, None)
    assert found.note == "adapter_config.json: a_field_of_tomorrow, lora_dtype, lorap_emb_lr: not known, not read"
    check = AdapterChecker(spec, MAX_RANK, DEMO / "model", folder.parent)
    assert check(str(folder)) == found.digest
    assert caplog.messages == [f"adapter {folder}: {found.note}"]


@pytest.mark.parametrize("pattern", ["q_proj", "layers.0.self_attn.q_proj", "^layers.0.self_attn.q_proj"])
def test_an_adapter_of_an_embedding_model_lacks_the_prefix(pattern: str, tmp_path: Path) -> None:
    """peft's own, of the model without its head."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    from tests.support.tiny_models import BY_NAME, save_tiny_model

    base = save_tiny_model(BY_NAME["llama-gqa"], tmp_path)
    given = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], task_type="FEATURE_EXTRACTION", rank_pattern={pattern: 2}
    )
    model = get_peft_model(AutoModel.from_pretrained(base), given)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / WEIGHT_FILE)
    assert "base_model.model.layers.0.self_attn.q_proj.lora_A.weight" in saved
    adapter = read_adapter(tmp_path / "adapter", load_spec(base), MAX_RANK)
    assert len(adapter.facts.modules) == len(saved) // 2 == 8
    first = adapter.facts.modules[0]
    assert (first.name, first.rank) == ("model.layers.0.self_attn.q_proj", 2)
    assert adapter.bytes_of(first.a).tobytes() == saved[first.a.name].tobytes()


def test_targets_that_need_a_regular_expression_are_not_run() -> None:
    config = parse_config(json.dumps(CONFIG | {"target_modules": "(a+)+$"}).encode())
    assert config.is_target("a" * 60 + "b") is None


def test_a_config_without_a_peft_type_is_refused() -> None:
    with pytest.raises(AdapterRefused, match="peft_type"):
        parse_config(b'{"r": 4}')


@pytest.mark.parametrize("how", ["another file in its place", "other bytes in it", "cut short"])
def test_content_that_is_swapped_while_it_is_read_is_never_taken_for_the_old(
    folder: Path, spec: ArchSpec, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Between the header and the numbers: what was opened is read on, or what is read is what the digest says."""
    before, path = adapter_digest(folder), folder / WEIGHT_FILE
    numbers = read_adapter(folder, spec, MAX_RANK).data.copy()
    whole = peft_folder._File.fill

    def swap(file: Any, target: memoryview) -> None:
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        if how == "another file in its place":
            path.with_suffix(".new").write_bytes(data)
            path.with_suffix(".new").rename(path)
        elif how == "other bytes in it":
            with path.open("r+b") as same:
                same.write(data)
        else:
            os.truncate(path, len(data) - 100)
        whole(file, target)

    monkeypatch.setattr(peft_folder._File, "fill", swap)
    if how == "cut short":
        assert "ends 100 bytes too early" in refusal(folder, spec)
        return
    adapter = read_adapter(folder, spec, MAX_RANK)
    assert (adapter.facts.digest == before) == np.array_equal(adapter.data, numbers) == (how.startswith("another"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_refused_or_another_adapter(folder: Path, spec: ArchSpec, data: st.DataObject) -> None:
    """Half of the changes are in the header or the configuration. The digest covers every byte of the weight file."""
    write(folder, tensors_for(spec))
    before = adapter_digest(folder)
    name = data.draw(st.sampled_from([CONFIG_FILE, WEIGHT_FILE]))
    content = bytearray((folder / name).read_bytes())
    last = data.draw(st.sampled_from([min(len(content), 2000), len(content)]))
    place = data.draw(st.integers(0, last - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(bytes(content))
    with suppress(AdapterRefused):
        facts = read_adapter(folder, spec, MAX_RANK).facts
        assert name == CONFIG_FILE or facts.digest != before
