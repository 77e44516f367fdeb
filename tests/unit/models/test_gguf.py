"""GGUF files: values of all kinds of blocks, which file is served, what is refused, and texts like the checkpoint's."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem import LLM, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param, Source
from tandem.parallel.quantization.layouts.gguf_blocks import FORMS, GgufBlocks
from tandem.parallel.stored.gguf_header import read_gguf
from tandem.parallel.stored.gguf_kinds import BY_NAME
from tandem.parallel.stored.headers import weight_files
from tandem.workers.gguf.gguf_folder import gguf_folder
from tandem.workers.lora.peft.base_tables import read_rows
from tandem.workers.messages.errors import AdapterRefused
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.model_source import has_model, model_digest, model_here, pin_model
from tandem.workers.planning.resolve import fingerprint, read_spec
from tests.support.gguf_files import metadata_of, save_gguf, write_gguf
from tests.unit.text.test_gguf_vocabulary import of_bytes

SCALES = (0.125, 0.0625)
PLACES = (0, 1, 31, 32, 77, 128, 200, 255)
VALUES: dict[str, tuple[tuple[int, ...], list[float], float]] = {
    "Q4_0": ((0,), [-0.875, 0.0, -0.5, 0.0, -0.25, 0.25, 0.0, -0.875], 119.25),
    "Q4_1": ((0, 2), [1.9375, 1.9375, 1.3125, 0.6875, 0.3125, 1.6875, 1.1875, 1.4375], 259.0),
    "Q5_0": ((0,), [1.75, 1.625, -1.125, 1.5, 1.0, 1.75, -0.375, 1.0], 260.0),
    "Q5_1": ((0, 2), [2.5625, 1.3125, 3.1875, 2.4375, 1.3125, 1.0625, 0.5625, 2.6875], 516.0),
    "Q8_0": ((0,), [6.875, 0.625, -10.625, 0.125, 5.0, -9.0, -12.125, -10.75], 2053.0),
    "Q2_K": ((80, 82), [0.75, 2.75, 0.0, 2.125, -0.0625, -0.125, -0.875, -0.5625], 225.5),
    "Q3_K": ((108,), [-0.0, 0.0, -4.5, -2.25, 10.5, 3.875, -0.0, 2.875], 1111.5),
    "Q4_K": ((0, 2), [3.25, 1.75, -0.75, 99.875, 15.9375, 18.4375, 65.9375, 6.375], 7200.375),
    "Q5_K": ((0, 2), [77.375, 107.375, 87.375, 28.4375, 1.5625, 4.4375, 129.9375, 53.3125], 15747.625),
    "Q6_K": ((208,), [2.0, 14.0, -124.5, -5.0, -305.0, -49.375, -18.0, 14.5], 30959.25),
    "IQ4_NL": ((0,), [4.75, 11.125, 4.75, 6.625, -4.375, -4.375, -4.375, -6.125], 1749.375),
    "IQ4_XS": ((0,), [-65.0, 38.0, 69.0, -189.875, -34.125, -333.75, 26.25, 72.875], 26029.75),
}
"""Of 256 elements of random bytes, in which the floats at these places are SCALES: elements at PLACES, and the sum of
all without signs, as package gguf 0.19.0 (ggml's own) undoes them."""


def test_a_generation_config_beside_the_file_goes_over_the_headers(tmp_path: Path) -> None:
    file, _ = save_gguf(DEMO_MODEL, tmp_path / "m.gguf", lambda name: "BF16", of_demo())
    own = json.loads((gguf_folder(file) / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2}')
    assert json.loads((gguf_folder(file) / "generation_config.json").read_text()) == {**own, "temperature": 0.2}
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(SettingsError, match=r"generation_config\.json is not JSON"):
        gguf_folder(file)


@pytest.mark.parametrize("kind", VALUES)
def test_blocks_stand_for_what_ggml_says(kind: str) -> None:
    assert list(VALUES) == list(FORMS)
    at, elements, total = VALUES[kind]
    size, width = BY_NAME[kind].elements, BY_NAME[kind].bytes
    data = bytearray(random.Random(kind).randbytes(256 // size * width))
    for block in range(256 // size):
        for place, scale in zip(at, SCALES, strict=False):
            data[block * width + place : block * width + place + 2] = np.float16(scale).tobytes()
    layout = GgufBlocks(kind)
    weight = Param(name="a.weight", shape=(1, 256), role="a", source=Source(("a.weight",)), scheme=layout.scheme)
    found = layout.coded(weight, [torch.frombuffer(data, dtype=torch.uint8)[None]], Mesh()).dense_OI()[0]
    assert [found[place].item() for place in PLACES] == pytest.approx(elements, rel=1e-6, abs=1e-7)
    assert found.abs().sum().item() == pytest.approx(total, rel=1e-6)


# ---- which file is served ----


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model as GGUF, alone in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("demo")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        file, _ = save_gguf(DEMO_MODEL, folder / "demo.gguf", lambda name: "BF16", of_demo())
        alone = folder / "alone"
        alone.mkdir()
        yield file.rename(alone / file.name)


def of_demo() -> dict[str, Any]:
    template = (DEMO_MODEL / "chat_template.jinja").read_text()
    text = of_bytes(DEMO_MODEL, "smollm", eos_token_id=2, padding_token_id=0)
    return {**text, "tokenizer.chat_template": template}


def test_texts_are_those_of_the_checkpoint_that_it_was_made_of(demo: Path) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0)
    texts = []
    for model in (demo, demo.parent, DEMO_MODEL):
        with LLM(str(model), device="cpu", max_model_len=256, gpu_memory_utilization=0.02) as llm:
            prompts = ["The sky", "1 2 3"]
            texts.append([one.outputs[0].text for one in llm.generate(prompts, greedy)])
            texts[-1].append(llm.chat([{"role": "user", "content": "Hi"}], greedy)[0].outputs[0].text)
    assert texts[0] == texts[1] == texts[2]


def test_a_file_a_folder_and_the_flags_name_the_same_model(demo: Path) -> None:
    for model in (
        ModelSettings(model=str(demo)),
        ModelSettings(model=str(demo.parent)),
        ModelSettings(model=str(demo), load_format="gguf", quantization="gguf"),
    ):
        pinned = pin_model(model)
        assert pinned.model == str(demo) and pinned.revision is None and has_model(pinned)
        assert pinned.served_model_name == (model.model,)
        here = model_here(pinned)
        assert weight_files(Path(here.model)) == [demo]
        spec = read_spec(EngineSettings(model=here))
        assert (spec.architecture, spec.torch_dtype, spec.weights.words) == ("LlamaForCausalLM", "bfloat16", "")
    pinned = pin_model(ModelSettings(model=str(demo)))
    other = replace(pinned, tokenizer=str(DEMO_MODEL))
    assert len(model_digest(pinned)) == 16 and model_digest(pinned) != model_digest(other)
    assert not has_model(replace(pinned, model=f"{demo}x"))
    assert refusal(Path("model.gguf")) == "MODEL MODEL: model.gguf: no such file"


def test_numbers_of_blocks_are_dense_and_become_int8_at_load(demo: Path) -> None:
    """Only a file of blocks is quantized already."""
    here = model_here(pin_model(ModelSettings(model=str(demo))))
    assert load_spec(here.model, quantization="int8").weights.words == "int8"
    assert load_spec(here.model, quantization="gguf").weights.schemes == ()
    with pytest.raises(SettingsError, match=r"--quantization: awq: .*gguf"):
        load_spec(here.model, quantization="awq")


def test_tables_of_adapters_are_not_compared_with_blocks(demo: Path) -> None:
    with pytest.raises(AdapterRefused, match="the model's weights are GGUF"):
        read_rows(gguf_folder(demo), ("model.embed_tokens.weight",), [0])


def test_a_file_that_was_replaced_is_read_anew(demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(demo.read_bytes())
    settings = EngineSettings(model=model_here(pin_model(ModelSettings(model=str(file)))))
    first = fingerprint(Path(settings.model.model), settings)
    data = bytearray(file.read_bytes())
    data[-40_000:-30_000] = bytes(10_000)
    file.write_bytes(data)
    again = EngineSettings(model=model_here(pin_model(ModelSettings(model=str(file)))))
    assert again.model.model != settings.model.model
    assert fingerprint(Path(again.model.model), again) != first


def refusal(model: Path, **more: Any) -> str:
    with pytest.raises(SettingsError) as error:
        model_here(pin_model(ModelSettings(model=str(model), **more)))
    return f"{error.value.flag} {error.value}"


def test_folders_with_several_models(demo: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(demo.read_bytes())
    words = refusal(tmp_path)
    assert "several models in GGUF: a.gguf, b-00001-of-00002.gguf; name one, such as" in words
    (tmp_path / "model.safetensors").touch()
    assert pin_model(ModelSettings(model=str(tmp_path))).model == str(tmp_path)  # safetensors come first
    (tmp_path / "a.gguf").unlink()
    assert pin_model(ModelSettings(model=str(tmp_path), load_format="gguf")).model.endswith("b-00001-of-00002.gguf")
    (tmp_path / "b-00002-of-00002.gguf").unlink()
    assert "is one of 2 files, of which b-00002-of-00002.gguf is not beside it" in refusal(tmp_path, load_format="gguf")


def test_load_format_gguf_without_gguf(tmp_path: Path) -> None:
    assert "--load-format: gguf: " in refusal(DEMO_MODEL, load_format="gguf")
    assert "holds no GGUF file, but safetensors" in refusal(DEMO_MODEL, load_format="gguf")
    assert "demo is no GGUF file, and no folder that holds one" in refusal(Path("demo"), load_format="gguf")
    with pytest.raises(SettingsError, match=r"--quantization: gguf: the checkpoint's weights are not quantized"):
        load_spec(DEMO_MODEL, quantization="gguf")


# ---- what is refused ----

CONFIG = {
    "model_type": "llama", "max_position_embeddings": 64, "hidden_size": 256, "num_hidden_layers": 1, "head_dim": 64,
    "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
}  # fmt: skip
TABLE = ("token_embd.weight", "F32", (8, 256), bytes(8 * 1024))


def of(name: str) -> dict[str, Any]:
    """The metadata of CONFIG as that of another architecture."""
    found = {key.replace("llama.", f"{name}."): value for key, value in metadata_of(CONFIG).items()}
    return {**found, "general.architecture": name}


REFUSED: list[tuple[dict[str, Any], list[Any], str]] = [
    ({"general.architecture": "mamba"}, [], "GGUF of the architecture 'mamba' is not read; read are llama, qwen2"),
    ({"general.architecture": "granitemoe"}, [], "'granitemoe' is not read; .*from their checkpoints in safe"),
    ({"general.type": "adapter"}, [], "is GGUF of a adapter, not of a model"),
    ({"llama.expert_count": 8}, [], "llama.expert_used_count is None, want a number"),
    ({**of("granite"), "granite.rope.scaling.finetuned": False}, [], "granite.rope.scaling.finetuned is false"),
    (of("granite"), [], "granite.embedding_scale is None, want a number"),
    ({**of("qwen3"), "qwen3.expert_count": 8}, [], "qwen3.expert_count is 8, which is not read"),
    ({"llama.attention.head_count_kv": [4, 2]}, [], r"head_count_kv is \[4, 2\], want a positive integer for all"),
    ({"llama.rope.dimension_count": 32}, [], "dimension_count is 32, where a head has 64 elements"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, [], "'longrope', read: linear, yarn"),
    ({"llama.attention.causal": False}, [], "causal is false"),
    (
        {},
        [("output.weight", "IQ2_XXS", (8, 256), bytes(8 * 66))],
        r"is IQ2_XXS, which is not read, .*: .*llama-quantize",
    ),
    ({}, [("rope_freqs.weight", "F32", (32,), struct.pack("<32f", *range(1, 33)))], "others are not read"),
]


@pytest.mark.parametrize(("changes", "more", "words"), REFUSED)
def test_what_is_not_read_is_refused_by_name(
    changes: dict[str, Any], more: list[Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", {**metadata_of(CONFIG), **changes}, [TABLE, *more])
    with pytest.raises(SettingsError, match=words):
        model_here(pin_model(ModelSettings(model=str(tmp_path / "m.gguf"))))


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:count]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"GGML" + data[4:], "it does not begin as one"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], r"its version is 1, want one of \(2, 3\)"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (cut(100), "is cut off within its header"),
        (cut(-1), "is cut off: it has"),
        (cut(0), "not a GGUF file"),
        (
            lambda data: data.replace(b"\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"\x0d\0\0\0\x05\0\0\0\0\0\0\0llama"),
            "type 13",
        ),
    ],
)
def test_files_that_are_no_gguf(change: Callable[[bytes], bytes], words: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, metadata_of(CONFIG), [TABLE])
    assert read_gguf(file).tensors["token_embd.weight"].shape == (8, 256)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(SettingsError, match=words):
        read_gguf(file)


def test_a_folder_for_what_is_made_that_cannot_be_written(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME names another folder" in refusal(demo)
