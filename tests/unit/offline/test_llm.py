"""LLM: the offline API, on the bundled demo model. Texts are the demo's; equality between ways of asking is ours."""

import json
import math
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tandem import LLM, BeamSearchParams, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tandem.workers.messages.sampling_check import RANGES
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.offline.outputs import Completion

GREEDY = SamplingParams(max_tokens=40, temperature=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_num_seqs=8) as opened:
        yield opened


def ask(llm: LLM, text: str, params: SamplingParams = GREEDY) -> str:
    return llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)[0].text


def test_chat_answers(llm: LLM) -> None:
    assert "5" in ask(llm, "What is 2 + 3?")
    assert ask(llm, "Count from 3 to 9.") == "3, 4, 5, 6, 7, 8, 9"


def test_many_at_once_equal_one_by_one(llm: LLM) -> None:
    prompts = [f"Once upon a time there was a {animal}" for animal in ("cat", "dog", "bird", "fish", "bear")] * 4
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts[:5]]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone] * 4


def test_without_max_tokens_an_answer_has_at_most_16_as_in_vllm(llm: LLM) -> None:
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (16, "length")


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    by_text = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0]
    by_ids = llm.generate(by_text.prompt_token_ids, GREEDY, use_tqdm=False)[0]
    assert by_text.text == by_ids.text
    assert by_ids.prompt is None


def test_a_seed_gives_the_same_text_whoever_else_runs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=7, n=3)
    first = llm.generate("Once upon a time", params, use_tqdm=False)[0]
    crowd = llm.generate(["Hello there", "Once upon a time", "One day"], [GREEDY, params, GREEDY], use_tqdm=False)[1]
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in crowd.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) > 1


def test_stop_string_ends_the_text_before_it_and_bills_no_more(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].text
    stop = whole[10:14]
    cut = llm.generate("Once upon a time", SamplingParams(max_tokens=40, temperature=0, stop=(stop,)), use_tqdm=False)[
        0
    ]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"
    assert len(cut.outputs[0].token_ids) < 40


def test_logprobs_are_vllms_dicts_with_the_chosen_token_first(llm: LLM) -> None:
    plain = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0]
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None, None)
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=3, prompt_logprobs=2)
    output = llm.generate("Once upon a time", params, use_tqdm=False)[0]
    done = output.outputs[0]
    assert done.logprobs is not None and [next(iter(one)) for one in done.logprobs] == done.token_ids
    for one in done.logprobs:
        assert [each.rank for each in one.values()] == [1, 2, 3]
        assert [each.logprob for each in one.values()] == sorted((each.logprob for each in one.values()), reverse=True)
    assert "".join(str(one[token].decoded_token) for one, token in zip(done.logprobs, done.token_ids, strict=True)) == (
        done.text
    )
    first, *others = output.prompt_logprobs or []
    assert first is None and len(others) == len(output.prompt_token_ids) - 1
    for shown, token in zip(others, output.prompt_token_ids[1:], strict=True):
        assert shown is not None and next(iter(shown)) == token and len(shown) in (2, 3)
        assert isinstance(shown[token].rank, int) and (len(shown) == 2) == (shown[token].rank <= 2)


def test_a_chosen_token_that_is_none_of_the_best_has_its_rank(llm: LLM) -> None:
    best = llm.generate("Once", GREEDY.clone(max_tokens=1, logprobs=20), use_tqdm=False)[0].outputs[0].logprobs[0]
    seventh = list(best)[6]
    params = GREEDY.clone(max_tokens=1, logprobs=2, allowed_token_ids=[seventh], detokenize=False)
    (found,) = llm.generate("Once", params, use_tqdm=False)[0].outputs[0].logprobs
    assert list(found) == [seventh, *list(best)[:2]]
    assert [one.rank for one in found.values()] == [7, 1, 2]
    assert {one.decoded_token for one in found.values()} == {None} != {best[seventh].decoded_token}
    assert found[seventh].logprob == best[seventh].logprob


