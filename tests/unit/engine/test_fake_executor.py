"""The suite's own teeth: an engine with a seeded defect does not get past the FakeExecutor."""

from typing import Any

import pytest
from builders import harness, request

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.engine.blocks.block_pool import BlockPool
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.messages.step import StepPlan


def run_forks() -> None:
    h = harness(num_blocks=200)
    h.add(request("a", 10, 6, n=3))
    h.run()


def test_block_copies_left_out_of_the_plan_are_noticed(monkeypatch):
    whole = InFlightStep.plan

    def without_copies(self: InFlightStep, *facts: Any) -> StepPlan:
        self.block_copies = []
        return whole(self, *facts)

    run_forks()
    monkeypatch.setattr(InFlightStep, "plan", without_copies)
    with pytest.raises(AssertionError, match="wrong KV"):
        run_forks()


def test_a_missing_copy_on_write_is_noticed(monkeypatch):
    monkeypatch.setattr(BlockManager, "make_writable", lambda self, table, start, end, step_id: [])
    with pytest.raises(AssertionError, match="while another row names it"):
        run_forks()


def test_reuse_of_a_block_that_a_plan_in_flight_names_is_noticed(monkeypatch):
    def run() -> None:
        h = harness(asynchronous=True, num_blocks=10, max_num_seqs=4)
        h.add(*(request(f"r{i}", 5, 30, stop_token_ids=tuple(range(30))) for i in range(20)))
        while h.engine.has_work():
            h.engine.turn(0.05)

    run()
    whole = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks, step_id: whole(self, blocks, 0))
    with pytest.raises(AssertionError, match="while another row names it"):
        run()


def test_a_prefix_found_under_another_salt_is_noticed(monkeypatch):
    def run() -> None:
        one = request("a", 16, 2, salt="s1")
        two = request("b", one.prompt_token_ids, 2, salt="s2")
        h = harness(roots={one.sampling.seed: "s1", two.sampling.seed: "s2"})
        for req in (one, two):
            h.add(req)
            h.run()

    run()
    whole = BlockManager.new_table
    monkeypatch.setattr(BlockManager, "new_table", lambda self, adapter, salt: whole(self, adapter, ""))
    with pytest.raises(AssertionError, match="wrong KV"):
        run()


def test_a_row_that_is_scheduled_before_its_sample_is_back_is_noticed_in_a_pipeline(monkeypatch):
    whole = Scheduler.__init__

    def never_relay(self: Scheduler, *args: object, relay: bool, **others: object) -> None:
        del relay
        whole(self, *args, relay=False, **others)

    monkeypatch.setattr(Scheduler, "__init__", never_relay)
    h = harness(stages=2)
    h.add(request("a", 4, 5))
    with pytest.raises(AssertionError, match="send back the sampled token"):
        h.run()
