"""LLM.beam_search on the bundled demo model: its arguments, errors, adapters, and the same beams over REST."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, BeamSearchParams, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tests.support.verbs import run_verb_here

PROMPTS = ["Once upon a time", "The cat sat"]
THREE = BeamSearchParams(beam_width=3, max_tokens=10)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_num_seqs=8, enable_lora=True) as opened:
        yield opened


def texts(llm: LLM, prompts: Any, params: BeamSearchParams = THREE, **more: Any) -> list[list[str]]:
    return [[one.text for one in output.sequences] for output in llm.beam_search(prompts, params, **more)]


def test_every_form_of_prompt_has_the_same_beams(llm: LLM) -> None:
    (plain,) = texts(llm, PROMPTS[0])
    ids = llm.tokenizer.encode(PROMPTS[0], add_special_tokens=True)
    assert texts(llm, [{"prompt": PROMPTS[0]}, ids, {"prompt_token_ids": ids}]) == [plain] * 3
    assert len(set(plain)) == 3 and all(text.startswith(PROMPTS[0]) for text in plain)
    assert texts(llm, []) == []


def test_scores_fall_and_are_the_sums_of_the_tokens(llm: LLM) -> None:
    for output in llm.beam_search(PROMPTS, THREE):
        scores = [one.cum_logprob / len(one.logprobs) for one in output.sequences]
        assert scores == sorted(scores, reverse=True)
        for one in output.sequences:
            chosen = [next(iter(shown.values())) for shown in one.logprobs]
            assert one.cum_logprob == pytest.approx(sum(each.logprob for each in chosen))
            assert one.text.endswith("".join(str(each.decoded_token) for each in chosen[-3:]))
            assert all(1 <= each.rank <= len(shown) for each, shown in zip(chosen, one.logprobs, strict=True))


def test_a_prompt_that_does_not_fit_fails_alone(llm: LLM) -> None:
    bad, good = llm.beam_search([[5] * 100_000, PROMPTS[0]], THREE)
    assert bad.sequences == [] and "100000" in str(bad.error)
    assert len(good.sequences) == 3 and good.error is None
    (unknown,) = llm.beam_search([[10**6]], THREE)
    assert "1000000" in str(unknown.error)


def test_each_prompt_may_have_its_adapter(llm: LLM) -> None:
    pirate = llm.load_adapter(DEMO_MODEL.parent / "adapters" / "pirate")
    hello = "Hello! How are you?"
    both = texts(llm, [hello, hello], lora_request=[None, pirate])
    assert both[0] != both[1] and both[1] == texts(llm, hello, lora_request=pirate)[0]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"beam_width": 0}, "beam_width=0 must be a whole number of at least 1"),
        ({"beam_width": 1025}, "beam_width=1025 must be at most 1024"),
        ({"max_tokens": 0}, "max_tokens=0 must"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must"),
        ({"length_penalty": 10.5}, "length_penalty=10.5 must"),
        ({"length_penalty": "1"}, "length_penalty='1' must"),
        ({"temperature": 0.7}, "temperature=0.7 must be 0 or 1"),
        ({"ignore_eos": 1}, "ignore_eos=1 must"),
    ],
)
def test_parameters_without_meaning_are_refused_by_name(llm: LLM, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.beam_search(PROMPTS, BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **params}))


def test_whole_batches_refuse_it() -> None:
    with (
        LLM("demo", batching_policy="static") as static,
        pytest.raises(SettingsError, match="static: beam search needs continuous") as caught,
    ):
        static.beam_search(PROMPTS, THREE)
    assert caught.value.flag == "batching_policy"


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="include_stop_str_in_output"):
        BeamSearchParams(beam_width=2, max_tokens=4, include_stop_str_in_output=True)  # type: ignore[call-arg]


def test_parameters_of_the_other_kind_are_a_type_error(llm: LLM) -> None:
    with pytest.raises(TypeError, match="is no BeamSearchParams"):
        llm.beam_search(PROMPTS, SamplingParams(max_tokens=4))  # type: ignore[arg-type]
    for given in (THREE, [THREE] * len(PROMPTS)):
        with pytest.raises(TypeError, match=r"BeamSearchParams.* is no SamplingParams"):
            llm.generate(PROMPTS, given, use_tqdm=False)  # type: ignore[arg-type]


def test_rest_and_offline_have_the_same_beams(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch file has the gateway's checks, its Generation and a real engine."""
    body = {"model": "demo", "prompt": PROMPTS[0], "use_beam_search": True, "n": 3, "max_tokens": 10, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {**body, "return_token_ids": True}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.chdir(tmp_path)
    done = run_verb_here("run-batch", "demo", "-i", "in.jsonl", "-o", "out.jsonl", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    (offline,) = llm.beam_search(PROMPTS[0], THREE)
    prompt = llm.tokenizer.encode(PROMPTS[0], add_special_tokens=True)
    assert [[*prompt, *choice["token_ids"]] for choice in answer["choices"]] == [s.tokens for s in offline.sequences]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == sum(len(s.logprobs) for s in offline.sequences)
