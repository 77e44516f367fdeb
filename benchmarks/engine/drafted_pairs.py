"""Drafts that a model makes, on a target that memory bounds and on the real model: how many times as fast, by batch.

    python -m benchmarks.engine.drafted_pairs --draft DIR [--method draft_model] [--target grown | FOLDER] [--rows 1,4]

The target `grown` is the demo model in a body of 0.44 billion parameters with the same logits (benchmarks/grown.py): it
takes the time of a large model and says what the demo says, so a draft that was distilled for the demo is its draft. It
is no model that anybody trained, and its vocabulary is the demo's. Medusa heads of the demo are made as wide. --draft
demo is the upper bound: a draft that is always right. Prompts are of the kinds that the demo knows
(tools/demo_model/prompts.py), from a seed that distilling does not use; of another target, the lines of --prompts, read
as `tandem distill` reads them: what a user says where the target has a chat template, else text to continue. Each pair
runs A-B-A-B in one process; ratios are medians of wall time, and of CPU time beside it, which other work on the machine
changes less. JSON goes to out/benchmarks.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from rich.console import Console

from benchmarks.engine.engine_run import TimelineSink, cpu_settings, opened_engine
from benchmarks.engine.speculation import Bench
from benchmarks.grown import grown_folder, grown_heads
from benchmarks.models import DEMO, MODELS, find_model
from benchmarks.record import RESULTS, write_record
from benchmarks.workload import Job
from tandem.configs.schema import EngineSettings, ModelSettings, SpeculativeSettings
from tandem.workers.text.chat_template import find_chat_template
from tandem.workers.text.tokenizer import load_tokenizer
from tools.demo_model.prompts import prompts

OUTPUT = 96
UNSEEN_SEED = 77
"""Of prompts; distilling's page has 0."""


@dataclass
class PairOutcome:
    """One comparison at a batch. speed_up, cpu_speed_up: seconds without drafts over seconds with them, by pair."""

    rows: int
    acceptance: float
    tokens_per_step: float
    speed_up: list[float]
    cpu_speed_up: list[float]

    def line(self) -> str:
        wall, cpu = statistics.median(self.speed_up), statistics.median(self.cpu_speed_up)
        spread = f"{min(self.speed_up):.2f} to {max(self.speed_up):.2f}"
        return (
            f"{self.rows:>3} rows: accepted {self.acceptance:5.1%}, {self.tokens_per_step:.2f} tokens a row and step, "
            f"{wall:.2f} times as fast ({spread}); by CPU time {cpu:.2f}"
        )


def settings_with(settings: EngineSettings, options: argparse.Namespace, draft: str) -> EngineSettings:
    """Returns the settings with a draft in a folder, as the options have it."""
    speculative = SpeculativeSettings(method=options.method, model=draft, num_speculative_tokens=options.drafts)
    model = replace(
        settings.model, draft=ModelSettings(model=draft, quantization=options.quantization, dtype=settings.model.dtype)
    )
    return replace(settings, speculative=speculative, model=model)


def jobs_for(target: Path, options: argparse.Namespace, count: int) -> list[Job]:
    """Returns prompts of the target's kinds, each with OUTPUT tokens to write."""
    tokenizer = load_tokenizer(target)
    template = find_chat_template(target, None, tokenizer)
    texts: list[str] = []
    if options.prompts is not None:
        lines = [line for line in options.prompts.read_text().splitlines() if line.strip()][:count]
        texts = lines if template is None else [template.render([{"role": "user", "content": line}]) for line in lines]
    else:
        for one in prompts(count, UNSEEN_SEED):
            assert template is not None
            texts.append(one["prompt"] if "prompt" in one else template.render(one["messages"]))
    return [Job(tokenizer.encode(text, add_special_tokens=False), OUTPUT) for text in texts]


def compare(bench: Bench, rows: int, jobs: Sequence[Job], repeats: int) -> PairOutcome:
    """A-B-A-B, with wall and CPU time of each."""
    engine = bench.engines[1]
    before, steps = engine.stats().drafts, engine.stats().steps
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(repeats):
        taken = []
        for with_drafts in (False, True):
            began = time.process_time()
            seconds = bench.seconds(with_drafts, jobs)
            taken.append((seconds, time.process_time() - began))
        wall.append(taken[0][0] / taken[1][0])
        cpu.append(taken[0][1] / taken[1][1])
    after = engine.stats().drafts
    assert before is not None and after is not None
    drafts, accepted = after.num_draft_tokens - before.num_draft_tokens, after.num_accepted - before.num_accepted
    tokens = repeats * sum(job.output_len for job in jobs)
    row_steps = (engine.stats().steps - steps) * min(rows, len(jobs))
    return PairOutcome(rows, accepted / drafts if drafts else 0.0, tokens / row_steps, wall, cpu)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="a folder of tandem distill, or demo")
    parser.add_argument("--method", default="draft_model", choices=("draft_model", "eagle3", "medusa"))
    parser.add_argument("--target", default="grown", help=f"grown, or {MODELS}")
    parser.add_argument("--quantization", default=None, help="of the draft's weights, made at load")
    parser.add_argument("--prompts", type=Path, default=None, help="a prompt a line; default: of the demo's kinds")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rows", default="1,4", help="sequences at once, several with commas")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3, help="A-B pairs")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    console, outcomes = Console(width=160), list[PairOutcome]()
    dtype: torch.dtype = getattr(torch, options.dtype)
    target = grown_folder(dtype) if options.target == "grown" else find_model(options.target, options.dtype)
    draft: Path = DEMO if options.draft == Path("demo") else options.draft
    if options.target == "grown" and options.method == "medusa":
        draft = grown_heads(draft, target)
    for rows in map(int, options.rows.split(",")):
        with ExitStack() as stack:
            settings = cpu_settings(target, options.threads, 1024, dtype=options.dtype, rows=rows)
            sinks = TimelineSink(), TimelineSink()
            plain, _ = stack.enter_context(opened_engine(settings, sinks[0]))
            drafting, _ = stack.enter_context(opened_engine(settings_with(settings, options, str(draft)), sinks[1]))
            bench = Bench(rows, plain, drafting, sinks)
            jobs = jobs_for(target, options, 2 * rows)
            compare(bench, rows, jobs, 1)
            outcomes.append(compare(bench, rows, jobs, options.repeats))
            console.print(outcomes[-1].line())
    name = f"drafts-{Path(options.target).name}-{options.method}.json"
    write_record(RESULTS / name, options, outcomes=[asdict(outcome) for outcome in outcomes])


if __name__ == "__main__":
    main()
