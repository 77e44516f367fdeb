"""--batch-invariant: the logits behind a text have one value, to the last bit, in bf16 and float32.

Random crowds pass through engines that chunk, preempt, swap, find prefixes and draft, each in its own way; whichever
engine first sees a text, every other must come to the same logits. The same histories find a token that takes a little
from its neighbour, and the usual mode. Below them, single decoders of the families: a text alone and whole beside one
in a crowd and in chunks.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.offload.weights.weight_copiers import InlineCopier
from tandem.parallel.context import ParallelContext
from tandem.workers.engine.transfers.copy_costs import CopyCosts
from tandem.workers.graphs.cpu_graphs import RUNS_BEFORE_CAPTURE
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import CpuDecodeAttention
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.decoder import build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu_invariant import InvariantCpuPlatform
from tests.left_to import rest_in_parity
from tests.support.adapters import save_random_adapter
from tests.support.free_drafts import free_drafts
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.seen_logits import SeenLogits, seeing
from tests.support.tiny_models import BY_NAME, SHALLOW, save_tiny_model

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"
VOCAB = 700
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FEW_BLOCKS = {"num_gpu_blocks_override": 44, "block_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "room for all": {},
    "odd chunks": {"max_num_batched_tokens": 23, "block_size": 8},
    "recomputed": {**FEW_BLOCKS, "enable_prefix_caching": False, "max_num_batched_tokens": 61},
    "swapped": {**FEW_BLOCKS, "kv_offloading_size": 0.05},
    "drafting": {"speculative_config": NGRAM},
    "streamed": {"cpu_offload_gb": 0.001, "max_num_batched_tokens": 37},
}


class Told(NamedTuple):
    """What happened to the crowds."""

    seen: SeenLogits
    answers: dict[tuple[int, ...], set[tuple[int, ...]]]
    preempted: int
    found: int
    loaded: int
    accepted: int


@pytest.fixture(scope="module", autouse=True)
def _no_measured_times() -> Iterator[None]:
    """However slow the machine is: copies of KV always pay, and drafts do while they are accepted."""
    threads = torch.get_num_threads()
    with (
        mock.patch.object(CopyCosts, "recompute_s", return_value=math.inf),
        free_drafts(),
    ):
        yield
    torch.set_num_threads(threads)


def texts(rng: random.Random) -> list[list[int]]:
    """Prompts of every length, some that begin alike, some that repeat themselves."""
    plain = [prompt_ids(length, VOCAB, seed=seed) for seed, length in enumerate((2, 16, 17, 45, 64, 99, 130, 150))]
    longer = [text + prompt_ids(rng.randrange(1, 30), VOCAB, seed=50 + place) for place, text in enumerate(plain[2:6])]
    return [*plain, *longer, *(prompt_ids(12, VOCAB, seed=80 + times) * times for times in (3, 6))]


def run(dtype: str, rounds: int, seed: int = 0, **flags: Any) -> Told:
    """Gives crowds to engines of all kinds in turn."""
    rng, seen = random.Random(seed), SeenLogits()
    prompts, answers = texts(rng), {}
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with ExitStack() as stack:
        common = {"dtype": dtype, "max_num_seqs": 7, "cpu_threads": 1, **flags}
        engines = [stack.enter_context(LLM("demo", **common, **kind)) for kind in KINDS.values()]
        with seeing(seen):
            for number in range(rounds):
                llm = engines[number % len(engines)]
                crowd = rng.sample(prompts, rng.choice((1, 3, 7, 7)))
                for output in llm.generate(crowd, greedy, use_tqdm=False):
                    answers.setdefault(tuple(output.prompt_token_ids), set()).add(tuple(output.outputs[0].token_ids))
        stats = [llm._engine.stats() for llm in engines]
    return Told(
        seen,
        answers,
        preempted=sum(one.preemptions for one in stats),
        found=sum(one.prefix_cache_hits for one in stats),
        loaded=sum(one.offload.blocks["load"] for one in stats if one.offload is not None),
        accepted=sum(one.drafts.num_accepted for one in stats if one.drafts is not None),
    )


def check(told: Told) -> None:
    assert told.seen.num_other == 0
    assert all(len(own) == 1 for own in told.answers.values()), "a prompt with two answers"


@DTYPES
def test_logits_depend_on_their_text_alone(dtype: str) -> None:
    told = run(dtype, 12, batch_invariant=True)
    check(told)
    assert told.seen.num_equal > 200 and told.preempted and told.found and told.loaded and told.accepted


def test_the_usual_mode_fails_these_histories() -> None:
    """On every CPU: decodes and chunks sum in other orders, which float32 shows. How many logits differ depends on the
    products of the CPU."""
    assert run("float32", 6).seen.num_other


def test_these_histories_find_a_token_that_takes_from_its_neighbour() -> None:
    attend = CpuDecodeAttention.attend

    def leaking(self: CpuDecodeAttention, q_TND: torch.Tensor, kv: LayerKV, out_TND: torch.Tensor, *args: Any) -> None:
        attend(self, q_TND, kv, out_TND, *args)
        out_TND += out_TND.roll(1, 0) / 64

    with mock.patch.object(CpuDecodeAttention, "attend", leaking):
        assert run("bfloat16", 6, batch_invariant=True).seen.num_other


@pytest.mark.chaos
@DTYPES
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_200_rounds_give_one_output_per_prompt(dtype: str, quantization: str | None) -> None:
    told = run(dtype, 200, seed=1, batch_invariant=True, quantization=quantization, kv_cache_dtype="auto")
    check(told)
    assert told.seen.num_equal > 5000 and told.preempted and told.found and told.loaded and told.accepted


RANKS: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16", "tensor_parallel_size": 2},
    {"dtype": "float32", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"dtype": "bfloat16", "tensor_parallel_size": 4, "quantization": "w8a8", "kv_cache_dtype": "fp8"},
    {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"},
)


@pytest.mark.parametrize("flags", [RANKS[0], *(pytest.param(flags, marks=pytest.mark.parity) for flags in RANKS[1:])])
def test_ranks_and_adapters_among_other_crowds(flags: dict[str, Any], tmp_path: Path) -> None:
    """What ranks in processes of their own tell: log probabilities, which come of all logits, and of whole prompts."""
    folder = save_random_adapter(DEMO, tmp_path / "a", rank=8, seed=3)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=5, prompt_logprobs=1)
    flags = {"cpu_threads": 1, "enable_lora": True, **flags}
    prompts = [prompt_ids(length, VOCAB, seed=length) for length in (3, 30, 70, 300)]
    with LLM("demo", batch_invariant=True, max_num_batched_tokens=310, **flags) as llm:
        ref = llm.load_adapter(folder)
        refs = [ref, None, ref, ref]
        crowd = llm.generate(prompts, params, use_tqdm=False, lora_request=refs)
        for prompt, its, among in zip(prompts, refs, crowd, strict=True):
            (alone,) = llm.generate([prompt], params, use_tqdm=False, lora_request=[its])
            assert (alone.prompt_logprobs, alone.outputs) == (among.prompt_logprobs, among.outputs)


# ---- families ----

FAMILIES = (
    "llama-gqa", "mistral-window", "gpt2", "qwen3", "phi3-longrope", "olmo", "olmo2", "stablelm", "stablelm-parallel",
    "cohere", "gpt_neox", "opt", "opt-post", "gptj", "falcon", "starcoder2", "ministral", "granite", "smollm3",
    "gemma", "gemma2", "gemma3", "llama-gelu", "llama-mqa-biased", "bloom-six-heads", "mpt", "falcon-alibi",
    "qwen3-untied", "gpt2-narrow", "mixtral", "qwen2_moe", "granitemoe", "deepseek_v2", "deepseek_v2-lite",
    "deepseek_v3",
)  # fmt: skip
"""One for each kind of attention, norm, position and MLP that the mode takes."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    rest_in_parity(
        itertools.product(FAMILIES, ["bfloat16", "float32"]),
        lambda name, dtype: (
            name in ("mistral-window", "gpt2", "mixtral")
            if dtype == "float32"
            else name not in SHALLOW or name in ("olmo2", "deepseek_v3")
        ),
    ),
)
def test_a_text_alone_and_in_a_crowd_in_chunks(name: str, dtype: str, tiny_folder: Callable[[str], Path]) -> None:
    folder, kind = tiny_folder(name), getattr(torch, dtype)
    spec, platform = load_spec(folder), InvariantCpuPlatform()
    decoder = build_decoder(spec, ParallelContext.single(), folder=folder, dtype=kind, platform=platform)
    prompts = [prompt_ids(length, spec.vocab_size, seed=length) for length in (70, 33, 5, 21, 64)]
    rows = PagedRows(decoder, 2 * len(prompts), 80, kind, platform=platform)
    alone = [rows.step([(row, prompt)], all_logits=True).clone() for row, prompt in enumerate(prompts)]
    rng, found = random.Random(0), [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
        work, places = [], []
        for place, prompt in enumerate(prompts):
            part = prompt[done[place] : done[place] + rng.choice((1, 1, 3, 18, 40))]
            if part:
                work.append((len(prompts) + place, part))
                places.append((place, len(part)))
                done[place] += len(part)
        parts = rows.step(work, all_logits=True).split([count for _, count in places])
        for (place, _), part in zip(places, parts, strict=True):
            found[place].append(part.clone())
    for whole, parts in zip(alone, found, strict=True):
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("dtype", "streamed"), [("bfloat16", ()), ("float32", (0, 1, 2))])
def test_decode_steps_with_latents_are_replayed(dtype: str, streamed: tuple[int, ...], tmp_path: Path) -> None:
    """To the same bits, on CPUs whose usual products are none of the kernels that a step is captured with, too. Without
    experts, whose products are torch's there."""
    tiny, kind = BY_NAME["deepseek_v2"], getattr(torch, dtype)
    changes = {**tiny.changes, "num_hidden_layers": 4, "first_k_dense_replace": 4}
    folder = save_tiny_model(replace(tiny, changes=changes), tmp_path)
    spec, platform = load_spec(folder), InvariantCpuPlatform()
    prompts = [prompt_ids(length, spec.vocab_size, seed=length) for length in (130, 33, 5)]
    found = []
    for replays in (False, True):
        decoder = build_decoder(
            spec,
            ParallelContext.single(),
            folder=folder,
            dtype=kind,
            platform=platform,
            streamed=streamed,
            copier=InlineCopier(),
        )
        decoder.graphs.can_replay &= replays
        rows = PagedRows(decoder, len(prompts), 150, kind, platform=platform)
        logits = [rows.step([*enumerate(prompts)])]
        for step in range(10):
            work = [(row, [3 + (7 * step + row) % 190]) for row in range(len(prompts) - step // 8)]
            logits.append(rows.step(work))
        found.append(torch.cat(logits))
        assert decoder.graphs.num_replays == (8 - RUNS_BEFORE_CAPTURE - 1 if replays else 0)
        decoder.close()
    assert torch.equal(*found)
