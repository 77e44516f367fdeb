"""Heads of EAGLE-1 and 3, Medusa and MTP guess what an independent implementation in torch guesses, over transformers'
hidden states, step by step: after prompts in chunks, found prefixes, and drafts that were refused."""

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem import LLM, SamplingParams
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.rank.drafters.head_drafts import HeadDrafts
from tandem.workers.rank.drafters.medusa_drafts import MedusaDrafts
from tandem.workers.rank.drafters.step_record import REST_AFTER
from tandem.workers.speculation.proposer import ProposalRow
from tests.support.adapters import save_random_adapter
from tests.support.draft_models import (
    DEMO,
    DIM,
    HEADS,
    KV_HEADS,
    MTP_PREFIX,
    TAPS,
    random_eagle,
    random_eagle_one,
    random_medusa,
    random_mtp,
)
from tests.support.free_drafts import constant_drafts
from tests.support.tiny_models import load_peer

PROMPTS = ["Once upon a time there was a little dog. The little dog was red. ", "The cat sat", "Say: a boat. " * 4]
PARAMS = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
GUESSES = 3
COMMON: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module", autouse=True)
def _drafts_pay() -> Iterator[None]:
    threads = torch.get_num_threads()
    with constant_drafts():
        yield
    torch.set_num_threads(threads)


