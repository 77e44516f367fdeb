"""The host-tier process with real coordinators and ranks: killed, frozen, refused. Nothing is left behind."""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.configs.errors import SettingsError
from tandem.offload.host.host_messages import (
    MAX_PACKET_BYTES,
    AskStatus,
    Attach,
    LeaseRegion,
    decode_reply,
    decode_request,
    encode,
)
from tandem.offload.host.host_process import HostProcess, HostTierError, attach, lease, status

ROOT = Path(__file__).resolve().parents[3]
PAGE = 4096
REGION_BYTES = 3 * PAGE
TIMEOUT_S = 30.0

HOLDER = f"""
import sys
from pathlib import Path
from tandem.offload.host.host_process import attach, lease
path, token = Path(sys.argv[1]), sys.argv[2]
if token:
    held = attach(path, token, int(sys.argv[3]), {TIMEOUT_S})
    print(token, flush=True)
    memory = held.slab
else:
    held = lease(path, "layout", {PAGE}, [{PAGE}, {PAGE}], {TIMEOUT_S})
    print(held.token, flush=True)
    memory = held.index
for line in sys.stdin:
    memory[: len(line) - 1] = line[:-1].encode()
    print("written", flush=True)
"""


class User:
    """A coordinator (no token) or a rank in its own process; say() writes text at the start of its memory."""

    def __init__(self, path: Path, token: str = "", rank: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), token, str(rank)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self.token = self._output.readline().strip()
        assert self.token

    def tell(self, text: str) -> None:
        self._input.write(text + "\n")
        self._input.flush()

    def heard(self) -> bool:
        return self._output.readline() == "written\n"

    def say(self, text: str) -> None:
        self.tell(text)
        assert self.heard()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._output.close()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., HostProcess]]:
    started: list[HostProcess] = []

    def start(budget_bytes: int = 4 * REGION_BYTES, name: str = "host") -> HostProcess:
        started.append(HostProcess(tmp_path / name, budget_bytes))
        started[-1].start()
        return started[-1]

    yield start
    for host in started:
        pid = host.pid
        host.stop()
        assert not host.socket_path.exists() and (pid is None or not psutil.pid_exists(pid))


@pytest.fixture
def users() -> Iterator[Callable[..., User]]:
    made: list[User] = []

    def hold(*arguments) -> User:
        made.append(User(*arguments))
        return made[-1]

    yield hold
    for user in made:
        user.kill()


def leased(host: HostProcess, layout: str = "layout", pages: int = 1):
    return lease(host.socket_path, layout, pages * PAGE, [pages * PAGE] * 2, TIMEOUT_S)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def test_a_private_titled_process(start):
    host = start()
    process = psutil.Process(host.pid)
    assert host.is_alive() and process.cmdline()[0] == "tandem host-tier" and process.cwd() == "/"
    assert host.socket_path.stat().st_mode & 0o777 == 0o600
    assert host.socket_path.parent.stat().st_mode & 0o777 == 0o700
    empty = status(host.socket_path, TIMEOUT_S)
    assert (empty.regions, empty.leases, empty.users, empty.bytes) == (0, 0, 0, 0)
    assert empty.budget_bytes == 4 * REGION_BYTES


def test_memory_outlives_its_killed_users(start, users):
    host = start()
    coordinator = users(host.socket_path)
    ranks = [users(host.socket_path, coordinator.token, rank) for rank in range(2)]
    coordinator.say("the index")
    for rank, user in enumerate(ranks):
        user.say(f"slab {rank}")
    now = status(host.socket_path, TIMEOUT_S)
    assert (now.regions, now.leases, now.users, now.bytes) == (1, 1, 3, REGION_BYTES)
    for user in (coordinator, *ranks):
        user.kill()
    assert status(host.socket_path, TIMEOUT_S).leases == 0

    successor = leased(host)
    assert successor.reused and successor.index[:9] == b"the index" and successor.token != coordinator.token
    with pytest.raises(HostTierError, match="no lease has this token"):
        attach(host.socket_path, coordinator.token, 0, TIMEOUT_S)
    for rank in range(2):
        slab = attach(host.socket_path, successor.token, rank, TIMEOUT_S)
        assert slab.slab[:6] == f"slab {rank}".encode() and len(slab.slab) == PAGE
        slab.close()
    successor.close()


