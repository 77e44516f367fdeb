"""Training: a student learns the target's distributions along the target's own answers; a killed run goes on.

The loss of a place is KL(target, student) and a tenth of the answer's own cross entropy; later places count less. Which
answers a step gets, and its rate, follow from the seed and its number, so a run that was ended and one that was not end
with the same bytes, on the same number of threads. N chains, V tokens that the student knows.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch.nn import functional

from tandem.parallel.stored.headers import read_header
from tandem.workers.distill.distill_settings import DistillSettings
from tandem.workers.distill.own_answers import Answer, Answers, Say
from tandem.workers.distill.student import Student, shifted
from tandem.workers.distill.target_model import AnswerStates, TargetModel
from tandem.workers.quantize.files.tensor_file import DTYPE_NAMES, of_memory, write_tensors
from tandem.workers.quantize.work_folder import WorkFolder

BATCH_TOKENS: Final = 256
"""Tokens of a step: of so many, many steps teach small models more in the same time than few of a thousand do."""
SORTED: Final = 16
"""Batches whose answers are sorted by length together, so that little is padding."""
WARM_STEPS: Final = 20
"""Steps whose rate rises; by their time it is known how many fit into the minutes."""
PLAN_S: Final = 30.0
"""Seconds after which that is reckoned again, as other work on the machine begins and ends."""
LEAST_SHARE: Final = 0.25
"""The part of the minutes, at least, that training gets, whatever the answers took."""
CE: Final = 0.1
LATER: Final = 0.8
"""The weight of a place, as a part of the one's before it."""
LOWEST: Final = 0.05
"""The last steps' part of the rate."""
KEEP_S: Final = 20.0
SAY_S: Final = 10.0
FILE: Final = "training.safetensors"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
STEP: Final = "step"
"""Keys of AdamW's state of a parameter; the last one stays on the host."""


class Training:
    """Teaches a student; what it has learned is kept in the work folder."""

    def __init__(
        self, student: Student, target: TargetModel, answers: Answers, settings: DistillSettings, work: WorkFolder
    ) -> None:
        self._student = student
        self._target = target
        self._answers = answers
        self._settings = settings
        self._work = work
        self._rate, self._parameters = (
            settings.learning_rate or student.learning_rate,
            list(student.module.parameters()),
        )
        self._planned, self._counted_s = (0, 0.0), 0.0  # step and time of the last plan; until when time is counted
        self._optimizer = torch.optim.AdamW(self._parameters, lr=self._rate, betas=(0.9, 0.95), weight_decay=0.01)

    def run(self, say: Say) -> int:
        """Learns until the steps are done; returns how many there were."""
        step = self._restored()
        began_s, state = time.monotonic(), self._work.state
        self._read(say)
        first, started_s = step, time.monotonic()
        state["training_seconds"] += started_s - began_s
        kept_s = said_s = started_s
        self._planned, self._counted_s = (step, started_s), started_s
        for number, answers in enumerate(self._batches()):
            if number < step:
                continue
            total = self._total(number)
            if total is not None and number >= total:
                break
            loss = self._learn(number, total, answers)
            step, now_s = number + 1, time.monotonic()
            if now_s - said_s >= SAY_S:
                said_s = now_s
                say(_progress(step, total, loss, (now_s - started_s) / (step - first)))
            if now_s - kept_s >= KEEP_S:
                kept_s = now_s
                self._keep(step)
        self._keep(step)
        return step

    # ---- inside ----

    def _read(self, say: Say) -> None:
        """Runs the answers through the target, so that steps do not wait for it and are of one length; answers whose
        states do not fit into memory are run when they are learned from."""
        said_s, answers = time.monotonic(), self._answers.learned
        for number, answer in enumerate(answers, 1):
            if self._target.is_full:
                return
            self._target.states([answer], self._student.taps)
            if time.monotonic() - said_s >= SAY_S:
                said_s = time.monotonic()
                say(f"the target reads its answers: {number:,} of {len(answers):,}")

    def _learn(self, number: int, total: int | None, answers: Sequence[Answer]) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * _share(number, total)
        loss = loss_of(self._student, self._target, self._target.states(answers, self._student.taps))
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def _total(self, number: int) -> int | None:
        """Returns how many steps there are; None while their time is not known. What the minutes leave time for is
        reckoned by the steps since it last was."""
        state, now_s = self._work.state, time.monotonic()
        if self._settings.steps is not None:
            return self._settings.steps
        taken, since_s = number - self._planned[0], now_s - self._planned[1]
        if taken >= WARM_STEPS and (since_s >= PLAN_S or "steps" not in state):
            self._planned = number, now_s
            self._count(now_s)
            all_s = self._settings.minutes * 60
            left_s = max(
                all_s - state["answer_seconds"] - state["training_seconds"], LEAST_SHARE * all_s - state["step_seconds"]
            )
            state["steps"] = max(2 * WARM_STEPS, number + int(left_s * taken / since_s))
            self._work.save()
        steps: int | None = state.get("steps")
        return steps

    def _count(self, now_s: float) -> None:
        """Adds the time since it was last counted to that of all runs."""
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        self._work.state["training_seconds"] += passed_s
        self._work.state["step_seconds"] += passed_s

    def _batches(self) -> Iterator[list[Answer]]:
        """Yields the answers of each step, all of them in each round, in another order."""
        turn = 0
        while True:
            draw = random.Random(f"{self._settings.seed} {turn}")
            answers = list(self._answers.learned)
            draw.shuffle(answers)
            batches: list[list[Answer]] = []
            for part in by_tokens(answers, SORTED * BATCH_TOKENS):
                batches += by_tokens(sorted(part, key=lambda one: len(one.ids)), BATCH_TOKENS)
            draw.shuffle(batches)
            yield from batches
            turn += 1

    def _keep(self, step: int) -> None:
        found = {STEP: torch.tensor(step)}
        for name, parameter in self._student.module.named_parameters():
            found[name] = parameter.detach()
            moments = self._optimizer.state[parameter]
            found |= {f"{name} {kind}": tensor for kind, tensor in moments.items()}
        write_tensors(self._work.path / FILE, [of_memory(name, tensor.cpu()) for name, tensor in found.items()])
        self._count(time.monotonic())
        self._work.save()

    def _restored(self) -> int:
        """Takes what an earlier run has learned; returns the number of its steps."""
        file = self._work.path / FILE
        if not file.is_file():
            return 0
        found = _read(file)
        with torch.no_grad():
            for name, parameter in self._student.module.named_parameters():
                parameter.copy_(found[name])
                moments = {kind: found[f"{name} {kind}"].to(parameter.device) for kind in MOMENTS}
                self._optimizer.state[parameter] = {**moments, STEP: found[f"{name} {STEP}"]}
        return int(found[STEP])


