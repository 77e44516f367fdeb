"""`tandem distill`: a draft learns from the demo model's answers and is what transformers reads; a run that was ended
writes the same bytes; guesses are drawn as the target draws; heads compute what serving will, under vLLM's names."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem import LLM, SamplingParams
from tandem.configs.errors import SettingsError
from tandem.workers.distill import step_times, training
from tandem.workers.distill.distill_run import DistillFolder, DistillTarget, distill, frequent_ids
from tandem.workers.distill.distill_settings import DistillSettings
from tandem.workers.distill.eagle_student import EagleStudent, tapped_layers
from tandem.workers.distill.kept_guesses import measure
from tandem.workers.distill.medusa_student import MedusaStudent
from tandem.workers.distill.own_answers import Answer, AnswerRun, Answers
from tandem.workers.distill.student import shifted
from tandem.workers.distill.target_model import AnswerStates, TargetModel
from tandem.workers.distill.training import Training, loss_of
from tandem.workers.offline.inputs import settings_of
from tandem.workers.planning.model_source import find_model
from tandem.workers.planning.resolve import read_spec
from tests.support.free_drafts import constant_drafts
from tests.support.paged_rows import prompt_ids

TinyFolder = Callable[[str], Path]
SMALL = DistillSettings(hidden=64, steps=120, answers=2, max_tokens=48, places=3)
WORDS = ("dog", "cat", "fox", "bear", "owl", "hen", "frog", "duck", "goat", "mouse", "horse", "sheep")
"""What the prompts are about; a tenth of them judges."""


@pytest.fixture(scope="module")
def demo() -> DistillTarget:
    return DistillTarget("demo", find_model("demo", None, "TARGET"), {"cpu_threads": 1, "max_num_seqs": 16})


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": f"Once upon a time there was a {word} who"} for word in WORDS]
    lines += [{"messages": [{"role": "user", "content": f"Spell the word {word}."}]} for word in WORDS]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def learned(demo: DistillTarget, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("learned") / "draft"
    return folder, distill(demo, SMALL, prompts, folder, lambda _: None)


def test_more_guesses_are_kept_than_of_an_untrained_draft(learned: tuple[Path, Any]) -> None:
    _, report = learned
    for before, after in zip(report["before"], report["after"], strict=True):
        assert after["acceptance_by_place"][0] > before["acceptance_by_place"][0] + 0.06, (before, after)
        assert after["rejection_bound"] is None or after["acceptance_by_place"][0] <= after["rejection_bound"] + 0.1
        assert after["acceptance_by_place"] == sorted(after["acceptance_by_place"], reverse=True)
    assert [one["temperature"] for one in report["after"]] == [0.0, 0.7, 1.0]
    assert len(report["step_seconds"]["target"]) == SMALL.places + 1 and report["training_steps"] == SMALL.steps


def test_transformers_reads_the_draft(learned: tuple[Path, Any], demo: DistillTarget) -> None:
    """And its logits, in float32, are those of what has learned."""
    folder, _ = learned
    text = "Once upon a time there was a fox who"
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    assert ids.tolist() == AutoTokenizer.from_pretrained(demo.folder)(text, return_tensors="pt").input_ids.tolist()
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0]
    ours = TargetModel(settings_of(folder, {"dtype": "float32", "cpu_threads": 1})[0])
    states = ours.states([Answer(ids[0].tolist(), 1, 0, 0.0)], ())
    assert (ours.logits(states.final_BWH[0]) - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_a_run_that_was_ended_writes_the_same_bytes(
    learned: tuple[Path, Any], demo: DistillTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once among the answers, once in training."""
    folder, whole = tmp_path / "draft", learned[0]
    answer, learn = AnswerRun._answer, Training._learn
    left = [4, 25]  # calls until it ends

    def ended(count: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            left[count] -= 1
            if left[count] == 0:
                raise KeyboardInterrupt
            return call(*arguments)

        return run

    monkeypatch.setattr(training, "KEEP_S", 0.0)
    monkeypatch.setattr(AnswerRun, "_answer", ended(0, answer))
    monkeypatch.setattr(Training, "_learn", ended(1, learn))
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            distill(demo, SMALL, prompts, folder, said.append)
        assert not (folder / "config.json").exists()
    assert left[0] < 0 and left[1] == 0
    with pytest.raises(SettingsError, match="it is not finished: the command that began it"):
        read_spec(settings_of(folder, {})[0])
    distill(demo, SMALL, prompts, folder, said.append)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
    assert not (folder / "unfinished").exists()
    distill(demo, SMALL, prompts, folder, said.append)
    assert said[-1] == f"{folder} is complete"


class _Itself:
    """A student that is the target."""

    module: Any = None
    taps = ()
    ids = None
    trained_places = 1
    learning_rate = 0.0

    def __init__(self, target: TargetModel) -> None:
        self._target = target

    def hidden(self, states: AnswerStates, places: int) -> list[torch.Tensor]:
        return [shifted(states.final_BWH, place) for place in range(places)]

    def logits(self, hidden_NH: torch.Tensor, place: int) -> torch.Tensor:
        return self._target.logits(hidden_NH)


def test_the_targets_own_logits_guess_all_that_it_has_drawn() -> None:
    """So the noise, and the places of the tokens, are those of the engine that wrote the answers."""
    flags = {"cpu_threads": 1, "dtype": "float32", "max_model_len": 128}
    answers = []
    with LLM("demo", **flags) as llm:
        prompt = llm.tokenizer.encode("Once upon a time there was a", add_special_tokens=True)
        for temperature in (0.0, 0.7, 1.0):
            params = SamplingParams(temperature=temperature, seed=5, max_tokens=40)
            (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            answers.append(Answer([*prompt, *output.outputs[0].token_ids], len(prompt), 5, temperature))
    target = TargetModel(settings_of("demo", flags)[0])
    for found in measure(_Itself(target), target, answers, 3, print):
        assert found.places == (1.0, 1.0, 1.0) and found.chains > 30
        assert found.bound is None or found.bound == pytest.approx(1, abs=1e-5)
        assert found.tokens == pytest.approx((2, 3, 4), rel=0.05), "but for the last step of an answer"


class _Other(_Itself):
    """A student that is a draft model."""

    def hidden(self, states: AnswerStates, places: int) -> list[torch.Tensor]:
        rows = [Answer(ids, 1, 0, 0.0) for ids in states.ids_BW.tolist()]
        final_BWH = self._target.states(rows, ()).final_BWH
        return [shifted(final_BWH, place) for place in range(places)]


def test_tokens_a_step_are_those_of_the_engine(learned: tuple[Path, Any]) -> None:
    """Whose steps begin behind a wrong guess, which is where the next one is wrong more often than elsewhere."""
    folder, flags = learned[0], {"cpu_threads": 1, "dtype": "float32", "max_model_len": 256}
    config = {"model": str(folder), "num_speculative_tokens": 3}
    answers, params = [], SamplingParams(temperature=0.7, seed=5, max_tokens=100, ignore_eos=True)
    with constant_drafts(), LLM("demo", speculative_config=config, **flags) as llm:
        for word in WORDS[:6]:
            prompt = llm.tokenizer.encode(f"Once upon a time there was a {word}", add_special_tokens=True)
            (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            answers.append(Answer([*prompt, *output.outputs[0].token_ids], len(prompt), 5, 0.7))
        drafts = llm._engine.stats().drafts
    assert drafts is not None and drafts.num_accepted > 20
    draft, target = (TargetModel(settings_of(model, flags)[0]) for model in (folder, "demo"))
    (found,) = measure(_Other(draft), target, answers, 3, print)
    steps = drafts.num_drafts + len(answers)  # the last token of an answer has no draft
    assert found.tokens[-1] == pytest.approx(99 * len(answers) / steps, rel=0.02)


# ---- heads, over a tiny random target ----


@pytest.fixture
def tiny(tiny_folder: TinyFolder) -> TargetModel:
    return TargetModel(settings_of(tiny_folder("llama-gqa"), {"dtype": "float32", "cpu_threads": 1})[0])


ROWS = [Answer(prompt_ids(length, 200, seed), 5, seed, 0.7) for seed, length in enumerate((19, 30))]


def test_a_chain_of_an_eagle_head_is_what_it_is_step_by_step(tiny: TargetModel) -> None:
    """An independent computation: the tokens before a chain with their vectors, then the chain's own, one sequence."""
    ids = frequent_ids(Answers(ROWS, []), tiny.spec.vocab_size, 50)
    student = EagleStudent(tiny, ids, torch.Generator().manual_seed(1))
    head, start, row = student._head, 11, 1
    for parameter in student.module.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(2))
    states = tiny.states(ROWS, student.taps)
    with torch.no_grad():
        found = [hidden_BWH[row, start] for hidden_BWH in student.hidden(states, 3)]
        vectors = list(head.fc(states.taps_BWH[row, :start]))  # of the tokens before the one that is not computed yet
        tokens = states.ids_BW[row, 1 : start + 1].tolist()
        for place in range(3):
            embedded = tiny.decoder.token_rows(torch.tensor(tokens)).float()
            vector = torch.stack(vectors)
            x = torch.cat([head.layer.attention_norm(embedded), head.hidden_norm(vector)], -1)[None]
            vector = vector + head.layer.attended(x)[0]
            vector = vector + head.layer.fed(vector)
            assert torch.allclose(head.norm(vector[-1]), found[place], atol=1e-4)
            vectors.append(vector[-1])
            tokens.append(int(states.ids_BW[row, start + place + 1]))


def test_what_an_eagle_head_is_written_as(tiny: TargetModel) -> None:
    ids = frequent_ids(Answers(ROWS, []), tiny.spec.vocab_size, 50)
    student = EagleStudent(tiny, ids, torch.Generator().manual_seed(1))
    size, kv = tiny.spec.hidden_size, 32
    layer = {
        "self_attn.q_proj": (size, 2 * size),
        "self_attn.k_proj": (kv, 2 * size),
        "self_attn.v_proj": (kv, 2 * size),
        "self_attn.o_proj": (size, size),
        "mlp.gate_proj": (96, size),
        "mlp.up_proj": (96, size),
        "mlp.down_proj": (size, 96),
        "hidden_norm": (size,),
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
    }
    shapes = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (size, 3 * size), "norm.weight": (size,), "lm_head.weight": (50, size)}
    shapes |= {"d2t": (50,), "t2d": (tiny.spec.vocab_size,)}
    found = student.tensors()
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool
    written = {token for one in ROWS for token in one.ids[one.start :]}
    assert (torch.arange(50) + found["d2t"]).tolist() == found["t2d"].nonzero().flatten().tolist()
    assert written <= set(found["t2d"].nonzero().flatten().tolist())
    config = student.config()
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 50
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert tapped_layers(32) == (2, 16, 29)
    assert float(loss_of(student, tiny, tiny.states(ROWS, student.taps)).detach()) > 0


def test_what_medusa_heads_are_written_as(tiny: TargetModel) -> None:
    """And that they begin as the target's own head."""
    student = MedusaStudent(tiny, DistillSettings(method="medusa", places=2, layers=2).checked())
    size, vocab = tiny.spec.hidden_size, tiny.spec.vocab_size
    shapes = {f"lm_heads.{head}.weight": (vocab, size) for head in range(2)}
    for block in (f"blocks.{head}.layers.{layer}" for head in range(2) for layer in range(2)):
        shapes |= {f"{block}.weight": (size, size), f"{block}.bias": (size,)}
    assert {name: tuple(tensor.shape) for name, tensor in student.tensors().items()} == shapes
    assert student.config()["medusa_num_heads"] == 2 and student.config()["medusa_num_layers"] == 2
    states = tiny.states(ROWS, ())
    with torch.no_grad():
        found = student.logits(student.hidden(states, 2)[1], 1)[:, 1:]
    assert torch.allclose(found, tiny.logits(states.final_BWH[:, :-1]), atol=1e-4)


def test_what_else_runs_for_a_while_is_in_no_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def call(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds * (9 if 50 < now_s < 150 else 1)

    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: now_s))
    assert step_times.timed([partial(call, 1), partial(call, 2), partial(call, 3)]) == pytest.approx([1, 2, 3])
    assert now_s > 150


