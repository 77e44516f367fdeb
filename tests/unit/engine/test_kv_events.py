"""KV events of a real engine: the keys that its journal tells are those that a gateway makes of the same prompt."""

import random

import pytest
from builders import Harness, harness, request
from fake_adapters import AdapterPlan
from fake_tiers import TierPlan

from tandem.cluster.routing.told_prefixes import ToldPrefixes
from tandem.workers.engine.blocks import kv_journal
from tandem.workers.engine.blocks.group_kv import GroupKv
from tandem.workers.engine.thread.kv_teller import QUIET_S, TELL_S, KvTeller
from tandem.workers.messages.kv_events import INDEX_TOKENS, KvEvents, KvFacts
from tandem.workers.messages.request import GenerationRequest, ReplyTo
from tests.support.kv_links import StraightLinks, telling

SIZE = 16
LONG = [2 + i * 7 % 90 for i in range(3 * INDEX_TOKENS + 40)]


class Told:
    """An engine, and a gateway that it tells of its KV."""

    def __init__(self, **engine: object) -> None:
        self.h: Harness = harness(block_size=SIZE, max_num_batched_tokens=256, max_model_len=2048, **engine)  # type: ignore[arg-type]
        assert self.h.engine.kv is not None
        self.prefixes = ToldPrefixes()
        self.teller, self.links = telling(self.h.engine.kv, self.prefixes, "g", 1, self.h.clock)
        self.tell()

    def tell(self) -> None:
        self.h.clock.now_s += TELL_S
        self.teller.tell()

    def serve(self, one: GenerationRequest) -> tuple[int, int]:
        """Serves a request. Returns the tokens that were predicted, and those that were found."""
        predicted = sum(self.prefixes.overlaps(one).overlaps.get("g", (0, 0)))
        self.h.add(one)
        self.h.run()
        self.h.drain_transfers()
        self.tell()
        return predicted, self.h.sink.begun[one.request_id]


@pytest.mark.parametrize(("adapter", "salt"), [(None, ""), (None, "tenant"), ("a1", ""), ("a1", "tenant")])
def test_a_second_turn_is_predicted(adapter: str | None, salt: str) -> None:
    told = Told(num_blocks=64, adapters=AdapterPlan())
    assert told.serve(request("first", LONG, 100, adapter=adapter, salt=salt)) == (0, 0)
    answer = told.h.sink.tokens["first", 0]
    predicted, found = told.serve(request("second", [*LONG, *answer, *LONG[:50]], adapter=adapter, salt=salt))
    assert found == (len(LONG) + len(answer) - 1) // SIZE * SIZE, "the answer's KV is there too"
    assert predicted == found // INDEX_TOKENS * INDEX_TOKENS > len(LONG)
    other = request("other", LONG, adapter="a2" if adapter else None, salt="" if salt else "another")
    assert told.serve(other) == (0, 0), "keys of other adapters and tenants are apart"


def test_the_last_token_is_always_computed() -> None:
    told = Told(num_blocks=64)
    told.serve(request("a", LONG[: 2 * INDEX_TOKENS]))
    assert told.serve(request("b", LONG[: 2 * INDEX_TOKENS])) == (INDEX_TOKENS, 2 * INDEX_TOKENS - SIZE)
    assert told.serve(request("c", LONG[: 2 * INDEX_TOKENS + 1])) == (2 * INDEX_TOKENS,) * 2


@pytest.mark.parametrize("more", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}])
def test_nothing_is_predicted_where_all_is_computed(more: dict[str, object]) -> None:
    told = Told(num_blocks=64)
    told.serve(request("a", LONG))
    assert told.serve(request("b", LONG, **more)) == (0, 0)


@pytest.mark.parametrize("disk_keys", [0, 200])
def test_evicted_keys_are_told_as_kept_while_a_lower_tier_has_them(disk_keys: int) -> None:
    told = Told(num_blocks=56, tiers=TierPlan(host_slots=30 if disk_keys else 100, disk_keys=disk_keys))
    first = request("first", LONG)
    told.serve(first)
    assert told.prefixes.overlaps(first).overlaps == {"g": (3 * INDEX_TOKENS, 0)}
    told.serve(request("second", 500))
    told.serve(request("third", 500))
    assert told.prefixes.overlaps(first).overlaps == {"g": (0, 3 * INDEX_TOKENS)}
    assert told.h.engine.reset_prefix_cache()
    told.tell()
    assert told.prefixes.overlaps(first).overlaps == {}


def test_what_an_earlier_group_left_on_disk_is_told_once_it_is_used() -> None:
    told = Told(num_blocks=40, tiers=TierPlan(host_slots=40))
    told.serve(request("first", LONG))
    told.serve(request("second", 500))
    kv = told.h.engine.kv
    assert kv is not None
    kv.journal._told.clear()  # as in a new process over the same memory
    told.links.ask()
    told.tell()
    again = request("again", LONG)
    assert told.prefixes.overlaps(again).overlaps == {}
    assert told.serve(again)[1] > 0, "it was loaded"
    assert told.prefixes.overlaps(again).overlaps == {"g": (3 * INDEX_TOKENS, 0)}


def test_reset_prefix_caches_are_told() -> None:
    told = Told(num_blocks=64)
    first = request("first", LONG)
    told.serve(first)
    assert told.h.engine.reset_prefix_cache()
    told.tell()
    assert told.prefixes.overlaps(first).overlaps == {}


def events(links: StraightLinks) -> list[KvEvents]:
    return [one for one in links.told if isinstance(one, KvEvents)]


