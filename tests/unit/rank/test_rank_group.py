"""RankGroup against ranks played by threads: handshake, order of results, deaths, failures, leaving."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from msgspec.structs import replace

from tandem.configs.schema import CacheSettings, EngineSettings, ModelSettings, ParallelSettings
from tandem.workers.executor.rank_channel import SocketChannel
from tandem.workers.executor.rank_group import LOAD_TIMEOUT_S, LOOPBACK, SHUTDOWN_S, RankGroup
from tandem.workers.messages.channel import ChannelContext, connect_dealer, lanes_name, life_secret, new_secret
from tandem.workers.messages.errors import GroupLost, SettingsError
from tandem.workers.messages.handshake import (
    AllocateKV,
    FindModel,
    FromRank,
    Hello,
    RankFailed,
    RankFetching,
    RankFound,
    RankListening,
    RankLoaded,
    RankLoading,
    RankReady,
    RankSetup,
    Shutdown,
    ToRank,
)
from tandem.workers.messages.step import StepPlan, StepResult
from tandem.workers.messages.transfer import TransferResult

SETTINGS = EngineSettings(model=ModelSettings(model="m"), parallel=ParallelSettings(tensor_parallel_size=2))
PORT = 4242
Answer = Callable[[int, ToRank], FromRank | Iterable[FromRank] | None]


def good_rank(rank: int, message: ToRank) -> FromRank | None:
    """Rank 0 holds 10 blocks, rank 1 holds 11; rank 0 answers steps."""
    if isinstance(message, RankSetup):
        return RankLoaded(
            rank=rank,
            num_blocks=10 + rank,
            weight_bytes=5,
            block_bytes=3,
            device="cpu",
            dtype="float32",
            threads=1,
            load_s=1.0 + rank,
            is_in_host_memory=True,
            free_host_bytes=2**30,
        )
    if isinstance(message, AllocateKV):
        return RankReady(rank)
    if isinstance(message, StepPlan) and rank == 0:
        return StepResult(step_id=message.step_id, rows=[])
    return None


def rank_without_memory(rank: int, message: ToRank) -> FromRank | None:
    """Rank 1 cannot have the host memory that it is told to take."""
    if isinstance(message, AllocateKV) and rank == 1:
        assert message.tiers is not None
        return RankReady(rank, "OSError: No space left on device")
    return good_rank(rank, message)


class FakeRank(threading.Thread):
    """Says hello, has the model (with what `answer` says before), names a port when asked to listen, then answers each
    message by `answer`, until Shutdown or its end. Its lanes say that it is ready, and hear what they are sent.
    heard: what followed the order to find the model."""

    def __init__(self, rank: int, endpoint: str, secret: str, answer: Answer, host: str) -> None:
        super().__init__(daemon=True)
        self.rank, self.answer, self.host = rank, answer, host
        self.heard: list[ToRank] = []
        self.is_ended = False
        self.context = ChannelContext()
        self.socket = connect_dealer(self.context, secret, endpoint, str(rank).encode())
        self.lanes = connect_dealer(self.context, secret, endpoint, lanes_name(rank))

    def run(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToRank)
        self.socket.send(msgspec.msgpack.encode(Hello(self.rank, 100 + self.rank, self.host)))
        while not self.heard or not isinstance(self.heard[-1], Shutdown):
            while not self.socket.poll(50) and not self.is_ended:
                continue
            if self.is_ended and not self.socket.poll(0):
                break
            message = decoder.decode(self.socket.recv())
            if not isinstance(message, FindModel):
                self.heard.append(message)
            if isinstance(message, RankSetup) and message.master_port is None:
                self.socket.send(msgspec.msgpack.encode(RankListening(self.rank, PORT)))
            answer = self.answer(self.rank, message)
            for said in answer if isinstance(answer, Iterable) else () if answer is None else (answer,):
                socket = self.lanes if isinstance(said, RankReady) else self.socket
                socket.send(msgspec.msgpack.encode(said))
            if isinstance(message, FindModel):
                self.socket.send(msgspec.msgpack.encode(RankFound(self.rank)))
        self.socket.close(linger=500)
        self.lanes.close(linger=500)
        self.context.term()


class Fleet:
    """RankLauncher of two FakeRanks, and their group."""

    def __init__(self, answer: Answer, hosts: tuple[str, str], groups: int, settings: EngineSettings) -> None:
        self.lost_message: str | None = None
        self.now_s = 0.0
        self.answer, self.hosts = answer, hosts
        self.ranks: list[FakeRank] = []
        self.given_s: list[float] = []
        self.group = RankGroup(settings, self, most_ranks=lambda own: own * groups, clock=lambda: self.now_s)

    def start(self, rank: int, endpoint: str, secret: str) -> None:
        self.ranks.append(FakeRank(rank, endpoint, secret, self.answer, self.hosts[rank]))
        self.ranks[-1].start()

    def lost(self) -> str | None:
        return self.lost_message

    def kill(self, grace_s: float) -> None:
        self.given_s.append(grace_s)
        for rank in self.ranks:
            rank.join(grace_s)
            rank.is_ended = True
            rank.join(30)

    def setup_of(self, rank: int) -> RankSetup:
        message = next(r for r in self.ranks if r.rank == rank).heard[0]
        assert isinstance(message, RankSetup)
        return message


@contextmanager
def fleet(
    answer: Answer = good_rank,
    hosts: tuple[str, str] = ("h", "h"),
    groups: int = 1,
    settings: EngineSettings = SETTINGS,
) -> Iterator[Fleet]:
    made = Fleet(answer, hosts, groups, settings)
    try:
        yield made
    finally:
        made.group.close()
        made.group.close()
        assert not any(rank.is_alive() for rank in made.ranks)


def test_start_takes_the_least_blocks_and_adds_bytes() -> None:
    with fleet() as f:
        ready = f.group.start()
        assert (ready.num_blocks, ready.weight_bytes, ready.block_bytes, ready.load_s) == (10, 10, 6, 2.0)
        assert ready.rank_pids == (100, 101)
        setup = f.setup_of(0)
        assert (setup.world_size, setup.ranks_on_node, setup.master_address) == (2, 2, "127.0.0.1")
        assert msgspec.msgpack.decode(setup.settings, type=EngineSettings) == SETTINGS
        assert all(AllocateKV(10) in rank.heard for rank in f.ranks)
    assert all(isinstance(rank.heard[-1], Shutdown) for rank in f.ranks)


def test_a_rank_without_host_memory_leaves_the_group_without_tiers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.workers.executor.tiers.layout_digest", lambda *_: bytes(16))
    settings = replace(SETTINGS, cache=CacheSettings(kv_offloading_gib=2**-20))
    with fleet(rank_without_memory, settings=settings) as f:
        ready = f.group.start()
    assert ready.store is None
    (note,) = ready.tier_notes
    assert note.startswith("--kv-offloading-size: rank 1: OSError: No space left on device; serving without tiers")
    assert note in caplog.messages


def test_ranks_on_two_machines_meet_at_rank_0() -> None:
    with fleet(hosts=("10.0.0.1", "10.0.0.2")) as f:
        f.group.start()
        assert (f.setup_of(1).master_address, f.setup_of(1).ranks_on_node) == ("10.0.0.1", 1)


def test_rank_0_chooses_the_port_and_the_others_get_it() -> None:
    with fleet() as f:
        f.group.start()
        assert (f.setup_of(0).master_port, f.setup_of(1).master_port) == (None, PORT)


def test_ranks_of_other_groups_on_the_machine_count() -> None:
    with fleet(groups=3) as f:
        f.group.start()
        assert [f.setup_of(rank).ranks_on_node for rank in (0, 1)] == [6, 6]


def test_plans_reach_every_rank_and_results_come_in_order() -> None:
    with fleet() as f:
        f.group.start()
        assert f.group.poll(0.0) is None
        plans = [StepPlan(step_id=i, work=[]) for i in (1, 2, 3)]
        for plan in plans:
            f.group.submit(plan)
        results = [f.group.poll(30.0) for _ in plans]
        assert [r.step_id for r in results if r is not None] == [1, 2, 3]
        assert f.group.poll(0.01) is None
    assert all(rank.heard[2:5] == plans for rank in f.ranks)


def test_a_dead_rank_ends_a_blocked_wait_within_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never listens for longer before it looks whether all live, and then for last words."""
    with fleet(lambda rank, m: None if isinstance(m, StepPlan) else good_rank(rank, m)) as f:
        f.group.start()
        f.group.submit(StepPlan(step_id=1, work=[]))
        poll, listened_s, last_s = f.group._poll, list[float](), list[float]()

        def noted(timeout_s: float) -> FromRank | None:
            (listened_s if f.lost_message is None else last_s).append(timeout_s)
            return poll(timeout_s)

        monkeypatch.setattr(f.group, "_poll", noted)
        threading.Timer(0.2, lambda: setattr(f, "lost_message", "rank 1 (pid 101) was killed by signal 9")).start()
        began_s = time.monotonic()
        with pytest.raises(GroupLost, match="signal 9"):
            f.group.poll(120.0)
        assert max(listened_s) <= 0.1 and max(last_s) <= 0.2
        assert time.monotonic() - began_s < 60
        with pytest.raises(GroupLost, match="signal 9"):
            f.group.submit(StepPlan(step_id=2, work=[]))


