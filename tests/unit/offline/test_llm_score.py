"""LLM.score: pairs and arguments of both kinds of models. Numbers are those of transformers in
tests/parity/test_scores.py."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, PoolingParams, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import UnsupportedModelError
from tandem.workers.text.tokenizer import load_tokenizer

NO, YES, CONTEXT, NEAR = 300, 400, 64, 1e-4
QUERY, DOCUMENTS = "Who has a boat?", ["The cat sleeps.", "Tom has a boat.", "A boat"]
TEMPLATE = "{{ messages[0].role }}: {{ messages[0].content }}\n{{ messages[1].role }}: {{ messages[1].content }}"
RAW = PoolingParams(use_activation=False)


@pytest.fixture(scope="module")
def judge() -> Iterator[LLM]:
    """The demo model, served as a classifier of two of its tokens."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    tokens = [tokenizer.piece(token_id) for token_id in (NO, YES)]
    overrides = {"classifier_from_token": tokens, "method": "from_2_way_softmax"}
    with LLM("demo", dtype="float32", max_model_len=CONTEXT, enable_lora=True, hf_overrides=overrides) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_model_len=CONTEXT) as opened:
        yield opened


def logits(llm: LLM, *pair: Any, **more: Any) -> list[float]:
    return [output.outputs.score for output in llm.score(*pair, pooling_params=RAW, use_tqdm=False, **more)]


def difference(llm: LLM, prompt: Any, **more: Any) -> float:
    """Of the two tokens' logits behind a prompt, by generate()."""
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=(NO, YES))
    (found,) = llm.generate(prompt, params, use_tqdm=False, **more)[0].outputs[0].logprobs
    return found[YES].logprob - found[NO].logprob


def test_a_pair_is_one_prompt(judge: LLM) -> None:
    found = judge.score(QUERY, DOCUMENTS, use_tqdm=False)
    wanted = [difference(judge, QUERY + text) for text in DOCUMENTS]
    assert [output.outputs.score for output in found] == pytest.approx(
        [1 / (1 + math.exp(-x)) for x in wanted], abs=NEAR
    )
    assert logits(judge, QUERY, DOCUMENTS) == pytest.approx(wanted, abs=NEAR) and len(set(wanted)) == 3
    old = judge.score(QUERY, DOCUMENTS, pooling_params=PoolingParams(activation=False), use_tqdm=False)
    assert [output.outputs.score for output in old] == pytest.approx(wanted, abs=NEAR)
    assert found[0].prompt_token_ids == judge.tokenizer.encode(QUERY + DOCUMENTS[0], add_special_tokens=True)
    ids = judge.tokenizer.encode(DOCUMENTS[1], add_special_tokens=True)
    pairs = [QUERY, {"prompt": "A"}], [{"prompt_token_ids": ids}, "boat"]
    assert logits(judge, *pairs) == pytest.approx([wanted[1], difference(judge, "Aboat")], abs=NEAR)


