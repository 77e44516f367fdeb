"""Beam search: the tokens and scores of transformers' generate(num_beams=...), which never stops while it may improve.

A small vocabulary makes end-of-sequence tokens frequent: beams end early, late, and not at all.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tandem import LLM, BeamSearchParams, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.workers.offline.beams import BeamSearchSequence
from tests.support.tiny_models import TinyModel, load_peer, save_tiny_model

VOCAB = 23
MAX_TOKENS = 12
EOS = {"one": 2, "two": [2, 7]}
PROMPTS = [[3, 9, 4, 15, 21], [5, 6, 8, 22, 11, 17, 3, 4, 19], [12], [20, 1, 3, 3, 9, 14, 10, 4, 5, 6, 7, 8]]


@pytest.fixture(scope="module", params=sorted(EOS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"vocab_size": VOCAB, "eos_token_id": EOS[request.param]}
    return save_tiny_model(TinyModel("beams", "llama", changes), tmp_path_factory.mktemp("beams"), seed=3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, tokenizer=str(DEMO_MODEL), dtype="float32", max_num_seqs=12, block_size=4) as opened:
        yield opened


@pytest.fixture(scope="module")
def peer(folder: Path) -> PreTrainedModel:
    return load_peer(folder)


def of_transformers(
    model: PreTrainedModel, prompt: list[int], width: int, max_tokens: int, length_penalty: float, *, ignore_eos: bool
) -> tuple[list[list[int]], list[float]]:
    """Output tokens, without what pads them, and scores of each beam."""
    inputs = torch.tensor([prompt])
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        early_stopping="never",
        length_penalty=length_penalty,
        pad_token_id=0,
        **({"eos_token_id": -1} if ignore_eos else {}),
        output_scores=True,
        return_dict_in_generate=True,
    )
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    outputs = out.sequences[:, len(prompt) :].tolist()
    tokens = [output[:length] for output, length in zip(outputs, lengths, strict=True)]
    return tokens, out.sequences_scores.tolist()


def scores(sequences: list[BeamSearchSequence], prompt_len: int, length_penalty: float) -> list[float]:
    return [one.cum_logprob / (len(one.tokens) - prompt_len) ** length_penalty for one in sequences]


CASES = [*itertools.product([2, 3, 5], [1.0, 0.0, -1.0], [False]), (5, 2.0, False), (2, 1.0, True), (3, 0.0, True)]
IN_PARITY = {(2, 0.0, False), (3, 1.0, False), (3, -1.0, False), (5, 0.0, False)}
"""Every width and every penalty of theirs is in other cases, too."""


@pytest.mark.parametrize(
    ("width", "length_penalty", "ignore_eos"),
    [pytest.param(*case, marks=pytest.mark.parity if case in IN_PARITY else ()) for case in CASES],
)
def test_tokens_and_scores_are_those_of_transformers(
    llm: LLM, peer: PreTrainedModel, width: int, length_penalty: float, ignore_eos: bool
) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=MAX_TOKENS, length_penalty=length_penalty, ignore_eos=ignore_eos
    )
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted, wanted_scores = of_transformers(peer, prompt, width, MAX_TOKENS, length_penalty, ignore_eos=ignore_eos)
        assert [one.tokens for one in output.sequences] == [[*prompt, *tokens] for tokens in wanted]
        assert scores(output.sequences, len(prompt), length_penalty) == pytest.approx(wanted_scores, rel=1e-5, abs=1e-4)
        for one in output.sequences:
            ended = not ignore_eos and one.tokens[-1] in llm._facts.eos_token_ids
            assert one.finish_reason == ("stop" if ended else "length")
            assert [next(iter(shown)) for shown in one.logprobs] == one.tokens[len(prompt) :]
            chosen = [next(iter(shown.values())).logprob for shown in one.logprobs]
            assert sum(chosen) == pytest.approx(one.cum_logprob)


def test_some_beams_end_early_and_some_do_not(llm: LLM) -> None:
    """What the comparison above is about does happen."""
    reasons, lengths = set(), set()
    for length_penalty in (1.0, -1.0):
        params = BeamSearchParams(beam_width=5, max_tokens=MAX_TOKENS, length_penalty=length_penalty)
        for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
            reasons |= {one.finish_reason for one in output.sequences}
            lengths |= {len(one.tokens) - len(prompt) for one in output.sequences}
    assert reasons == {"stop", "length"} and len(lengths) > 3


def test_one_beam_that_never_ends_is_greedy(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=20, ignore_eos=True)
    greedy = llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), use_tqdm=False)
    for beams, one in zip(llm.beam_search(PROMPTS, params), greedy, strict=True):
        assert beams.sequences[0].tokens == [*one.prompt_token_ids, *one.outputs[0].token_ids]


def test_the_end_of_the_context_ends_beams(folder: Path, peer: PreTrainedModel) -> None:
    with LLM(folder, tokenizer=str(DEMO_MODEL), dtype="float32", max_num_seqs=4, max_model_len=16) as short:
        prompt = PROMPTS[3]
        output = short.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=50, ignore_eos=True))[0]
        wanted, _ = of_transformers(peer, prompt, 3, 4, 1.0, ignore_eos=True)
        assert [one.tokens[len(prompt) :] for one in output.sequences] == wanted