def test_ranks_that_live_and_finish_no_step_are_stuck() -> None:
    with fleet(lambda rank, m: None if isinstance(m, StepPlan) and m.step_id > 1 else good_rank(rank, m)) as f:
        f.group.start()
        f.group.submit(StepPlan(step_id=1, work=[]))
        f.now_s += 0.1
        assert f.group.poll(30.0) is not None
        f.group.submit(StepPlan(step_id=2, work=[]))
        began_s = f.now_s

        def wait_long() -> None:
            while f.now_s < began_s + 700:
                f.now_s += 0.5
                assert f.group.poll(0.0) is None

        with pytest.raises(GroupLost, match=r"no step has finished for 6\d s although every rank lives"):
            wait_long()
        assert f.now_s - began_s > 60
        with pytest.raises(GroupLost, match="stuck"):
            f.group.submit(StepPlan(step_id=3, work=[]))


def test_a_failed_rank_reports_its_reason() -> None:
    def fails(rank: int, message: ToRank) -> FromRank | None:
        if isinstance(message, StepPlan) and rank == 1:
            return RankFailed(rank=1, message="RuntimeError: boom")
        return good_rank(rank, message) if not isinstance(message, StepPlan) else None

    with fleet(fails) as f:
        f.group.start()
        f.group.submit(StepPlan(step_id=1, work=[]))
        with pytest.raises(GroupLost, match="rank 1: RuntimeError: boom"):
            f.group.poll(30.0)