def test_max_logprobs_is_vllms() -> None:
    with LLM("demo", max_logprobs=-1, max_model_len=64) as all_of_them:
        params = SamplingParams(max_tokens=1, logprobs=all_of_them._facts.vocab_size)
        (found,) = all_of_them.generate("Once", params, use_tqdm=False)[0].outputs[0].logprobs
        assert len(found) == params.logprobs
    with LLM("demo", max_logprobs=3, max_model_len=64) as few:
        with pytest.raises(ValueError, match=r"logprobs=4 exceeds the limit of 3 \(max_logprobs\)"):
            few.generate("Once", SamplingParams(logprobs=4), use_tqdm=False)
        with pytest.raises(ValueError, match="beam_width=2 exceeds the limit of 1, half of max_logprobs"):
            few.beam_search("Once", BeamSearchParams(beam_width=2, max_tokens=4))


def test_a_prompt_that_does_not_fit_fails_alone(llm: LLM) -> None:
    outputs = llm.generate([[5] * 100_000, "Once upon a time", [10**6]], GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "error"]
    assert "100000" in str(outputs[0].outputs[0].error)
    assert "1000000" in str(outputs[2].outputs[0].error)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logprobs": 9999}, r"logprobs=9999 exceeds the limit of 20 \(max_logprobs\)"),
        ({"prompt_logprobs": 21}, r"prompt_logprobs=21 exceeds the limit of 20 \(max_logprobs\)"),
        ({"stop_token_ids": (1, 10**6)}, "stop_token_ids: token id 1000000 is outside the vocabulary, 0 to"),
        ({"logit_bias": ((10**6, 1.0),)}, "logit_bias: token id 1000000 is outside"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias: token id 1000000 is outside"),
        ({"allowed_token_ids": (1, 10**6)}, "allowed_token_ids: token id 1000000 is outside the vocabulary, 0 to"),
        ({"bad_words_token_ids": ((1, 10**6),)}, "bad_words_token_ids: token id 1000000 is outside"),
        ({"grammar": "root ::= 'a'"}, "grammar is made from structured_outputs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_parameters_that_the_model_cannot_take_are_refused_by_name(
    llm: LLM, params: dict[str, Any], words: str
) -> None:
    bad = SamplingParams(**{"max_tokens": 8, **params})
    with pytest.raises(ValueError, match=f"^{words}"):
        llm.generate("Once upon a time", bad, use_tqdm=False)
    with pytest.raises(ValueError, match=f"^{words}"):
        llm.generate(["Once upon a time", "Hello"], [GREEDY, bad], use_tqdm=False)
    assert not llm._engine.has_work(), "nothing has begun"


def test_parameters_that_no_constructor_has_seen_are_checked(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^temperature=9: Expected `float` <= 2\.0"):
        llm.generate("Once upon a time", msgspec.structs.replace(GREEDY, temperature=9), use_tqdm=False)


def test_every_parameter_has_its_range(llm: LLM) -> None:
    assert {*RANGES, "grammar", "structured_outputs"} == set(SamplingParams.__struct_fields__)
    odd = SamplingParams(max_tokens=4, temperature=0, top_k=-1, stop=["zzz"], logit_bias=((5, -math.inf),))  # type: ignore[arg-type]
    assert llm.generate("Once upon a time", odd, use_tqdm=False)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("inside", [True, False])
def test_thinking_has_its_budget_and_then_its_end_mark(llm: LLM, inside: bool) -> None:
    start, end = (301,), (302, 303)
    budget = ThinkingBudget(tokens=5, start=start, end=end, inside=inside)
    free = llm.generate("Once upon a time", SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)[0]
    params = SamplingParams(max_tokens=12, temperature=0, n=2, thinking_budget=budget)
    for output in llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs:
        if inside:
            assert output.token_ids[:5] == free.outputs[0].token_ids[:5]
            assert tuple(output.token_ids[5:7]) == end and not set(end) & set(output.token_ids[7:])
        else:
            assert output.token_ids == free.outputs[0].token_ids


def test_what_vllm_takes_for_a_tuple_is_taken(llm: LLM) -> None:
    text = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].text
    stop, (first, *_) = text[5:8], llm.tokenizer.encode(text, add_special_tokens=False)
    for ours, theirs in (
        ({"stop": (stop,)}, {"stop": stop}),
        ({"logit_bias": ((first, -math.inf), (5, 3.0))}, {"logit_bias": {np.int64(first): -math.inf, 5: 3}}),
        ({}, {"stop": None, "stop_token_ids": None, "logit_bias": None, "bad_words": None}),
    ):
        texts = [
            llm.generate("Once upon a time", SamplingParams(max_tokens=20, temperature=0, **more), use_tqdm=False)[
                0
            ].text  # type: ignore[arg-type]
            for more in (ours, theirs)
        ]
        assert texts[0] == texts[1]
        assert not ours or texts[0] != text


def test_bad_words_are_not_written_and_only_allowed_tokens_are(llm: LLM) -> None:
    """In one batch; a word of one token and one of several, inside a text and at its start."""
    prompt = "Once upon a time there was a"
    plain = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
    first, *_ = words = [word for word in plain.text.split() if word.isalpha()][:3]
    assert len(words) == 3
    digits = [llm.tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "37"]
    without = SamplingParams(max_tokens=40, temperature=0, bad_words=tuple(words))
    by_ids = llm.tokenizer.encode(f" {first}", add_special_tokens=False)
    without_one = SamplingParams(max_tokens=40, temperature=0, bad_words_token_ids=(tuple(by_ids),))
    only = SamplingParams(max_tokens=9, temperature=1.0, seed=1, allowed_token_ids=tuple(digits))
    texts = llm.generate([prompt] * 4, [without, without_one, only, GREEDY], use_tqdm=False)
    answers = [text.outputs[0] for text in texts]
    assert not set(words) & set(answers[0].text.split())
    assert first not in answers[1].text.split()
    assert len(answers[2].token_ids) == 9 and set(answers[2].token_ids) <= set(digits)
    assert answers[3].token_ids == plain.token_ids


def test_a_request_that_forbids_every_token_fails_alone_and_says_why(llm: LLM) -> None:
    (token,) = llm.tokenizer.encode("3", add_special_tokens=False)[:1]
    nothing = SamplingParams(max_tokens=9, temperature=0, allowed_token_ids=(token,), bad_words_token_ids=((token,),))
    drawn = SamplingParams(max_tokens=9, seed=1, allowed_token_ids=(token,), logit_bias=((token, -math.inf),))
    outputs = llm.generate(["Once upon a time"] * 3, [nothing, drawn, GREEDY], use_tqdm=False)
    plain = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0]
    for output in outputs[:2]:
        assert output.outputs[0].finish_reason == "error"
        assert "every token is forbidden" in str(output.outputs[0].error)
    assert outputs[2].outputs[0].token_ids == plain.outputs[0].token_ids


