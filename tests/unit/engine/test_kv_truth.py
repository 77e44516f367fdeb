"""A state machine of two groups that tell a gateway of their KV: whatever is lost on the way, and however often a group
comes back under its name, two seconds later the gateway knows what is true."""

import pytest
from builders import Harness, harness, request
from fake_tiers import TierPlan
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tandem.cluster.routing.prefix_index import EXPECTED_S, Overlap, PrefixIndex
from tandem.cluster.routing.told_prefixes import ToldPrefixes
from tandem.offload.kv.block_key import block_key, root_key
from tandem.offload.kv.host_tier import HostTier
from tandem.workers.engine.blocks import kv_journal
from tandem.workers.engine.thread.kv_teller import KvTeller
from tandem.workers.messages import kv_events
from tandem.workers.messages.kv_events import KvEvents
from tests.support.kv_links import GATEWAY, StraightLinks, telling

SIZE, INDEX_BLOCKS = 4, 2
EQUAL_AFTER_S, LOOP_S = 2.0, 0.1
TEXTS = [[2 + (start + i * i) % 60 for i in range(44)] for start in range(6)]
PROMPTS = st.builds(
    lambda first, shared, then, length: (TEXTS[first][:shared] + TEXTS[then])[:length],
    st.integers(0, 3), st.sampled_from([0, 8, 16, 24]), st.integers(0, 3), st.sampled_from([9, 17, 30, 41]),
)  # fmt: skip
SALTS = st.sampled_from(["", "", "s"])
GROUPS = st.sampled_from(["a", "b"])


