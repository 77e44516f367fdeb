"""Heads of EAGLE-1 and 3, Medusa and MTP guess what an independent implementation in torch guesses, over transformers'
hidden states, step by step: after prompts in chunks, found prefixes, and drafts that were refused."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem import LLM, SamplingParams
from tandem.workers.rank.drafters.head_drafts import HeadDrafts
from tandem.workers.rank.drafters.medusa_drafts import MedusaDrafts
from tandem.workers.speculation.proposer import ProposalRow
from tests.support.draft_models import DEMO, DIM, HEADS, KV_HEADS, TAPS, random_eagle, random_eagle_one, random_medusa
from tests.support.free_drafts import constant_drafts
from tests.support.tiny_models import BY_NAME, load_peer, save_tiny_model

PROMPTS = ["Once upon a time there was a little dog. The little dog was red. ", "The cat sat", "Say: a boat. " * 4]
PARAMS = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
GUESSES = 3


@pytest.fixture(scope="module", autouse=True)
def _drafts_pay() -> Iterator[None]:
    threads = torch.get_num_threads()
    with constant_drafts():
        yield
    torch.set_num_threads(threads)


class Demo:
    """The demo in transformers."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    @torch.inference_mode()
    def states(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The taps' hidden states side by side, and the last one after the norm."""
        found = self.model.model(torch.tensor([ids]), output_hidden_states=True)
        layers = self.model.model.layers
        before = found.hidden_states[:-1]  # the last of them is normed
        behind: list[torch.Tensor] = []
        with torch.inference_mode():
            hook = layers[-1].register_forward_hook(
                lambda _, __, out: behind.append(out[0] if isinstance(out, tuple) else out)
            )
            self.model.model(torch.tensor([ids]))
            hook.remove()
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

    def guesses(self, known: list[int]) -> list[int]:
        vectors = self.demo.states(known[:-1])[0] @ self.w["fc.weight"].T
        tokens, found = known[1:], list[int]()
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


def run(kind: type[Any], method: str, folder: Path, **settings: Any) -> list[tuple[list[int], list[int]]]:
    """What is said while prompts are answered twice; their texts are those of no drafts."""
    watched, config = Watched(kind), {"method": method, "model": str(folder), "num_speculative_tokens": GUESSES}
    common: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "num_gpu_blocks_override": 64}
    with LLM("demo", **common) as plain:
        texts = [each.outputs[0].token_ids for each in plain.generate(PROMPTS, PARAMS, use_tqdm=False)]
    with (
        mock.patch.object(kind, "propose", lambda drafter, rows: watched(drafter, rows)),
        LLM("demo", speculative_config=config, **common | settings) as llm,
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
    tiny = BY_NAME["deepseek_v3"]
    folder = save_tiny_model(dataclasses.replace(tiny, changes={**tiny.changes, "num_hidden_layers": 3}), tmp_path)
    peer, rng = load_peer(folder), torch.Generator().manual_seed(2)
    size, vocab = peer.config.hidden_size, peer.config.vocab_size
    extra = {
        "enorm": 1 + torch.randn(size, generator=rng) * 0.1,
        "hnorm": 1 + torch.randn(size, generator=rng) * 0.1,
        "eh_proj": torch.randn(size, 2 * size, generator=rng) * size**-0.5,
        "shared_head.norm": 1 + torch.randn(size, generator=rng) * 0.1,
        "shared_head.head": torch.randn(vocab, size, generator=rng),
    }
    named = {f"model.layers.2.{name}.weight": tensor for name, tensor in extra.items()}
    save_file(named, folder / "model-mtp.safetensors", {"format": "pt"})
    _with_index(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
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


def _with_index(folder: Path) -> None:
    """Writes the index of a checkpoint of several files."""
    names = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
