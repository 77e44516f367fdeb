"""Structured output: time of a mask and of compiling a schema, on one thread, and a decode step with every row masked.

    python -m benchmarks.engine.structured
    python -m benchmarks.engine.structured --schemas FILE.jsonl --tokenizer FOLDER --step-seconds 0

--schemas is a file with lines {"name", "schema", "tests": [{"valid", "data"}]}, such as a sample of MaskBench, else
some are made up here; --tokenizer a folder with tokenizer.json, else one of --vocab tokens is made up. Printed are how
many schemas compile, and for those whether valid instances are accepted and invalid ones refused, whole texts in the
tokenizer's tokens. A mask is made ahead of each token of each valid instance. The step is that of --model with random
weights and --batch rows, forward and sampling, with a grammar in every row and with none, in turns; best times.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher

from benchmarks.engine.decode_step import build, make_batch, make_kv
from benchmarks.machine import OtherCpu
from benchmarks.models import SHAPES, write_tokenizer
from benchmarks.record import RESULTS, write_record
from tandem.workers.messages.step import RowInit, RowSampling, StepPlan
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.row_table import RowTable
from tandem.workers.sampling.sampler import sample
from tandem.workers.structured.grammar_store import GrammarRefused, GrammarStore
from tandem.workers.text.grammars import json_schema
from tandem.workers.text.tokenizer import load_tokenizer

ENDLESS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "tags": {"items": {"type": "string"}}},
        "required": ["name", "count", "tags"],
    },
    "minItems": 100_000,
}
"""A schema whose text does not end within a measurement."""
NO_OPTIONS: dict[str, Any] = {}


def made_up(count: int) -> Iterator[dict[str, Any]]:
    """Schemas of nested objects and lists with one valid and one invalid instance each."""
    rng = random.Random(0)

    def grow(depth: int) -> tuple[dict[str, Any], Any]:
        kind = rng.choice(["string", "integer", "enum", "boolean", "object", "array"] if depth else ["object"])
        if kind == "object" or (kind == "array" and depth > 3):
            made = {f"{rng.choice('abcdefgh')}{i}": grow(depth + 1) for i in range(rng.randint(1, 5 - min(depth, 3)))}
            schema = {"type": "object", "properties": {name: one for name, (one, _) in made.items()}}
            schema |= {"required": sorted(made), "additionalProperties": False}
            return schema, {name: value for name, (_, value) in made.items()}
        if kind == "array":
            schema, value = grow(depth + 1)
            return {"type": "array", "items": schema, "maxItems": 8}, [value] * rng.randint(0, 3)
        words = [f"word {rng.randint(0, 999)}" for _ in range(5)]
        plain: dict[str, tuple[dict[str, Any], Any]] = {
            "string": ({"type": "string", "maxLength": 60}, " ".join(words)),
            "integer": ({"type": "integer", "minimum": 0, "maximum": 9999}, rng.randint(0, 9999)),
            "enum": ({"enum": words}, words[2]),
            "boolean": ({"type": "boolean"}, True),
        }
        return plain[kind]

    for number in range(count):
        schema, value = grow(0)
        tests = [{"valid": True, "data": value}, {"valid": False, "data": {**value, "more": 1}}]
        yield {"name": f"made up {number}", "schema": schema, "tests": tests}


def samples(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.schemas is None:
        return list(made_up(100))
    return [json.loads(line) for line in options.schemas.read_text().splitlines()]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def follow(matcher: LLMatcher, tokens: list[int], times_us: list[float]) -> bool:
    """Whether a text is taken and may end there; notes the time of the mask ahead of each token."""
    for token in tokens:
        began_s = time.perf_counter()
        matcher.compute_bitmask()
        times_us.append((time.perf_counter() - began_s) * 1e6)
        if not matcher.try_consume_tokens([token]):
            return False
    return bool(matcher.is_accepting())


def measure_schemas(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compiles all schemas and follows their instances; prints and returns the figures."""
    store, tokenizer = GrammarStore(folder, options.vocab, ()), load_tokenizer(folder)
    began_s = time.perf_counter()
    store.open()
    figures: dict[str, Any] = {"tokenizer_s": time.perf_counter() - began_s}
    compile_ms: list[float] = []
    mask_us: list[float] = []
    reasons: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    chosen = samples(options)
    for one in chosen:
        began_s = time.perf_counter()
        try:
            store.compile("now", json_schema(one["schema"]))
        except GrammarRefused as refusal:
            reasons[str(refusal)[:70]] += 1
            continue
        compile_ms.append((time.perf_counter() - began_s) * 1e3)
        start = store.start("now")
        assert start is not None
        for test in one.get("tests", ()):
            ids = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False)
            is_taken = follow(start.deep_copy(), ids, mask_us if test["valid"] else [])
            outcomes[f"{'valid' if test['valid'] else 'invalid'} {'accepted' if is_taken else 'refused'}"] += 1
    figures |= {
        "schemas": len(chosen),
        "compiled": len(compile_ms),
        "instances": dict(outcomes),
        "compile_ms": {name: percentile(compile_ms, share) for name, share in (("p50", 0.5), ("p99", 0.99))},
        "mask_us": {name: percentile(mask_us, share) for name, share in (("p50", 0.5), ("p99", 0.99))},
        "mask_us_mean": statistics.fmean(mask_us),
        "masks": len(mask_us),
    }
    print(
        f"{figures['compiled']} of {figures['schemas']} schemas compile; {dict(outcomes)}\n"
        f"compile p50 {figures['compile_ms']['p50']:.2f} ms, p99 {figures['compile_ms']['p99']:.1f} ms; mask p50 "
        f"{figures['mask_us']['p50']:.0f} us, p99 {figures['mask_us']['p99']:.0f} us, mean "
        f"{figures['mask_us_mean']:.0f} us over {len(mask_us)} tokens; tokenizer {figures['tokenizer_s']:.1f} s",
        flush=True,
    )
    for reason, count in reasons.most_common(8):
        print(f"  {count:4d} refused: {reason}")
    return figures


