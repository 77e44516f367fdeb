"""distill(): a target's answers, a student that learns from them, and what it has learned. The steps, and what is kept.

All that is finished lies in the folder of the result (workers/quantize/work_folder.py): answers, shard by shard, and
what the student has learned so far. A run that was ended goes on there.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from tandem.configs.errors import SettingsError
from tandem.workers.distill.distill_settings import DRAFT, DRAFT_VOCABULARY, EAGLE, MEDUSA, DistillSettings
from tandem.workers.distill.draft_student import DraftStudent, draft_shape
from tandem.workers.distill.eagle_student import EagleStudent, tapped_layers
from tandem.workers.distill.kept_guesses import measure
from tandem.workers.distill.medusa_student import MedusaStudent
from tandem.workers.distill.own_answers import AnswerRun, Answers, Say
from tandem.workers.distill.prompt_file import read_prompts
from tandem.workers.distill.step_times import StepTimes, decode_steps, timed
from tandem.workers.distill.student import Student
from tandem.workers.distill.target_model import AnswerStates, TargetModel
from tandem.workers.distill.training import Training
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.offline.inputs import settings_of
from tandem.workers.offline.llm import LLM
from tandem.workers.planning.hub import BESIDE_WEIGHTS
from tandem.workers.planning.resolve import read_spec, resolve_max_model_len
from tandem.workers.quantize.files.tensor_file import of_memory, write_tensors, write_text
from tandem.workers.quantize.work_folder import WorkFolder, weights_digest
from tandem.workers.text.tokenizer import load_tokenizer

REPORT: Final = "distill_report.json"
OF_WEIGHTS: Final = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files beside a target's weights that say nothing of a draft's."""


@dataclass(frozen=True, slots=True)
class DistillTarget:
    """A target. model: as the user named it; folder: its files; flags: of the engine that runs it."""

    model: str
    folder: Path
    flags: Mapping[str, Any]


class DistillFolder(WorkFolder):
    """The folder of the result."""

    flag: ClassVar[str] = "--out"
    report: ClassVar[str] = REPORT
    result: ClassVar[str] = "what was distilled"
    new_state: ClassVar[Mapping[str, Any]] = {"answer_seconds": 0.0, "training_seconds": 0.0, "step_seconds": 0.0}


def distill(
    target: DistillTarget, settings: DistillSettings, prompts: Path, output: Path, say: Say = print
) -> dict[str, Any]:
    """Writes a draft model or a head for the target into a folder and returns the report, which lies there too.

    say: takes lines about progress. A run that was ended is gone on with: from the same answers the same bytes come.
    SettingsError and UnsupportedModelError, by flag, before anything is computed where a flag is at fault.
    """
    settings = settings.checked()
    engine = settings_of(target.model, target.flags)[0]
    spec = read_spec(engine)
    _check_fit(settings, spec)
    context = resolve_max_model_len(engine, spec)
    found = read_prompts(prompts, target.folder, load_tokenizer(target.folder), context, settings.seed)
    if found.dropped:
        say(f"{found.dropped} prompts are too long for the context of {context} tokens")
    made_of = {
        **settings.as_json(),
        "prompts": blake2b(repr((found.learned, found.judged)).encode(), digest_size=8).hexdigest(),
        "weights": weights_digest(target.folder),
    }
    work = DistillFolder(output, made_of)
    try:
        if (report := work.finished) is not None:
            say(f"{output} is complete")
            return report
        work.open()
        open_engine = partial(LLM, target.model, **{**target.flags, "seed": settings.seed, "max_logprobs": 0})
        answers = AnswerRun(found, settings, work, open_engine, say).run()
        return _DistillRun(target, settings, work, answers, TargetModel(engine), say).run()
    except OSError as error:
        words = f"{error.filename or output}: {error.strerror or error}; the same command goes on where it was"
        raise SettingsError(words, DistillFolder.flag) from error
    finally:
        work.close()


def _check_fit(settings: DistillSettings, spec: ArchSpec) -> None:
    """Checks that the target has what the method needs. SettingsError, by flag."""
    if settings.method == DRAFT:
        draft_shape(spec, settings)
    if settings.method == EAGLE:
        tapped_layers(spec.num_layers)
    if (settings.draft_vocab or 0) > spec.vocab_size:
        raise SettingsError(f"{settings.draft_vocab}: the target has {spec.vocab_size} tokens", "--draft-vocab")


