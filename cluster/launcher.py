"""`tandem serve`: starts Redis, Ray and the Serve application, watches them, and takes all of it down again.

    checks -> redis -> ray -> serve -> groups ready -> serving -> (signal) drain -> nothing left

Everything started here is a descendant of this process; every folder made here is removed; a start that fails half-way
ends the same way as a signal. Settings errors are found before Ray starts, as far as they can be.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from cluster import machine, ray_node
from cluster.coordination.redis_server import RedisServer
from cluster.fleet_news import FleetNews
from cluster.helper import Helper, Startable
from cluster.loading_line import LoadingLine
from cluster.placement import declared_cpus, max_groups, min_groups
from cluster.preflight import (
    check_adapters,
    check_memory,
    check_model,
    check_port,
    check_processes,
    check_redis,
    choose_device,
    fit_host_tier,
    open_to_others,
    without_compiler,
)
from cluster.reaper import Reaper, orphans
from cluster.run_files import PrivateFolder, RunFile, remove_run_file, write_run_file
from cluster.service import ServiceFacts, groups_per_node, install_root, new_facts
from cluster.signals import Signals, StopRequested
from cluster.strays import Strays
from cluster.supervisor import INTERRUPTED, Told
from configs.errors import SettingsError
from configs.schema import ServiceSettings
from offload.host_process import HostProcess

WATCH_PERIOD_S = 1.0
RAY_POLL_S = 0.2
ROUNDS = 10


class Launcher:
    """One service, from its start to its end. `say` prints one line for the user."""

    def __init__(self, settings: ServiceSettings, address: str | None, say: "Say", told: Told) -> None:
        self._settings = settings
        self._address = address
        self._say = say
        self._told = told
        self._signals = Signals()
        self._host_tier: HostProcess | None = None
        self._helpers: list[Helper] = []
        self._stack = ExitStack()
        self._phases: list[tuple[str, float]] = []
        self._begun = False
        self._run_file: RunFile | None = None
        self._strays = Strays()
        self._news: FleetNews | None = None
        self._left: Any = None  # our Ray, while we are not connected to it

    def run(self) -> int:
        """The exit status. SettingsError for what the user can mend, with everything taken down again."""
        install_root()
        self._signals.install()
        try:
            if (number := self._run_start()) is not None:
                self._told.interrupted()
                self._say.line(INTERRUPTED)
                return 128 + number
            self._told.started()
            if self._address is None:
                self._left = ray_node.leave()
            self._watch()
        finally:
            self._signals.raising = False
            self._take_down()
        return 0

    # ---- start ---------------------------------------------------------------------------------------------------

    def _run_start(self) -> int | None:
        """The signal that interrupted it, None when everything is up."""
        try:
            try:
                self._start()
            finally:
                self._signals.raising = False
        except StopRequested as stop:
            return stop.number
        except Exception:
            # The signal went to the whole process group, and Ray or Redis failed because of it.
            if self._signals.first() is None:
                raise
        return self._signals.first()

    def _start(self) -> None:
        with self._phase("checks"):
            self._check()
            folder = PrivateFolder()
            self._told.folder(folder.path)
            self._stack.callback(folder.remove)
            os.chdir(folder.empty)  # a user's folder may hold packages of our names
            self._stack.callback(os.chdir, "/")
        with self._phase("redis", None if self._settings.redis.url is not None else "starting Redis ..."):
            url = self._start_redis(folder.redis)
        self._settings = with_state_folder(self._settings, folder)
        self._start_host_tier(folder.host_tier)
        with self._phase("ray", "starting Ray ..." if self._address is None else f"joining Ray at {self._address} ..."):
            self._start_ray(folder)
        facts = self._facts(url)
        with self._signals.held():
            from cluster.serve_app import ServeApp  # imports ray, whose environment is prepared by now

        app = ServeApp(self._settings, facts, private=self._address is None)
        announced = self._stack.enter_context(ExitStack())  # ends after the drain: till then `tandem status` shows it
        self._stack.callback(self._drain, app)
        if self._address is not None:
            self._told.started()  # others' Ray does not die with us, and must not keep our application
        with self._phase("serve", "starting Ray Serve ..."):
            app.deploy()
        groups, count = _groups(min_groups(self._settings)), self._settings.gateway.num_gateways
        gateways = "the gateway" if count == 1 else f"{count} gateways"
        with self._phase("groups", f"starting {gateways} and {groups}, loading weights ..."):
            try:
                choices = app.wait_until_ready(self._restart_helpers, self._say.loading.show)
            finally:
                self._say.loading.clear()
        for choice in choices:
            self._say.line(choice)
        self._announce(facts, announced)

    def _check(self) -> None:
        settings = self._settings = choose_device(self._settings)
        check_port(settings.gateway.host, settings.gateway.port)
        check_model(settings)
        if self._address is None:
            check_processes(settings)
        for line in check_adapters(settings):
            self._say.line(line)
        check_memory(settings)
        self._settings, note = fit_host_tier(settings)
        if note is not None:
            self._say.line(note)
        if (slower := without_compiler(settings)) is not None:
            self._say.line(slower)
        if settings.redis.url is not None:
            check_redis(settings.redis.url)
        if self._address is not None and settings.redis.url is None:
            raise SettingsError("--address needs a Redis that every node can reach", "--redis-url")

    def _start_redis(self, folder: Path) -> str:
        if self._settings.redis.url is not None:
            return self._settings.redis.url
        redis = RedisServer(folder)
        self._stack.callback(redis.stop)
        redis.start()
        self._keep_running(redis, "the private Redis server", "requests go on")
        return redis.url

    def _start_host_tier(self, folder: Path) -> None:
        """The process that holds KV in this machine's memory, when all groups are here and want it."""
        gib = self._settings.engine.cache.kv_offloading_gib
        if gib is None or self._address is not None:
            return
        # keys of slots take a little beside the slots
        self._host_tier = HostProcess(folder, int(gib * 1.01 * 2**30 + 2**20) * max_groups(self._settings))
        self._stack.callback(self._host_tier.stop)
        self._host_tier.start()
        self._keep_running(self._host_tier, "the host-tier process", "groups keep the memory they hold")

    def _keep_running(self, process: Startable, name: str, meanwhile: str) -> None:
        self._helpers.append(Helper(process, name, meanwhile, self._say.line))

    def _start_ray(self, folder: PrivateFolder) -> None:
        private = self._address is None
        if private:
            reaper = Reaper(folder.path)
            self._told.reaper(reaper.pid)
            self._stack.callback(reaper.dismiss)
            self._stack.callback(self._end_orphans, folder)
        ray_node.prepare_environment(folder.write_token(ray_node.new_token()) if private else None)
        with self._signals.held():
            ray_node.load()
            self._stack.callback(lambda: ray_node.shut_down(self._left))
        if self._address is not None:
            ray_node.join(self._address)
        else:
            device = self._settings.engine.device.device or "cpu"
            cpus = declared_cpus(self._settings, device, machine.cores())
            gpus = machine.cuda_device_count() if device == "cuda" else 0
            ray_node.start_private(folder.ray, cpus, gpus)

    def _facts(self, redis_url: str) -> ServiceFacts:
        return new_facts(
            single_node=self._address is None,
            redis_url=redis_url,
            open_port=True,
            device=self._settings.engine.device.device or "cpu",
            gateway_node=ray_node.node_address() if self._address is not None else None,
            groups_on_node=groups_per_node(max_groups(self._settings), self._nodes()),
            host_socket=None if self._host_tier is None else str(self._host_tier.socket_path),
        )

    def _nodes(self) -> int:
        """Machines that groups may be placed on."""
        if self._address is None:
            return 1
        from cluster.app import cpu_nodes

        return cpu_nodes()

    def _announce(self, facts: ServiceFacts, announced: ExitStack) -> None:
        gateway = self._settings.gateway
        host = f"[{gateway.host}]" if ":" in gateway.host else gateway.host
        url = f"http://{host}:{gateway.port}"
        assert facts.redis_url is not None
        self._run_file = RunFile(
            pid=os.getpid(),
            started_at=time.time(),
            url=url,
            model=self._settings.engine.model.served_model_name[0],
            service_id=facts.service_id,
            redis_url=facts.redis_url,
        )
        path = write_run_file(self._run_file)
        self._told.run_file(path)
        announced.callback(remove_run_file, path)
        if (warning := open_to_others(self._settings, facts.redis_url)) is not None:
            self._say.line(warning)
        self._say.phases(self._phases)
        self._say.url(url, self._run_file.model, min_groups(self._settings), max_groups(self._settings))
        news = FleetNews(facts.redis_url, facts.service_id, self._say.line)
        news.start()
        self._news = news

    @contextmanager
    def _phase(self, name: str, doing: str | None = None) -> Iterator[None]:
        """Times a part of the start. `doing` is said as it begins; from then on there is something to take down."""
        started_s = time.monotonic()
        if doing is not None:
            self._begun = True
            self._say.line(doing)
        yield
        self._phases.append((name, time.monotonic() - started_s))

    # ---- serving and the end -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until a signal; keeps the private Redis and the host tier running; a lost Ray ends the service."""
        while not self._signals.wait(WATCH_PERIOD_S):
            for helper in self._helpers:
                helper.keep()
            if not ray_node.is_alive(self._left):
                raise SettingsError("Ray's own processes have died; the service cannot go on")

    def _restart_helpers(self) -> None:
        for helper in self._helpers:
            helper.restart_if_dead()

    def _drain(self, app: "ServeApp") -> None:  # type: ignore[name-defined]  # noqa: F821
        drained = threading.Event()
        if self._news is not None:
            self._news.stop()
        if self._address is None:
            threading.Thread(target=self._end_with_ray, args=(drained,), name="tandem-drain", daemon=True).start()
        if app.is_ready and self._signals.first() is not None:
            self._say.line(stopping_line(app.requests_in_hand(), self._settings.shutdown_timeout_s))
        if self._run_file is not None:
            with suppress(OSError):
                write_run_file(replace(self._run_file, stopping=True))
        if self._left is not None and ray_node.is_alive(self._left):
            try:
                ray_node.rejoin(self._left)
            except Exception as error:  # of many kinds; it may die at this moment
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                self._say.line(f"Ray cannot be asked to drain, requests in hand are cut off: {why}")
        app.drain(lambda: self._signals.is_urgent, self._cut_off)
        drained.set()

    def _cut_off(self, count: int) -> None:
        self._say.line(cut_off_line(count, None if self._signals.is_urgent else self._settings.shutdown_timeout_s))

    def _end_with_ray(self, drained: threading.Event) -> None:
        """A service manager signals all processes: without Ray's own nothing drains, and the main thread would wait for
        them for a minute."""
        while not drained.wait(RAY_POLL_S):
            if self._signals.first() is not None and not ray_node.is_alive(self._left):
                self._told.end("Ray got the signal too: requests in flight are cut off")
                return

    def _end_orphans(self, folder: PrivateFolder) -> None:
        """What a private Ray left behind; its own parents may be gone, so it is found by its folder."""
        for _ in range(ROUNDS):  # one that was just being started shows up in a later round
            if not (found := orphans(folder.path)):
                return
            self._strays.end(found)

    def _take_down(self) -> None:
        """Backwards through everything that was started; nothing stops it, a second signal only hurries it."""
        started_s = time.monotonic()
        try:
            self._stack.close()
        finally:
            self._strays.end(psutil.Process().children(recursive=True))
        if self._begun:
            self._say.line(self._strays.stopped_line(time.monotonic() - started_s))