def test_the_text_includes_what_ended_it_if_asked_for(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].text
    stop, include = whole[10:14], {"max_tokens": 40, "temperature": 0, "include_stop_str_in_output": True}
    cut = llm.generate("Once upon a time", SamplingParams(stop=(stop,), **include), use_tqdm=False)[0]  # type: ignore[arg-type]
    assert cut.text == whole[: whole.index(stop) + len(stop)]
    assert ask(llm, "What is 2 + 3?", SamplingParams(**include)) == ask(llm, "What is 2 + 3?")  # type: ignore[arg-type]
    shown = ask(llm, "What is 2 + 3?", SamplingParams(skip_special_tokens=False, **include))  # type: ignore[arg-type]
    assert shown.removeprefix(ask(llm, "What is 2 + 3?")) == "<|im_end|>"


NO_PROMPTS: list[Any] = [
    [None], [["a"]], [[True]], 5, [5, "a"], [5, True], b"abc", [b"abc"], [{5}], np.array(5), np.array([0.5]),
    np.array([True]), [np.array([[5, 6]])], {"prompt_token_ids": "a"}, [{"prompt_token_ids": [0.5]}],
]  # fmt: skip


@pytest.mark.parametrize("prompts", NO_PROMPTS, ids=repr)
def test_what_is_no_prompt_is_a_type_error(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="a prompt is text or a list of token ids, not"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


BAD_MAPPINGS: list[tuple[dict[str, Any], str]] = [
    ({}, "needs the key prompt or prompt_token_ids"),
    ({"prompt": None}, "needs the key prompt or prompt_token_ids"),
    ({"cache_salt": "x"}, "needs the key prompt or prompt_token_ids"),
    ({"prompt": "a", "multi_modal_data": {}}, "has no key 'multi_modal_data'; it may have prompt, prompt_token_ids"),
    ({"prompt_ids": [5]}, "has no key 'prompt_ids'"),
    ({"prompt": [5]}, r"the key prompt of a prompt is text, not \[5\]"),
    ({"prompt": "a", "cache_salt": 5}, "the key cache_salt of a prompt is text, not 5"),
]


@pytest.mark.parametrize(("mapping", "words"), BAD_MAPPINGS, ids=str)
def test_keys_of_a_prompt_that_cannot_be_honoured_are_named(llm: LLM, mapping: Any, words: str) -> None:
    for prompts in (mapping, ["Once upon a time", mapping]):
        with pytest.raises(TypeError, match=words):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not llm._engine.has_work(), "nothing has begun"


def test_mappings_are_prompts_as_in_vllm(llm: LLM) -> None:
    plain = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0]
    ids = plain.prompt_token_ids
    mixed: list[Any] = [
        {"prompt": "Once upon a time"},
        "Once upon a time",
        {"prompt_token_ids": np.array(ids)},
        ids,
        {"prompt_token_ids": ids, "prompt": "as it was written"},
        {"prompt": "Once upon a time", "multi_modal_data": None, "mm_processor_kwargs": None},
    ]
    outputs = llm.generate(mixed, GREEDY, use_tqdm=False)
    assert [output.text for output in outputs] == [plain.text] * len(mixed)
    assert [output.prompt_token_ids for output in outputs] == [ids] * len(mixed)
    words = ["Once upon a time"] * 2 + [None, None, "as it was written", "Once upon a time"]
    assert [output.prompt for output in outputs] == words
    for one in mixed:
        assert llm.generate(one, GREEDY, use_tqdm=False)[0].text == plain.text


