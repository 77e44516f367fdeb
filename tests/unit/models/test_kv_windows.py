"""How layers with windows are divided into groups, for models as they are published."""

from typing import Any

import pytest

from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.config.config_reader import spec_from_config
from tandem.workers.models.spec.kv_layout import block_layouts, kv_layouts, kv_windows
from tandem.workers.planning.sizes import kv_token_bytes

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 5376,
    "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 1024, "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 168, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 32768, "sliding_window": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "max_model_len", "windows"),
    [
        ({}, 32768, (None, *[1024] * 6)),
        ({}, 1024, (None,)),
        ({"num_hidden_layers": 26}, 32768, (None, *[1024] * 6)),
        ({"num_hidden_layers": 48}, 32768, (None, *[1024] * 5)),
        ({"layer_types": ["sliding_attention", "full_attention"] * 31}, 32768, (None, 1024)),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"] * 4, "num_hidden_layers": 9}, 4096,
         (None, 1024)),
        ({"layer_types": ["sliding_attention"] * 23 + ["full_attention"], "num_hidden_layers": 24}, 4096,
         (None, *[1024] * 6)),
    ],
)  # fmt: skip
def test_groups_have_about_as_many_layers_each(
    changes: dict[str, Any], max_model_len: int, windows: tuple[int | None, ...]
) -> None:
    assert kv_windows(spec_from_config(GEMMA3 | changes), max_model_len) == windows


def test_a_window_on_every_layer_is_one_group() -> None:
    assert kv_windows(spec_from_config(MISTRAL), 32768) == (4096,)
    assert kv_windows(spec_from_config(MISTRAL), 4096) == (None,)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_block_has_room_for_the_largest_group_of_each_stage(stages: int) -> None:
    spec = spec_from_config(GEMMA3)
    windows = kv_windows(spec, 32768)
    for stage in range(stages):
        mesh = Mesh(1, stages, stage)
        layouts = kv_layouts(spec, mesh, windows)
        first = sum(len(kv_layouts(spec, Mesh(1, stages, before))) for before in range(stage))
        for layer, layout in enumerate(layouts, first):
            assert windows[layout.group] == spec.layers[layer].params.window
        largest = max([layout.group for layout in layouts].count(group) for group in range(len(windows)))
        assert len(block_layouts(layouts)) == largest <= -(-11 // stages)
        whole = kv_token_bytes(spec, mesh, "bfloat16")
        assert kv_token_bytes(spec, mesh, "bfloat16", windows) * len(layouts) == whole * largest
