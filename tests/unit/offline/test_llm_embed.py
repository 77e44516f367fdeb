"""LLM.embed: vLLM's names, parameters and refusals; the numbers are transformers', with adapters those of the merged
model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem import LLM, PoolingParams, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tests.support.adapters import load_adapted_peer, save_random_adapter
from tests.support.in_process import runner_of
from tests.support.tiny_models import load_peer

TEXTS = ["Once upon a time there was a little girl", "The sun", "What is 2 + 3?"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_num_seqs=4, max_num_batched_tokens=9) as opened:
        yield opened


def pooled(model: Any, token_ids: list[int], kind: str = "last", normalize: bool = True) -> Any:
    with torch.inference_mode():
        hidden_TH = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]
    vector_H = hidden_TH[-1] if kind == "last" else hidden_TH.mean(0)
    return (vector_H / vector_H.norm() if normalize else vector_H).numpy()


def test_numbers_are_those_of_transformers(llm: LLM) -> None:
    peer = load_peer(DEMO_MODEL)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    raw = llm.embed(TEXTS, pooling_params=PoolingParams(normalize=False), use_tqdm=False)
    for text, output, plain in zip(TEXTS, outputs, raw, strict=True):
        assert output.prompt == text and output.finished and output.outputs.error is None
        assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=True)
        assert output.outputs.hidden_size == len(output.outputs.embedding) == peer.config.hidden_size
        np.testing.assert_allclose(output.outputs.embedding, pooled(peer, output.prompt_token_ids), atol=1e-5)
        wanted = pooled(peer, output.prompt_token_ids, normalize=False)
        np.testing.assert_allclose(plain.outputs.embedding, wanted, atol=2e-4)


def test_adapters_are_those_of_merged_models(tmp_path: Path) -> None:
    """Three prompts in one batch, each with its own adapter or none; last and mean."""
    folders = [save_random_adapter(DEMO_MODEL, tmp_path / str(n), rank=8, seed=n) for n in range(2)]
    ids = [[5, 6, 7, 8, 9, 10, 11, 12, 13]] * 3
    peers = [load_peer(DEMO_MODEL), *(load_adapted_peer(DEMO_MODEL, folder) for folder in folders)]
    for kind in ("LAST", "MEAN"):
        config = {"pooling_type": kind}
        with LLM("demo", dtype="float32", enable_lora=True, max_num_batched_tokens=5, max_num_seqs=3,
                 pooler_config=config) as llm:  # fmt: skip
            refs = [None, *(llm.load_adapter(folder) for folder in folders)]
            outputs = llm.embed(ids, lora_request=refs, use_tqdm=False)
        vectors = [output.outputs.embedding for output in outputs]
        for vector, peer in zip(vectors, peers, strict=True):
            np.testing.assert_allclose(vector, pooled(peer, ids[0], kind.lower()), atol=1e-5)
        assert not np.allclose(vectors[0], vectors[1], atol=1e-2) and not np.allclose(vectors[1], vectors[2], atol=1e-2)


def test_steps_that_are_replayed_give_the_same() -> None:
    """Prompts of one token look like decodes to a rank, which captures and replays their steps."""
    with LLM("demo", dtype="bfloat16", max_num_seqs=4) as llm:
        graphs: Any = runner_of(llm._executor)._model.graphs  # type: ignore[attr-defined]
        outputs = llm.embed([[5 + i % 4] for i in range(40)], use_tqdm=False)
        if not graphs.can_replay:
            pytest.skip("no kernels here")
    assert graphs.num_replays > 2
    for i, output in enumerate(outputs):
        np.testing.assert_allclose(output.outputs.embedding, outputs[i % 4].outputs.embedding, atol=1e-3)
    assert not np.allclose(outputs[0].outputs.embedding, outputs[1].outputs.embedding, atol=1e-2)


def test_text_and_ids_and_generation_between_them(llm: LLM) -> None:
    (by_text,) = llm.embed(TEXTS[0], use_tqdm=False)
    llm.generate(TEXTS[0], SamplingParams(max_tokens=3), use_tqdm=False)
    by_ids = llm.embed([by_text.prompt_token_ids, [5]], use_tqdm=False)
    np.testing.assert_allclose(by_ids[0].outputs.embedding, by_text.outputs.embedding, atol=1e-5)
    assert by_ids[0].prompt is None and by_ids[1].prompt_token_ids == [5]


def test_a_prompt_that_cannot_be_served_says_why_and_the_others_run(llm: LLM) -> None:
    long, empty, wrong, good = llm.embed([[5] * 100_000, [], [10**6], [5]], use_tqdm=False)
    assert "context" in str(long.outputs.error) and "no tokens" in str(empty.outputs.error)
    assert "prompts" in str(wrong.outputs.error) or "vocabulary" in str(wrong.outputs.error)
    assert good.outputs.error is None and good.outputs.embedding
    assert all(output.finished and not output.outputs.embedding for output in (long, empty, wrong))


def test_a_prompt_is_cut_to_its_last_tokens_as_over_rest(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXTS[0], add_special_tokens=True)
    limit = llm._facts.max_model_len
    for keep, kept in ((3, ids[-3:]), (100, ids), (-1, ids), (None, ids)):
        cut = llm.embed([TEXTS[0], ids], truncate_prompt_tokens=keep, use_tqdm=False)
        (wanted,) = llm.embed([kept], use_tqdm=False)
        for output in cut:
            assert output.prompt_token_ids == kept
            np.testing.assert_allclose(output.outputs.embedding, wanted.outputs.embedding, atol=1e-5)
        assert cut[0].prompt == TEXTS[0]
    (long,) = llm.embed([[5] * (limit + 3)], truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(long.prompt_token_ids) == limit and long.outputs.embedding
    for wrong in (0, -2, 1.5, True, "3"):
        with pytest.raises(ValueError, match=f"truncate_prompt_tokens={wrong!r} must be -1 or a whole number"):
            llm.embed(TEXTS, truncate_prompt_tokens=wrong)  # type: ignore[arg-type]


def test_wrong_arguments_raise_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(TypeError, match="pooling_params: 5 is no PoolingParams"):
        llm.embed("x", pooling_params=[5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="2 pooling_params for 1 prompts"):
        llm.embed("x", pooling_params=[PoolingParams()] * 2)
    with pytest.raises(ValueError, match="dimensions=7: this model's embeddings cannot be cut"):
        llm.embed("x", pooling_params=PoolingParams(dimensions=7))
    with pytest.raises(ValueError, match=r"dimensions=1\.5 must be a whole number"):
        llm.embed("x", pooling_params=PoolingParams(dimensions=1.5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="normalize='yes' must be"):
        llm.embed("x", pooling_params=PoolingParams(normalize="yes"))  # type: ignore[arg-type]


def test_matryoshka_cuts_and_normalizes_again(llm: LLM) -> None:
    (whole,) = llm.embed("The sun", use_tqdm=False)
    with LLM("demo", dtype="float32", hf_overrides={"is_matryoshka": True}) as other:
        (cut,) = other.embed("The sun", pooling_params=PoolingParams(dimensions=16), use_tqdm=False)
    wanted = np.array(whole.outputs.embedding[:16])
    np.testing.assert_allclose(cut.outputs.embedding, wanted / np.linalg.norm(wanted), atol=1e-5)


def test_the_models_own_files_choose(tmp_path: Path, llm: LLM) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "1_Pooling").mkdir()
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in
               (("Transformer", ""), ("Pooling", "1_Pooling"))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with LLM(folder, dtype="float32") as other:
        (output,) = other.embed("The sun", use_tqdm=False)
    wanted = pooled(load_peer(DEMO_MODEL), output.prompt_token_ids, "mean", normalize=False)
    np.testing.assert_allclose(output.outputs.embedding, wanted, atol=2e-4)


def test_a_wrong_pooler_config_is_refused_before_the_weights_are_read() -> None:
    with pytest.raises(SettingsError, match="pooling_type 'CLS' is not one of LAST, MEAN"):
        LLM("demo", pooler_config={"pooling_type": "CLS"})


def test_after_close_it_raises() -> None:
    opened = LLM("demo")
    opened.close()
    with pytest.raises(RuntimeError, match="closed"):
        opened.embed("x")
