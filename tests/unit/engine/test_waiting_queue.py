"""WaitingQueue against a plain model: who is queued, who waits for what, who counts for a tenant; seeded defects."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.transfer import Failure

CAUSES = [
    (Blocker.FORK, "r"),
    (Blocker.ADAPTER, "x"),
    (Blocker.ADAPTER, "y"),
    (Blocker.KV, 1),
    (Blocker.TURN, "x"),
    (Blocker.ALONE, "r"),
]
HUNT = settings(
    max_examples=400, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate], database=None
)


class Seq(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @property
    def state(self) -> SimpleNamespace:
        """Of a request that has had a row; how long it waits is told elsewhere (test_course.py)."""
        return SimpleNamespace(admitted=True, paused_s=0.0)


def machine(queue_class: type[WaitingQueue] = WaitingQueue) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        """model: each waiting sequence, and its cause; None: queued; "loose": unblocked and not yet dealt with."""

        def __init__(self) -> None:
            super().__init__()
            self.queue = queue_class()
            self.model: dict[Any, Any] = {}
            self.count = 0

        def pick(self, data: st.DataObject) -> Any:
            return data.draw(st.sampled_from(list(self.model)))

        @rule(tenant=st.sampled_from("tu"), adapter=st.sampled_from([None, "x", "y"]), cause=st.sampled_from(CAUSES))
        def come(self, tenant: str, adapter: str | None, cause: Any) -> None:
            self.count += 1
            seq = Seq(tenant=tenant, adapter=adapter, order=(0, self.count, 0), bound_step=0, tokens=[1])
            if self.count % 3:
                self.queue.block(seq, *cause)
                self.model[seq] = cause
            else:
                self.queue.push(seq)
                self.model[seq] = None

        @precondition(lambda self: self.model)
        @rule(data=st.data(), cause=st.sampled_from(CAUSES[1:]))
        def block(self, data: st.DataObject, cause: Any) -> None:
            seq = self.pick(data)
            self.queue.block(seq, *cause)
            self.model[seq] = cause

        @rule(data=st.data(), cause=st.sampled_from(CAUSES), tenant=st.sampled_from(["", "t"]), fails=st.booleans())
        def unblock(self, data: st.DataObject, cause: Any, tenant: str, fails: bool) -> None:
            event = Awaited(*cause, Failure("internal", "a rule says so") if fails else None)
            freed = self.queue.unblock(event, only=(lambda seq: seq.tenant == tenant) if tenant else None)
            wanted = {seq for seq, of in self.model.items() if of == cause and tenant in ("", seq.tenant)}
            assert set(freed) == wanted, "others than waited for it"
            for seq in freed:
                how = data.draw(st.sampled_from(["push", "remove"]))
                if how == "push":
                    self.queue.push(seq)
                    self.model[seq] = None
                elif cause[0] is Blocker.FORK:
                    self.queue.push(seq)
                    self.queue.remove(seq)
                    del self.model[seq]
                else:
                    self.queue.remove(seq)
                    del self.model[seq]

        @precondition(lambda self: self.model)
        @rule(data=st.data())
        def remove(self, data: st.DataObject) -> None:
            seq = self.pick(data)
            self.queue.remove(seq)
            del self.model[seq]

        @invariant()
        def agrees(self) -> None:
            queue, model = self.queue, self.model
            queue.check_invariants()
            assert len(queue) == sum(cause is None for cause in model.values()), "the queue is miscounted"
            assert {seq: queue.blocker_of(seq) for seq in model} == {s: c and c[0] for s, c in model.items()}
            for cause in CAUSES:
                assert list(queue.blocked_by(*cause)) == [
                    s for s in queue.blocked_by(*cause) if model.get(s) == cause
                ], "somebody waits who is gone"
                assert len(queue.blocked_by(*cause)) == sum(of == cause for of in model.values())
            for digest in "xy":
                kinds = (Blocker.FORK, Blocker.ADAPTER)
                admitted = {s for s, c in model.items() if s.adapter == digest and (c is None or c[0] not in kinds)}
                assert set(queue.with_adapter(digest)) == admitted, "users of an adapter are miscounted"
            for tenant in "tu":
                counted = [
                    s for s, c in model.items() if s.tenant == tenant and (c is None or c[0] is not Blocker.FORK)
                ]
                known = queue.tenants._tenants.get(tenant)
                assert (known.waiting if known else 0) == len(counted), "a tenant's sequences are miscounted"

    return Machine


TestWaitingQueue = machine().TestCase
TestWaitingQueue.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class StillWaits(WaitingQueue):
    def remove(self, seq: Any) -> None:
        self.tenants.remove(seq)


class CountsForks(WaitingQueue):
    def block(self, seq: Any, blocker: Blocker, key: Any) -> None:
        super().block(seq, blocker, key)
        self.tenants.block(seq)


class ForgetsTheHeld(WaitingQueue):
    def block(self, seq: Any, blocker: Blocker, key: Any) -> None:
        super().block(seq, blocker, key)
        if blocker is Blocker.ALONE:
            self.tenants.remove(seq)


class KeepsUsers(WaitingQueue):
    def _clear(self, seq: Any) -> None:
        adapter, seq.adapter = seq.adapter, None
        super()._clear(seq)
        seq.adapter = adapter


class FreesAll(WaitingQueue):
    def unblock(self, event: Awaited, only: Any = None) -> list[Any]:
        return super().unblock(event)


@pytest.mark.parametrize("defect", [StillWaits, CountsForks, ForgetsTheHeld, KeepsUsers, FreesAll])
def test_a_seeded_defect_is_caught(defect: type[WaitingQueue]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine(defect), settings=HUNT)
