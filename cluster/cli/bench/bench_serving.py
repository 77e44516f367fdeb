"""`tandem bench serve`, from its flags to its exit status: finds the service, makes the requests, runs and reports."""

import asyncio
import random
import ssl
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from tandem.cluster.cli.base.plot_file import check_plot
from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.bench.arrival_times import due_times, pace_words
from tandem.cluster.cli.bench.bench_figures import LoadFigures
from tandem.cluster.cli.bench.bench_flags import FieldFlags, ResultFlags, TargetFlags, TrafficFlags
from tandem.cluster.cli.bench.bench_plot import draw_load
from tandem.cluster.cli.bench.bench_report import check_file, reasons, record, report_lines, result_file, write_result
from tandem.cluster.cli.bench.data_sets.choose_data import check_data, make_samples
from tandem.cluster.cli.bench.data_sets.data_flags import DataFlags
from tandem.cluster.cli.bench.data_sets.samples import Sample, SampleText, load_sample_text
from tandem.cluster.cli.bench.load_backends import LoadBackend, load_backend
from tandem.cluster.cli.bench.load_client import LoadClient, LoadRequest
from tandem.cluster.cli.bench.load_run import LoadResult, run_load, wait_until_ready
from tandem.cluster.cli.client.endpoint import Endpoint, EndpointError, is_here
from tandem.cluster.cli.client.running_service import certificate_of, newest
from tandem.cluster.gateway.http.tls import ClientFiles, client_context
from tandem.configs.environment import variable
from tandem.configs.errors import SettingsError, TandemError
from tandem.configs.secrets import read_secret

NO_EOS: Final = frozenset({"random", "timed_trace"})
"""Data sets whose answers have the length that is asked for, whatever the model would write."""
DONE, ALL_FAILED, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True)
class ServeBench:
    """One `tandem bench serve`."""

    target: TargetFlags
    data: DataFlags
    traffic: TrafficFlags
    fields: FieldFlags
    results: ResultFlags

    def run(self) -> int:
        """Runs and reports it; returns the exit status. TandemError before the first request when a flag is wrong or
        the service does not say its model."""
        self._check()
        place = _Place.of(self.target)
        backend = load_backend(self.target.backend, self.fields.logprobs)
        model, tokenizer = self._names(place)
        text = load_sample_text(tokenizer)
        is_timed = self.data.dataset_name == "timed_trace" and self.traffic.self_timed is not False
        samples = make_samples(self.data, text, as_chat=self.target.backend == "openai-chat", timed=is_timed)
        requests = self._requests(samples, backend, place, model)
        due_s = due_times(self.traffic, samples, self.data.seed)
        result = asyncio.run(self._load(place, backend, requests, due_s))
        file = result_file(self.results, self.target, self.traffic, model)
        about = {"model_id": model, "tokenizer_id": tokenizer, "num_prompts": self.data.num_prompts}
        return self._report(result, backend, text, file, about)

    def _check(self) -> None:
        pooling = load_backend(self.target.backend, None).pools
        check_data(self.data)
        self.traffic.check(self.data.dataset_name)
        self.results.figures(pooling=pooling), self.results.percentiles()
        if self.results.goals() and pooling:
            raise SettingsError(f"{' '.join(self.results.goodput)}: embeddings have no tokens to time", "--goodput")
        if self.fields.logprobs is not None and self.target.backend not in ("openai", "vllm", "openai-chat"):
            raise SettingsError(f"{self.fields.logprobs}: --backend {self.target.backend} has none", "--logprobs")
        if self.data.dataset_name == "timed_trace" and self.target.backend == "openai-chat":
            raise SettingsError("openai-chat: --dataset-name timed_trace sends token ids, to openai alone", "--backend")
        self.fields.fields(), self.target.headers()
        check_file(self.results)  # makes the folder, where the plot may go too
        check_plot(self.results.plot)

    def _names(self, place: "_Place") -> tuple[str, str | None]:
        """The model's name in requests, and the name of the tokenizer."""
        model, root = self.target.served_model_name or self.target.model, None
        if model is None:
            model, root = place.first_model()
            say(f"the model is {model}")
        return model, self.target.tokenizer or self.target.model or root or model

    def _requests(
        self, samples: Sequence[Sample], backend: LoadBackend, place: "_Place", model: str
    ) -> list[LoadRequest]:
        """Writes all requests before the first one is sent."""
        names = _models(self.target, model, len(samples), self.data.seed)
        ends_by_length = self.fields.ignore_eos or self.data.dataset_name in NO_EOS
        fixed = {"ignore_eos": True} if ends_by_length and not backend.pools else {}
        own, prefix = self.fields.fields(), self.target.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-"
        return [
            LoadRequest(
                msgspec.json.encode({"model": name, **backend.body(sample), **fixed, **own}),
                {**place.headers, "x-request-id": f"{prefix}{number}", **self.target.headers()},
                sample.prompt_len,
            )
            for number, (sample, name) in enumerate(zip(samples, names, strict=True))
        ]

    async def _load(
        self, place: "_Place", backend: LoadBackend, requests: Sequence[LoadRequest], due_s: Sequence[float]
    ) -> LoadResult:
        from tqdm import tqdm

        url = place.url + (self.target.endpoint or backend.route)
        most = self.traffic.max_concurrency
        async with LoadClient(url, backend, place.tls, most=most, proxied=place.proxied) as client:
            await self._prepare(client, requests[0], url)
            say(f"sending {len(requests)} requests to {url} {pace_words(due_s, most)}")
            with tqdm(total=len(requests), unit="request", disable=self.results.disable_tqdm) as bar:
                return await run_load(client, requests, due_s, most, bar.update)

    async def _prepare(self, client: LoadClient, request: LoadRequest, url: str) -> None:
        """Waits for a first answer and warms up, if the flags say so."""
        timeout_s = self.target.ready_check_timeout_sec
        if timeout_s and (error := await wait_until_ready(client, request, timeout_s)) is not None:
            raise EndpointError(f"{url} gave no answer within {timeout_s} s: {error}")
        if count := self.traffic.num_warmups:
            await run_load(client, [request] * count, [0.0] * count, self.traffic.max_concurrency, lambda: None)

    def _report(
        self, result: LoadResult, backend: LoadBackend, text: SampleText, file: Path | None, about: Mapping[str, Any]
    ) -> int:
        goals = self.results.goals()
        figures = LoadFigures(
            result,
            shown=self.results.figures(pooling=backend.pools),
            percentiles=self.results.percentiles(),
            goals=goals,
            queues=self.traffic.max_concurrency is not None,
            rate=self.traffic.request_rate,
            count=lambda words: len(text.tokenizer.encode(words, add_special_tokens=False)),
            pools=backend.pools,
        )
        for line in reasons(figures.failed):
            say(line)
        if result.unfinished:
            say(f"interrupted: {result.unfinished} of {result.unfinished + len(result.outcomes)} requests have no end")
        if goals:
            say(f"goodput counts requests with {', '.join(f'{n} up to {ms:g} ms' for n, ms in goals.items())}")
        print("\n".join(report_lines(figures, self.traffic)), flush=True)
        if file is not None:
            found = record(figures, self.target, self.traffic, self.results, about)
            write_result(file, found, append=self.results.append_result)
            say(f"saved as {file}")
        if (drawn := check_plot(self.results.plot)) is not None:
            draw_load(figures, drawn, f"{about['model_id']}, {self.data.dataset_name}")
            say(f"drawn into {drawn}")
        if result.unfinished:
            return INTERRUPTED
        return DONE if figures.good else ALL_FAILED