def loss_of(student: Student, target: TargetModel, states: AnswerStates) -> torch.Tensor:
    """Returns the mean loss of the chains that start in these answers."""
    wanted_NV = target.logits(states.final_BWH[states.chains_BW]).log_softmax(-1)
    if student.ids is not None:
        wanted_NV = wanted_NV[:, student.ids.to(wanted_NV.device)]
    number_BW = states.chains_BW.flatten().cumsum(0).view_as(states.chains_BW) - 1  # rows of wanted_NV
    total, weights = wanted_NV.new_zeros(()), 0.0
    for place, hidden_BWH in enumerate(student.hidden(states, student.trained_places)):
        inside_BW = states.chains_BW & shifted(states.chains_BW, place)
        if not inside_BW.any():
            break
        found_NV = student.logits(hidden_BWH[inside_BW], place).log_softmax(-1)
        teacher_NV = wanted_NV[shifted(number_BW, place)[inside_BW]]
        kl_N = (teacher_NV.exp() * (teacher_NV - found_NV)).sum(-1)
        ce_N = _cross_entropy(found_NV, shifted(states.ids_BW, place + 1)[inside_BW], student.ids)
        weight = LATER**place
        total, weights = total + weight * (kl_N + CE * ce_N).mean(), weights + weight
    return total / max(weights, 1e-9)


def _cross_entropy(found_NV: torch.Tensor, ids_N: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
    """Returns the answers' own; 0 for tokens that the student does not know."""
    if known is None:
        return functional.nll_loss(found_NV, ids_N, reduction="none")
    known = known.to(ids_N.device)
    place_N = torch.searchsorted(known, ids_N).clamp(max=len(known) - 1)
    return functional.nll_loss(found_NV, place_N, reduction="none") * (known[place_N] == ids_N)


def by_tokens(answers: Sequence[Answer], most: int) -> list[list[Answer]]:
    """Returns the answers in parts of at most so many tokens, or one answer."""
    parts: list[list[Answer]] = []
    room = 0
    for one in answers:
        if not parts or len(one.ids) > room:
            parts.append([])
            room = most
        parts[-1].append(one)
        room -= len(one.ids)
    return parts


def _share(number: int, total: int | None) -> float:
    """Returns a step's part of the rate: it rises, then falls as a cosine."""
    rising = min(1.0, (number + 1) / WARM_STEPS)
    if total is None or number < WARM_STEPS or total <= WARM_STEPS:
        return rising
    fallen = (number - WARM_STEPS) / (total - WARM_STEPS)
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * fallen))


def _progress(step: int, total: int | None, loss: float, seconds: float) -> str:
    if total is None:
        return f"training: step {step}, loss {loss:.3f}, {seconds:.2f} s a step"
    return f"training: step {step} of {total}, loss {loss:.3f}; about {(total - step) * seconds:.0f} s left"


def _read(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file that write_tensors() has written."""
    dtypes, found = {name: dtype for dtype, name in DTYPE_NAMES.items()}, {}
    for name, stored in read_header(file).items():
        data = bytearray(stored.nbytes)
        with stored.file.open("rb") as stream:
            stream.seek(stored.start)
            stream.readinto(data)
        found[name] = torch.frombuffer(data, dtype=dtypes[stored.dtype]).view(stored.shape)
    return found