class OneLife:
    """One life of a group: its engine, and what tells the gateway of it."""

    def __init__(self, prefixes: ToldPrefixes, name: str, life: int, now_s: float, teller: type[KvTeller]) -> None:
        tiers = TierPlan(host_slots=16, disk_keys=8)
        self.h: Harness = harness(num_blocks=16, block_size=SIZE, tiers=tiers)
        self.h.clock.now_s = now_s
        self.life = life
        assert self.h.engine.kv is not None
        self.links: StraightLinks
        self.teller, self.links = telling(self.h.engine.kv, prefixes, name, life, self.h.clock)
        self.teller.__class__ = teller

    def has(self, tokens: list[int], salt: str) -> Overlap:
        """The truth: what the pool and the tiers have of a prompt, one indexed key after the other."""
        manager, tiers = self.h.engine.manager, self.h.executor.tiers
        key, keys = root_key("revision", "float32", None, salt), list[bytes]()
        for place in range((len(tokens) - 1) // SIZE):
            key = block_key(key, tokens[place * SIZE : (place + 1) * SIZE])
            keys.append(key)
        device = below = 0
        for key in keys[INDEX_BLOCKS - 1 :: INDEX_BLOCKS]:
            on_device = manager.pool.lookup(key) is not None
            if on_device and not below:
                device += 1
            elif on_device or (tiers is not None and tiers.store.place(key) is not None):
                below += 1
            else:
                break
        return Overlap(device * SIZE * INDEX_BLOCKS, below * SIZE * INDEX_BLOCKS)


def machine(teller: type[KvTeller] = KvTeller) -> type[RuleBasedStateMachine]:
    """The state machine over this teller: the real one, or one with a seeded defect."""

    class TruthMachine(RuleBasedStateMachine):
        @initialize()
        def build(self) -> None:
            self.now_s = 100.0
            self.prefixes = ToldPrefixes()
            self.groups: dict[str, OneLife] = {}
            self.asked: list[tuple[list[int], str]] = []
            self.expects_until_s = 0.0
            self.number = 0
            for name in ("a", "b"):
                self.come_back(name)

        def come_back(self, name: str) -> None:
            life = self.groups[name].life + 1 if name in self.groups else 1
            self.groups[name] = OneLife(self.prefixes, name, life, self.now_s, teller)

        def new_name(self) -> str:
            self.number += 1
            return f"r{self.number}"

        def pass_time(self, seconds: float) -> None:
            for _ in range(round(seconds / LOOP_S)):
                self.now_s += LOOP_S
                self.prefixes.tick(self.now_s)
                for group in self.groups.values():
                    group.h.clock.now_s = self.now_s
                    group.teller.tell()

        @rule(name=GROUPS, tokens=PROMPTS, salt=SALTS, lose=st.integers(0, 2), is_sent=st.booleans())
        def serve(self, name: str, tokens: list[int], salt: str, lose: int, is_sent: bool) -> None:
            one = request(self.new_name(), tokens, 3, salt=salt)
            self.asked.append((tokens, salt))
            group = self.groups[name]
            if is_sent:
                self.prefixes.note(one.request_id, self.prefixes.overlaps(one))
                self.prefixes.sent(one.request_id, name, self.now_s)
                self.expects_until_s = self.now_s + EXPECTED_S
            group.links.lose = lose
            group.h.add(one)
            group.h.run()
            self.pass_time(2 * LOOP_S)

        @rule(name=GROUPS, first=st.integers(0, 80), count=st.integers(1, 3))
        def storm(self, name: str, first: int, count: int) -> None:
            """Prompts of nobody's that push out what there was, all between two messages."""
            for token in range(first, first + count):
                self.groups[name].h.add(request(self.new_name(), [token + 2] * 40, 1))
            self.groups[name].h.run()

        @rule(name=GROUPS, what=st.sampled_from(["reset", "restart", "cut", "unfollow"]), lose=st.integers(0, 3))
        def accident(self, name: str, what: str, lose: int) -> None:
            group = self.groups[name]
            if what == "reset":
                group.h.engine.reset_prefix_cache()
            elif what == "restart":
                self.come_back(name)
                self.groups[name].links.lose = lose  # its first messages
            elif what == "cut":
                group.links.is_cut = True
                self.pass_time(0.5 * lose)
                group.links.is_cut = False
                group.links.ask()  # as TokenSender does when a link is there again
            else:  # the gateway's record is away for a while
                group.teller.follow([])
                self.pass_time(5 * LOOP_S)
                group.teller.follow([GATEWAY])
            self.pass_time(LOOP_S)

        @rule()
        def is_true_after_two_seconds(self) -> None:
            for group in self.groups.values():
                group.h.drain_transfers()
                group.links.lose = 0
            self.pass_time(max(EQUAL_AFTER_S, self.expects_until_s - self.now_s + LOOP_S))
            for tokens, salt in self.asked[-12:]:
                one = request("r", tokens, salt=salt)
                truth = {name: group.has(tokens, salt) for name, group in self.groups.items()}
                told = self.prefixes.overlaps(one).overlaps
                assert told == {name: has for name, has in truth.items() if sum(has)}

        def teardown(self) -> None:
            if hasattr(self, "groups"):
                self.is_true_after_two_seconds()

    return TruthMachine


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small numbers, so that few steps reach them."""
    monkeypatch.setattr(kv_events, "INDEX_TOKENS", SIZE * INDEX_BLOCKS)
    monkeypatch.setattr(kv_journal, "MOST_CHANGES", 12)
    monkeypatch.setattr(kv_journal, "PART_KEYS", 2)


def check(kind: type[RuleBasedStateMachine], examples: int = 60) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        kind,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        ),
    )


class NeverAsked(KvTeller):
    """Seeded: gives no snapshot to those that ask."""

    def tell(self) -> None:
        self._links.need_snapshot()
        super().tell()


class NoEmptyMessages(KvTeller):
    """Seeded: a loss of the last message is never noticed."""

    def tell(self) -> None:
        if any(one.needs_snapshot for one in self._followers.values()) or self._kv.journal.has_changes:
            super().tell()


def hole_blind(self: PrefixIndex, group: str, life: int, events: KvEvents) -> bool:
    """Seeded: takes what comes behind a hole."""
    known = self._groups.get(group)
    if known is not None and known.life == life and known.next and events.number != 1:
        known.next = events.number
    return _apply(self, group, life, events)


_apply = PrefixIndex.apply


@pytest.mark.parametrize("teller", [NeverAsked, NoEmptyMessages])
def test_a_defect_of_the_teller_is_found(teller: type[KvTeller]) -> None:
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        check(machine(teller))


def test_a_hole_that_nobody_sees_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "apply", hole_blind)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        check(machine())


def test_a_tier_that_tells_of_no_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "_tell", lambda self, key: None)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        check(machine())


def test_the_index_is_true_two_seconds_after_any_loss() -> None:
    check(machine())
