"""The names that Ray and Serve keep private are there, and mean what cluster/ray_private/ takes them to mean.

A new release of Ray fails here and nowhere else: each message says what the name was for. What needs a running Ray is
read in its source instead.
"""

import ast
import contextvars
import inspect
import logging
import subprocess
from contextlib import nullcontext
from dataclasses import fields
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray._common import constants
from ray._private import node as ray_nodes
from ray._private import parameter, services, state
from ray._private import worker as ray_worker
from ray._private.grpc_utils import init_grpc_channel
from ray.serve import context as serve_context
from ray.serve._private import application_state, default_impl
from ray.serve._private import replica as serve_replica
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve._private.handle_options import DynamicHandleOptions, InitHandleOptions
from ray.serve.context import ReplicaContext

from tandem.cluster.ray_private import local_node
from tandem.cluster.ray_private.application_state import application_state as asked_for_state
from tandem.cluster.ray_private.application_state import autoscaling_in_force
from tandem.cluster.ray_private.ray_facts import gcs_of
from tandem.cluster.ray_private.replica_end import DRAINING_NAME, EXIT_NAME
from tandem.cluster.ray_private.replica_logging import SERVES, ReplicaLogging, replica_logging
from tandem.cluster.ray_private.separate_calls import call_separately
from tandem.configs.autoscaling import GROUP_SCALING, ScalingGoals, checked_autoscaling, goals_of

OURS = {"policy_function": GROUP_SCALING}


def source(of: Any) -> str:
    return inspect.getsource(of)


def globals_of(function: Any) -> set[str]:
    """The global names that a function reads, those in functions inside it too."""
    codes, names = [inspect.unwrap(function).__code__], set[str]()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return names


def test_global_node() -> None:
    why = "worker._global_node: a driver leaves its private Ray and comes back to it (local_node.take_node)"
    assert ray_worker._global_node is None, why
    assigned = [
        ast.unparse(node) for node in ast.walk(ast.parse(source(ray_worker.init))) if isinstance(node, ast.Global)
    ]
    assert "global _global_node" in assigned, why
    assert "_global_node.kill_all_processes" in source(ray_worker.shutdown), (
        f"{why}; shutdown() ends what it finds there"
    )


def test_channels_to_gcs() -> None:
    why = "grpc_utils.init_grpc_channel: whether a GCS speaks, over TLS too where Ray has it (ray_facts.gcs_answers)"
    assert [*inspect.signature(init_grpc_channel).parameters][:2] == ["address", "options"], why
    assert "RAY_USE_TLS" in source(init_grpc_channel), why


def test_the_address_of_gcs(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "services.canonicalize_bootstrap_address: what ray.init(address) will ask (ray_facts.gcs_of)"
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
    assert [gcs_of(address) for address in ("auto", "10.9.9.9:1", "ray://h:1")] == [
        "10.1.2.3:6379",
        "10.9.9.9:1",
        None,
    ], why
    assert "canonicalize_bootstrap_address(address, _temp_dir)" in source(ray_worker.init), why


def test_logging_config_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "ReplicaContext._deployment_config.logging_config: log files have the form that a Serve file says"
    assert "_deployment_config" in {field.name for field in fields(ReplicaContext)}, why
    assert "logging_config" in DeploymentConfig.model_fields, why
    asked = source(application_state.ApplicationState)
    assert "deploy_info.deployment_config.logging_config is None" in asked, f"{why}; the application's is put there"
    assert logging.getLogger(SERVES).name == SERVE_LOGGER_NAME, why

    def read(given: Any) -> ReplicaLogging:
        config = DeploymentConfig(logging_config=given)
        monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(_deployment_config=config))
        return replica_logging()

    logger = logging.getLogger(SERVES)
    monkeypatch.setattr(logger, "level", logging.INFO)
    assert read({"encoding": "JSON", "enable_access_log": False}) == (True, False)
    assert read({"log_level": "DEBUG"}) == (False, True)
    assert logger.level == logging.INFO
    assert read(None) == (False, True)
    assert logger.level == logging.WARNING, "nobody asked for Serve's line of each call"
    logger.setLevel(logging.INFO)


