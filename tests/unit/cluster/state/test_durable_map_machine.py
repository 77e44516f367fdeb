"""Two gateways' copies of one map over a real Redis that is emptied, set back and refuses, against a naive model.

The model knows what the map must hold as long as one thing at a time happens to it; after more than one it only knows
who held what. Whatever happens, both copies and Redis agree in the end, and then nobody writes any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import durable_map, keys
from tandem.cluster.state.durable_map import DurableMap
from tandem.cluster.state.epoch import Epoch
from tandem.cluster.state.map_copy import MapCopy
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tests.support.private_redis import private_redis

OWN = keys.MapKeys("tandem:test:own", "tandem:test:own:id", "tandem:test:own:counter")
SHARED = keys.MapKeys("tandem:test:shared", keys.SENTINEL, owns_id=False)
NAMES = st.sampled_from("abc")
WHO = st.sampled_from((0, 1))
T = TypeVar("T")
HUNT = settings(
    max_examples=60, stateful_step_count=20, deadline=None, derandomize=True, phases=[Phase.generate], database=None
)


class Thing(msgspec.Struct, frozen=True):
    size: int


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with private_redis() as server:
        yield server


def machine(server: RedisServer, place: keys.MapKeys) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        """content: what Redis must hold. is_exact: the model knows that. lost: what both copies held when Redis was
        emptied, until one of them has written it back. unseen_loss: the map is an older copy that no gateway has seen.
        """

        def __init__(self) -> None:
            super().__init__()
            self.loop = asyncio.new_event_loop()
            self.sizes = iter(range(1, 10**6))
            self.lives = iter(range(1, 10**6))
            self.clients = [BackgroundClient(server.url, retries=0)]
            self.redis = self.clients[0]
            self.do("FLUSHALL")
            for user in ("one", "two"):
                self.do("ACL", "SETUSER", user, "on", ">secret", "~*", "&*", "+@all")
                url = f"unix://{user}@{server.socket_path}?password=secret"
                self.clients.append(BackgroundClient(url, retries=0))
            self.commands = DurableMap(self.redis, place, Thing, msgspec.msgpack, "things")
            self.copies = [self.fresh(0), self.fresh(1)]
            self.refused: set[int] = set()
            self.content: dict[str, int] = {}
            self.lost: dict[str, int] | None = None
            self.is_older = False
            self.is_exact = True
            self.saved: list[tuple[bytes, bytes]] | None = None
            self.ever: set[tuple[str, int]] = set()
            self.settle()

        def teardown(self) -> None:
            for client in self.clients:
                self.wait(client.close())
            self.loop.close()

        # ---- helpers ---------------------------------------------------------------------------------------------

        def wait(self, work: Awaitable[T]) -> T:
            return self.loop.run_until_complete(work)  # type: ignore[arg-type]

        def do(self, *parts: str | bytes | int) -> Any:
            return self.wait(self.redis.command(*parts))

        def fresh(self, who: int) -> MapCopy[Thing]:
            return MapCopy(DurableMap(self.clients[1 + who], place, Thing, msgspec.msgpack, "things"))

        def held(self, who: int) -> dict[str, int]:
            return {name: thing.size for name, thing in self.copies[who].values.items()}

        def look_of(self, who: int) -> bool:
            """A gateway's look; where the id is shared, its fleet has seen to it before. False: it was refused."""
            copy = self.copies[who]
            assert copy.map is not None
            redis = copy.map.redis
            try:
                if not place.owns_id and self.wait(redis.command("GET", place.id)) is None:
                    self.wait(copy.reseed())
                    self.wait(redis.command("SET", place.id, f"life-{next(self.lives)}", "NX"))
                self.wait(copy.refresh())
            except RedisUnavailable:
                assert who in self.refused, "nothing was wrong with Redis"
                return False
            return True

        def note_write(self, name: str, size: int | None) -> None:
            self.content.pop(name, None)
            if size is not None:
                self.content[name] = size
                self.ever.add((name, size))
            self.is_exact = self.is_exact and not self.is_older
            if self.lost is not None and size is None:
                self.is_exact = False  # it may be in a copy that is written back later

        # ---- what happens ----------------------------------------------------------------------------------------

        @rule(name=NAMES, removes=st.booleans())
        def command(self, name: str, removes: bool) -> None:
            """`tandem ... add` or `rm`, which has no copy."""
            held = self.wait(self.commands.get(name))
            size = None if removes else next(self.sizes)
            after = b"" if size is None else self.commands.encode(Thing(size))
            assert self.wait(self.commands.compare_and_set(name, held.raw if held else b"", after)) is not None
            self.note_write(name, size)

        @rule(who=WHO, name=NAMES, removes=st.booleans())
        def change(self, who: int, name: str, removes: bool) -> None:
            """An admin's request to one gateway."""
            copy, size = self.copies[who], None if removes else next(self.sizes)
            before = copy.values.get(name)
            if before is None and size is None:
                return
            try:
                changed = self.wait(copy.replace(before, Thing(size) if size is not None else None, name))
            except RedisUnavailable:
                if self.lost is None:
                    assert who in self.refused or self.is_older
                return
            if changed:
                self.note_write(name, size)
            elif self.is_exact and self.lost is None and not self.is_older:
                assert self.held(who) == self.content, "whoever was too slow has the latest"
            else:
                self.noticed(who)

        @rule(who=WHO)
        def look(self, who: int) -> None:
            if self.look_of(who):
                self.noticed(who)

        def noticed(self, who: int) -> None:
            """The first look after a fault puts it right."""
            if self.lost is not None:
                self.content, self.lost = self.lost | self.content, None
            self.is_older = False
            if self.is_exact:
                assert self.held(who) == self.content

        @rule(calmly=st.booleans())
        def lose(self, calmly: bool) -> None:
            """FLUSHALL. Copies that differ, or of which one has not come back from the loss before: no exact model."""
            if calmly:
                self.settle()
            same = self.held(0) == self.held(1) == self.content and not self.is_older
            known = all(copy._known is not None and copy._known == copy._read for copy in self.copies)
            at_rest = same and known and self.copies[0]._known == self.copies[1]._known
            self.is_exact = self.is_exact and at_rest and self.lost is None
            self.do("FLUSHALL")
            self.lost = dict(self.content) if self.lost is None else self.lost
            self.content = {}

        @rule()
        def save(self) -> None:
            names = sorted(self.do("KEYS", "*"))
            self.saved = [(name, self.do("DUMP", name)) for name in names]

        @precondition(lambda self: self.saved is not None)
        @rule(calmly=st.booleans())
        def go_back(self, calmly: bool) -> None:
            """Redis is started again with a file of some time ago."""
            if calmly:
                self.settle()
            assert self.saved is not None
            before = self.wait(self.commands.epoch())
            at_rest = all(copy._known == copy._read == before for copy in self.copies) and self.lost is None
            self.do("FLUSHALL")
            for name, data in self.saved:
                self.do("RESTORE", name, 0, data)
            there = self.wait(self.commands.epoch())
            self.is_exact = self.is_exact and at_rest and there.id == before.id and not self.is_older
            self.is_older = there.counter < before.counter

        @rule(who=WHO, reads=st.booleans())
        def refuse(self, who: int, reads: bool) -> None:
            """Redis takes no more writes of a gateway, or answers it nothing."""
            self.do("ACL", "SETUSER", ("one", "two")[who], "-@all", *(("+@read",) if reads else ()))
            self.refused.add(who)

        @rule(who=WHO)
        def allow(self, who: int) -> None:
            self.do("ACL", "SETUSER", ("one", "two")[who], "+@all")
            self.refused.discard(who)

        @rule(who=WHO, has_file=st.booleans())
        def restart(self, who: int, has_file: bool) -> None:
            before, self.copies[who] = self.copies[who], self.fresh(who)
            if has_file and before.id is not None:
                self.copies[who].adopt(before.values, before.id)
            self.is_exact = self.is_exact and self.lost is None and not self.is_older

        @rule()
        def settle(self) -> None:
            """All faults end, and both gateways look."""
            for who in (0, 1):
                self.allow(who)
            for who in (0, 1, 0):
                assert self.look_of(who)
            if self.is_exact:
                self.noticed(0)
            rest = self.wait(self.commands.epoch())
            for who in (1, 0, 1):
                self.look_of(who)
            assert self.wait(self.commands.epoch()) == rest, "somebody writes for ever"
            found = {name: thing.size for name, thing in self.wait(self.commands.read()).values.items()}
            assert self.held(0) == self.held(1) == found, "the gateways do not agree"
            assert set(found.items()) <= self.ever, "nobody ever wrote that"
            self.content, self.lost, self.is_older, self.is_exact = found, None, False, True

        @invariant()
        def stays_closed(self) -> None:
            """Who has ever known an id of the map never takes it for one that was never there."""
            for copy in self.copies:
                assert copy._known is None or copy._known.id is None or copy.id is not None

    return Machine


@pytest.mark.parametrize("place", [OWN, SHARED], ids=["own id", "shared id"])
def test_copies_and_redis_agree_whatever_happens(server: RedisServer, place: keys.MapKeys) -> None:
    run_state_machine_as_test(
        machine(server, place),
        settings=settings(max_examples=20, stateful_step_count=20, deadline=None, derandomize=True),
    )


def takes_older(patch: pytest.MonkeyPatch) -> None:
    since = Epoch.since

    def blind(self: Epoch, known: Epoch | None) -> Any:
        return since(self, known if known is None or known.id != self.id else Epoch(known.id, self.counter - 1))

    patch.setattr(Epoch, "since", blind)


DEFECTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an older copy is taken": takes_older,
    "nothing is written back": lambda patch: patch.setattr(
        durable_map, "SEED", durable_map.SEED.replace("for i = 7, #ARGV, 2 do", "for i = 7, 0, 2 do")
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_seeded_defect_is_caught(server: RedisServer, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    DEFECTS[defect](monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine(server, OWN), settings=HUNT)