def test_a_salt_hides_the_prefix_from_others(llm: LLM) -> None:
    prompt = "A prompt with a salt, which is long enough for several blocks of the cache to be full of it. " * 3
    cached = [
        llm.generate({"prompt": prompt, "cache_salt": salt}, GREEDY, use_tqdm=False)[0].cached_tokens
        for salt in ("a", "b", "a")
    ]
    assert cached[:2] == [0, 0] and cached[2] > 0


PARTS = [
    {"type": "text", "text": "What is"},
    {"type": "text", "text": "2 + 3?", "cache_control": {"type": "ephemeral"}},
]
CALL = {"id": "c1", "index": 0, "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
SAME: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "user", "content": PARTS}], [{"role": "user", "content": "What is\n2 + 3?"}]),
    ([{"role": "developer", "content": "Be short.", "id": "m"}], [{"role": "system", "content": "Be short."}]),
    (
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}],
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "null"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}],
    ),
    ([{"role": "tool", "content": None}], [{"role": "tool", "content": ""}]),
]


@pytest.mark.parametrize(("messages", "plain"), SAME)
def test_messages_are_read_as_the_service_reads_them(llm: LLM, messages: Any, plain: Any) -> None:
    last = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([[*messages, *last], [*plain, *last]], GREEDY.clone(max_tokens=1), use_tqdm=False)
    assert [output.outputs[0].error for output in outputs] == [None, None]
    assert outputs[0].prompt == outputs[1].prompt


BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"role": "user"}, "A message of role user must have content."),
    ({"content": "x"}, "messages[0].role must be a text such as user, not None."),
    ({"role": "user", "content": 5}, "messages[0].content must be a text or a list of parts, not 5."),
    ({"role": "user", "content": [{"type": "image_url"}]}, 'Content of type "image_url" is not supported'),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text must be a text, not None."),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "must be JSON, not"),
    ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function must name a function."),
    ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls must be a list of calls."),
]