@pytest.mark.parametrize("name", ["gcs_address", "dead_processes", "kill_all_processes", "get_session_dir_path"])
def test_methods_of_the_node(name: str) -> None:
    why = "Node: address to come back to, deaths of GCS and raylet, and the session's folder for the private Redis"
    assert hasattr(ray_nodes.Node, name), f"Node.{name}; {why}"


def test_a_gcs_is_started_again_at_its_port() -> None:
    why = "Node.start_gcs_server: the GCS of a private Ray is started again (local_node.GcsServer)"
    assert "check_alive" in inspect.signature(ray_nodes.Node.kill_gcs_server).parameters, why
    started = source(ray_nodes.Node.start_gcs_server)
    assert "gcs_server_port=self._ray_params.gcs_server_port" in started, f"{why}; the port of its first start"
    assert "self.all_processes[" in started, why


def test_what_a_gcs_knows_is_on_disk() -> None:
    why = "gcs_storage, gcs_storage_path: what the GCS of a private Ray knows outlives it (local_node.start_node)"
    asked = source(ray_nodes.Node)
    assert '_resolve_ray_config("gcs_storage",' in asked and '_resolve_ray_config("gcs_storage_path",' in asked, why
    assert "_system_config" in source(ray_worker.init), why


def test_dead_processes_are_pairs_that_begin_with_the_kind() -> None:
    why = "Node.dead_processes(): Ray's own death ends the service (local_node.node_runs)"
    assert "result.append((process_type, process_info.process))" in source(ray_nodes.Node.dead_processes), why
    kinds = {ray_nodes.ray_constants.PROCESS_TYPE_GCS_SERVER, ray_nodes.ray_constants.PROCESS_TYPE_RAYLET}
    assert kinds == {"gcs_server", "raylet"}, why


def test_arguments_of_init() -> None:
    why = "ray.init(): the private Ray has its files in our folder and listens on loopback only (local_node.start_node)"
    accepted = source(ray_worker.init)
    for name in ("_temp_dir", "_node_ip_address"):
        assert f'"{name}"' in accepted or name in inspect.signature(ray.init).parameters, f"{name}; {why}"


def test_parameters_that_leave_monitors_out() -> None:
    why = "RayParams: a private Ray starts 2 s sooner without monitors (local_node._trimmed); else it starts whole"
    assert {"no_monitor", "include_log_monitor"} <= set(inspect.signature(parameter.RayParams).parameters), why
    assert "ray._private.parameter.RayParams(" in source(ray_worker.init), f"{why}; init() looks it up there"


def test_ports_of_agents() -> None:
    why = "RayParams: the ports of a private Ray's agents, which need not be waited for then (local_node.start_node)"
    assert set(local_node.AGENT_PORTS) <= set(inspect.signature(parameter.RayParams).parameters), why
    started = source(ray_nodes.Node.start_raylet)
    assert all(f"{name}=self._ray_params.{name}" in started for name in local_node.AGENT_PORTS), why
    ports = local_node._free_ports(local_node.AGENT_PORTS)
    assert len({*ports.values()}) == len(local_node.AGENT_PORTS)
    with local_node._trimmed(**ports):
        made = parameter.RayParams(metrics_export_port=None)
    assert {name: getattr(made, name) for name in ports} == ports
    assert made.no_monitor and not made.include_log_monitor


def test_processes_are_started_by_console_popen() -> None:
    why = "services.ConsolePopen: a signal to our process group must not end Ray before the drain (local_node._popen)"
    assert "ConsolePopen" in globals_of(services.start_ray_process), why
    assert issubclass(services.ConsolePopen, subprocess.Popen), f"{why}; it takes Popen's arguments"


def test_the_api_server_is_started_by_one_function() -> None:
    why = "services.start_api_server: a private Ray has no process of a dashboard that is off (local_node._trimmed)"
    assert next(iter(inspect.signature(services.start_api_server).parameters)) == "include_dashboard", why
    started = source(ray_nodes.Node.start_api_server)
    assert "_private.services.start_api_server(\n            include_dashboard," in started, (
        f"{why}; it is looked up there"
    )
    assert "if process_info is not None:" in started, f"{why}; a Node needs none"
    asked = local_node._no_api_server(lambda *given: given, None, "host")
    assert (asked, local_node._no_api_server(lambda *given: given, False, "host")) == ((None, "host"), ("", None))