class Rows:
    """Rows that sample behind the same forward pass, with or without a grammar."""

    def __init__(self, options: argparse.Namespace, store: GrammarStore, grammar: str | None) -> None:
        self.table = RowTable(options.batch, options.context + 4096, 16, options.vocab, store)
        inits = [
            RowInit(
                row=row,
                token_ids=[5] * options.context,
                prompt_len=options.context,
                num_computed=0,
                sampling=RowSampling(temperature=0.8, seed=row, grammar=grammar, stop_token_ids=(1,)),
            )
            for row in range(options.batch)
        ]
        self.table.apply(StepPlan(step_id=1, work=[], new_rows=inits))
        self._rows = np.arange(options.batch)

    def sample(self, logits: torch.Tensor) -> None:
        """One token for each row."""
        table = self.table
        positions = table.num_known[self._rows].copy()
        drawn = sample(logits, self._rows, positions, table.sampling, table.history, CpuPlatform())
        sampled = drawn.collect()
        assert not any(sampled.failed) and not table.sampling.grammars.errors
        table.reserve(self._rows)
        table.fill(self._rows, sampled.token_ids)


def measure_steps(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A step with every row masked over one with none, A-B-A-B."""
    store = GrammarStore(folder, options.vocab, ())
    store.compile("endless", json_schema(ENDLESS))
    spec, decoder, _ = build(options.model, torch.bfloat16, [torch.bfloat16])
    batch = make_batch(1, [options.context] * options.batch)
    kv = make_kv(spec, -(-options.context // 16) * options.batch, torch.bfloat16).tensors
    sides = {"unmasked": Rows(options, store, None), "masked": Rows(options, store, "endless")}
    times: dict[str, list[float]] = {name: [] for name in sides}
    parts: dict[str, list[float]] = {name: [] for name in sides}
    with OtherCpu() as other, torch.inference_mode():
        while sum(times["masked"]) < options.step_seconds or len(times["masked"]) < 12:
            for name, rows in sides.items():
                began_s = time.perf_counter()
                logits = decoder.forward(batch, kv, None)
                sampled_s = time.perf_counter()
                rows.sample(logits)
                ended_s = time.perf_counter()
                times[name].append(ended_s - began_s)
                parts[name].append(ended_s - sampled_s)
    warm = {name: own[4:] for name, own in times.items()}
    step_ms = {name: min(own) * 1e3 for name, own in warm.items()}
    sampling_ms = {name: min(own[4:]) * 1e3 for name, own in parts.items()}
    ratio = step_ms["masked"] / step_ms["unmasked"]
    added = (sampling_ms["masked"] - sampling_ms["unmasked"]) / step_ms["unmasked"]
    print(
        f"step of {options.batch} rows: {step_ms['unmasked']:.1f} ms unmasked, {step_ms['masked']:.1f} ms masked, "
        f"ratio {ratio:.3f}; sampling {sampling_ms['unmasked']:.1f} and {sampling_ms['masked']:.1f} ms, "
        f"{added:+.1%} of a step; other_cpu {other.share:.2f}"
    )
    return {
        "step_ms": step_ms,
        "sampling_ms": sampling_ms,
        "ratio": ratio,
        "added_share": added,
        "steps": len(warm["masked"]),
        "other_cpu": other.share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, help="JSON lines of schemas with instances; default: made up")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json; default: made up")
    parser.add_argument("--vocab", type=int, default=151_936, help="tokens; default: Qwen's")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2, help="of the step; masks are measured on one")
    parser.add_argument("--step-seconds", type=float, default=20.0, help="of masked steps; 0: no steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.tokenizer or Path(temporary)
        if options.tokenizer is None:
            write_tokenizer(folder, options.vocab)
        torch.set_num_threads(1)
        schemas = measure_schemas(options, folder)
        torch.set_num_threads(options.threads)
        steps = measure_steps(options, folder) if options.step_seconds else NO_OPTIONS
    write_record(RESULTS / "structured.json", options, schemas=schemas, step=steps)


if __name__ == "__main__":
    main()
