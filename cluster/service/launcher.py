"""The launcher of `tandem serve`: starts Redis, Ray and the Serve application, watches them and takes them down.

    checks -> redis -> ray -> serve -> groups ready -> serving -> (signal) drain -> (reaper) nothing left

A start that fails half-way ends in the same order as a service that gets a signal. Whatever outlives the launcher, and
its files, are the reaper's.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tandem.cluster.deploy import devices
from tandem.cluster.deploy.nodes import Node, alive_nodes, memory_note, on_cluster
from tandem.cluster.deploy.placement import declared_cpus, declared_gpus, max_groups, min_groups
from tandem.cluster.deploy.preflight import (
    check_adapters,
    check_labels,
    check_memory,
    check_model,
    check_port,
    check_processes,
    check_redis,
    choose_device,
    fit_host_tier,
    note_on_keys,
)
from tandem.cluster.deploy.resolved_settings import settings_here
from tandem.cluster.gateway.http.tls import read_certificate, server_context
from tandem.cluster.gateway.tracing.tracing import check_tracing
from tandem.cluster.logs.log_files import LogPlace
from tandem.cluster.process.load_progress import LoadProgress
from tandem.cluster.process.reaper import INTERRUPTED, StatusPipe, print_line
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.process.run_files import PrivateFolder, RunFile, remove_run_file, write_run_file
from tandem.cluster.process.sidecar import Sidecar, Startable
from tandem.cluster.process.signals import Signals, StopRequested
from tandem.cluster.ray_private.local_node import GcsServer, node_runs, raylet_runs
from tandem.cluster.service import ray_node
from tandem.cluster.service.group_event_log import GroupEventLog
from tandem.cluster.service.joined_ray import JoinedRay
from tandem.cluster.wire.service_facts import ServiceFacts, new_identity
from tandem.configs.autoscaling import check_policy
from tandem.configs.errors import SettingsError
from tandem.configs.limits import available_cores
from tandem.configs.platform_facts import steps_line
from tandem.configs.schema import ServiceSettings
from tandem.offload.host.host_process import HostProcess, region_bytes
from tandem.workers.planning.start_notes import model_notes

if TYPE_CHECKING:
    from tandem.cluster.service.serve_app import ServeApp

WATCH_PERIOD_S = 1.0
RAY_POLL_S = 0.2
SIGNAL_AFTER_ERROR_S = 1.0


class Launcher:
    """One service, from its start to its end. settings: pinned ones. address: of the Ray to join; None starts a private
    one. may_be_open: that Ray need not ask for tokens. logs: the place for log files; None: no process may write
    any."""

    def __init__(
        self,
        settings: ServiceSettings,
        address: str | None,
        console: "Console",
        status_pipe: StatusPipe,
        may_be_open: bool = False,
        logs: LogPlace | None = None,
    ) -> None:
        self._settings = settings
        self._address = address
        self._may_be_open = may_be_open
        self._logs = logs
        self._console = console
        self._status_pipe = status_pipe
        self._signals = Signals()
        self._host_tier: HostProcess | None = None
        self._sidecars: list[Sidecar] = []
        self._stack = ExitStack()
        self._phases: list[tuple[str, float]] = []
        self._run_file: RunFile | None = None
        self._group_events: GroupEventLog | None = None
        self._left_ray: Any = None  # the private Ray, while this process is not connected to it
        self._joined: JoinedRay | None = None
        self._nodes: list[Node] = []  # of the Ray that was joined, when it was

    def run(self) -> int:
        """Runs the service and returns the exit status. Errors that the user can mend are SettingsErrors; they too are
        raised after the take-down."""
        try:
            if (number := self._run_start()) is not None:
                self._status_pipe.interrupted()
                self._console.print_line(INTERRUPTED)
                return 128 + number
            self._status_pipe.started()
            if self._address is None:
                self._left_ray = ray_node.leave()
                self._keep_running(GcsServer(self._left_ray), "Ray's GCS", "requests go on")
            self._watch()
        finally:
            self._signals.raising = False
            self._take_down()
        return 0

    # ---- start ---------------------------------------------------------------------------------------------------

    def _run_start(self) -> int | None:
        """Starts everything. Returns the signal that interrupted the start; None when the service is up."""
        try:
            try:
                self._signals.install()  # in here: a signal interrupts whatever follows it, its own last lines too
                self._start()
            finally:
                self._signals.raising = False
        except StopRequested as stop:
            return stop.number
        except SettingsError:
            if self._signals.first() is None:
                raise
        except Exception:
            # A signal to every process makes Ray or Redis fail, perhaps before it arrives here.
            if not self._signals.wait(SIGNAL_AFTER_ERROR_S):
                raise
        return self._signals.first()

    def _start(self) -> None:
        if self._address is not None:
            with self._phase("ray", f"joining Ray at {self._address} ..."):
                self._join_ray(self._address)
        with self._phase("checks"):
            self._check()
            if (logs := self._log_folder()) is not None:
                self._console.print_line(f"logs go to {logs}")
            with self._signals.held():
                folder = PrivateFolder()
            os.chdir("/")  # Ray's workers import from their driver's folder first: a user's may hold a redis.py
        with self._phase("redis", None if self._settings.redis.url is not None else "starting Redis ..."):
            url = self._start_redis(folder.redis)
        self._settings = with_state_folder(self._settings, folder)
        self._start_host_tier(folder.host_tier)
        if self._address is None:
            with self._phase("ray", "starting Ray ..."):
                self._start_ray(folder)
        facts = self._facts(url)
        with self._signals.held():
            from tandem.cluster.service import serve_app  # imports ray, whose environment is prepared by now

        app = serve_app.ServeApp(self._settings, facts, private=self._address is None)
        announced = self._stack.enter_context(ExitStack())  # ends after the drain: till then `tandem status` shows it
        self._stack.callback(self._drain, app)
        if self._address is not None:
            self._status_pipe.started()  # a Ray of others outlives this process; the application must not
        with self._phase("serve", "starting Ray Serve ..."):
            app.deploy()
        self._wait_until_ready(app)
        self._announce(facts, announced)

    def _check(self) -> None:
        from tandem.cluster.gateway.app.model_text import check_text  # jinja2, tokenizers

        settings = self._settings = choose_device(self._settings) if self._address is None else self._on_cluster()
        for line in settings.without_effect:
            self._console.print_line(line)
        self._print_if(steps_line(settings.engine, settings.engine.device.chosen))
        check_labels(settings, private=self._address is None)
        check_policy(settings.autoscaling_config)
        check_port(settings.gateway.host, settings.gateway.port)
        server_context(settings.gateway)
        check_tracing(settings.gateway.otlp_traces_endpoint)
        # ranks elsewhere download a hub's weights themselves
        has_weights = self._address is None or settings.engine.model.revision is None
        here = settings_here(settings, weights=has_weights)
        spec = check_model(here, weights=has_weights)
        for line in (*model_notes(here.engine, spec), *check_text(here)):
            self._console.print_line(line)
        for line in check_adapters(here):
            self._console.print_line(line)
        if self._address is None:
            self._check_machine(here)
        if settings.redis.url is not None:
            check_redis(settings.redis.url)
        if self._address is not None and settings.redis.url is None:
            raise SettingsError("--address needs a Redis that every node can reach", "--redis-url")

    def _check_machine(self, here: ServiceSettings) -> None:
        """Checks this machine's memory, for groups that are all here. here: the settings with its folders."""
        check_processes(here)
        check_memory(here)
        self._settings, note = fit_host_tier(self._settings)
        self._print_if(note)

    def _on_cluster(self) -> ServiceSettings:
        """Settings for the nodes of the Ray that was joined; prints what is to be known of them."""
        settings = on_cluster(self._settings, self._nodes)
        self._print_if(memory_note(settings_here(settings, weights=False), self._nodes))
        return settings

    def _print_if(self, line: str | None) -> None:
        if line is not None:
            self._console.print_line(line)

    def _start_redis(self, folder: Path) -> str:
        if self._settings.redis.url is not None:
            return self._settings.redis.url
        kept = self._settings.gateway.state_dir
        redis = RedisServer(folder, data=None if kept is None else Path(kept).absolute() / "redis")
        self._stack.callback(redis.stop)
        redis.start()
        self._keep_running(redis, "the private Redis server", "requests go on")
        return redis.url

    def _start_host_tier(self, folder: Path) -> None:
        """Starts the process that holds KV in this machine's memory, when all groups are here and want it."""
        gib = self._settings.engine.cache.kv_offloading_gib
        if gib is None or self._address is not None:
            return
        self._host_tier = HostProcess(folder, region_bytes(gib) * max_groups(self._settings))
        self._stack.callback(self._host_tier.stop)
        self._host_tier.start()
        self._keep_running(self._host_tier, "the host-tier process", "groups keep the memory they hold")

    def _keep_running(self, process: Startable, name: str, meanwhile: str) -> None:
        self._sidecars.append(Sidecar(process, name, meanwhile, self._console.print_line))

    def _start_ray(self, folder: PrivateFolder) -> None:
        """Starts a private Ray."""
        self._load_ray(folder.write_token(ray_node.new_token()))
        device = self._settings.engine.device.chosen
        cpus = declared_cpus(self._settings, device, available_cores())
        gpus = declared_gpus(device, devices.cuda_device_count())
        ray_node.start_private(folder.ray, folder.gcs, cpus, gpus)

    def _join_ray(self, address: str) -> None:
        """Joins a Ray of others, and learns its nodes."""
        os.chdir("/")
        self._load_ray(None)
        gcs_address = ray_node.join(address, may_be_open=self._may_be_open)
        from tandem.cluster.ray_private.ray_facts import gcs_answers  # imports ray

        answers, gives_up_s = partial(gcs_answers, gcs_address), ray_node.gives_up_s()
        self._joined = JoinedRay(address, answers, gives_up_s, self._console.print_line)
        self._nodes = alive_nodes()

    def _load_ray(self, token_file: Path | None) -> None:
        ray_node.prepare_environment(token_file)
        with self._signals.held():
            ray_node.load()
            self._stack.callback(lambda: ray_node.shut_down(self._left_ray))

    def _wait_until_ready(self, app: "ServeApp") -> None:
        groups, count = _groups(min_groups(self._settings)), self._settings.gateway.num_gateways
        gateways = "the gateway" if count == 1 else f"{count} gateways"
        loads = f"{groups}, loading weights" if min_groups(self._settings) else "no group until a request comes"
        with self._phase("groups", f"starting {gateways} and {loads} ..."):
            try:
                choices = app.wait_until_ready(self._restart_sidecars, self._console.loading.show)
            finally:
                self._console.loading.clear()
        for choice in choices:
            self._console.print_line(choice)

    def _facts(self, redis_url: str) -> ServiceFacts:
        service_id, secret = new_identity()
        return ServiceFacts(
            service_id=service_id,
            secret=secret,
            single_node=self._address is None,
            redis_url=redis_url,
            open_port=True,
            device=self._settings.engine.device.chosen,
            gateway_node=ray_node.node_address() if self._address is not None else None,
            max_groups=max_groups(self._settings),
            logs=self._logs,
            host_socket=None if self._host_tier is None else str(self._host_tier.socket_path),
        )

    def _log_folder(self) -> str | None:
        """The folder of this run's log files on this machine."""
        return None if self._logs is None else str(self._logs.folder(""))

    def _announce(self, facts: ServiceFacts, announced: ExitStack) -> None:
        gateway = self._settings.gateway
        host = f"[{gateway.host}]" if ":" in gateway.host else gateway.host
        url = f"{'http' if gateway.ssl_certfile is None else 'https'}://{host}:{gateway.port}"
        assert facts.redis_url is not None
        self._run_file = RunFile(
            pid=os.getpid(),
            started_at=time.time(),
            url=url,
            model=self._settings.engine.model.served_model_name[0],
            service_id=facts.service_id,
            redis_url=facts.redis_url,
            certificate=read_certificate(gateway),
            logs=self._log_folder(),
            supervisor=self._status_pipe.supervisor,
        )
        announced.callback(remove_run_file, write_run_file(self._run_file))
        if (note := note_on_keys(self._settings, facts.redis_url)) is not None:
            self._console.print_line(note)
        self._console.print_phases(self._phases)
        low, high = min_groups(self._settings), max_groups(self._settings)
        self._console.print_url(url, self._run_file.model, low, high, has_page=not gateway.disable_ui)
        groups = max_groups(self._settings)
        events = GroupEventLog(facts.redis_url, facts.service_id, groups, self._console.print_line)
        events.start()
        self._group_events = events

    @contextmanager
    def _phase(self, name: str, doing: str | None = None) -> Iterator[None]:
        """Times a part of the start. doing: the line for its beginning, where it begins processes."""
        started_s = time.monotonic()
        if doing is not None:
            self._status_pipe.begun()
            self._console.print_line(doing)
        yield
        self._phases.append((name, time.monotonic() - started_s))

    # ---- serving and the end -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Returns at a signal. Keeps what is beside the service running; SettingsError once Ray is lost."""
        while not self._signals.wait(WATCH_PERIOD_S):
            if self._joined is not None:
                self._joined.check()
            elif not raylet_runs(self._left_ray):
                raise SettingsError("Ray's raylet has died, and with it every group; the service cannot go on")
            for sidecar in self._sidecars:
                sidecar.keep()

    def _restart_sidecars(self) -> None:
        for sidecar in self._sidecars:
            sidecar.restart_if_dead()

    def _drain(self, app: "ServeApp") -> None:
        drained = threading.Event()
        if self._group_events is not None:
            self._group_events.stop()
        if self._address is None:
            threading.Thread(target=self._end_with_ray, args=(drained,), name="tandem-drain", daemon=True).start()
        if app.is_ready and self._signals.first() is not None:
            self._console.print_line(stopping_line(app.requests_in_flight(), self._settings.shutdown_timeout_s))
        if self._run_file is not None:
            with suppress(OSError):
                write_run_file(replace(self._run_file, stopping=True))
        if self._left_ray is not None and node_runs(self._left_ray):
            try:
                ray_node.rejoin(self._left_ray)
            except Exception as error:  # of many kinds; it may die at this moment
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                self._console.print_line(f"Ray cannot be asked to drain, requests in flight are cut off: {why}")
        app.drain(lambda: self._signals.is_urgent, self._cut_off)
        drained.set()

    def _cut_off(self, count: int) -> None:
        limit_s = None if self._signals.is_urgent else self._settings.shutdown_timeout_s
        self._console.print_line(cut_off_line(count, limit_s))

    def _end_with_ray(self, drained: threading.Event) -> None:
        """Asks for the end of everything once a signal has also ended Ray's own processes, as a service manager's to
        all does: nothing drains without them, and the main thread would wait for a minute."""
        while not drained.wait(RAY_POLL_S):
            if self._signals.first() is not None and not node_runs(self._left_ray):
                self._status_pipe.abort("Ray got the signal too: requests in flight are cut off")
                return

    def _take_down(self) -> None:
        """Ends everything in reverse order of the start. No error stops it; a second signal shortens the drain."""
        self._status_pipe.stopping()
        self._stack.close()