class _DistillRun:
    """The run once there are answers."""

    def __init__(
        self,
        target: DistillTarget,
        settings: DistillSettings,
        work: DistillFolder,
        answers: Answers,
        model: TargetModel,
        say: Say,
    ) -> None:
        self._target = target
        self._settings = settings
        self._work = work
        self._answers = answers
        self._model = model
        self._say = say
        self._student = STUDENTS[settings.method](model, settings, answers)
        self._student.module.to(model.platform.device)

    def run(self) -> dict[str, Any]:
        work = self._work
        self._say(f"{len(self._answers.learned)} answers to learn from, {self._answers.num_tokens:,} tokens")
        if (before := work.kept("before")) is None:
            before = self._measured()
            work.put("before", before)
        steps = Training(self._student, self._model, self._answers, self._settings, work).run(self._say)
        self._round()
        self._write()
        report = {
            "target": self._target.model,
            "settings": self._settings.as_json(),
            "answers": len(self._answers.learned),
            "answer_tokens": self._answers.num_tokens,
            "answer_seconds": work.state["answer_seconds"],
            "training_steps": steps,
            "training_seconds": work.state["training_seconds"],
            "parameters": sum(one.numel() for one in self._student.module.parameters()),
            "before": before,
            **self._judged(),
            "made_of": work.state["made_of"],
        }
        write_text(work.output / REPORT, f"{json.dumps(report, indent=1)}\n")
        work.remove()
        return report

    # ---- inside ----

    def _measured(self) -> list[dict[str, Any]]:
        found = measure(self._student, self._model, self._answers.judged, self._settings.places, self._say)
        return [one.as_json() for one in found]

    def _judged(self) -> dict[str, Any]:
        """Returns the acceptance of what was learned, and what it would save."""
        found = measure(self._student, self._model, self._answers.judged, self._settings.places, self._say)
        times = self._times()
        rows = []
        for one in found:
            gain, guesses = times.gain(one)
            rows.append({**one.as_json(), "predicted_gain": gain, "best_guesses": guesses})
        seconds = {"target": list(times.target), "guess": times.guess, "guesses_at_once": times.once}
        return {"after": rows, "step_seconds": seconds}

    def _times(self) -> StepTimes:
        is_medusa = self._settings.method == MEDUSA
        if self._settings.method == DRAFT:
            flags = {name: value for name, value in self._target.flags.items() if name != "revision"}
            draft = TargetModel(settings_of(self._work.output, flags)[0], self._model.platform)
            (guess,) = decode_steps(draft, 1)
        else:
            guess = partial(_guess, self._student, self._one_state(), self._settings.places if is_medusa else 1)
        *target_s, guess_s = timed([*decode_steps(self._model, self._settings.places + 1), guess])
        return StepTimes(tuple(target_s), guess_s, once=is_medusa)

    def _one_state(self) -> AnswerStates:
        """Returns what a head reads of one token, and the empty place before it."""
        size, device = self._model.spec.hidden_size, self._model.platform.device
        flags_BW = torch.tensor([[False, True]], device=device)
        taps_BWH = torch.zeros(1, 2, size * len(self._student.taps), device=device)
        return AnswerStates(flags_BW.long(), taps_BWH, torch.zeros(1, 2, size, device=device), flags_BW)

    @torch.no_grad()
    def _round(self) -> None:
        """Rounds what was learned to the type that is written, so that this is judged."""
        for parameter in self._student.module.parameters():
            parameter.copy_(parameter.to(self._model.dtype))

    def _write(self) -> None:
        """Writes the files of the result, config.json last. It may run again after it broke off."""
        output, dtype = self._work.output, self._model.dtype
        tensors = {name: tensor.detach().cpu() for name, tensor in self._student.tensors().items()}
        stored = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
        write_tensors(output / "model.safetensors", [of_memory(*pair) for pair in stored.items()])
        if self._settings.method == DRAFT:
            for found in (file for pattern in BESIDE_WEIGHTS for file in sorted(self._target.folder.glob(pattern))):
                if found.name not in OF_WEIGHTS:
                    place = output / found.relative_to(self._target.folder)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(found, place)
        config = {**self._student.config(), "torch_dtype": str(dtype).removeprefix("torch.")}
        write_text(output / "config.json", json.dumps(config, indent=1))


@torch.no_grad()
def _guess(student: Student, state: AnswerStates, places: int) -> None:
    for place, hidden_BWH in enumerate(student.hidden(state, places)):
        student.logits(hidden_BWH[state.chains_BW], place).sum().item()


def _generator(settings: DistillSettings) -> torch.Generator:
    return torch.Generator().manual_seed(settings.seed)


def _draft(model: TargetModel, settings: DistillSettings, answers: Answers) -> Student:
    return DraftStudent(model.spec, settings, _generator(settings))


def _eagle(model: TargetModel, settings: DistillSettings, answers: Answers) -> Student:
    count = settings.draft_vocab or min(DRAFT_VOCABULARY, model.spec.vocab_size)
    return EagleStudent(model, frequent_ids(answers, model.spec.vocab_size, count), _generator(settings))


def _medusa(model: TargetModel, settings: DistillSettings, answers: Answers) -> Student:
    return MedusaStudent(model, settings)


STUDENTS: Mapping[str, Callable[[TargetModel, DistillSettings, Answers], Student]] = {
    DRAFT: _draft,
    EAGLE: _eagle,
    MEDUSA: _medusa,
}


def frequent_ids(answers: Answers, vocab_size: int, count: int) -> torch.Tensor:
    """Returns the ids that are most frequent in the answers, ascending; of equally frequent ones the lowest."""
    written = torch.tensor([token for one in answers.learned for token in one.ids[one.start :]])
    frequency_V = written.bincount(minlength=vocab_size)
    return frequency_V.sort(descending=True, stable=True).indices[:count].sort().values
