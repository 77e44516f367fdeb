"""The flags of `tandem bench serve` beside those of prompts: whom to load, when, with which fields, what to keep."""

import json
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from tandem.cluster.cli.base.flag_groups import setting
from tandem.cluster.cli.client.running_service import CLIENT
from tandem.configs.environment import PREFIX
from tandem.configs.errors import SettingsError

BACKENDS: Final = ("openai", "vllm", "openai-chat", "openai-responses", "openai-embeddings")
FIGURES: Final = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
GOALS: Final = ("ttft", "tpot", "e2el")
SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """The service: where it is, what is asked of it, and with which key."""

    backend: str = setting(
        "Kind of route: openai is completions, and vllm another name for it.", default="openai", choices=BACKENDS
    )
    base_url: str | None = setting(
        "Address of any OpenAI-compatible service.", names=("--base-url", "--url"), shown="the newest one here"
    )
    host: str | None = setting("In place of --base-url.", shown="127.0.0.1")
    port: int | None = setting("In place of --base-url.", shown="8000", least=1, most=65535)
    endpoint: str | None = setting("Route.", shown="that of --backend, such as /v1/completions")
    model: str | None = setting("Name of the model in requests.", shown="the first that the service lists")
    served_model_name: str | None = setting("Name in requests, if --model is where the tokenizer is.")
    tokenizer: str | None = setting("Folder or hub id of the tokenizer that makes and counts prompts.", shown="--model")
    lora_modules: tuple[str, ...] = setting("Adapters to ask in place of the model.", default=())
    lora_assignment: str = setting("How requests get one.", default="random", choices=("random", "round-robin"))
    api_key: str | None = setting(
        "Key (or env:NAME, file:PATH).", shown="$TANDEM_API_KEY, else $OPENAI_API_KEY", variable=f"{PREFIX}API_KEY"
    )
    header: tuple[str, ...] = setting("KEY=VALUE of more headers.", default=())
    ssl_certfile: str | None = setting(
        "PEM file with a certificate to show to the service.", variable=f"{CLIENT}SSL_CERTFILE"
    )
    ssl_keyfile: str | None = setting(
        "PEM file with its key.", shown="it is in --ssl-certfile", variable=f"{CLIENT}SSL_KEYFILE"
    )
    ssl_ca_certs: str | None = setting(
        "PEM file with the CA certificates to trust.", shown="what the machine trusts", variable=f"{CLIENT}SSL_CA_CERTS"
    )
    ready_check_timeout_sec: int = setting("Longest wait for a first answer before the load.", default=0, least=0)
    request_id_prefix: str | None = setting("Requests are named this and a number.", shown="bench- and eight digits")

    def headers(self) -> dict[str, str]:
        """The headers of --header. SettingsError for one that is no KEY=VALUE."""
        return pairs(self.header, "--header")


@dataclass(frozen=True, kw_only=True)
class TrafficFlags:
    """Times of requests, and how many run at once."""

    request_rate: float = setting("Requests a second; inf sends all at once.", default=inf, above=0)
    burstiness: float = setting(
        "Shape of the gaps: 1 is Poisson's, less comes in bursts, more is even.", default=1.0, above=0
    )
    max_concurrency: int | None = setting("Most requests at a time; others wait in the client.", least=1)
    ramp_up_strategy: str | None = setting(
        "Change the rate from the first request to the last.", choices=("linear", "exponential")
    )
    ramp_up_start_rps: float | None = setting("The first rate.", least=0)
    ramp_up_end_rps: float | None = setting("The last rate.", above=0)
    self_timed: bool | None = setting("Send requests of timed_trace when the trace says.", shown="on for timed_trace")
    num_warmups: int = setting("Requests before the load that do not count.", default=0, least=0)

    def check(self, data_set: str) -> None:
        """SettingsError for flags that contradict each other."""
        if self.self_timed is not None and data_set != "timed_trace":
            raise SettingsError(f"--dataset-name {data_set} has no times", "--self-timed")
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ramp != (None, None):
                raise SettingsError("is missing beside --ramp-up-start-rps and --ramp-up-end-rps", "--ramp-up-strategy")
            return
        start, end = ramp
        if start is None or end is None:
            raise SettingsError("needs --ramp-up-start-rps and --ramp-up-end-rps", "--ramp-up-strategy")
        if self.request_rate != inf:
            raise SettingsError(f"{self.request_rate:g}: --ramp-up-strategy says the rate", "--request-rate")
        if start > end:
            raise SettingsError(f"{start:g} is above --ramp-up-end-rps {end:g}", "--ramp-up-start-rps")
        if start == 0:
            raise SettingsError("0: the first request would never be sent", "--ramp-up-start-rps")