def test_a_failure_that_no_step_has_caused_says_so_also_later() -> None:
    def fails(rank: int, message: ToRank) -> FromRank | None:
        if isinstance(message, StepPlan):
            return RankFailed(rank=rank, message="its lane channel failed", by_step=False)
        return good_rank(rank, message)

    with fleet(fails) as f:
        f.group.start()
        f.group.submit(StepPlan(step_id=1, work=[]))
        for ask in (lambda: f.group.poll(30.0), lambda: f.group.submit(StepPlan(step_id=2, work=[]))):
            with pytest.raises(GroupLost, match="lane channel") as caught:
                ask()
            assert not caught.value.by_step


def test_a_setting_refused_by_a_rank_is_a_settings_error() -> None:
    def refuses(rank: int, message: ToRank) -> FromRank | None:
        return RankFailed(rank=rank, message="too little", flag="--max-model-len")

    with fleet(refuses) as f, pytest.raises(SettingsError, match="too little") as refused:
        f.group.start()
    assert refused.value.flag == "--max-model-len"


def test_a_rank_that_dies_while_loading_ends_the_start() -> None:
    with fleet(lambda rank, m: None) as f:
        threading.Timer(0.2, lambda: setattr(f, "lost_message", "rank 0 exited with status 1")).start()
        with pytest.raises(GroupLost, match="status 1"):
            f.group.start()