@pytest.mark.parametrize(("message", "words"), BAD_MESSAGES, ids=[words for _, words in BAD_MESSAGES])
def test_a_message_that_cannot_be_read_fails_its_conversation_alone(llm: LLM, message: Any, words: str) -> None:
    (output,) = llm.chat([[message]], GREEDY, use_tqdm=False)
    assert words in str(output.outputs[0].error)


def test_a_chat_takes_vllms_arguments(llm: LLM) -> None:
    begun = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "2 + 3 ="}]
    go_on: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(begun, GREEDY, use_tqdm=False, **go_on)
    assert str(output.prompt).endswith("2 + 3 =") and output.text.strip().startswith("5")
    (bare,) = llm.chat(begun[:1], GREEDY.clone(max_tokens=1), use_tqdm=False, add_generation_prompt=False)
    assert "assistant" not in str(bare.prompt)
    (own,) = llm.chat(begun, GREEDY, use_tqdm=False, chat_template="{{ messages[0]['content'] }}!")
    marked = [{**begun[0], "prefix": "!"}]
    (read,) = llm.chat(marked, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content + messages[0].prefix }}")
    assert read.prompt_token_ids == own.prompt_token_ids, "a template may read fields of its own"
    assert own.prompt == "What is 2 + 3?!"
    shown = llm.chat(begun[:1], GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    assert shown[0].text == ask(llm, "What is 2 + 3?"), "there is nothing to switch"
    with pytest.raises(ValueError, match="continue_final_message=True needs add_generation_prompt=False"):
        llm.chat(begun, GREEDY, continue_final_message=True)
    with pytest.raises(ValueError, match="chat_template: 'no-such' is no file, and no text of a template"):
        llm.chat(begun, GREEDY, chat_template="no-such")


def test_what_scripts_of_vllm_call_first(llm: LLM) -> None:
    outputs = llm.generate(["A", "B"], GREEDY, use_tqdm=False, priority=[1, 0])
    assert int(outputs[1].request_id) == int(outputs[0].request_id) + 1 and all(one.finished for one in outputs)
    theirs = llm.get_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    shown = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt == shown
    assert theirs(shown)["input_ids"] == llm.tokenizer.encode(shown, add_special_tokens=True)
    for wrong, error in (([0], ValueError), ([0, "x"], TypeError), ([True, 0], TypeError)):
        with pytest.raises(error, match="priorit"):
            llm.generate(["A", "B"], GREEDY, use_tqdm=False, priority=wrong)  # type: ignore[arg-type]


def test_token_ids_without_text(llm: LLM) -> None:
    text = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0]
    ids = llm.generate("Once upon a time", GREEDY.clone(detokenize=False), use_tqdm=False)[0].outputs[0]
    assert (ids.text, ids.token_ids) == ("", text.token_ids)
    with pytest.raises(ValueError, match="needs detokenize=True"):
        llm.generate("A", GREEDY.clone(detokenize=False, stop="x"), use_tqdm=False)
    with pytest.raises(TypeError, match="extra_args"):
        SamplingParams(extra_args=None)  # type: ignore[call-arg]


def test_log_probabilities_of_named_tokens(llm: LLM) -> None:
    every = llm.generate("Once", GREEDY.clone(max_tokens=2, logprobs=20), use_tqdm=False)[0].outputs[0]
    named = (every.token_ids[1], every.token_ids[0], 5)
    some = llm.generate("Once", GREEDY.clone(max_tokens=2, logprob_token_ids=named), use_tqdm=False)[0].outputs[0]
    assert some.token_ids == every.token_ids and some.logprobs is not None and every.logprobs is not None
    for found, all_of_them in zip(some.logprobs, every.logprobs, strict=True):
        assert set(found) == set(named) and next(iter(found)) == next(iter(all_of_them))
        assert [one.rank for one in found.values()] == [1, None, None], "nobody has counted for tokens that are named"
        assert all(found[token].logprob == all_of_them[token].logprob for token in found.keys() & all_of_them)


