"""A state machine over a whole engine whose prompts are longer than its steps, on fake ranks: requests come, are given
up and give way to each other in the middle of their prompts, steps run out of memory, and loads of KV fail under those
who run on them. The engine's invariants, reservations among them, are asserted after each step; at the end everybody
has an end, and those that ran to theirs the right one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from builders import Harness, assert_as_expected, harness, request
from fake_tiers import TierPlan
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tandem.workers.messages.request import Abort, GenerationRequest
from tandem.workers.messages.transfer import CopyKV
from tests.support.engine_invariants import check_invariants

MODES: tuple[dict[str, Any], ...] = (
    {"asynchronous": False},
    {"asynchronous": True},
    {"drafts": 3, "max_num_batched_tokens": 10},
    {"stages": 2},
    {"stages": 4},
)
"""With drafts, which take up to half of a step, steps are larger, and still smaller than the longest prompt."""
PATIENCE = 20
"""Steps without progress while fake ranks copy KV."""


class PromptMachine(RuleBasedStateMachine):
    """Few blocks and tokens in a step; prompts begin alike, so that they find each other's blocks."""

    h: Harness | None = None
    has_failed = False

    @initialize(
        mode=st.sampled_from(MODES),
        num_blocks=st.integers(11, 14),
        rows=st.integers(3, 6),
        budget=st.sampled_from([4, 5, 8]),
        host_slots=st.sampled_from([0, 0, 40]),
    )
    def build(self, mode: dict[str, Any], num_blocks: int, rows: int, budget: int, host_slots: int) -> None:
        self.memory: dict[int, int] = {}
        self.copies_fail = False
        self.h = harness(
            **{"max_num_batched_tokens": budget, **mode},
            num_blocks=num_blocks,
            block_size=2,
            max_num_seqs=rows,
            room=lambda step_id: self.memory.get(step_id, float("inf")),
            tiers=TierPlan(host_slots=host_slots, fails=self.fails) if host_slots else None,
            patience=PATIENCE,
        )
        self.requests: dict[str, GenerationRequest] = {}

    def fails(self, transfer: CopyKV, rank: int, place: int) -> bool:
        return self.copies_fail and transfer.kind == "load"

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """A rule that failed says why; teardown must not speak over it."""
        self.has_failed = True
        yield
        self.has_failed = False

    @property
    def live(self) -> list[GenerationRequest]:
        assert self.h is not None
        return [req for name, req in self.requests.items() if name not in self.h.sink.ends]

    @rule(
        prompt_len=st.sampled_from([1, 2, 11, 12]),
        text=st.integers(0, 2),
        max_tokens=st.sampled_from([1, 4, 10]),
        n=st.sampled_from([1, 1, 2]),
        priority=st.sampled_from([0, 0, 1]),
        resumed=st.sampled_from([0, 0, 3]),
        count=st.integers(1, 3),
    )
    def arrive(
        self, prompt_len: int, text: int, max_tokens: int, n: int, resumed: int, count: int, **more: int
    ) -> None:
        assert self.h is not None
        resumed = min(resumed, max_tokens - 1)
        resume = [[5 + choice + i for i in range(resumed)] for choice in range(n)] if resumed else None
        for _ in range(count):
            prompt = [2 + (7 + 4 * text) * i % 90 for i in range(prompt_len)]
            req = request(f"r{len(self.requests)}", prompt, max_tokens, n=n, resume=resume, **more)
            with self.noting_failure():
                self.h.add(req)
            self.requests[req.request_id] = req
            text += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        assert self.h is not None
        req = data.draw(st.sampled_from(self.live))
        choice = data.draw(st.sampled_from([None, None, *range(req.sampling.n)]))
        with self.noting_failure():
            self.h.engine.abort(Abort(request_id=req.request_id, attempt=0, choice=choice))
            check_invariants(self.h.engine)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        assert self.h is not None
        for _ in range(count):
            if self.h.engine.has_work():
                with self.noting_failure():
                    self.h.step()

    @rule(ahead=st.integers(1, 3), tokens=st.sampled_from([2, 4]))
    def lack_memory(self, ahead: int, tokens: int) -> None:
        """A step that is not planned yet has memory for so many tokens."""
        assert self.h is not None
        self.memory[len(self.h.executor.plans) + ahead] = tokens

    @rule()
    def break_or_mend_copies(self) -> None:
        self.copies_fail = not self.copies_fail

    def teardown(self) -> None:
        """Steps have memory again: everybody gets an end, and nothing is used or reserved."""
        if self.h is None or self.has_failed:
            return
        self.memory.clear()
        self.h.run()
        assert not self.live, "a request without an end"
        for name, req in self.requests.items():
            if "abort" not in self.h.sink.ends[name].finish_reasons:
                assert_as_expected(self.h, req)