class Demo:
    """The demo in transformers. It computes each text once: tests ask for the same ones."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        self._found: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def states(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The taps' hidden states side by side, and the last one after the norm."""
        text = tuple(ids)
        if text not in self._found:
            self._found[text] = self._compute(ids)
        return self._found[text]

    @torch.inference_mode()
    def _compute(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        layers = self.model.model.layers
        behind: list[torch.Tensor] = []
        hook = layers[-1].register_forward_hook(
            lambda _, __, out: behind.append(out[0] if isinstance(out, tuple) else out)
        )
        found = self.model.model(torch.tensor([ids]), output_hidden_states=True)
        hook.remove()
        before = found.hidden_states[:-1]  # the last of them is normed
        taps = [behind[0].view(1, len(ids), -1) if tap == len(layers) else before[tap] for tap in TAPS]
        return torch.cat(taps, -1)[0], found.last_hidden_state[0]

    def embed(self, ids: list[int]) -> torch.Tensor:
        return self.model.model.embed_tokens(torch.tensor(ids)).detach()


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x_TND: torch.Tensor) -> torch.Tensor:
    angle_TF = torch.arange(len(x_TND))[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([each, each], -1)[:, None] for each in (angle_TF.cos(), angle_TF.sin()))
    half = torch.cat([-x_TND[..., DIM // 2 :], x_TND[..., : DIM // 2]], -1)
    return x_TND * cos + half * sin


class Eagle:
    """EAGLE-3 as its paper and vLLM's llama_eagle3.py have it, without a cache."""

    def __init__(self, folder: Path, demo: Demo) -> None:
        self.w = load_file(folder / "model.safetensors")
        self.normed = json.loads((folder / "config.json").read_text())["norm_before_residual"]
        self.demo = demo

    def guesses(self, known: list[int], first: int = 0) -> list[int]:
        """first: token from which on the head has seen the text."""
        vectors = (self.demo.states(known[:-1])[0] @ self.w["fc.weight"].T)[first:]
        tokens, found = known[first + 1 :], list[int]()
        for _ in range(GUESSES):
            token, vector = self.step(tokens, vectors)
            found.append(token)
            tokens, vectors = [*tokens, token], torch.cat([vectors, vector[None]])
        return found

    def step(self, tokens: list[int], vectors: torch.Tensor) -> tuple[int, torch.Tensor]:
        w = {name.removeprefix("midlayer."): tensor for name, tensor in self.w.items()}
        own = w.get("embed_tokens.weight")
        embedded = self.demo.embed(tokens) if own is None else own[torch.tensor(tokens)]
        normed = rms(vectors, w["hidden_norm.weight"])
        x = torch.cat([rms(embedded, w["input_layernorm.weight"]), normed], -1)
        q, k, v = ((x @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM)) for name in "qkv")
        q, k = rotated(q), rotated(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), is_causal=True)
        out = (normed if self.normed else vectors) + attended.transpose(0, 1).flatten(1) @ w[
            "self_attn.o_proj.weight"
        ].T
        y = rms(out, w["post_attention_layernorm.weight"])
        gated = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        out = out + gated @ w["mlp.down_proj.weight"].T
        best = int((rms(out[-1], w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
        return best + int(w["d2t"][best]), out[-1]


class Medusa:
    """Medusa-1's heads."""

    def __init__(self, folder: Path, demo: Demo) -> None:
        self.w, self.demo = load_file(folder / "model.safetensors"), demo

    def guesses(self, known: list[int]) -> list[int]:
        last, found = self.demo.states(known[:-1])[1][-1], list[int]()
        for head in range(GUESSES):
            x = last
            for layer in range(2):
                stem = f"blocks.{head}.layers.{layer}"
                x = x + F.silu(x @ self.w[f"{stem}.weight"].T + self.w[f"{stem}.bias"])
            found.append(int((x @ self.w[f"lm_heads.{head}.weight"].T).argmax()))
        return found


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo()


class Watched:
    """What a proposer was asked, and said."""

    def __init__(self, kind: type[Any]) -> None:
        self.said: list[tuple[list[int], list[int]]] = []
        self._propose = kind.propose

    def __call__(self, drafter: Any, rows: list[ProposalRow]) -> Any:
        found = self._propose(drafter, rows)
        self.said += [(row.token_ids.tolist(), [*ids]) for row, ids in zip(rows, found, strict=True)]
        return found


@lru_cache(maxsize=1)
def texts_without_drafts() -> list[list[int]]:
    with LLM("demo", **COMMON) as plain:
        return [each.outputs[0].token_ids for each in plain.generate(PROMPTS, PARAMS, use_tqdm=False)]


def run(kind: type[Any], method: str, folder: Path, **settings: Any) -> list[tuple[list[int], list[int]]]:
    """What is said while prompts are answered twice; their texts are those of no drafts."""
    watched, config = Watched(kind), {"method": method, "model": str(folder), "num_speculative_tokens": GUESSES}
    texts = texts_without_drafts()
    with (
        mock.patch.object(kind, "propose", lambda drafter, rows: watched(drafter, rows)),
        LLM("demo", speculative_config=config, **COMMON | settings) as llm,
    ):
        for _ in range(2):
            assert [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == texts
    return watched.said


@pytest.mark.parametrize("changes", [{}, {"own_embedding": True, "normed_residual": True}], ids=["shared", "own"])
def test_an_eagle3_head_guesses_as_the_reference_does(changes: Any, demo: Demo, tmp_path: Path) -> None:
    folder = random_eagle(tmp_path / "eagle", **changes)
    reference, said = Eagle(folder, demo), run(HeadDrafts, "eagle3", folder, max_num_batched_tokens=32, max_num_seqs=8)
    with_guesses = [(known, ids) for known, ids in said if ids]
    assert len(with_guesses) > 60
    for known, ids in with_guesses:
        assert ids == reference.guesses(known)[: len(ids)]


def test_medusas_heads_guess_as_the_reference_does(demo: Demo, tmp_path: Path) -> None:
    folder = random_medusa(tmp_path / "medusa", GUESSES)
    reference, said = Medusa(folder, demo), run(MedusaDrafts, "medusa", folder)
    with_guesses = [(known, ids) for known, ids in said if ids]
    assert len(with_guesses) > 60
    for known, ids in with_guesses:
        assert ids == reference.guesses(known)[: len(ids)]


BLOCK = 16
PAUSE = 2 * REST_AFTER


@pytest.fixture
def paused() -> Iterator[list[int]]:
    """Drafts begin when an engine has run so many steps as the list's only number says."""
    left, begin = [PAUSE], Drafting.begin_step

    def begin_step(drafting: Drafting, num_rows: int) -> bool:
        left[0] -= 1
        return left[0] < 0 and begin(drafting, num_rows)

    with mock.patch.object(Drafting, "begin_step", begin_step):
        yield left


def guesses_of(llm: LLM, watched: Watched, prompt: Any, **params: Any) -> tuple[list[int], dict[int, list[int]]]:
    """A text, and the guesses by the tokens that were known."""
    watched.said.clear()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, ignore_eos=True, **params), use_tqdm=False)
    text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return text, {len(known): ids for known, ids in watched.said if ids}


def test_a_head_that_has_missed_something_goes_on_from_the_next_block(
    demo: Demo, tmp_path: Path, paused: list[int]
) -> None:
    """Of a row that ran while it rested, and of a found prefix that was computed meanwhile, it sees what comes behind;
    of one that it has read it sees all."""
    folder, watched = random_eagle(tmp_path / "eagle"), Watched(HeadDrafts)
    reference = Eagle(folder, demo)
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": GUESSES}
    common: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "num_gpu_blocks_override": 64, "block_size": BLOCK}
    with (
        mock.patch.object(HeadDrafts, "propose", lambda drafter, rows: watched(drafter, rows)),
        LLM("demo", speculative_config=config, **common) as llm,
    ):
        text, guesses = guesses_of(llm, watched, PROMPTS[0], max_tokens=PAUSE + 64)
        begun = min(guesses) - 2
        assert begun % BLOCK == 0 and begun < len(text) - 64 + BLOCK and len(guesses) >= 48
        assert all(ids == reference.guesses(text[:known], begun)[: len(ids)] for known, ids in guesses.items())
        for prompt, first in ((text[: begun + 5], begun), (PROMPTS[0], 0)):
            _, guesses = guesses_of(llm, watched, prompt, max_tokens=24)
            assert len(guesses) > 20
            assert all(ids == reference.guesses(text[:known], first)[: len(ids)] for known, ids in guesses.items())


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_rows_that_are_in_every_other_step_have_guesses(method: str, tmp_path: Path) -> None:
    """Adapters take turns in steps where there are more than --max-loras."""
    kind, write = {"eagle3": (HeadDrafts, random_eagle), "medusa": (MedusaDrafts, random_medusa)}[method]
    watched, folder = Watched(kind), write(tmp_path / method)
    config = {"method": method, "model": str(folder), "num_speculative_tokens": GUESSES}
    common: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "enable_lora": True, "max_loras": 1}
    adapters = [save_random_adapter(DEMO, tmp_path / f"{i}", rank=4, seed=i, modules=("q_proj",)) for i in range(2)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with (
        mock.patch.object(kind, "propose", lambda drafter, rows: watched(drafter, rows)),
        LLM("demo", speculative_config=config, num_gpu_blocks_override=64, **common) as llm,
    ):
        refs = [llm.load_adapter(adapter) for adapter in adapters]
        llm.generate([PROMPTS[0], PROMPTS[1]], params, use_tqdm=False, lora_request=refs)
    steps = [[*group] for _, group in groupby(watched.said, key=lambda one: one[0][:3])]
    assert len(steps) > 10, "they take turns"
    assert sum(bool(ids) for _, ids in watched.said) > 30


class EagleOne:
    """EAGLE-1 as vLLM's llama_eagle.py has it, without a cache."""

    def __init__(self, folder: Path, demo: Demo) -> None:
        self.w, self.demo = load_file(folder / "model.safetensors"), demo

    def guesses(self, known: list[int]) -> list[int]:
        tokens, hidden, found = known[1:], self.demo.states(known[:-1])[1], list[int]()
        for _ in range(GUESSES):
            out = self.step(tokens, hidden)[-1]
            found.append(int(self.demo.model.lm_head(out).argmax()))
            tokens, hidden = [*tokens, found[-1]], torch.cat([hidden, out[None]])
        return found

    def step(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        w = {name.removeprefix("layers.0."): tensor for name, tensor in self.w.items()}
        x = torch.cat([self.demo.embed(tokens), hidden], -1) @ w["fc.weight"].T + w["fc.bias"]
        q, k, v = ((x @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM)) for name in "qkv")
        q, k = rotated(q), rotated(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), is_causal=True)
        out = x + attended.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
        y = rms(out, w["post_attention_layernorm.weight"])
        gated = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        return out + gated @ w["mlp.down_proj.weight"].T


@torch.inference_mode()
def test_an_eagle1_head_guesses_as_the_reference_does(demo: Demo, tmp_path: Path) -> None:
    folder = random_eagle_one(tmp_path / "eagle")
    reference, said = (
        EagleOne(folder, demo),
        run(HeadDrafts, "eagle", folder, max_num_batched_tokens=32, max_num_seqs=8),
    )
    with_guesses = [(known, ids) for known, ids in said if ids]
    assert len(with_guesses) > 20
    for known, ids in with_guesses:
        assert ids == reference.guesses(known)[: len(ids)]


# ---- MTP ----


class Mtp:
    """The layer behind the last of a DeepSeek-V3, by transformers' own layer, as vLLM's deepseek_mtp.py has it."""

    def __init__(self, peer: Any, extra: dict[str, torch.Tensor]) -> None:
        self.peer, self.w = peer, extra
        self.layer = peer.model.layers[-1]

    def guesses(self, known: list[int]) -> list[int]:
        peer = self.peer
        outputs: list[torch.Tensor] = []
        hook = peer.model.layers[-2].register_forward_hook(lambda _, __, out: outputs.append(out))
        peer.model(torch.tensor([known[:-1]]))
        hook.remove()
        hidden = peer.model.norm(outputs[0])[0]
        tokens, found = known[1:], list[int]()
        for _ in range(GUESSES):
            embedded = peer.model.embed_tokens(torch.tensor(tokens)).clone()
            embedded[0] = 0
            both = torch.cat([self.normed(embedded, "enorm"), self.normed(hidden, "hnorm")], -1)
            x, places = (both @ self.w["eh_proj"].T)[None], torch.arange(len(tokens))[None]
            mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
            out = self.layer(x, attention_mask=mask, position_embeddings=peer.model.rotary_emb(x, places))
            last = (out[0] if isinstance(out, tuple) else out).view(len(tokens), -1)[-1]
            found.append(int((self.normed(last, "shared_head.norm") @ self.w["shared_head.head"].T).argmax()))
            tokens, hidden = [*tokens, found[-1]], torch.cat([hidden, last[None]])
        return found

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.peer.config.rms_norm_eps) * self.w[name]


@torch.inference_mode()
def test_an_mtp_layer_guesses_as_the_reference_does(tmp_path: Path) -> None:
    folder = random_mtp(tmp_path)
    peer = load_peer(folder.parent / "whole")
    extra = {
        name.removeprefix(MTP_PREFIX).removesuffix(".weight"): tensor
        for name, tensor in load_file(folder / "model-mtp.safetensors").items()
    }
    reference, watched = Mtp(peer, extra), Watched(HeadDrafts)
    prompts = [list(range(5, 60)), list(range(9, 20))]
    common: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "num_gpu_blocks_override": 64}
    common["tokenizer"] = str(DEMO)
    with (
        mock.patch.object(HeadDrafts, "propose", lambda drafter, rows: watched(drafter, rows)),
        LLM(str(folder), speculative_config={"method": "mtp", "num_speculative_tokens": GUESSES}, **common) as llm,
    ):
        llm.generate(prompts, PARAMS, use_tqdm=False)
    with_guesses = [(known, ids) for known, ids in watched.said if ids]
    assert len(with_guesses) > 15
    for known, ids in with_guesses:
        assert ids == reference.guesses(known)[: len(ids)]
