"""n-gram speculation: acceptance on texts that quote their prompt, speed-up by acceptance, cost where none is accepted.

    python -m benchmarks.engine.speculation [--model llama-135m | qwen3-0.6b | FOLDER] [--rows 1] [--repeats 3]

First the demo model, which has learnt to repeat a phrase and to tell stories: acceptance and speed-up of what it writes
itself. Then a model of --model's shape with random weights. It is made to write edits and extractive summaries of
passages in its prompts (dictated.py), with real lookups. Last its drafts are the true next tokens with a given
probability and wrong otherwise: the speed-up at each acceptance, beside the one that the measured times of steps
predict. At acceptance 0 the budget switches drafts off; the goal is 0.97 of the speed
without speculation. Each pair runs A-B-A-B in one process; ratios are medians. Two engines of one process differ by
where their memory lies: with the demo model, whose steps take a millisecond, by more than what is measured. So there
each ratio is of two new engines, opened in the other order each time. JSON goes to out/benchmarks.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from benchmarks.engine.dictated import KEY, dictate, quoting_jobs
from benchmarks.engine.engine_run import TimelineSink, cpu_settings, drain, opened_engine, run_jobs
from benchmarks.models import DEMO, MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.workload import Job
from tandem.configs.schema import SpeculativeSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.speculation.proposer import ProposalRow
from tandem.workers.text.tokenizer import load_tokenizer
from tests.support.in_process import runner_of

DRAFTS = 5
OUTPUT = 128
PAIRS = 4
"""Of the demo's short runs, with the same two engines."""
ACCEPTANCES = (0.0, 0.25, 0.5, 0.75, 1.0)
NGRAM = SpeculativeSettings(method="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_max=4, prompt_lookup_min=2)
SENTENCES = (
    "the red boat sails over the quiet lake",
    "my little dog likes to run in the garden",
    "a green bird sings near the old house",
    "the cat sleeps under the big table",
)
REPEATED = [f"<|im_start|>user\nSay: {text}<|im_end|>\n<|im_start|>assistant\n" for text in SENTENCES]
STORIES = [f"Once upon a time {text}. Once upon a time {text}. Once upon a time" for text in SENTENCES]


class Scripted:
    """A Proposer that knows the text: each draft is the true next token with probability `acceptance`, else wrong."""

    def __init__(self, acceptance: float, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._acceptance = acceptance
        self._texts = {tuple(text[:16]): text for text in texts}
        self._vocab_size = vocab_size
        self._rng = random.Random(5)

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        return [self._guess(row) for row in rows]

    def _guess(self, row: ProposalRow) -> list[int]:
        text, length = self._texts[tuple(row.token_ids[:16].tolist())], len(row.token_ids)
        true = text[length : length + row.max_drafts]
        return [t if self._rng.random() < self._acceptance else (t + 1) % self._vocab_size for t in true]


@dataclass
class Outcome:
    """One comparison. acceptance: accepted drafts over drafts; speed_up: seconds without speculation over seconds with
    it, by pair; predicted: by the times of steps."""

    name: str
    acceptance: float
    tokens_per_step: float
    speed_up: list[float]
    predicted: float | None = None

    def line(self) -> str:
        """One line for the console."""
        ratio = statistics.median(self.speed_up)
        spread = f"{min(self.speed_up):.2f} to {max(self.speed_up):.2f}"
        said = "" if self.predicted is None else f", predicted {self.predicted:.2f}"
        return (
            f"{self.name:<28} accepted {self.acceptance:5.1%}  {self.tokens_per_step:.2f} tokens a row and step  "
            f"speed-up {ratio:.2f} ({spread}){said}"
        )


class Bench:
    """One model with and without speculation: two engines in this process, of which one runs at a time."""

    def __init__(self, rows: int, plain: Engine, drafting: Engine, sinks: Sequence[TimelineSink]) -> None:
        self.rows = rows
        self.engines, self._sinks = (plain, drafting), sinks
        self._runs = 0

    def seconds(self, with_drafts: bool, jobs: Sequence[Job]) -> float:
        """Time of all jobs."""
        engine, sink = self.engines[with_drafts], self._sinks[with_drafts]
        self._runs += 1
        began_s = time.perf_counter()
        run_jobs(engine, sink, jobs, self.rows, f"run{self._runs}")
        took_s = time.perf_counter() - began_s
        drain(engine)
        return took_s

    def texts(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Prompts with their outputs, without speculation."""
        self.seconds(False, jobs)
        tokens = self._sinks[0].tokens
        return [[*job.prompt, *tokens[f"run{self._runs}-{place}"]] for place, job in enumerate(jobs)]

    def compare(self, name: str, jobs: Sequence[Job], repeats: int) -> Outcome:
        """A-B-A-B."""
        before, steps = self.engines[1].stats().drafts, self.engines[1].stats().steps
        speed_up = [self.seconds(False, jobs) / self.seconds(True, jobs) for _ in range(repeats)]
        after = self.engines[1].stats().drafts
        assert before is not None and after is not None
        drafts = after.num_draft_tokens - before.num_draft_tokens
        acceptance = (after.num_accepted - before.num_accepted) / drafts if drafts else 0.0
        tokens = repeats * sum(job.output_len for job in jobs)
        row_steps = (self.engines[1].stats().steps - steps) * min(self.rows, len(jobs))
        return Outcome(name, acceptance, tokens / row_steps, speed_up)

    def predicted(self, acceptance: float) -> float:
        """The speed-up at an acceptance by the measured costs: tokens of a step over its relative time, with as many
        drafts as are best."""
        drafting = self.engines[1].drafting
        assert drafting is not None
        prices, tokens, best = drafting.costs.prices(self.rows), 1.0, 1.0
        for most in range(1, DRAFTS + 1):
            tokens += acceptance**most
            best = max(best, tokens * prices.step / prices.seconds(self.rows * most, most))
        return best


def bench_of(
    model: Path, options: argparse.Namespace, stack: ExitStack, *, drafting_first: bool = False
) -> tuple[Bench, tuple[ModelRunner, ModelRunner]]:
    """Opens both engines, without and with speculation; `stack` keeps them open."""
    settings = cpu_settings(model, options.threads, 1024, dtype=options.dtype, rows=options.rows)
    sinks = TimelineSink(), TimelineSink()
    engines: dict[bool, Engine] = {}
    for drafts in (True, False) if drafting_first else (False, True):
        own = replace(settings, speculative=NGRAM) if drafts else settings
        engines[drafts], _ = stack.enter_context(opened_engine(own, sinks[drafts]))
    plain, drafting = engines[False], engines[True]
    runners = runner_of(plain.executor), runner_of(drafting.executor)
    return Bench(options.rows, plain, drafting, sinks), runners


def quoting(options: argparse.Namespace, stack: ExitStack) -> Iterator[Outcome]:
    """The demo model on texts that quote their prompts."""
    tokenizer = load_tokenizer(DEMO)
    for name, texts, length in (("repeat a phrase", REPEATED, 12), ("go on with a story", STORIES, 64)):
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        jobs, found = [Job(prompt, length) for prompt in prompts], []
        for turn in range(2 * options.repeats):
            with ExitStack() as own:
                bench, _ = bench_of(DEMO, options, own, drafting_first=turn % 2 == 1)
                bench.compare(name, jobs, 1)
                found.append(bench.compare(f"demo: {name}", jobs, PAIRS))
        speed_up = [statistics.median(outcome.speed_up) for outcome in found]
        acceptance = statistics.fmean(outcome.acceptance for outcome in found)
        tokens = statistics.fmean(outcome.tokens_per_step for outcome in found)
        yield Outcome(f"demo: {name}", acceptance, tokens, speed_up)


def dictated(options: argparse.Namespace, stack: ExitStack) -> Iterator[Outcome]:
    """Edits and summaries that a model of a real shape is made to write."""
    bench, runners = bench_of(find_model(options.model, options.dtype), options, stack)
    for kind in ("edit", "summarize"):
        jobs, answers = quoting_jobs(kind, max(4, options.rows), OUTPUT)
        for runner in runners:
            dictate(runner, answers)
        for text, job in zip(bench.texts(jobs), jobs, strict=True):
            assert text[len(job.prompt) :] == answers[tuple(job.prompt[:KEY])], "it writes what it is made to"
        bench.compare("warm", jobs, 1)
        outcome = bench.compare(f"{kind} a passage", jobs, options.repeats)
        outcome.predicted = bench.predicted(outcome.acceptance)
        yield outcome


def scripted(options: argparse.Namespace, stack: ExitStack) -> Iterator[Outcome]:
    """Drafts of known acceptance, on a model of a real shape."""
    folder = find_model(options.model, options.dtype)
    vocab_size = load_spec(folder).vocab_size
    bench, (_, runner) = bench_of(folder, options, stack)
    rng = random.Random(1)
    jobs = [Job([rng.randrange(2, vocab_size) for _ in range(64)], OUTPUT) for _ in range(options.rows)]
    texts = bench.texts(jobs)
    for acceptance in ACCEPTANCES:
        runner._proposer = Scripted(acceptance, texts, vocab_size)
        bench.compare("warm", jobs, 1)
        outcome = bench.compare(f"drafts right {acceptance:.0%}", jobs, options.repeats)
        outcome.predicted = bench.predicted(acceptance)
        yield outcome


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-135m", help=MODELS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rows", type=int, default=1, help="sequences at once")
    parser.add_argument("--repeats", type=int, default=3, help="A-B pairs")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    console = Console(width=160)
    outcomes: list[Outcome] = []
    for part in (quoting, dictated, scripted):
        with ExitStack() as stack:
            for outcome in part(options, stack):
                console.print(outcome.line())
                outcomes.append(outcome)
    write_record(
        RESULTS / f"speculation-{Path(options.model).name}-{options.rows}.json",
        options,
        outcomes=[asdict(outcome) for outcome in outcomes],
    )


if __name__ == "__main__":
    main()