def loads_in_parts(rank: int, message: ToRank) -> Iterator[FromRank]:
    """Rank 0 has 10 bytes to load, rank 1 has 30."""
    if isinstance(message, RankSetup):
        total = 10 + 20 * rank
        yield from (RankLoading(rank, loaded, total) for loaded in (0, total // 2, total))
    if (answer := good_rank(rank, message)) is not None:
        yield answer


def test_what_the_ranks_have_loaded_adds_up() -> None:
    with fleet(loads_in_parts) as f:
        assert f.group.loading() == (0, 0)
        f.group.start()
        assert f.group.loading() == (40, 40)


def test_a_download_is_told_by_machine_and_time_for_it_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """News of it come 50 minutes after each other, the last one late."""

    def fetches(rank: int, message: ToRank) -> Iterator[FromRank]:
        if isinstance(message, FindModel | RankSetup):
            yield RankFetching(rank, 2**30, 5 * 2**29)
        if (answer := good_rank(rank, message)) is not None:
            yield answer

    told: list[str] = []
    with fleet(fetches, hosts=("a", "b")) as f:
        receive = f.group._receive

        def slow(timeout_s: float) -> FromRank | None:
            told.append(f.group.fetching())
            message = receive(timeout_s)
            f.now_s += 3000.0 * isinstance(message, RankFetching)
            return message

        monkeypatch.setattr(f.group, "_receive", slow)
        f.group.start()
        assert f.now_s == 4 * 3000.0 and f.group.fetching() == ""
    assert {"a: 1.0 of 2.5 GiB", "b: 1.0 of 2.5 GiB"} <= {part for line in told for part in line.split(", ")}


def test_no_progress_is_reported_before_each_rank_has_reported() -> None:
    def half(rank: int, message: ToRank) -> FromRank | None:
        return RankLoading(rank, 5, 10) if isinstance(message, RankSetup) and rank == 0 else None

    with fleet(half) as f:
        threading.Timer(0.3, lambda: setattr(f, "lost_message", "rank 1 is gone")).start()
        with pytest.raises(GroupLost, match="rank 1 is gone"):
            f.group.start()
        assert f.group.loading() == (0, 0)


def test_the_time_for_loading_begins_anew_with_every_part_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is read 50 minutes after the one before it."""
    with fleet(loads_in_parts) as f:
        receive = f.group._receive

        def slow(timeout_s: float) -> FromRank | None:
            message = receive(timeout_s)
            f.now_s += 3000.0 * isinstance(message, RankLoading)
            return message

        monkeypatch.setattr(f.group, "_receive", slow)
        f.group.start()
        assert f.now_s == 6 * 3000.0


def test_a_rank_that_stops_loading_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(rank: int, message: ToRank) -> FromRank | None:
        return RankLoading(1, 5, 10) if rank == 1 else good_rank(rank, message)

    with fleet(stops) as f:
        receive, seen, given_s = f.group._receive, set[type](), list[float]()

        def until_silent(timeout_s: float) -> FromRank | None:
            """Time passes once each rank has said what it has to say."""
            given_s.append(timeout_s)
            while not seen >= {RankLoaded, RankLoading}:
                if (message := receive(0.05)) is not None:
                    seen.add(type(message))
                    return message
            return receive(0.0)

        monkeypatch.setattr(f.group, "_receive", until_silent)
        with pytest.raises(GroupLost, match=r"rank\(s\) \[1\] have not loaded the model, and sent nothing for"):
            f.group.start()
        assert given_s[-1] == LOAD_TIMEOUT_S


def answers_heard(secret_of: Callable[[str, str], str], until: set[int]) -> list[int]:
    """Rank 1 of g-1 answers ticket 1 at a port that is g-2's by now, then rank 0 of g-2: the ranks that g-2 hears,
    all of `until` and what comes within 0.2 s more."""
    channel = SocketChannel(secret_of("of the service", "g-2"), LOOPBACK)
    context = ChannelContext()
    lanes = []
    for rank, life in ((1, "g-1"), (0, "g-2")):
        secret = secret_of("of the service", life)
        lanes.append(connect_dealer(context, secret, channel.endpoint, lanes_name(rank)))
        lanes[-1].send(msgspec.msgpack.encode(TransferResult(rank=rank, ticket=1)))
    heard: list[int] = []
    for timeout_s in (*[0.1] * 100, 0.2):
        if until <= set(heard):
            timeout_s = 0.2
        message = channel.receive(timeout_s)
        if isinstance(message, TransferResult):
            heard.append(message.rank)
        elif until <= set(heard):
            break
    for lane in lanes:
        lane.close(linger=0)
    context.term()
    channel.close()
    return heard


def test_a_late_answer_of_an_earlier_life_is_ignored() -> None:
    assert answers_heard(life_secret, until={0}) == [0]


def test_the_late_answer_would_be_heard_without_a_secret_of_each_life() -> None:
    """The seeded defect: tickets carry no life of the group, the channel's key takes its place (docs/decisions/007)."""
    assert sorted(answers_heard(lambda service, life: life_secret(service, "any"), until={0, 1})) == [0, 1]


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    channel = SocketChannel(new_secret(), LOOPBACK)
    stranger = FakeRank(0, channel.endpoint, new_secret(), good_rank, "h")
    stranger.socket.send(msgspec.msgpack.encode(Hello(0, 1, "h")))
    assert channel.receive(0.3) is None
    stranger.socket.close(linger=0)
    stranger.lanes.close(linger=0)
    stranger.context.term()
    channel.close()


def test_a_group_that_is_well_asks_its_ranks_to_leave_and_a_broken_one_does_not_wait() -> None:
    with fleet() as f:
        f.group.start()
    assert f.given_s == [SHUTDOWN_S] and all(isinstance(rank.heard[-1], Shutdown) for rank in f.ranks)
    with fleet() as f:
        f.group.start()
        f.group.report("rank 1 is frozen")
        with pytest.raises(GroupLost, match="rank 1 is frozen"):
            f.group.poll(30.0)
    assert f.given_s == [0.0] and not any(isinstance(rank.heard[-1], Shutdown) for rank in f.ranks)