def test_a_frozen_rank_keeps_its_memory_from_the_successor(start, users):
    host = start()
    coordinator = users(host.socket_path)
    frozen = users(host.socket_path, coordinator.token, 0)
    frozen.say("old")
    coordinator.say("index")
    frozen.process.send_signal(signal.SIGSTOP)
    coordinator.kill()

    successor = leased(host)
    assert not successor.reused and successor.index[:] == bytes(PAGE)
    slab = attach(host.socket_path, successor.token, 0, TIMEOUT_S)
    assert slab.slab[:] == bytes(PAGE)
    frozen.tell("late")
    frozen.process.send_signal(signal.SIGCONT)
    assert frozen.heard()
    assert slab.slab[:] == bytes(PAGE), "the late writer wrote into its own region"
    with pytest.raises(HostTierError, match="its coordinator has gone"):
        attach(host.socket_path, coordinator.token, 1, TIMEOUT_S)

    frozen.kill()
    again = leased(host)
    assert again.reused and again.index[:5] == b"index"
    for held in (slab, successor, again):
        held.close()


def test_a_successor_is_refused_when_only_the_frozen_ones_region_would_fit(start, users):
    host = start(budget_bytes=REGION_BYTES)
    coordinator = users(host.socket_path)
    frozen = users(host.socket_path, coordinator.token, 1)
    frozen.process.send_signal(signal.SIGSTOP)
    coordinator.kill()
    with pytest.raises(HostTierError, match=f"may take {REGION_BYTES} bytes, {REGION_BYTES} are leased"):
        leased(host)
    frozen.kill()
    held = leased(host)
    assert held.reused
    held.close()


def test_free_regions_make_room(start):
    host = start()
    for layout in ("one", "two", "three", "four"):
        leased(host, layout).close()
    large = leased(host, "large", 2)
    assert not large.reused
    kept, new = leased(host, "three"), leased(host, "one")
    assert kept.reused and not new.reused
    for held in (large, kept, new):
        held.close()


def test_what_can_never_fit_is_refused(start):
    host = start()
    with pytest.raises(HostTierError, match="do not fit"):
        leased(host, pages=100)
    for sizes in ([], [0], [-1], [2**60], [PAGE] * 65):
        with pytest.raises(HostTierError, match="not a request"):
            lease(host.socket_path, "layout", PAGE, sizes, TIMEOUT_S)
    with pytest.raises(HostTierError, match="not a request"):
        lease(host.socket_path, "x" * 257, PAGE, [PAGE], TIMEOUT_S)
    assert status(host.socket_path, TIMEOUT_S).regions == 0


def test_memory_is_reserved_before_it_is_given(start):
    host = start(budget_bytes=2**28)
    held = lease(host.socket_path, "layout", PAGE, [2**26], TIMEOUT_S)
    memory = [entry for entry in Path(f"/proc/{host.pid}/fd").iterdir() if "memfd" in os.readlink(entry)]
    assert sum(os.stat(entry).st_blocks * 512 for entry in memory) >= 2**26 + PAGE
    held.close()


def test_a_view_keeps_the_hold(start):
    host = start()
    held = leased(host)
    view = memoryview(held.index)
    with pytest.raises(BufferError):
        held.close()
    assert status(host.socket_path, TIMEOUT_S).leases == 1
    view.release()
    held.close()
    held.close()
    assert status(host.socket_path, TIMEOUT_S).leases == 0