def test_a_block_that_comes_and_goes_between_two_messages_is_not_told() -> None:
    told = Told(num_blocks=64)
    told.h.add(request("a", LONG))
    told.h.run()
    told.h.engine.reset_prefix_cache()
    told.tell()
    assert not any(one.stored or one.gone for one in events(told.links))


def test_a_quiet_group_says_once_a_second_that_nothing_is_missing() -> None:
    told = Told(num_blocks=64)
    before = len(events(told.links))
    for _ in range(int(5 / TELL_S)):
        told.tell()
    said = events(told.links)[before:]
    assert len(said) == 5 / QUIET_S and not any(one.stored or one.kept or one.gone for one in said)
    assert [one.number for one in said] == list(range(2, 7))


def test_more_changes_than_a_message_may_have_become_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_journal, "MOST_CHANGES", 2)
    monkeypatch.setattr(kv_journal, "PART_KEYS", 2)
    told = Told(num_blocks=64)
    one = request("a", LONG)
    told.serve(one)
    snapshot = events(told.links)[-2:]
    assert [part.number for part in snapshot] == [1, 2] and [part.is_last for part in snapshot] == [False, True]
    assert told.prefixes.overlaps(one).overlaps == {"g": (3 * INDEX_TOKENS, 0)}


@pytest.mark.parametrize("engine", [{"caching": False}, {"kv_events": False}, {"windows": (64, 32)}])
def test_groups_whose_keys_say_nothing_tell_nothing(engine: dict[str, object]) -> None:
    assert harness(block_size=SIZE, **engine).engine.kv is None  # type: ignore[arg-type]


def test_layers_with_windows_beside_whole_ones_are_told_by_the_whole_ones() -> None:
    told = Told(num_blocks=128, windows=(None, 64))
    told.serve(request("first", LONG))
    predicted, found = told.serve(request("second", [*LONG, 5]))
    assert predicted == found // INDEX_TOKENS * INDEX_TOKENS == 3 * INDEX_TOKENS


def test_nobody_is_told_without_a_gateway() -> None:
    told = Told(num_blocks=64)
    told.teller.follow([])
    before = len(told.links.told)
    told.serve(request("a", LONG))
    assert len(told.links.told) == before and told.teller.wait_s() == float("inf")
    kv = told.h.engine.kv
    assert kv is not None and len(kv.journal) == 3, "what there is, is known for the next gateway"
    told.h.engine.reset_prefix_cache()
    told.tell()
    assert len(kv.journal) == 0, "and no more than that"


def test_conversations_that_overlap_in_time_are_predicted_within_an_index_block() -> None:
    """Turns of many conversations at once, in a pool that does not hold them all, with what is told 0.2 s late."""
    told, draw = Told(num_blocks=400, max_num_seqs=4), random.Random(5)
    conversations = [[2 + draw.randrange(90) for _ in range(draw.randrange(150, 500))] for _ in range(12)]
    predicted: dict[str, int] = {}
    talking: dict[int, str] = {}
    for step in range(2000):
        told.h.clock.now_s += 0.02
        told.teller.tell()
        told.prefixes.tick(told.h.clock.now_s)
        for place, name in list(talking.items()):
            if name in told.h.sink.ends:
                conversations[place] += told.h.sink.tokens[name, 0]
                conversations[place] += [2 + draw.randrange(90) for _ in range(draw.randrange(10, 60))]
                del talking[place]
        place = draw.randrange(len(conversations))
        if step % 12 == 0 and place not in talking and len(conversations[place]) < 1900:
            one = request(f"r{step}", list(conversations[place]), draw.randrange(5, 30))
            prefix = told.prefixes.overlaps(one)
            told.prefixes.note(one.request_id, prefix)
            told.prefixes.sent(one.request_id, "g", told.h.clock.now_s)
            predicted[one.request_id] = sum(prefix.overlaps.get("g", (0, 0)))
            told.h.add(one)
            talking[place] = one.request_id
        told.h.step()
    told.h.run()
    errors = [told.h.sink.begun[name] - tokens for name, tokens in predicted.items()]
    right = sum(0 <= error < INDEX_TOKENS for error in errors) / len(errors)
    found = sum(told.h.sink.begun.values())
    assert len(errors) > 100 and found > 100 * INDEX_TOKENS
    assert right >= 0.95, sorted(errors)


class ManyLinks:
    """KvLinks to gateways of which some cannot be reached."""

    def __init__(self, *lost: str) -> None:
        self.lost = lost
        self.told: list[str] = []

    def open(self, reply_to: ReplyTo) -> None:
        """All are open."""

    def tell(self, reply_to: ReplyTo, message: KvFacts | KvEvents) -> bool:
        if reply_to.nonce not in self.lost:
            self.told.append(f"{reply_to.nonce} {type(message).__name__}")
        return reply_to.nonce not in self.lost

    def need_snapshot(self) -> list[ReplyTo]:
        return []


def test_the_engine_is_held_for_one_snapshot_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one, links = Told(), ManyLinks("lost")
    kv = one.h.engine.kv
    assert kv is not None
    teller = KvTeller(kv, links, one.h.clock)
    teller.follow([ReplyTo(f"tcp://{name}", name) for name in ("lost", "b", "c")])
    monkeypatch.setattr(GroupKv, "take_changes", lambda kv: None)  # there are always too many
    turns = []
    for _ in range(4):
        links.told.clear()
        teller.tell()
        turns.append(list(links.told))
        one.h.clock.now_s += TELL_S
    assert turns == [[f"{name} KvFacts", f"{name} KvEvents"] for name in "bcbc"]
