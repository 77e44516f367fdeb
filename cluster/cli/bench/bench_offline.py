"""`tandem bench latency` and `throughput`: the engine of tandem.LLM in this process, without HTTP and queues."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tandem.cluster.cli.base.flag_groups import setting
from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.bench.data_sets.choose_data import check_data, make_samples
from tandem.cluster.cli.bench.data_sets.data_flags import DataFlags
from tandem.cluster.cli.bench.data_sets.samples import Sample, SampleText
from tandem.configs.errors import SettingsError

if TYPE_CHECKING:
    from tandem.workers.offline.llm import LLM
    from tandem.workers.offline.outputs import RequestOutput

PERCENTILES = (10, 25, 50, 75, 90, 99)
MOST_IDS = 10_000
"""Prompts of `latency` are random ids below this, as in vLLM."""


@dataclass(frozen=True, kw_only=True)
class LatencyFlags:
    """The batch that is timed."""

    input_len: int = setting("Tokens of each prompt.", default=32, least=1)
    output_len: int = setting("Tokens of each answer.", default=128, least=1)
    batch_size: int = setting("Prompts at once.", default=8, least=1)
    n: int = setting("Answers to each prompt; with --use-beam-search its beams.", default=1, least=1)
    use_beam_search: bool = setting("Beam search in place of sampling.", default=False)
    num_iters_warmup: int = setting("Batches before those that count.", default=10, least=0)
    num_iters: int = setting("Batches that count.", default=30, least=1)
    disable_detokenize: bool = setting("Leave out the making of text.", default=False)
    output_json: str | None = setting("JSON file for the figures.")


@dataclass(frozen=True, kw_only=True)
class ThroughputFlags:
    """The way in which the prompts are run."""

    n: int = setting("Answers to each prompt.", default=1, least=1)
    num_warmups: int = setting("Prompts before those that count.", default=0, least=0)
    disable_detokenize: bool = setting("Leave out the making of text.", default=False)
    output_json: str | None = setting("JSON file for the figures.")


def run_latency(model: str, flags: LatencyFlags, engine: Mapping[str, Any]) -> None:
    """Times batches, and prints mean and percentiles in seconds. engine: flags of LLM. Without --enable-prefix-caching
    there is no prefix cache, which would answer all batches but the first. SettingsError for flags that do not fit."""
    import numpy as np
    from tqdm import tqdm

    file = _json_file(flags.output_json)
    with _opened_llm(model, {"enable_prefix_caching": False, **engine}) as llm:
        batch = _LatencyBatch(llm, flags)
        for _ in tqdm(range(flags.num_iters_warmup), desc="warm-up"):
            batch.run()
        latencies = [batch.run() for _ in tqdm(range(flags.num_iters), desc="bench")]
    percentiles = dict(zip(PERCENTILES, map(float, np.percentile(latencies, PERCENTILES)), strict=True))
    average = float(np.mean(latencies))
    print(f"Avg latency: {average} seconds")
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value} seconds")
    _write(file, {"model_id": model, "avg_latency": average, "latencies": latencies, "percentiles": percentiles})


class _LatencyBatch:
    """The same batch of prompts, again and again."""

    def __init__(self, llm: "LLM", flags: LatencyFlags) -> None:
        import numpy as np

        from tandem.workers.messages.request import SamplingParams
        from tandem.workers.text.beam_search import BeamSearchParams

        most = llm.local.facts.max_model_len
        if flags.input_len + flags.output_len > most:
            both = f"{flags.input_len} and --output-len {flags.output_len}"
            raise SettingsError(f"{both} are more than the context of {most} tokens", "--input-len")
        ids = min(MOST_IDS, llm.local.facts.vocab_size)
        draw = np.random.RandomState(0)
        self._llm, self._flags = llm, flags
        self._prompts = draw.randint(0, ids, (flags.batch_size, flags.input_len)).tolist()
        self._params = SamplingParams(
            n=flags.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=flags.output_len,
            detokenize=not flags.disable_detokenize,
        )
        self._beams = BeamSearchParams(beam_width=flags.n, max_tokens=flags.output_len, ignore_eos=True)

    def run(self) -> float:
        """Seconds of the batch. SettingsError with the reason when a prompt could not be served."""
        began_s = perf_counter()
        if self._flags.use_beam_search:
            errors = [output.error for output in self._llm.beam_search(self._prompts, self._beams)]
        else:
            errors = _errors(self._llm.generate(self._prompts, self._params, use_tqdm=False))
        took_s = perf_counter() - began_s
        if any(errors):
            raise SettingsError(f"{self._flags.batch_size}: {next(filter(None, errors))}", "--batch-size")
        return took_s


def run_throughput(model: str, data: DataFlags, flags: ThroughputFlags, engine: Mapping[str, Any]) -> bool:
    """Runs all prompts at once, and prints requests and tokens a second. engine: flags of LLM. Returns False when no
    prompt was served. SettingsError for flags that do not fit."""
    from dataclasses import replace

    file = _json_file(flags.output_json)
    check_data(data)
    with _opened_llm(model, {"seed": data.seed, **engine}) as llm:
        text = SampleText(llm.tokenizer, Path(llm.settings.model.tokenizer or llm.settings.model.model))
        samples = make_samples(data, text)
        if flags.num_warmups:
            warm = make_samples(replace(data, seed=data.seed + 1, num_prompts=flags.num_warmups), text)
            _generated(llm, warm, flags)
        began_s = perf_counter()
        outputs = _generated(llm, samples, flags)
        took_s = perf_counter() - began_s
    return _report_throughput(model, outputs, took_s, file)


def _generated(llm: "LLM", samples: Sequence[Sample], flags: ThroughputFlags) -> "list[RequestOutput]":
    from tandem.workers.messages.request import SamplingParams

    params = [
        SamplingParams(
            n=flags.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=sample.output_len,
            detokenize=not flags.disable_detokenize,
        )
        for sample in samples
    ]
    return llm.generate([sample.prompt for sample in samples], params)


def _report_throughput(model: str, outputs: "Sequence[RequestOutput]", took_s: float, file: Path | None) -> bool:
    errors = _errors(outputs)
    failed = sum(error is not None for error in errors)
    if failed:
        say(f"{failed} of {len(outputs)} prompts failed, the first one: {next(filter(None, errors))}")
    good = [output for output, error in zip(outputs, errors, strict=True) if error is None]
    prompts = sum(len(output.prompt_token_ids or ()) for output in good)
    answers = sum(len(one.token_ids) for output in good for one in output.outputs)
    per_s = [count / took_s for count in (len(good), prompts + answers, answers)]
    print(f"Throughput: {per_s[0]:.2f} requests/s, {per_s[1]:.2f} total tokens/s, {per_s[2]:.2f} output tokens/s")
    print(f"Total num prompt tokens:  {prompts}")
    print(f"Total num output tokens:  {answers}")
    figures = {"elapsed_time": took_s, "num_requests": len(good), "total_num_tokens": prompts + answers}
    figures |= {"requests_per_second": per_s[0], "tokens_per_second": per_s[1]}
    _write(file, {"model_id": model, **figures, **({"failed": failed} if failed else {})})
    return bool(good)


def _errors(outputs: "Sequence[RequestOutput]") -> list[str | None]:
    """The reason of each output that was not served, None of others."""
    return [next((one.error for one in output.outputs if one.error is not None), None) for output in outputs]


def _opened_llm(model: str, engine: Mapping[str, Any]) -> "LLM":
    from tandem.workers.offline.llm import LLM

    return LLM(model, **engine)


def _json_file(given: str | None) -> Path | None:
    """The file of --output-json. SettingsError, before anything is loaded, where there is no such folder."""
    if given is None:
        return None
    if not Path(given).resolve().parent.is_dir():
        raise SettingsError(f"{given}: there is no such folder", "--output-json")
    return Path(given)


def _write(file: Path | None, found: Mapping[str, Any]) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps(found, indent=4), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{file} cannot be written: {error.strerror}", "--output-json") from error