def test_the_prefix_cache_is_not_read_and_is_reset(llm: LLM) -> None:
    prompt = "A prompt that is asked again and again, and which is longer than several blocks of the cache. " * 3
    fresh = GREEDY.clone(skip_reading_prefix_cache=True)
    assert [llm.generate(prompt, one, use_tqdm=False)[0].cached_tokens > 0 for one in (GREEDY, GREEDY, fresh)] == [
        False,
        True,
        False,
    ]
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    values = {value.name: value for value in llm.get_metrics()}
    assert values["tandem:generation_tokens_total"].kind == "counter"
    seconds = values["tandem:e2e_request_latency_seconds"]
    assert seconds.count == seconds.buckets["+Inf"] > 3 and seconds.value > 0


@pytest.mark.parametrize("messages", ["hi", [["hi"]], [5], {"role": "user"}])
def test_what_is_no_conversation_is_a_type_error(llm: LLM, messages: Any) -> None:
    with pytest.raises(TypeError, match="a conversation is a list of messages, not"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_other_arguments_of_a_wrong_kind_are_named(llm: LLM) -> None:
    wrong: Any = "nope"
    with pytest.raises(TypeError, match="lora_request: 'n' is not what load_adapter"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, lora_request=wrong)
    for given, words in (
        ([GREEDY, wrong], "sampling_params: 'nope' is no SamplingParams"),
        (wrong, "sampling_params: 'nope' is no SamplingParams"),
        (5, "sampling_params: 5 is no SamplingParams"),
        ({"temperature": 0}, r"sampling_params: {'temperature': 0} is no SamplingParams; write SamplingParams"),
        ([GREEDY, {"temprature": 0}], "is no SamplingParams, which has no 'temprature'"),
    ):
        with pytest.raises(TypeError, match=words):
            llm.generate(["a", "b"], given, use_tqdm=False)  # type: ignore[arg-type]
    assert not llm._engine.has_work(), "nothing has begun"


def test_a_conversation_that_the_template_refuses_fails_alone(llm: LLM) -> None:
    good = [{"role": "user", "content": "What is 2 + 3?"}]
    outputs = llm.chat([good, [{"role": "foo", "content": "hi"}], good], GREEDY, use_tqdm=False)
    assert [bool(o.text) for o in outputs] == [True, False, True]
    assert outputs[1].outputs[0].finish_reason == "error" and "foo" in str(outputs[1].outputs[0].error)


def test_a_closed_llm_raises() -> None:
    llm = LLM("demo", dtype="float32", max_model_len=128)
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("a", GREEDY, use_tqdm=False)


def test_numbers_of_numpy_are_numbers(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=8, temperature=0.5, seed=7, stop_token_ids=(1, 2))
    numpys: dict[str, Any] = {"temperature": np.float64(0.5), "seed": np.int64(7), "stop_token_ids": range(1, 3)}
    texts = [
        llm.generate("Once upon a time", params, use_tqdm=False)[0].text
        for params in (plain, SamplingParams(max_tokens=8, **numpys))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "prompts",
    [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), [np.int64(5), np.int32(6), 7], [[5, 6, 7]], np.array([[5, 6, 7]])],
    ids=repr,
)
def test_token_ids_of_any_library_are_a_prompt(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [5, 6, 7] and all(type(i) is int for i in output.prompt_token_ids)
    assert output.outputs[0].error is None


def test_several_arrays_are_several_prompts(llm: LLM) -> None:
    outputs = llm.generate(np.arange(6).reshape(2, 3), GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[0, 1, 2], [3, 4, 5]]
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    columns = llm.generate(torch.tensor([[5], [6]]), GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in columns] == [[5], [6]], "an array of one id is no id"
    with pytest.raises(TypeError, match="a prompt is text or a list of token ids"):
        llm.generate(torch.tensor([True, False]), GREEDY, use_tqdm=False)


def test_more_tokens_than_the_context_holds_end_with_it(llm: LLM) -> None:
    context = llm._facts.max_model_len
    endless = SamplingParams(max_tokens=10 * context, temperature=0, ignore_eos=True)
    (done,) = llm.generate([[5] * (context - 8)], endless, use_tqdm=False)[0].outputs
    assert (len(done.token_ids), done.finish_reason, done.error) == (8, "length", None)


def test_a_conversation_without_messages_fails_alone(llm: LLM) -> None:
    good = [{"role": "user", "content": "What is 2 + 3?"}]
    outputs = llm.chat([good, []], GREEDY, use_tqdm=False)
    assert "5" in outputs[0].text
    assert (outputs[1].outputs[0].finish_reason, outputs[1].outputs[0].error) == (
        "error",
        "The conversation has no messages.",
    )
    assert llm.chat([], GREEDY, use_tqdm=False) == [], "no conversations, no answers"


def test_a_pool_below_one_context_has_a_note_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    small: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "block_size": 16, "max_model_len": 100}
    with LLM("demo", **small, num_gpu_blocks_override=7):
        assert "blocks" not in caplog.text
    with LLM("demo", **small, num_gpu_blocks_override=4) as short:
        endless = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        (done,) = short.generate([5] * 10, endless, use_tqdm=False)[0].outputs
    assert (len(done.token_ids), done.finish_reason) == (65 - 10, "length")
    [warning] = [record.getMessage() for record in caplog.records if "blocks" in record.getMessage()]
    assert warning.startswith("--num-gpu-blocks-override 4 holds 64 tokens, less than one context of 100")
    assert "end at 65 tokens; 7 blocks would hold it all" in warning


