"""RequestFigures: sizes and times of requests that have ended, as rows of /metrics under vLLM's names and buckets."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Self

from tandem.workers.engine.base.metric_rows import Histogram, Metric
from tandem.workers.engine.base.sequence import RequestState

ITL_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


def token_bounds(most: int) -> tuple[float, ...]:
    """Returns 1, 2, 5, 10, 20, .. up to `most`."""
    return tuple(
        digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5) if digit * 10**power <= most
    )


@dataclass(slots=True, eq=False)
class RequestFigures:
    """Histograms over the requests that have had a row here, each counted once it has ended. Of one that another group
    began, times count from its arrival here."""

    prompt_tokens: Annotated[Histogram, Metric("histogram", "request_prompt_tokens", "Tokens of a prompt.")]
    generation_tokens: Annotated[
        Histogram, Metric("histogram", "request_generation_tokens", "Tokens of all choices of a request.")
    ]
    most_generation_tokens: Annotated[
        Histogram, Metric("histogram", "request_max_num_generation_tokens", "Tokens of a request's longest choice.")
    ]
    max_tokens: Annotated[
        Histogram, Metric("histogram", "request_params_max_tokens", "The field max_tokens of requests.")
    ]
    n: Annotated[Histogram, Metric("histogram", "request_params_n", "The field n of requests.")] = field(
        default_factory=lambda: Histogram((1, 2, 5, 10, 20))
    )
    prefill_s: Annotated[
        Histogram, Metric("histogram", "request_prefill_time_seconds", "From the first step to the first token.")
    ] = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    decode_s: Annotated[
        Histogram, Metric("histogram", "request_decode_time_seconds", "From the first token to the end.")
    ] = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    inference_s: Annotated[
        Histogram, Metric("histogram", "request_inference_time_seconds", "From the first step to the end.")
    ] = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    time_per_output_token_s: Annotated[
        Histogram,
        Metric("histogram", "request_time_per_output_token_seconds", "A request's mean time between two tokens."),
    ] = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))

    @classmethod
    def for_contexts(cls, max_model_len: int) -> Self:
        """Empty ones, of a model that takes so many tokens."""
        bounds = token_bounds(max_model_len)
        return cls(*(Histogram(bounds) for _ in range(4)))

    def observe(self, state: RequestState, now_s: float) -> None:
        """Counts a request that has ended; one that never had a row not at all."""
        if state.first_step_s is None:
            return
        usage, sampling = state.usage(), state.request.sampling
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.generation_tokens.observe(usage.completion_tokens)
        self.most_generation_tokens.observe(max(seq.num_billed for seq in state.sequences))
        self.max_tokens.observe(sampling.max_tokens)
        self.n.observe(sampling.n)
        self.inference_s.observe(now_s - state.first_step_s)
        if state.first_token_s is None:
            return
        self.prefill_s.observe(state.first_token_s - state.first_step_s)
        decode_s = now_s - state.first_token_s
        self.decode_s.observe(decode_s)
        resumed = state.request.resume_token_ids or [[] for _ in state.sequences]
        most = max(seq.num_output - len(before) for seq, before in zip(state.sequences, resumed, strict=True))
        if most > 1:
            self.time_per_output_token_s.observe(decode_s / (most - 1))

    def snapshot(self) -> "RequestFigures":
        """Returns a copy, in which nothing is counted any more."""
        return RequestFigures(*(getattr(self, each.name).snapshot() for each in fields(self)))
