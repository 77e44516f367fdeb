"""Writes docs/models.md, the page of supported models, from the registry of families.

    make model-table

tests/unit/tools/test_model_table.py holds the page up to date, and each cell by the tests that its column names.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.workers.models.spec.family import Family
from tandem.workers.models.spec.family_rows.families import FAMILIES
from tandem.workers.models.spec.parameter_names import Role

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
NAMES: Mapping[str, str] = {
    "LlamaForCausalLM": "Llama 1 to 3.x, SmolLM 1 and 2, TinyLlama",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small",
    "MinistralForCausalLM": "Ministral",
    "Qwen2ForCausalLM": "Qwen 1.5, 2 and 2.5",
    "Qwen3ForCausalLM": "Qwen 3",
    "SmolLM3ForCausalLM": "SmolLM 3",
    "Phi3ForCausalLM": "Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4 mini",
    "GraniteForCausalLM": "Granite 3.x",
    "OlmoForCausalLM": "OLMo 1",
    "Olmo2ForCausalLM": "OLMo 2",
    "StableLmForCausalLM": "StableLM 2, 3B, 12B",
    "CohereForCausalLM": "Command R, Command R+, Aya",
    "GemmaForCausalLM": "Gemma 1",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3, text only",
    "MixtralForCausalLM": "Mixtral",
    "Qwen2MoeForCausalLM": "Qwen 1.5 MoE, Qwen 2 57B-A14B",
    "Qwen3MoeForCausalLM": "Qwen 3 30B-A3B, 235B-A22B",
    "GraniteMoeForCausalLM": "Granite 3.x 1B-A400M, 3B-A800M",
    "DeepseekV2ForCausalLM": "DeepSeek-V2, V2-Lite, V2.5",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, R1",
    "GptOssForCausalLM": "gpt-oss",
    "GPT2LMHeadModel": "GPT-2",
    "BloomForCausalLM": "BLOOM, BLOOMZ",
    "Starcoder2ForCausalLM": "StarCoder 2",
    "GPTNeoXForCausalLM": "GPT-NeoX, Pythia",
    "GPTJForCausalLM": "GPT-J",
    "OPTForCausalLM": "OPT",
    "FalconForCausalLM": "Falcon 7B, 40B, 180B, RW",
    "MptForCausalLM": "MPT",
}
HEAD = """# Models

<!-- Written by tools/model_table.py (make model-table). -->

A model is served if its `config.json` names one of these architectures. What a `config.json` asks for and Tandem does
not compute is refused when the service starts, by key and value; so are weights that are neither bf16,
fp16 or float32 nor [quantized in a way that is read](serving/quantized.md), where a table has each form of weights
with ranks, experts, adapters, drafts, streamed layers and KV tiers.
RoPE scaling may be linear, dynamic, llama3, yarn or longrope, in old and new spellings. Which of longrope's factors
apply is decided once, by `--max-model-len`, as in vLLM; `transformers` decides it for each prompt by its length.

✓ means that tests with tiny random models of the family pass. `transformers` is the judge: logits within 2e-5 of the
largest one and 64 greedy tokens, in float32
(`tests/parity/test_decoder_logits.py`), in chunks and in any blocks
(`test_decoder_steps.py`). The columns are:

- **TP × PP**, tensor and pipeline parallel ranks (`test_decoder_parallel.py`).
- **EP**, whole experts on each rank, `--enable-expert-parallel` (`test_decoder_parallel.py`).
- **LoRA**, adapters on all linear layers, against PEFT (`test_lora_logits.py`).
- **Offload**: n-gram drafts, preemption, KV in host memory, streamed weights and prefix hits at once
  (`test_families_served.py`), and weights of all layers streamed (`test_streamed_layers.py`).

`make test` compares logits and tokens of every family, and runs the rest for some; `make parity` runs all of it.

"""


def _rows() -> Iterator[tuple[str, ...]]:
    yield ("Models", "Architecture", "TP × PP", "EP", "LoRA", "Offload", "Accepted with these values only")
    yield ("---",) * 7
    for family in sorted(FAMILIES, key=lambda family: NAMES[family.architecture].lower()):
        architecture = family.architecture
        names = ", ".join(f"`{name}`" for name in (architecture, *family.aliases))
        yield NAMES[architecture], names, "✓", ep_cell(family), lora_cell(family), "✓", _neutral(family)


def ep_cell(family: Family) -> str:
    """Whether whole experts may be on a rank, or the error's words."""
    return "refused: no experts" if family.moe is None else "✓"


def lora_cell(family: Family) -> str:
    """Which linear layers adapters may change, and the error's words for others."""
    if family.latent:
        refused = family.names.stems[Role.KV_B].rpartition(".")[2]
        return f"attention; refused: adapters of experts, adapters of {refused}"
    return "✓" if family.moe is None else "attention; refused: adapters of experts"


def _neutral(family: Family) -> str:
    """The keys of its own of which some values are refused."""
    keys = [f"`{key}` {_value(values)}" for key, values in family.neutral.items()]
    keys += [f"`{key}` equal to `{other}`" for key, other in family.equal.items()]
    return ", ".join(keys)


def _value(values: tuple[object, ...]) -> str:
    given = [value for value in values if value is not None]
    return str(given[0]).lower() if given else "null"


def page() -> str:
    """Returns the page."""
    return HEAD + "\n".join(f"| {' | '.join(cells)} |" for cells in _rows()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