def test_prefix_is_found_again(llm: LLM) -> None:
    prompt = "Once upon a time there was a very small boat that went out to sea and came back. " * 4
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].cached_tokens > 0


def test_slow_kernels_and_what_helps_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As at the start of a service: here for a CPU that multiplies bytes, and no pairs of bf16."""
    monkeypatch.setattr("tandem.workers.platforms.cpu.multiplies_by_row", lambda _: True)
    monkeypatch.setattr("tandem.workers.platforms.cpu.obstacle", lambda _: None)
    monkeypatch.setattr("tandem.workers.kernels.cpu.cpu_int8_gemm.int8_kernel", lambda _: object())
    with LLM("demo", dtype="float32", max_num_seqs=2):
        pass
    (said,) = [one for one in caplog.records if "w8a8 is two to four times as fast" in one.getMessage()]
    assert (said.name, said.levelname) == ("tandem.offline", "WARNING")


def test_two_engines_in_one_process(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The second with arguments of vLLM that change nothing here: a line of the log for each says why."""
    foreign: dict[str, Any] = {"cuda_graph_sizes": 8, "swap_space": 4, "disable_log_stats": True}
    with LLM("demo", dtype="float32", max_num_seqs=2, **foreign) as other:
        assert ask(other, "What is 2 + 3?") == ask(llm, "What is 2 + 3?")
    lines = [record.getMessage() for record in caplog.records if record.name == "tandem.offline"]
    assert [any(name.replace("_", "-") in line or name in line for line in lines) for name in foreign] == [True] * 3


def test_a_seed_of_the_llm_makes_a_script_repeatable(caplog: pytest.LogCaptureFixture) -> None:
    """Each prompt has a seed of its own; a request's own seed moves no other."""
    params = SamplingParams(max_tokens=20, temperature=2.0, ignore_eos=True)

    def script(seed: int, second: SamplingParams = params) -> list[list[int]]:
        with LLM("demo", dtype="float32", max_num_seqs=4, seed=seed) as llm:
            calls = [llm.generate(["Once"] * 2, [params, second], use_tqdm=False) for _ in range(2)]
        return [output.outputs[0].token_ids for call in calls for output in call]

    first = script(7)
    assert script(7) == first != script(0) and len({*map(tuple, first)}) == 4
    own = script(7, params.clone(seed=3))
    assert own[0::2] == first[0::2] and own[1] == own[3] and own[1] not in first
    assert not [record for record in caplog.records if "seed" in record.getMessage()]


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_equal_prompts_get_different_texts(llm: LLM, seed: int | None) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, logprobs=0)
    outputs = llm.generate(["Once upon a time"] * 4, params, use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) > 1
    one = outputs[0].outputs[0]
    chosen = [shown[token].logprob for shown, token in zip(one.logprobs, one.token_ids, strict=True)]
    assert one.cumulative_logprob == sum(chosen) < 0
    assert Completion(index=0).cumulative_logprob is None


