"""What a user gets on one GPU without flags: `LLM.generate`, then the same workload over HTTP from `tandem serve`.

    python -m benchmarks.service.llm_and_http [--model llama-8b] [--jobs 512] [--concurrency 128]

Random weights drawn on the device, prompts and answers of the mixed workload (benchmarks/workload.py), greedy and with
temperature 0.8 and top-p 0.95. `LLM` gets all jobs at once; the service has --concurrency streams. Printed are seconds
until the first answer, tokens a second, and the percentiles of a stream. JSON goes to out/benchmarks. --device cpu is
for a try without a GPU.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from benchmarks.engine.gpu_steps import DRAWN, release
from benchmarks.models import SHAPES, config_folder
from benchmarks.record import RESULTS, note, write_record
from benchmarks.service.serving import Service, stream_completion
from benchmarks.workload import Job, Timeline, describe, mixed_workload, summarize
from tandem import LLM, SamplingParams

MAX_MODEL_LEN = 1024
WAYS: Mapping[str, Mapping[str, Any]] = {"greedy": {"temperature": 0.0}, "drawn": DRAWN}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--jobs", type=int, default=512)
    parser.add_argument("--scale", type=float, default=1.0, help="of the workload's lengths")
    parser.add_argument("--concurrency", type=int, default=128, help="streams at once")
    parser.add_argument("--parts", nargs="+", default=["llm", "http"], choices=("llm", "http"))
    return parser.parse_args()


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of both sides."""
    flags = {"device": options.device, "load_format": "dummy", "max_model_len": MAX_MODEL_LEN}
    on_cpu = {"cpu_threads": 1, "kv_cache_memory_bytes": 2**28}
    return flags | (on_cpu if options.device == "cpu" else {})


def run_llm(options: argparse.Namespace, folder: str, jobs: list[Job]) -> dict[str, float]:
    """Tokens a second of generate(), by way; `start_s`: until the first answer."""
    began_s = time.perf_counter()
    found: dict[str, float] = {}
    with LLM(folder, **flags_of(options)) as llm:
        llm.generate([jobs[0].prompt], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        found["start_s"] = time.perf_counter() - began_s
        for way, fields in WAYS.items():
            params = [SamplingParams(max_tokens=job.output_len, ignore_eos=True, **fields) for job in jobs]
            begin_s = time.perf_counter()
            outputs = llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert tokens == sum(job.output_len for job in jobs), "an answer has another length"
            found[way] = tokens / (time.perf_counter() - begin_s)
            print(f"LLM, {way}: {found[way]:.0f} tokens/s", flush=True)
            llm.reset_prefix_cache()
    note(case="LLM", model=options.model, jobs=len(jobs), **found)
    return found


async def streamed(
    options: argparse.Namespace, service: Service, jobs: list[Job], fields: Mapping[str, Any]
) -> list[Timeline]:
    """Runs all jobs as streams, so many at once."""
    start_s = time.perf_counter()
    timelines = [Timeline(start_s) for _ in jobs]
    places = asyncio.Semaphore(options.concurrency)

    async def placed(session: aiohttp.ClientSession, job: Job, timeline: Timeline) -> None:
        async with places:
            timeline.submitted_s = time.perf_counter()
            await stream_completion(session, service, job, timeline, fields)

    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(placed(session, job, timeline) for job, timeline in zip(jobs, timelines, strict=True)))
    return timelines


def run_http(options: argparse.Namespace, folder: str, jobs: list[Job]) -> dict[str, Any]:
    """The figures of a service, by way; its prompts differ, or it would find their KV."""
    arguments = [
        part for name, value in flags_of(options).items() for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    found: dict[str, Any] = {}
    with Service(folder, [*arguments, "--no-enable-prefix-caching"], RESULTS / "gpu-serve.log") as service:
        found["start_s"] = service.first_answer_s
        asyncio.run(streamed(options, service, jobs[:2], WAYS["greedy"]))
        for way, fields in WAYS.items():
            summary = summarize(asyncio.run(streamed(options, service, jobs, fields)))
            print(describe(f"HTTP, {way}", summary), flush=True)
            found[way] = {"tokens_per_s": summary.tokens_per_s, "ttft_ms": summary.ttft_ms, "itl_ms": summary.itl_ms}
    note(case="HTTP", model=options.model, jobs=len(jobs), concurrency=options.concurrency, **found)
    return found


def main() -> None:
    options = parse_arguments()
    folder = str(config_folder(options.model))
    vocab = int(str(SHAPES[options.model]["vocab_size"]))
    jobs = mixed_workload(vocab, count=options.jobs, scale=options.scale)
    llm = run_llm(options, folder, jobs) if "llm" in options.parts else None
    release(options.device)  # the service sizes its KV by what is free
    http = run_http(options, folder, jobs) if "http" in options.parts else None
    write_record(RESULTS / f"llm-and-http-{options.model}.json", options, llm=llm, http=http)


if __name__ == "__main__":
    main()