class Console:
    """The launcher's lines for the user; replaced in tests. A terminal that is gone ends nothing."""

    def __init__(self) -> None:
        self.loading = LoadProgress()

    def print_line(self, text: str) -> None:
        """Prints `text` on an empty line."""
        self.loading.clear()
        print_line(text)

    def print_phases(self, phases: list[tuple[str, float]]) -> None:
        """Prints how long the start took. phases: name and seconds of each."""
        total = sum(seconds for _, seconds in phases)
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases)
        self.print_line(f"started in {total:.1f} s ({parts})")

    def print_url(self, url: str, model: str, low: int, high: int, *, has_page: bool) -> None:
        """Prints the address. low, high: the fewest and the most groups."""
        groups = _groups(low) + (f", up to {high}" if high > low else "")
        page = f", and a page to try it on {url}" if has_page else ""
        self.print_line(f"serving {model} with {groups} on {url}/v1{page}")


def with_state_folder(settings: ServiceSettings, folder: PrivateFolder) -> ServiceSettings:
    """Settings whose gateways keep their state in the private folder, where no other is set and Redis is private too.

    With another Redis, gateways keep a folder of their own until Redis has everything that is in it.
    """
    if settings.gateway.state_dir is not None or settings.redis.url is not None:
        return settings
    return replace(settings, gateway=replace(settings.gateway, state_dir=str(folder.state)))


def stopping_line(in_flight: int | None, limit_s: float) -> str:
    """The line for the beginning of a drain. in_flight: requests; None where the gateway did not answer."""
    if in_flight == 0:
        return "stopping: no request is in flight"
    count = "" if in_flight is None else f"{in_flight} "
    who = "1 request in flight has" if in_flight == 1 else f"{count}requests in flight have"
    return f"stopping: {who} up to {limit_s:g} s to finish (--shutdown-timeout); signal again to end at once"


def cut_off_line(count: int, limit_s: float | None) -> str:
    """The line for a drain that was ended early. limit_s: None where another signal ended it."""
    who = "1 request was" if count == 1 else f"{count} requests were"
    why = "by the second signal" if limit_s is None else f"after {limit_s:g} s (--shutdown-timeout)"
    return f"{who} cut off {why}"


def _groups(count: int) -> str:
    return f"{count} group{'' if count == 1 else 's'}"