def test_a_node_is_waited_for_by_one_function() -> None:
    why = "services.get_node: a raylet may take longer than Ray's 30 s to be known to GCS (local_node._patient)"
    made = source(ray_nodes.Node.__init__)
    assert "ray._private.services.get_node(" in made and "except RuntimeError as e:" in made, why
    assert "is None" not in source(services.get_node), f"{why}; it raises while there is no such node"


class Started:
    """A process that has ended once `polls` looks at it were made."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def poll(self) -> int | None:
        self.polls -= 1
        return None if self.polls >= 0 else 1


@pytest.mark.parametrize(("known_at_s", "polls", "took_s"), [(170.0, 99, 170.0), (250.0, 99, 190.0), (250.0, 1, 20.0)])
def test_a_slow_raylet_is_waited_for_while_rays_processes_live(known_at_s: float, polls: int, took_s: float) -> None:
    now_s = 0.0

    def find(*given: str) -> str:
        nonlocal now_s
        now_s += 10
        if now_s < known_at_s:
            raise RuntimeError("no such node")
        return " ".join(given)

    with pytest.raises(RuntimeError) if took_s != known_at_s else nullcontext():
        assert local_node._patient(find, [Started(polls)], lambda: now_s, "gcs", "node") == "gcs node"
    assert now_s == took_s


def test_what_is_trimmed_is_put_back() -> None:
    def found() -> tuple[object, ...]:
        return parameter.RayParams, services.ConsolePopen, services.start_api_server, services.get_node

    before = found()
    with local_node._trimmed():
        assert not set(found()) & set(before)
    assert found() == before


def test_dead_workers_are_printed_by_one_function() -> None:
    why = "worker.print_to_stdstream: a dead worker says nothing on our terminal (keep_workers_off_terminal)"
    assert list(inspect.signature(ray_worker.print_to_stdstream).parameters) == ["data", "ignore_prefix"], why


def test_free_resources() -> None:
    why = (
        "state.available_resources_per_node: a new version starts before the old one ends where there is room (app.py)"
    )
    assert not inspect.signature(state.available_resources_per_node).parameters, why
    why = "_raylet.node_labels_match_selector: room is counted on the nodes that a selector takes (app.py)"
    assert ray._raylet.node_labels_match_selector({"part": "a"}, {"part": "in(a,b)"}), why
    assert not ray._raylet.node_labels_match_selector({"part": "a"}, {"part": "!a"}), why


def test_the_head_node_is_known() -> None:
    why = "constants.HEAD_NODE_RESOURCE_NAME: a service's record is on the head node (wire/identity.py)"
    assert constants.HEAD_NODE_RESOURCE_NAME == "node:__internal_head__", why


def test_nodes_that_are_drained_are_known() -> None:
    why = "GcsClient.get_draining_nodes(timeout): groups leave a node before it goes (group/node_drain.py)"
    assert hasattr(ray._raylet.InnerGcsClient, "get_draining_nodes"), why
    assert "worker.gcs_client = node.get_gcs_client()" in source(ray_worker.connect), f"{why}; the worker has one"


def test_the_session_folder_is_known_to_workers() -> None:
    why = "worker.global_worker.node: the private Redis has its folder in the session's (wire/identity.py)"
    assert isinstance(ray_worker.global_worker, ray_worker.Worker) and hasattr(ray_worker.global_worker, "node"), why


def test_titles() -> None:
    why = "ray._raylet.setproctitle: ranks are named in ps, and ended by name (process_titles.py)"
    assert callable(ray._raylet.setproctitle), why


def test_serves_own_client() -> None:
    why = "serve.context._get_global_client: an open service needs a proxy on loopback (wire/serve_proxy.py)"
    assert "raise_if_no_controller_running" in inspect.signature(serve_context._get_global_client).parameters, why
    assert isinstance(serve_context.ServeControllerClient.http_config, property), why


def test_calls_of_one_request_have_numbers_of_their_own() -> None:
    """A router that has two calls of one number at once forgets one of them: a request of two prompts hung behind
    Serve's proxy."""
    why = "serve.context: calls of one request are told apart by their routers (separate_calls.py)"
    handle = InitHandleOptions.create()

    def number() -> str:
        return str(default_impl.get_request_metadata(handle, DynamicHandleOptions()).internal_request_id)

    def answer() -> None:
        serve_context._set_request_context(_internal_request_id="of the request")
        assert number() == number() == "of the request", why
        assert len({"of the request", call_separately(number), call_separately(number)}) == 3, why
        assert number() == "of the request", "what Serve does with it afterwards is not disturbed"

    contextvars.copy_context().run(answer)