@dataclass(frozen=True)
class _Place:
    """The service. url: without /v1. proxied: a proxy of the environment stands between."""

    url: str
    headers: Mapping[str, str]
    key: str | None
    certificate: str | None
    files: ClientFiles
    tls: ssl.SSLContext | None
    proxied: bool

    @classmethod
    def of(cls, target: TargetFlags) -> "_Place":
        """Finds it by --base-url, by --host and --port, or as the newest service of this user here, if one runs.
        SettingsError for flags that contradict each other or name no address."""
        url = _address(target).rstrip("/").removesuffix("/v1")
        key = target.api_key or variable("OPENAI_API_KEY")  # $TANDEM_API_KEY is the flag
        key = None if key is None else read_secret(key, "--api-key")
        certificate = certificate_of(url)
        files = ClientFiles(target.ssl_certfile, target.ssl_keyfile, target.ssl_ca_certs)
        with Endpoint(url, key, certificate, files):  # which checks all of them
            parts = urlsplit(url)
        headers = {"content-type": "application/json"}
        headers |= {} if key is None else {"authorization": f"Bearer {key}"}
        tls = client_context(certificate, files) if parts.scheme == "https" else None
        return cls(url, headers, key, certificate, files, tls, not is_here(parts.hostname or ""))

    def first_model(self) -> tuple[str, str | None]:
        """The first model that the service lists, and what it is made of. EndpointError when it lists none."""
        with Endpoint(self.url, self.key, self.certificate, self.files) as endpoint:
            listed = endpoint.models()
        return listed[0].id, listed[0].root


def _address(target: TargetFlags) -> str:
    if target.base_url is not None:
        if target.host is not None or target.port is not None:
            raise SettingsError(f"{target.base_url}: --host and --port say the same", "--base-url")
        return target.base_url
    if target.host is not None or target.port is not None:
        host = target.host or "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{target.port or 8000}"
    try:
        return newest("--base-url").url
    except TandemError as error:
        raise TandemError(f"{error} of any OpenAI-compatible service") from error


def _models(target: TargetFlags, model: str, count: int, seed: int) -> list[str]:
    """The name that each request asks for: the model's, or those of the adapters."""
    adapters = target.lora_modules or (model,)
    if target.lora_assignment == "round-robin":
        return [adapters[place % len(adapters)] for place in range(count)]
    draw = random.Random(seed)
    return [draw.choice(adapters) for _ in range(count)]