def test_a_template_sees_both_and_an_adapter_counts(judge: LLM, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jinja"
    file.write_text(TEMPLATE)
    wanted = difference(judge, f"query: {QUERY}\ndocument: A boat")
    for given in (TEMPLATE, str(file)):
        assert logits(judge, QUERY, "A boat", chat_template=given) == pytest.approx([wanted], abs=NEAR)
    pirate = judge.load_adapter(DEMO_MODEL.parent / "adapters" / "pirate")
    adapted = difference(judge, f"{QUERY}A boat", lora_request=pirate)
    assert logits(judge, QUERY, "A boat", lora_request=pirate) == pytest.approx([adapted], abs=NEAR)
    assert abs(adapted - difference(judge, f"{QUERY}A boat")) > 0.01
    refused = judge.score(QUERY, "A", chat_template="{{ raise_exception('no pairs') }}", use_tqdm=False)
    assert "no pairs" in str(refused[0].outputs.error) and refused[0].outputs.score == 0


def test_a_prompt_leaves_room_for_the_token_behind_it(judge: LLM) -> None:
    ids = judge.tokenizer.encode(QUERY + "a boat " * 99, add_special_tokens=True)
    long, good = judge.score([QUERY, QUERY], ["a boat " * 99, "A boat"], use_tqdm=False)
    assert str(CONTEXT) in str(long.outputs.error) and good.outputs.error is None and good.outputs.score > 0
    for keep, kept in ((-1, CONTEXT - 1), (CONTEXT - 1, CONTEXT - 1), (5, 5)):
        (cut,) = judge.score(QUERY, "a boat " * 99, truncate_prompt_tokens=keep, use_tqdm=False)
        assert cut.outputs.error is None and cut.prompt_token_ids == ids[-kept:]
    (beyond,) = judge.score(QUERY, "a boat " * 99, truncate_prompt_tokens=CONTEXT, use_tqdm=False)
    assert len(beyond.prompt_token_ids) == CONTEXT and str(CONTEXT) in str(beyond.outputs.error)


SALTS: tuple[Any, Any] = ({"prompt": "a", "cache_salt": "x"}, {"prompt": "b", "cache_salt": "y"})
OF_ALL: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (("a", "b"), {"pooling_params": {"use_activation": True}}, TypeError, "is no PoolingParams; write PoolingParams"),
    (("a", "b"), {"pooling_params": [RAW]}, TypeError, "pooling_params: .PoolingParams.* is no PoolingParams"),
    (("a", "b"), {"lora_request": "pirate"}, TypeError, "lora_request: 'pirate' is not what load_adapter"),
    (("a", "b"), {"chat_template": 5}, TypeError, "chat_template: 5 is no text"),
    (("a", "b"), {"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens=0 must be -1 or"),
    (("a", 5), {}, TypeError, "a prompt is text or a list of token ids, not 5"),
    ((["a", "b"], ["a", "b", "c"]), {}, ValueError, "2 prompts cannot be paired with 3"),
    (("a", "b"), {"pooling_params": PoolingParams(use_activation=1)}, ValueError, "use_activation=1 must be True or"),  # type: ignore[arg-type]
    (("a", "b"), {"pooling_params": PoolingParams(use_activation=True, activation=False)}, ValueError,
     "use_activation=True and activation=False exclude each other"),
]  # fmt: skip
OF_JUDGES: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (("a", "b"), {"pooling_params": PoolingParams(dimensions=5)}, ValueError, "dimensions=5 is of embeddings"),
    (("a", "b"), {"pooling_params": PoolingParams(normalize=True)}, ValueError, "normalize=True is of embeddings"),
    (("a", "b"), {"chat_template": "none.jinja"}, ValueError, "chat_template: 'none.jinja' is no file"),
    (SALTS, {}, ValueError, "cache_salt: 'x' and 'y' are of one pair"),
]


def test_arguments_without_meaning_are_refused_by_name(judge: LLM, plain: LLM) -> None:
    for llm, cases in ((judge, [*OF_ALL, *OF_JUDGES]), (plain, OF_ALL)):
        for pair, more, kind, words in cases:
            with pytest.raises(kind, match=words):
                llm.score(*pair, use_tqdm=False, **more)
    with pytest.raises(ValueError, match="chat_template='x': this model compares embeddings and judges no pairs"):
        plain.score("a", "b", chat_template="x")


def test_a_way_to_judge_that_is_not_served_is_refused_at_the_start() -> None:
    overrides = {"classifier_from_token": ["no", "yes"], "method": "no_post_processing"}
    with pytest.raises(UnsupportedModelError, match="method 'no_post_processing'"):
        LLM("demo", hf_overrides=overrides)


def test_scores_of_embeddings_take_the_same_names(plain: LLM) -> None:
    one, other = plain.embed(["a", "b"], use_tqdm=False, pooling_params=RAW)
    assert math.hypot(*one.outputs.embedding) != pytest.approx(1), "use_activation=False: not normalized"
    same, differs = plain.score("a", ["a", "b"], use_tqdm=False, pooling_params=RAW)
    assert same.outputs.score == pytest.approx(1) and differs.outputs.score < 0.999
    assert differs.prompt_token_ids == [*one.prompt_token_ids, *other.prompt_token_ids]
