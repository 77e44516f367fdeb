"""A state machine over a whole engine with adapters on fake ranks: requests come, go, are given up, while ranks fetch,
place and drop when they please, sometimes refuse, and lack memory for a step. The fakes notice a wrong slot, a page
rewritten under a plan, a row without its adapter; the engine's own invariants are asserted after each step, and at the
end everybody has an end.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from builders import Harness, assert_as_expected, assert_embedded, embedding, harness, request
from fake_adapters import AdapterOp, AdapterPlan
from fake_tiers import TierPlan
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tandem.workers.engine.adapters.adapter_cache import AdapterCache
from tandem.workers.engine.transfers.transfer_manager import TransferManager
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import Abort, AdapterRef, GenerationRequest

DIGESTS = ("a", "b", "c", "s3://d", "s3://e", "f")
BIG = "f"
"""It takes the whole device."""
MODES: tuple[dict[str, Any], ...] = (
    {"asynchronous": False},
    {"asynchronous": True},
    {"stages": 2},
    {"stages": 4},
    {"drafts": 3},
    {"drafts": 4, "asynchronous": True},
)
LONG_ENOUGH = 700
"""Steps of 10 ms in which every waiting request advances, whatever is in the way."""


def machine(
    adapter_cache: type[AdapterCache] = AdapterCache, transfers: type[TransferManager] = TransferManager
) -> type[RuleBasedStateMachine]:
    """The state machine over these classes (the real ones, or one with a seeded defect)."""

    class Hurried(adapter_cache):  # type: ignore[misc, valid-type]
        """Has requests pause soon."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **{"slice_s": 0.03, **named})

    class AdapterMachine(RuleBasedStateMachine):
        h: Harness | None = None
        has_failed = False

        @initialize(
            mode=st.sampled_from(MODES),
            num_pages=st.integers(2, 6),
            max_loras=st.integers(1, 3),
            max_cpu_loras=st.integers(1, 5),
            num_ranks=st.integers(1, 2),
            num_blocks=st.integers(8, 30),
            rows=st.integers(1, 5),
            host_slots=st.sampled_from([0, 0, 6, 40]),
            budget=st.sampled_from([3, 6, 32]),
            cache=st.sampled_from([adapter_cache, Hurried]),
            policy=st.sampled_from(["continuous"] * 4 + ["static", "dynamic"]),
            windows=st.sampled_from([(None,), (None,), (None, 5)]),
        )
        def build(
            self,
            mode: dict[str, Any],
            num_pages: int,
            num_blocks: int,
            rows: int,
            host_slots: int,
            budget: int,
            cache: type[AdapterCache],
            policy: str,
            windows: tuple[int | None, ...],
            **plan: int,
        ) -> None:
            self.slow: dict[tuple[int, int], int] = {}
            self.held: set[str] = set()
            self.broken: set[str] = set()
            self.ever_broken: set[str] = set()
            self.room = math.inf
            pages = {digest: 1 + i % 2 for i, digest in enumerate(DIGESTS)} | {BIG: num_pages}
            self.h = harness(
                **mode,
                num_blocks=num_blocks * len(windows),
                windows=windows,
                batching_policy=policy,
                room=lambda step: self.room,
                max_num_seqs=rows,
                max_num_batched_tokens=budget,
                patience=LONG_ENOUGH,
                adapter_cache=cache,
                transfers=transfers,
                tiers=TierPlan(host_slots=host_slots, num_ranks=plan["num_ranks"]) if host_slots else None,
                adapters=AdapterPlan(
                    num_pages=num_pages,
                    pages=lambda digest, rank: pages[digest],
                    refuses=self.refuses,
                    delay=self.delay,
                    **plan,
                ),
            )
            self.requests: dict[str, GenerationRequest] = {}

        def delay(self, move: AdapterOp, rank: int) -> int | None:
            if move.adapter.digest in self.held:
                return None
            return self.slow.get((move.ticket % 8, rank), 0)

        def refuses(self, move: AdapterOp, rank: int) -> str | None:
            return "broken" if move.adapter.digest in self.broken and rank == 0 else None

        @contextmanager
        def noting_failure(self) -> Iterator[None]:
            """A rule that failed says why; teardown must not speak over it."""
            self.has_failed = True
            yield
            self.has_failed = False

        @property
        def live(self) -> list[GenerationRequest]:
            return [req for name, req in self.requests.items() if name not in self.h.sink.ends]

        # ---- requests ----

        @rule(
            adapter=st.sampled_from((*DIGESTS, None)),
            prompt_len=st.integers(1, 16),
            max_tokens=st.integers(1, 14),
            n=st.sampled_from([1, 1, 1, 3]),
            tenant=st.sampled_from(["t", "t", "u"]),
            priority=st.sampled_from([0, 0, 1]),
            stops=st.sampled_from([(), tuple(range(2, 40))]),
            deadline_s=st.sampled_from([None, None, 0.05]),
            suspect=st.sampled_from([False] * 5 + [True]),
            is_embedded=st.sampled_from([False] * 5 + [True]),
        )
        def arrive(self, prompt_len: int, max_tokens: int, n: int, stops: Any, is_embedded: bool, **more: Any) -> None:
            name, adapter = f"r{len(self.requests)}", more["adapter"]
            prompt = [2 + 7 * i % 90 for i in range(prompt_len)]
            if is_embedded:
                req = embedding(name, prompt, **more)
            else:
                req = request(name, prompt, max_tokens, n=n, stop_token_ids=stops, **more)
            with self.noting_failure():
                try:
                    self.h.add(req)
                    self.requests[name] = req
                except RequestRefused:
                    assert adapter in self.ever_broken

        @precondition(lambda self: self.live)
        @rule(data=st.data())
        def give_up(self, data: st.DataObject) -> None:
            req = data.draw(st.sampled_from(self.live))
            choice = data.draw(st.sampled_from([None, None, *range(req.sampling.n)]))
            with self.noting_failure():
                self.h.engine.abort(Abort(request_id=req.request_id, attempt=0, choice=choice))

        @rule(pins=st.sets(st.sampled_from(DIGESTS), max_size=2))
        def pin(self, pins: set[str]) -> None:
            with self.noting_failure():
                self.h.engine.set_pinned_adapters([AdapterRef(name=d, digest=d, source=d) for d in sorted(pins)])

        # ---- time and ranks ----

        @rule(count=st.integers(1, 5))
        def step(self, count: int) -> None:
            for _ in range(count):
                if self.h.engine.has_work():
                    with self.noting_failure():
                        self.h.step()

        @rule(seconds=st.sampled_from([0.2, 1.1, 31.0]))
        def wait(self, seconds: float) -> None:
            self.h.clock.now_s += seconds

        @rule(place=st.integers(0, 7), rank=st.integers(0, 1), looks=st.integers(0, 4))
        def slow_down(self, place: int, rank: int, looks: int) -> None:
            self.slow[place, rank] = looks

        @rule(digest=st.sampled_from(DIGESTS))
        def hold_or_let_go(self, digest: str) -> None:
            self.held ^= {digest}

        @rule(digest=st.sampled_from(DIGESTS))
        def break_or_mend(self, digest: str) -> None:
            self.broken ^= {digest}
            self.ever_broken |= self.broken

        @rule(room=st.sampled_from([2, 9, math.inf, math.inf]))
        def have_memory_for(self, room: float) -> None:
            self.room = room

        # ---- the end ----

        def teardown(self) -> None:
            """Ranks answer again: everybody gets an end, those that ran to theirs the right one; nothing is left."""
            if self.h is None or self.has_failed:
                return
            self.held.clear()
            self.slow.clear()
            self.room = math.inf
            self.h.run()
            assert not self.live, "a request without an end"
            for name, req in self.requests.items():
                ended = self.h.sink.ends[name]
                if ended.refused is not None:
                    assert ended.refused[0] == (503 if "waited" in ended.refused[3] else 400)
                elif "abort" not in ended.finish_reasons:
                    check = assert_as_expected if req.pool is None else assert_embedded
                    check(self.h, req)

    return AdapterMachine