def overridden(autoscaling_config: dict[str, Any]) -> Any:
    """What Serve makes of a deployment with our policy where a section `deployments:` has this."""
    from ray.serve._private import application_state, config, deployment_info
    from ray.serve.schema import ServeApplicationSchema

    ours = config.AutoscalingConfig(**checked_autoscaling({"min_replicas": 1, "max_replicas": 3}))
    info = deployment_info.DeploymentInfo(
        deployment_config=config.DeploymentConfig.from_default(autoscaling_config=ours),
        replica_config=config.ReplicaConfig.create(lambda: None),
        start_time_ms=0,
        deployer_job_id="",
    )
    given = {"name": "d", "autoscaling_config": autoscaling_config}
    file = ServeApplicationSchema(import_path="a:b", deployments=[given])
    return application_state.override_deployment_info({"d": info}, file)["d"].deployment_config


async def test_the_autoscaling_that_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section `deployments:` beats the args whole: what it does not name is Serve's, the policy too."""
    why = "serve's controller: gateways tell of the bounds that count (application_state.autoscaling_in_force)"
    from ray.serve._private import controller
    from ray.serve.generated import serve_pb2

    assert hasattr(controller.ServeController, "get_deployment_info"), why
    asked: list[tuple[str, str]] = []
    config = overridden({"min_replicas": 0, "max_replicas": 6})

    async def told(deployment: str, app: str) -> bytes:
        asked.append((deployment, app))
        return serve_pb2.DeploymentRoute(
            deployment_info=serve_pb2.DeploymentInfo(deployment_config=config.to_proto())
        ).SerializeToString()

    client = SimpleNamespace(_controller=SimpleNamespace(get_deployment_info=SimpleNamespace(remote=told)))
    monkeypatch.setattr(serve_context, "_get_global_client", lambda **_: client)
    found = await autoscaling_in_force("app", "d")
    assert asked == [("d", "app")] and found is not None, why
    assert (found["min_replicas"], found["max_replicas"]) == (0, 6) and goals_of(found) is None, why
    config = overridden(checked_autoscaling({"max_replicas": 6, "policy": {**OURS, "policy_kwargs": {"ttft_s": 0.5}}}))
    assert config.autoscaling_config.policy.get_policy().__name__ == "GroupScaling", why
    assert goals_of(await autoscaling_in_force("app", "d")) == ScalingGoals(ttft_s=0.5, low=1, high=6), why
    config = type(config).from_default()
    assert await autoscaling_in_force("app", "d") is None, f"{why}; the number is fixed"

    async def odd(*_: str) -> bytes:
        return b"\xff"

    client._controller.get_deployment_info = client._controller.get_serve_status = SimpleNamespace(remote=odd)
    assert await autoscaling_in_force("app", "d") is None and await asked_for_state("app") is None, "never an error"


def test_what_a_new_version_is_to_serve() -> None:
    """docs/serving/start.md, "Numbers that need no restart"."""
    why = "deploy_utils.get_app_code_version: bounds beside the same policy change while all goes on"
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeApplicationSchema

    def version(*deployments: dict[str, Any]) -> str:
        return str(get_app_code_version(ServeApplicationSchema(import_path="a:b", deployments=list(deployments))))

    def groups(**config: Any) -> dict[str, Any]:
        return {"name": "tandem-coordinator", "autoscaling_config": config}

    assert version(groups(max_replicas=1, policy=OURS)) == version(groups(max_replicas=6, policy=OURS)), why
    with_goal = {**OURS, "policy_kwargs": {"ttft_s": 1.0}}
    named = [
        version(),
        version(groups(policy=OURS)),
        version(groups(policy=with_goal)),
        version(groups(max_replicas=1)),
    ]
    assert len(set(named)) == 4, f"{why}; another policy is a new version"
    assert version({"name": "tandem-gateway", "user_config": {"queue_timeout": 3}, "num_replicas": 2}) == version(), why