def test_many_groups_at_once_each_get_their_own(start):
    host = start(budget_bytes=20 * REGION_BYTES)
    held, lock = [], threading.Lock()

    def take() -> None:
        mine = leased(host)
        with lock:
            held.append(mine)

    threads = [threading.Thread(target=take) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 20 and not any(one.reused for one in held)
    for number, one in enumerate(held):
        one.index[0] = number
    assert [one.index[0] for one in held] == list(range(20))
    for one in held:
        one.close()


# ---- ends ----

PARENT = """
import sys, time
from pathlib import Path
from tandem.offload.host.host_process import HostProcess
host = HostProcess(Path(sys.argv[1]), 10**6)
host.start()
print(host.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_its_killed_parent_and_users_go_on(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "host")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    host = psutil.Process(int(parent.stdout.readline()))
    socket_path = tmp_path / "host" / "host-tier.sock"
    held = lease(socket_path, "layout", PAGE, [PAGE], TIMEOUT_S)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([host], timeout=TIMEOUT_S)
    assert not host.is_running() and not socket_path.exists()
    held.index[:4] = b"mine"
    assert held.index[:4] == b"mine"
    held.close()
    with pytest.raises(HostTierError, match="no host tier at"):
        lease(socket_path, "layout", PAGE, [PAGE], TIMEOUT_S)


def test_sigterm_ends_it_and_sigint_does_not(start):
    host = start()
    process = psutil.Process(host.pid)
    process.send_signal(signal.SIGINT)
    assert status(host.socket_path, TIMEOUT_S).regions == 0
    process.terminate()
    until(lambda: not host.is_alive())
    assert not host.socket_path.exists()


def test_it_may_be_started_again(start):
    host = start()
    held = leased(host)
    host.stop()
    host.stop()
    assert not host.is_alive() and host.pid is None
    host.start()
    assert status(host.socket_path, TIMEOUT_S).regions == 0, "memory ends with the process and its users"
    held.close()


def test_a_failed_start_says_why(tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match="too long"):
        HostProcess(tmp_path / ("x" * 100), 1).start()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    host = HostProcess(tmp_path / "host", 1)
    with pytest.raises(SettingsError, match="did not start: no host tier at"):
        host.start()
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # says that it does not know our flags
    with pytest.raises(SettingsError, match=r"did not start: .*cat"):
        host.start()
    assert not host.is_alive() and host.pid is None


# ---- bad company ----


@pytest.fixture
def raw(start) -> Iterator[tuple[HostProcess, socket.socket]]:
    host = start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(host.socket_path))
        yield host, connection


def ask(connection: socket.socket, packet: bytes) -> object:
    connection.send(packet)
    return decode_reply(connection.recv(MAX_PACKET_BYTES))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(packet):
    try:
        assert isinstance(decode_request(packet), LeaseRegion | Attach | AskStatus)
    except HostTierError:
        pass


def test_bad_packets_end_nothing(raw):
    host, connection = raw
    good = encode(LeaseRegion("layout", PAGE, [PAGE]))
    nested = b"\x81\xa1x" + b"\x91" * 10_000
    for packet in (b"\x00", b"\xc1", good[:-1], good + b"x", nested, b"x" * MAX_PACKET_BYTES, b"x" * 100_000):
        reply = ask(connection, packet)
        assert type(reply).__name__ == "Refused"
    assert type(ask(connection, good)).__name__ == "Leased"
    assert type(ask(connection, good)).__name__ == "Refused", "one region per connection"
    assert status(host.socket_path, TIMEOUT_S).leases == 1


def test_descriptors_that_are_sent_to_it_are_not_kept(raw):
    host, connection = raw
    ask(connection, encode(AskStatus()))
    before = psutil.Process(host.pid).num_fds()
    for _ in range(5):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0, 1]))]
        connection.sendmsg([encode(AskStatus())], rights)
        connection.recv(MAX_PACKET_BYTES)
    assert psutil.Process(host.pid).num_fds() == before


def test_a_client_that_never_reads_is_dropped(raw):
    host, connection = raw
    sent = 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for sent in range(100_000):  # noqa: B007
            connection.send(encode(AskStatus()))
    assert sent < 99_999
    assert status(host.socket_path, TIMEOUT_S).users == 0


def test_a_frozen_process_costs_a_caller_its_deadline_only(start):
    host = start()
    process = psutil.Process(host.pid)
    process.suspend()
    began_s = time.monotonic()
    with pytest.raises(HostTierError, match=r"did not answer in 0\.2 s"):
        lease(host.socket_path, "layout", PAGE, [PAGE], 0.2)
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    process.resume()
    deadline_s = time.monotonic() + TIMEOUT_S
    while status(host.socket_path, TIMEOUT_S).leases:  # it may take the late request before it sees who has hung up
        assert time.monotonic() < deadline_s, "what came too late is not held"


STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.settimeout(30)
    connection.connect(sys.argv[1])
    try:
        connection.send(bytes.fromhex(sys.argv[2]))
        print(len(connection.recv(1000)))
    except (BrokenPipeError, ConnectionResetError):
        print(0)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be someone else")
def test_another_user_is_not_answered():
    folder = Path(f"/tmp/tandem-test-{os.getpid()}")
    host = HostProcess(folder, REGION_BYTES)
    host.start()
    try:
        folder.chmod(0o755)
        host.socket_path.chmod(0o666)
        done = subprocess.run(
            ["/usr/bin/env", "python3", "-c", STRANGER, str(host.socket_path), encode(AskStatus()).hex()],
            user=65534,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout == "0\n", done.stderr
        assert status(host.socket_path, TIMEOUT_S).users == 0
    finally:
        host.stop()
        (folder / "host-tier.log").unlink()
        folder.rmdir()


def test_the_memory_has_no_name(start):
    host = start()
    held = leased(host)
    assert isinstance(held.index, mmap.mmap)
    assert {entry.name for entry in host.socket_path.parent.iterdir()} == {"host-tier.sock", "host-tier.log"}
    held.close()