@pytest.mark.parametrize(
    ("slower", "runs"), [(8.0, 1), (1 / 3, 1), (1.0, 3)], ids=["busy later", "busy at first", "ended twice"]
)
def test_training_takes_the_minutes_that_it_has(
    slower: float, runs: int, tiny: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else begins or ends on the machine, and however often it is ended: half of ten are the answers'."""
    now_s, steps = 0.0, 0

    def learn(self: Training, *_: Any) -> float:
        nonlocal now_s, steps
        steps += 1
        now_s += 0.5 if steps <= 40 else 0.5 * slower
        if runs > 1 and steps in (100, 250):
            raise KeyboardInterrupt
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        return 0.0

    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(Training, "_learn", learn)
    settings = DistillSettings(method="medusa", places=1, minutes=10)
    for run in range(runs):
        work = DistillFolder(tmp_path / "out", {})
        work.open()
        work.state["answer_seconds"] = 300.0
        one = Training(MedusaStudent(tiny, settings), tiny, Answers(ROWS, []), settings, work)
        with nullcontext() if run + 1 == runs else pytest.raises(KeyboardInterrupt):
            done = one.run(lambda _: None)
        work.close()
    assert 290 <= work.state["training_seconds"] <= 310
    assert 290 <= now_s <= 310 + (runs - 1) * 20 and done <= steps <= done + (runs - 1) * 41, "what was not kept again"


def test_heads_are_written_and_learn(demo: DistillTarget, prompts: Path, tmp_path: Path) -> None:
    for method, name in (("eagle", "midlayer.self_attn.q_proj.weight"), ("medusa", "blocks.0.layers.0.weight")):
        settings = DistillSettings(method=method, steps=6, answers=1, max_tokens=12, places=2)
        report = distill(demo, settings, prompts, tmp_path / method, lambda _: None)
        stored = load_file(tmp_path / method / "model.safetensors")
        assert stored[name].dtype == torch.bfloat16 and stored[name].abs().max() > 0
        assert report["step_seconds"]["guesses_at_once"] == (method == "medusa")