def test_ctrl_c_leaves_the_engine_usable(llm: LLM) -> None:
    before = ask(llm, "What is 2 + 3?")

    def interrupt() -> None:
        while not llm.local.ask(lambda engine: engine.stats().running):
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        endless = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
        cut = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Once upon a time"] * 3, endless, use_tqdm=False)
        cut.result()
    assert ask(llm, "What is 2 + 3?") == before
    assert llm.local.ask(lambda engine: engine.stats().running) == 0


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"model": "no-such-folder"}, "^MODEL: no-such-folder is no folder here, and not .* in the hub's cache"),
        ({"model": "org/no-such"}, "^MODEL: org/no-such is no folder here, and not .* in the hub's cache"),
        ({"model": "./no-such"}, "^MODEL: ./no-such: no such folder"),
        ({"model": "demo", "dtype": "float12"}, "^--dtype: 'float12' is not one of"),
        ({"model": "demo", "max_model_len": 10**9}, "^--max-model-len 1000000000 "),
        ({"model": "demo", "block_size": 3}, "^--block-size: 3 must be a power of two"),
        ({"model": "demo", "kv_offloading_size": "x"}, "^--kv-offloading-size: 'x': expected `float`"),
        ({"model": "demo", "kv_disk_path": "/x"}, "^--kv-disk-path: the disk is below host memory"),
        ({"model": "demo", "max_tokens": 5}, "^max_tokens is not a setting"),
        ({"model": "demo", "port": 80}, "^port is the service's; an LLM has no use for it"),
        ({"model": "demo", "data_parallel_size": 2}, "^data_parallel_size is the service's"),
        ({"model": "demo", "enable_log_requests": True}, "^enable_log_requests is the service's"),
        ({"model": "demo", "enable_log_requests": False, "max_tokens": 5}, "^max_tokens is not a setting"),
        ({"model": "demo", "revision": "main"}, "^--revision: demo is a folder"),
        ({"model": "demo", "tokenizer": "no-such"}, "^--tokenizer: no-such is no folder here"),
        ({"model": "demo", "tokenizer": str(DEMO_MODEL.parent)}, "^--tokenizer: .*demo holds no tokenizer.json"),
        ({"model": "demo", "kv_cache_memory_bytes": 1000}, "kv-cache-memory-bytes"),
    ],
)
def test_settings_that_cannot_be_honoured_name_setting_and_value(
    arguments: dict[str, object], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match=names):
        LLM(**arguments)  # type: ignore[arg-type]


def test_another_tokenizer_is_used(llm: LLM, tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "text")
    (folder / "model.safetensors").unlink()
    for template in folder.glob("*.jinja"):
        template.write_text(
            "{{ messages[0].content }}, said {{ how or 'plainly' }}{% for t in tools or [] %}{{ t.name }}{% endfor %}"
        )
    file = folder / "tokenizer_config.json"
    more_tokens = {"added_tokens_decoder": {"768": {"content": "<far>", "special": True}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | more_tokens))
    with LLM("demo", dtype="float32", max_num_seqs=2, tokenizer=str(folder)) as other:
        (far,) = other.generate("Once<far>", GREEDY, use_tqdm=False)
        assert str(far.outputs[0].error).startswith("The text has the token '<far>' with id 768, for which")
        once = [{"role": "user", "content": "Once"}]
        (output,) = other.chat(once, GREEDY, use_tqdm=False)
        more = {"tools": [{"name": "t"}], "chat_template_kwargs": {"how": "loud"}}
        (loud,) = other.chat(once, GREEDY, use_tqdm=False, **more)
        assert loud.prompt == "Once, said loudt"
        with pytest.raises(ValueError, match="the chat template has no variable 'tools'"):
            other.chat(once, GREEDY, chat_template_kwargs={"tools": []})
    assert output.prompt == "Once, said plainly"
    assert output.text == llm.generate(output.prompt_token_ids, GREEDY, use_tqdm=False)[0].text


def test_the_readme_example_runs() -> None:
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    example = next(block for block in readme.split("```python\n")[1:] if "from tandem import" in block).split("```")[0]
    shown: list[str] = []
    exec(compile(example, "README.md", "exec"), {"print": shown.append})
    assert shown and shown[0]
