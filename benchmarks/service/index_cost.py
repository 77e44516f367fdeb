"""What the prefix index of a gateway costs: its memory, what it holds the event loop for, and a question on a thread.

Called by benchmarks/service/routing.py (`make bench-routing`). The index is filled through the messages that groups
send: so many keys that one group has each, and a prompt that all of them have. Times are of the thread's CPU. The
roofline of a question is the hashing of its blocks alone (hashlib over the same bytes).
"""

import gc
import random
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import psutil

from tandem.cluster.routing.told_prefixes import EXPECT_AT_ONCE, ToldPrefixes, prompt_heads
from tandem.workers.engine.blocks.kv_journal import PART_KEYS
from tandem.workers.messages.kv_events import HEAD_BYTES, KvEvents, KvFacts
from tandem.workers.messages.request import GenerationRequest, SamplingParams

FACTS = KvFacts("", "revision", "bfloat16", 16, 8)
HOT_TOKENS = 100_000
REPEATS = 5


class IndexCost(NamedTuple):
    """Figures of one index. entries: keys. memory_mib: growth of the process. part_us: one
    message of PART_KEYS keys. tick_us: one slice of the cleaning up after a group. expect_us: what is expected of one
    prompt, at most. cold_us, hot_us: a question about a prompt that nobody has, and about one of HOT_TOKENS tokens that
    all have. roofline_us: the hashing of the latter."""

    groups: int
    entries: int
    memory_mib: float
    part_us: float
    tick_us: float
    expect_us: float
    cold_us: float
    hot_us: float
    roofline_us: float

    def words(self) -> str:
        """Says all of it."""
        return (
            f"index of {self.groups} groups, {self.entries:,} entries: {self.memory_mib:.0f} MiB\n"
            f"on the loop: a message of {PART_KEYS:,} keys {self.part_us:.0f} us, a slice of cleaning up "
            f"{self.tick_us:.0f} us, to expect {EXPECT_AT_ONCE} keys {self.expect_us:.0f} us\n"
            f"on a thread: a cold prompt {self.cold_us:.0f} us, one of {HOT_TOKENS:,} tokens that all have "
            f"{self.hot_us:.0f} us (its hashing alone {self.roofline_us:.0f} us)"
        )


def request_of(name: str, prompt: list[int]) -> GenerationRequest:
    """A request of these tokens."""
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=200))


def hot_prompt() -> list[int]:
    """The prompt that all groups have in filled()."""
    return [number % 50_000 for number in range(HOT_TOKENS)]


def filled(groups: list[str], entries: int) -> ToldPrefixes:
    """An index with so many entries, as the groups tell them."""
    draw, prefixes = random.Random(1), ToldPrefixes()
    hot = list(prompt_heads(request_of("hot", hot_prompt()), FACTS))
    for group in groups:
        prefixes.take(group, 1, FACTS, 0.0)
        tell(prefixes, group, [*hot, *(draw.randbytes(HEAD_BYTES) for _ in range(entries // len(groups)))])
    return prefixes


def tell(prefixes: ToldPrefixes, group: str, keys: list[bytes], life: int = 1) -> list[float]:
    """Has a group tell a snapshot. Returns the seconds of each part."""
    seconds = []
    for part, start in enumerate(range(0, len(keys), PART_KEYS)):
        events = KvEvents(
            "",
            part + 1,
            stored=keys[start : start + PART_KEYS],
            is_snapshot=True,
            is_last=start + PART_KEYS >= len(keys),
        )
        began_s = time.thread_time()
        prefixes.take(group, life, events, 0.0)
        seconds.append(time.thread_time() - began_s)
    return seconds


def index_cost(groups: list[str], entries: int) -> tuple[ToldPrefixes, IndexCost]:
    """Fills an index and measures it."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    prefixes = filled(groups, entries)
    gc.collect()
    memory = psutil.Process().memory_info().rss - before
    for _ in range(300):
        prefixes.tick(0.0)  # as after the start
    cold, hot = request_of("cold", [7] * HOT_TOKENS), request_of("hot", hot_prompt())
    return prefixes, IndexCost(
        groups=len(groups),
        entries=entries,
        memory_mib=memory / 2**20,
        part_us=_part_s(prefixes) * 1e6,
        tick_us=_tick_s(prefixes) * 1e6,
        expect_us=_expect_s(prefixes, hot) * 1e6,
        cold_us=_median_s(lambda: prefixes.overlaps(cold)) * 1e6,
        hot_us=_median_s(lambda: prefixes.overlaps(hot)) * 1e6,
        roofline_us=_median_s(_hashing) * 1e6,
    )


def _part_s(prefixes: ToldPrefixes) -> float:
    draw = random.Random(2)
    prefixes.take("new", 1, FACTS, 0.0)
    seconds = [
        max(tell(prefixes, "new", [draw.randbytes(HEAD_BYTES) for _ in range(PART_KEYS)])) for _ in range(REPEATS)
    ]
    return sorted(seconds)[REPEATS // 2]


def _tick_s(prefixes: ToldPrefixes) -> float:
    prefixes.keep_only(lambda group: group != "new")
    return _median_s(lambda: prefixes.tick(0.0), 100)


def _expect_s(prefixes: ToldPrefixes, hot: GenerationRequest) -> float:
    """Of a hot prompt that was sent to a group which has nothing."""
    prefixes.note("hot", prefixes.overlaps(hot))
    seconds = []
    for life in range(2, 2 + REPEATS):
        prefixes.take("empty", life, FACTS, 0.0)
        tell(prefixes, "empty", [bytes(HEAD_BYTES)], life)
        prefixes.sent("hot", "empty", 0.0)
        began_s = time.thread_time()
        prefixes.expect_sent()
        seconds.append(time.thread_time() - began_s)
    prefixes.forget("hot")
    prefixes.keep_only(lambda group: group != "empty")
    return sorted(seconds)[REPEATS // 2]


def _hashing() -> None:
    block = bytes(4 * FACTS.block_size)
    key = bytes(16)
    for _ in range(HOT_TOKENS // FACTS.block_size):
        key = blake2b(key + block, digest_size=16).digest()


def _median_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    seconds = []
    for _ in range(repeats):
        began_s = time.thread_time()
        work()
        seconds.append(time.thread_time() - began_s)
    return sorted(seconds)[repeats // 2]
