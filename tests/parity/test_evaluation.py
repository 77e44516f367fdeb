"""`tandem eval`: perplexity and KL are transformers', on one rank and on two, and those of published texts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.workers.evaluation.evaluate import judge, sample_of
from tandem.workers.evaluation.judgement import verdict_of
from tandem.workers.offline.inputs import settings_of
from tests.support.dequantized import save_dequantized
from tests.support.tiny_models import load_peer
from tests.support.verbs import run_verb_here

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo" / "model"
DATA = ROOT.parent / "shared" / "data"
STORIES = DATA / "models" / "stories260K"
TEXT = "What is 2 + 3? It is 5. Count from 1 to 9: 1 2 3 4 5 6 7 8 9. Once upon a time there was a small café. " * 2
SMALL = ("--dtype", "float32", "--cpu-threads", "1", "--kv-cache-memory-bytes", "4M")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def peer_rows(folder: Path, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = load_peer(folder)(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits.double(), dim=1)


def told(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.parity)])
def test_perplexity_is_that_of_transformers(tmp_path: Path, text: Path, ranks: str) -> None:
    output = tmp_path / "told.json"
    sample = sample_of(settings_of("demo", {})[0], text)
    ended = run_verb_here(
        "eval", "demo", "--perplexity", str(text), *SMALL, "-tp", ranks, "--output-json", str(output), "--worst", "3"
    )
    assert ended.returncode == 0, ended.stderr
    (window,) = sample.windows
    rows = peer_rows(DEMO, window.ids)
    logprobs = rows.gather(1, torch.tensor(window.ids[1:])[:, None])[:, 0]
    found = told(output)
    assert found["scores"]["logprob"] == pytest.approx(logprobs.tolist(), abs=1e-4)
    assert found["perplexity"] == pytest.approx(logprobs.mean().neg().exp().item(), rel=1e-5)
    assert found["scores"]["best"] == rows.argmax(1).tolist()
    assert f"perplexity         {found['perplexity']:.4f}" in ended.stdout


def test_a_rounded_model_is_as_far_as_transformers_says(tmp_path: Path, text: Path) -> None:
    """The judged folder has the weights that int8 holds, in float32."""
    output, folder = tmp_path / "told.json", save_dequantized(DEMO, tmp_path / "rounded")
    flags = ("--perplexity", str(text), *SMALL, "--window", "24", "--stride", "9", "--tokens", "70")
    ended = run_verb_here("eval", str(folder), *flags, "--against", str(DEMO), "--output-json", str(output))
    assert ended.returncode == 0, ended.stderr
    sample = sample_of(settings_of("demo", {})[0], text, window=24, stride=9, tokens=70)
    wanted, best = [], []
    for one in sample.windows:
        p, q = (peer_rows(each, one.ids)[one.first - 1 :] for each in (DEMO, folder))
        wanted += (p.exp() * (p - q)).sum(1).tolist()
        best += (p.argmax(1) == q.argmax(1)).tolist()
    found = told(output)
    assert found["tokens"] == len(wanted) == 70
    assert found["scores"]["kl"] == pytest.approx(wanted, rel=0.01, abs=1e-6)
    assert found["against"]["mean_kl"] == pytest.approx(sum(wanted) / 70, rel=0.01)
    assert found["against"]["agreement"] == sum(best) / 70


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "--perplexity: a file of text is needed"),
        (("--perplexity", "TEXT", "--against", "dense"), "compared with itself"),
        (("--perplexity", "TEXT", "--against", "/nowhere"), "--against: /nowhere: no such folder"),
        (("--perplexity", "TEXT", "--window", "100000"), "--window: 100000 must be from 2 to the context"),
        (("--perplexity", "TEXT", "--window", "8", "--stride", "8"), "--stride: 8 must be from 1 to 7"),
        (("--perplexity", "TEXT", "--output-json", "/absent/x"), "--output-json: /absent/x: No such file"),
        (("--perplexity", "/absent"), "--perplexity: /absent: No such file"),
    ],
)
def test_errors_name_the_flag(text: Path, flags: tuple[str, ...], words: str) -> None:
    ended = run_verb_here("eval", "demo", *(str(text) if flag == "TEXT" else flag for flag in flags))
    assert ended.returncode == 2
    assert words in ended.stderr, ended.stderr


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K checkpoint is not beside the repository")
def test_another_vocabulary_is_refused(text: Path) -> None:
    ended = run_verb_here("eval", "demo", "--perplexity", str(text), "--against", str(STORIES))
    assert ended.returncode == 2
    assert "--against" in ended.stderr and "512" in ended.stderr


def published(name: str) -> list[str]:
    """The texts of reference.json, each apart."""
    if name == "stories":
        whole = (DATA / "text" / "tinystories_v2_sample.txt").read_text()
        return [text.strip() for text in whole.split("<|endoftext|>") if text.strip()]
    if name == "train":
        lines = (DATA / "text" / "tinystories_train_head.jsonl").read_text().splitlines()[:43]
        return [json.loads(line)["text"].replace("\n\n", "\n") for line in lines]
    whole = (DATA / "text" / "tinyshakespeare.txt").read_text()
    return [whole[first : first + 800] for first in range(0, 80_000, 800)]


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K checkpoint is not beside the repository")
@pytest.mark.parametrize(
    ("name", "perplexity", "bits"),
    [
        ("stories", 3.548, 0.887),
        ("train", 3.471, 0.846),
        pytest.param("plays", 114.7, 4.252, marks=pytest.mark.parity),
    ],
)
def test_published_perplexities(tmp_path: Path, name: str, perplexity: float, bits: float) -> None:
    """Each text is cut to the context of 512 tokens, as it was for the published figures: to one window."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in published(name)))
    settings, _ = settings_of(STORIES, {"dtype": "float32", "cpu_threads": 1, "kv_cache_memory_bytes": 2**22})
    sample = sample_of(settings, file)
    sample.windows[:] = [window for window in sample.windows if window.start == 0]
    verdict = verdict_of(judge(settings, sample, tmp_path, progress=False), sample.num_bytes)
    assert verdict.perplexity == pytest.approx(perplexity, rel=2e-4)
    assert verdict.bits_per_byte == pytest.approx(bits, rel=1e-3)
