"""The target's own answers, written by the engine that serves, in shards that a later run finds again. Torch-free.

Each request has a seed that follows from the run's, so that a shard has the same bytes whenever it is written, and so
that the noise of each of its tokens is known: acceptance is counted by repeating the draw with a draft's logits.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tandem.configs.errors import SettingsError
from tandem.workers.distill.distill_settings import TEMPERATURES, DistillSettings
from tandem.workers.distill.prompt_file import FLAG, Prompts
from tandem.workers.messages.request import SamplingParams
from tandem.workers.offline.llm import LLM
from tandem.workers.quantize.work_folder import WorkFolder

SHARD: Final = 32
"""Requests that are sent together, and kept together."""
SHARE: Final = 0.5
"""The part of the minutes, at most, that answers for training take."""
SHORTEST: Final = 3
"""Tokens of an answer that something can be learned from."""
JUDGED_TEMPERATURES: Final = (0.0, *TEMPERATURES)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target. ids: of prompt and answer. start: where the answer begins."""

    ids: list[int]
    start: int
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to learn from, and those to judge by, at JUDGED_TEMPERATURES."""

    learned: list[Answer]
    judged: list[Answer]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers to learn from."""
        return sum(len(one.ids) - one.start for one in self.learned)


@dataclass(frozen=True, slots=True)
class _Shard:
    """Prompts that are answered together. round: a prompt's answers differ by it."""

    name: str
    prompts: Sequence[list[int]]
    round: int
    temperatures: Sequence[float]


class AnswerRun:
    """Writes what the work folder lacks. open_engine: loads the target, where something is lacking."""

    def __init__(
        self,
        prompts: Prompts,
        settings: DistillSettings,
        work: WorkFolder,
        open_engine: Callable[[], LLM],
        say: Say,
    ) -> None:
        self._prompts = prompts
        self._settings = settings
        self._work = work
        self._open = open_engine
        self._say = say

    def run(self) -> Answers:
        """Returns all answers. Those for training end when their part of the minutes is over, counted over all runs;
        how many there are is kept, so that a later run learns from the same. SettingsError where the target has written
        next to nothing."""
        if "shards" not in self._work.state:
            with self._open() as llm:
                self._write(llm)
        judged = [one for shard in self._judged() for one in self._read(shard)]
        shards = list(self._learned())[: self._work.state["shards"]]
        learned = [one for shard in shards for one in self._read(shard)]
        if not learned or not judged:
            words = "the target answers next to nothing to these prompts"
            raise SettingsError(f"{words}; give others, such as questions for a model with a chat template", FLAG)
        return Answers(learned, judged)

    def _write(self, llm: LLM) -> None:
        state, most_s = self._work.state, SHARE * self._settings.minutes * 60
        for shard in self._judged():
            self._answer(llm, shard)
            words = (
                f"{len(shard.prompts)} prompts that are kept out are answered, temperature {shard.temperatures[0]:g}"
            )
            self._say(f"answers: {words}; {state['answer_seconds']:.0f} s of {most_s:.0f}")
        shards, tokens = list(self._learned()), 0
        for number, shard in enumerate(shards, 1):
            tokens += self._answer(llm, shard)
            spent_s = state["answer_seconds"]
            self._say(
                f"answers: part {number} of at most {len(shards)}, {tokens:,} tokens; {spent_s:.0f} s of {most_s:.0f}"
            )
            if spent_s >= most_s or number == len(shards):
                state["shards"] = number
                self._work.save()
                return

    def _judged(self) -> Iterator[_Shard]:
        for temperature in JUDGED_TEMPERATURES:
            yield _Shard(f"judged-{temperature:g}", self._prompts.judged, 0, [temperature])

    def _learned(self) -> Iterator[_Shard]:
        """Yields shards in which each prompt gets another temperature with each round."""
        prompts = self._prompts.learned
        for turn in range(self._settings.answers):
            for first in range(0, len(prompts), SHARD):
                some = prompts[first : first + SHARD]
                temperatures = [TEMPERATURES[(turn + place) % len(TEMPERATURES)] for place in range(len(some))]
                yield _Shard(f"answers-{turn:03}-{first // SHARD:05}", some, turn, temperatures)

    def _answer(self, llm: LLM, shard: _Shard) -> int:
        """Writes a shard unless it is there; returns how many tokens its answers have."""
        found = self._work.kept(shard.name)
        if found is None:
            started_s, context = time.monotonic(), llm.local.facts.max_model_len
            draw = random.Random(f"{self._settings.seed} {shard.name}")
            temperatures = list(shard.temperatures) * (len(shard.prompts) if len(shard.temperatures) == 1 else 1)
            params = [
                SamplingParams(
                    temperature=temperature,
                    seed=draw.getrandbits(62),
                    max_tokens=min(self._settings.max_tokens, context - len(prompt)),
                    detokenize=False,
                )
                for prompt, temperature in zip(shard.prompts, temperatures, strict=True)
            ]
            given: Sequence[Any] = [{"prompt_token_ids": prompt} for prompt in shard.prompts]
            outputs = llm.generate(given, params, use_tqdm=False)
            if (wrong := next((one for one in outputs if one.outputs[0].error is not None), None)) is not None:
                raise SettingsError(f"a prompt was not answered: {wrong.outputs[0].error}", FLAG)
            found = [
                {"ids": [*prompt, *output.outputs[0].token_ids], "start": len(prompt), "seed": one.seed}
                | {"temperature": one.temperature}
                for prompt, output, one in zip(shard.prompts, outputs, params, strict=True)
            ]
            self._work.put(shard.name, found)
            self._work.state["answer_seconds"] += time.monotonic() - started_s
            self._work.save()
        return sum(len(one["ids"]) - one["start"] for one in found)

    def _read(self, shard: _Shard) -> list[Answer]:
        """Returns the answers of a shard that are long enough."""
        answers = (Answer(**one) for one in self._work.kept(shard.name))
        return [one for one in answers if len(one.ids) - one.start >= SHORTEST]