@dataclass(frozen=True, kw_only=True)
class FieldFlags:
    """Fields of every request."""

    ignore_eos: bool = setting(
        "Answers end at their length alone; always so for random and timed_trace.", default=False
    )
    temperature: float | None = setting("Field of this name.", shown="the service's")
    top_p: float | None = setting("Likewise.")
    top_k: int | None = setting("Likewise.")
    min_p: float | None = setting("Likewise.")
    frequency_penalty: float | None = setting("Likewise.")
    presence_penalty: float | None = setting("Likewise.")
    repetition_penalty: float | None = setting("Likewise.")
    logprobs: int | None = setting("Log probabilities of so many tokens at each place.", least=0)
    extra_body: str | None = setting("JSON object with more fields.")

    def fields(self) -> dict[str, Any]:
        """The fields that were given, without `logprobs` and `ignore_eos`. SettingsError for an --extra-body that is no
        object."""
        given = {name: getattr(self, name) for name in SAMPLING}
        more: Any = {}
        if self.extra_body is not None:
            try:
                more = json.loads(self.extra_body)
            except ValueError as error:
                raise SettingsError(f"{self.extra_body:.80} is no JSON: {error}", "--extra-body") from error
            if not isinstance(more, dict):
                raise SettingsError(f"{self.extra_body:.80} is no JSON object", "--extra-body")
        return {**{name: value for name, value in given.items() if value is not None}, **more}


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """Output and files of a run."""

    percentile_metrics: str | None = setting(
        f"Figures to print, with commas between them, of {', '.join(FIGURES)}: to the first token, a token after it, "
        "between two events with tokens, a whole answer, and waits for --max-concurrency.",
        shown="ttft,tpot,itl; of embeddings e2el",
    )
    metric_percentiles: str = setting("Their percentiles, with commas between them.", default="99")
    goodput: tuple[str, ...] = setting(
        f"Goals in milliseconds such as ttft:200 tpot:50, of {', '.join(GOALS)}: counts requests that reach all.",
        default=(),
    )
    save_result: bool = setting("Write a JSON file with vLLM's fields.", default=False)
    save_detailed: bool = setting("With times, lengths, texts and errors of each request in it.", default=False)
    append_result: bool = setting("Add a line to that file in place of a new one.", default=False)
    result_dir: str | None = setting("Folder of the file.", shown="here")
    result_filename: str | None = setting("Its name.", shown="made of backend, rate, model and time")
    label: str | None = setting("Begins the name in place of the backend.")
    metadata: tuple[str, ...] = setting("KEY=VALUE of more fields of the file.", default=())
    plot: str | None = setting("Draw the run into this file (.png, .svg or .pdf).")
    disable_tqdm: bool = setting("No progress bar.", default=False)

    def figures(self, *, pooling: bool) -> tuple[str, ...]:
        """The figures to show. pooling: no tokens come back. SettingsError for an unknown one."""
        given = self.percentile_metrics
        names = tuple(part.strip() for part in given.split(",")) if given else ("e2el",) if pooling else FIGURES[:3]
        for name in names:
            if name not in FIGURES:
                raise SettingsError(f"{name}: not one of {', '.join(FIGURES)}", "--percentile-metrics")
        return names

    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to show. SettingsError for what is not within 0 and 100."""
        try:
            found = tuple(float(part) for part in self.metric_percentiles.split(","))
        except ValueError as error:
            raise SettingsError(f"{self.metric_percentiles}: not numbers", "--metric-percentiles") from error
        if not all(0 <= one <= 100 for one in found):
            raise SettingsError(f"{self.metric_percentiles}: not within 0 and 100", "--metric-percentiles")
        return found

    def goals(self) -> dict[str, float]:
        """Milliseconds by figure. SettingsError for what is no goal."""
        goals: dict[str, float] = {}
        for given in self.goodput:
            name, _, limit = given.partition(":")
            if name not in GOALS:
                raise SettingsError(f"{given}: goals are of {', '.join(GOALS)}", "--goodput")
            try:
                goals[name] = float(limit)
            except ValueError as error:
                raise SettingsError(f"{given}: not NAME:MILLISECONDS", "--goodput") from error
            if not goals[name] >= 0:
                raise SettingsError(f"{given}: a goal is at least 0", "--goodput")
        return goals


def pairs(given: tuple[str, ...], flag: str) -> dict[str, str]:
    """Reads KEY=VALUE. SettingsError for what is none."""
    found = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"{one}: not KEY=VALUE", flag)
        found[key.strip()] = value.strip()
    return found