def test_the_state_of_an_application() -> None:
    why = "serve's controller: a gateway tells its replacement from the end of the service (application_state.py)"
    from ray.serve._private import application_state, common, controller
    from ray.serve.generated import serve_pb2
    from ray.serve.schema import ApplicationStatus

    assert hasattr(controller.ServeController, "get_serve_status"), why
    assert "self._controller.get_serve_status.remote(" in source(serve_context.ServeControllerClient), why
    states = {"RUNNING", "DEPLOYING", "DEPLOY_FAILED", "UNHEALTHY", "DELETING", "NOT_STARTED"}
    assert states <= {status.value for status in ApplicationStatus}, why
    said = application_state.StatusOverview(
        application_state.ApplicationStatusInfo(ApplicationStatus.DELETING, "", 0.0),
        "a",
        [
            common.DeploymentStatusInfo(
                "d", common.DeploymentStatus.DEPLOY_FAILED, common.DeploymentStatusTrigger.REPLICA_STARTUP_FAILED, "why"
            )
        ],
    )
    read = application_state.StatusOverview.from_proto(
        serve_pb2.StatusOverview.FromString(said.to_proto().SerializeToString())
    )
    assert (read.app_status.status.value, read.deployment_statuses[0].status.value) == ("DELETING", "DEPLOY_FAILED"), (
        why
    )


def test_a_version_that_does_not_start_ends_no_old_replica() -> None:
    why = "RAY_SERVE_STOP_FAILED_ROLLING_UPDATES: the version before serves on (docs/serving/start.md)"
    from ray.serve._private import constants as serve_constants

    assert serve_constants.RAY_SERVE_STOP_FAILED_ROLLING_UPDATES is True, why


def test_what_the_monitor_says() -> None:
    why = "the monitor's report and its file: nodes that may come are room for a new version (coming_nodes.py)"
    from ray._private import services as ray_services
    from ray.autoscaler._private import autoscaler, monitor

    said = source(monitor.Monitor)
    assert '"monitor_pid": os.getpid()' in said and 'status["autoscaler_report"] = asdict(' in said, why
    assert "DEBUG_AUTOSCALING_STATUS, as_json" in said, why
    assert {"active_nodes", "pending_nodes", "pending_launches"} <= set(
        autoscaler.AutoscalerSummary.__dataclass_fields__
    ), why
    assert '"--autoscaling-config=" + str(autoscaling_config)' in source(ray_services.start_monitor), why


def test_an_application_is_deleted_without_waiting() -> None:
    why = "serve.delete(_blocking): a second signal cuts the end short (application_end.begin_delete)"
    assert "_blocking" in inspect.signature(serve.delete).parameters, why


def test_the_handler_of_sigterm() -> None:
    why = "worker's sigterm_handler: SIGTERM ends a gateway or a group in order (replica_end.on_sigterm)"
    codes = [code for code in ray_worker.Worker.main_loop.__code__.co_consts if isinstance(code, CodeType)]
    assert [code.co_name for code in codes if EXIT_NAME in code.co_names] == ["sigterm_handler"], why
    assert callable(getattr(ray_worker, EXIT_NAME)), why


def test_the_end_of_a_replica() -> None:
    why = "ReplicaActor._replica_impl: a replica hears that it is taken down before Serve waits (on_taken_down)"
    assert "self._replica_impl.perform_graceful_shutdown()" in source(serve_replica.ReplicaActor), why
    assert hasattr(ray_worker.global_worker, "actors"), f"{why}; the actor is found among the worker's"


def test_the_draining_period() -> None:
    why = f"replica.{DRAINING_NAME}: a gateway on its own port is not kept for 30 s (skip_draining_period)"
    assert getattr(serve_replica, DRAINING_NAME) > 0, why
    assert DRAINING_NAME in source(serve_replica).partition("def perform_graceful_shutdown")[2], (
        f"{why}; read at its end"
    )
