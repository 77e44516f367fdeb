"""Starts or joins Ray for the launcher: a private Ray has no dashboard, usage statistics or worker logs.

prepare_environment() comes before the first import of ray, which reads its authentication mode and Serve's switches
then. Between start and drain nothing is asked of Ray, and a driver's connection costs 0.2 % of a core: leave(),
rejoin().
"""

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from tandem.cluster.deploy.ray_tokens import check_token
from tandem.cluster.ray_private.local_node import (
    connect_to_node,
    give_back_node,
    is_listening,
    keep_workers_off_terminal,
    start_node,
    take_node,
)
from tandem.configs.bundled import read_switches
from tandem.configs.errors import SettingsError, TandemError

CONNECT_S = 5.0
OBJECT_STORE_BYTES = 80 * 2**20
DRIVER: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "tandem"}
PROXY = "RAY_grpc_enable_http_proxy"
GIVES_UP = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_SWITCHES = {
    # times of each handler in Ray's own loops, for its debug files: a good part of what an idle worker computes
    "RAY_event_stats": "0",
    # what its state API and its metrics port would show: a private Ray has no dashboard to ask, and /metrics is ours.
    # Each worker has threads and connections for them.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def prepare_environment(token_file: Path | None) -> None:
    """Sets the environment variables that Ray reads and its processes inherit. token_file: None for the user's own."""
    os.environ.update(RAY_SWITCHES)
    for name, value in read_switches().items():
        os.environ[name] = value if name == PROXY else os.environ.get(name, value)
    os.environ.pop("RAY_ADDRESS", None)
    if token_file is not None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ.pop("RAY_REDIS_ADDRESS", None)  # of a cluster's head: a private Ray would take it for its own


def gives_up_s() -> float:
    """Seconds after which Ray's processes end that were started with this environment, once GCS does not answer."""
    return float(os.environ[GIVES_UP])


def new_token() -> str:
    return secrets.token_hex(32)


def load() -> None:
    """Imports ray, a second of work, with the environment prepared."""
    import ray  # noqa: F401

    keep_workers_off_terminal()


def node_address() -> str:
    """This node's address in the cluster, as resources name it."""
    import ray

    return str(ray.util.get_node_ip_address())


def start_private(temp_folder: Path, gcs_folder: Path, num_cpus: int, num_gpus: int) -> None:
    """Starts a private Ray on this machine, below this process. TandemError when one of Ray's processes does not start,
    or not within RAYLET_START_S (local_node.py)."""
    try:
        start_node(
            temp_folder,
            gcs_folder,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **DRIVER,
        )
    except Exception as error:
        why = str(error).partition("\n")[0]
        hint = " Other work may keep the cores busy; start again then." if "timed out" in why else ""
        raise TandemError(f"Ray does not start: {why}{hint}") from error


def leave() -> Any:
    """Disconnects from a private Ray, which goes on with everything in it, and returns its processes (ray's Node).

    The driver's job ends by that: only detached actors, as Serve's are, and actors made by them stay.
    """
    import ray

    node = take_node()
    ray.shutdown()
    return node


def rejoin(left: Any) -> None:
    """Reconnects to the private Ray of leave(), with Ray's exceptions; shut_down() works also where that fails."""
    try:
        connect_to_node(left, **DRIVER)
    finally:
        give_back_node(left)


def join(address: str, *, may_be_open: bool = False) -> str:
    """Connects to a running Ray; returns the address of its GCS. SettingsError when it does not answer, or asks nobody
    for a token and may_be_open is False."""
    import ray

    from tandem.cluster.ray_private.ray_facts import gcs_of

    try:
        if (gcs := gcs_of(address)) is not None and not is_listening(gcs, CONNECT_S):
            raise ConnectionError(f"nothing accepts connections at {gcs}")
        ray.init(address=address, **DRIVER)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SettingsError(
            f"{address}: no Ray cluster answers there: {str(error).splitlines()[0]}", "--address"
        ) from error
    gcs_address = str(ray.get_runtime_context().gcs_address)
    if not may_be_open:
        check_token(address, gcs_address, "--address", "--allow-unauthenticated-ray")
    return gcs_address


def openness(address: str) -> list[str]:
    """Returns the words for a joined Ray that asks nobody for a token, none for another."""
    import ray

    try:
        check_token(address, ray.get_runtime_context().gcs_address, "--address", "--allow-unauthenticated-ray")
    except SettingsError as error:
        return [str(error)]
    return []


def shut_down(left: Any = None) -> None:
    """Ends a private Ray's processes, or disconnects from a joined Ray. left: as leave() returned it."""
    import ray

    if left is not None:
        give_back_node(left)
    ray.shutdown()