class Say:
    """How the launcher talks; replaced in tests."""

    def __init__(self) -> None:
        self.loading = LoadingLine()

    def line(self, text: str) -> None:
        self.loading.clear()
        with suppress(OSError, UnicodeError):  # the terminal may be gone; what is running is not
            print(f"tandem: {text}", flush=True)

    def phases(self, phases: list[tuple[str, float]]) -> None:
        total = sum(seconds for _, seconds in phases)
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases)
        self.line(f"started in {total:.1f} s ({parts})")

    def url(self, url: str, model: str, low: int, high: int) -> None:
        groups = _groups(low) + (f", up to {high}" if high > low else "")
        self.line(f"serving {model} with {groups} on {url}/v1")


def with_state_folder(settings: ServiceSettings, folder: PrivateFolder) -> ServiceSettings:
    """The state of a service whose Redis ends with it may go with the private folder. With another's Redis gateways
    keep a folder of their own, which they remove when Redis has everything that is in it."""
    if settings.gateway.state_dir is not None or settings.redis.url is not None:
        return settings
    return replace(settings, gateway=replace(settings.gateway, state_dir=str(folder.state)))


def stopping_line(in_hand: int | None, limit_s: float) -> str:
    """What is said once, when the draining begins. in_hand: requests, None where the gateway did not say."""
    if in_hand == 0:
        return "stopping: no request is in hand"
    count = "" if in_hand is None else f"{in_hand} "
    who = "1 request in hand has" if in_hand == 1 else f"{count}requests in hand have"
    return f"stopping: {who} up to {limit_s:g} s to finish (--shutdown-timeout); signal again to end at once"


def cut_off_line(count: int, limit_s: float | None) -> str:
    """What is said when the draining did not end by itself. limit_s: None where another signal ended it."""
    who = "1 request was" if count == 1 else f"{count} requests were"
    why = "by the second signal" if limit_s is None else f"after {limit_s:g} s (--shutdown-timeout)"
    return f"{who} cut off {why}"


def _groups(count: int) -> str:
    return f"{count} group{'s' if count > 1 else ''}"
