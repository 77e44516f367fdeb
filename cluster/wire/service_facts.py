"""Names of the deployments, and the facts that every process of one service gets at its start.

The launcher or cluster/app.py makes the facts; they travel in deployment init arguments, never on a command line.
"""

import logging
import secrets

import msgspec
from msgspec.structs import replace

from tandem.cluster.logs.log_files import LogPlace, hide_messages, open_log, open_requests_log
from tandem.configs.errors import SettingsError
from tandem.configs.limits import ANY_PORTS, Ports
from tandem.configs.schema import Device, RecordMode
from tandem.workers.messages.channel import new_secret

log = logging.getLogger("ray.serve.tandem")
APP = "tandem"
GATEWAY = "tandem-gateway"
COORDINATOR = "tandem-coordinator"
CPU_SHARE = 0.1
"""CPUs that Ray counts for an actor that is no GPU rank."""
GATEWAY_SHARE = 0.01
"""... for a gateway: next to none, as gateways of a new version always start beside the old ones."""
MAX_ONGOING_REQUESTS = 100_000
"""Above every queue limit: the engine admits requests, Serve only counts them."""


class ServiceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a service. Replicas of one version get the same at their start."""

    single_node: bool  # all processes are on one machine and use loopback
    device: Device
    # the identity; empty where replicas learn it from the application's identity actor (identity.py)
    service_id: str = ""
    secret: str = ""
    redis_url: str | None = None  # None when the identity actor has a private one
    open_port: bool = False  # gateways listen themselves
    gateway_node: str | None = None  # address of the node that gateways must run on, because their port is there
    ports: Ports = ANY_PORTS  # --port-range, for the private Redis; others have it of the settings
    max_groups: int = 1  # that may run at once, with autoscaling its maximum
    may_sleep: bool = False  # there may be no group at all: the first request brings one
    is_scaled: bool = False  # the number of groups follows their figures (cluster/scaling/decide.py)
    # Ray id of the one machine, when other nodes could join; a process that is placed elsewhere refuses to start
    home_node: str | None = None
    shutdown_timeout_s: float = 30.0  # for the requests of a group that is taken down
    model_digest: str = ""  # of the model that this version serves, empty: not known
    logs: LogPlace | None = LogPlace()  # None: there are no log files
    record_mib: int = 0  # --record-mib
    record: RecordMode = "redacted"  # --record
    host_socket: str | None = None  # of the machine's host-tier process; None when ranks hold that memory themselves


def new_identity() -> tuple[str, str]:
    """A fresh service id and a fresh secret."""
    return secrets.token_hex(6), new_secret()


def open_log_of(facts: ServiceFacts, name: str) -> None:
    """Opens the log file of this process, with the identity in the facts. Without one it goes on, as it may be that
    nobody can write there on this machine. What it logs shows no messages of exceptions."""
    hide_messages()
    if facts.logs is None:
        return
    try:
        open_log(facts.logs.folder(facts.service_id), name, facts.logs.level, facts.logs.form)
    except OSError as error:
        log.warning("%s has no log file: %s", name, error)


def open_requests_log_of(facts: ServiceFacts, name: str) -> bool:
    """Opens the file of this process's lines about requests. Returns whether there is one."""
    if facts.logs is None:
        return False
    try:
        open_requests_log(facts.logs.folder(facts.service_id), name, facts.logs.form)
    except OSError as error:
        log.warning("%s has no log file: %s", name, error)
        return False
    return True


def with_serves_logging(facts: ServiceFacts) -> ServiceFacts:
    """Returns the facts for a replica. Under Serve its log files have the form that the logging_config of Serve says,
    or --log-format, if one of them says JSON; under `tandem serve` the facts stay as they are."""
    if facts.open_port:
        return facts
    from tandem.cluster.ray_private.replica_logging import replica_logging  # as in check_node()

    serves = replica_logging()
    if facts.logs is None:
        return facts
    form = "json" if serves.is_json else facts.logs.form
    return replace(facts, logs=replace(facts.logs, form=form, has_access_lines=serves.has_access_lines))


def check_node(facts: ServiceFacts) -> None:
    """Raises SettingsError on a machine where the other processes cannot reach this one. Every process that Ray starts
    calls it."""
    if facts.home_node is not None:
        import ray  # the launcher imports this module before Ray's environment is set

        check_home(facts.home_node, ray.get_runtime_context().get_node_id())


def check_home(home_node: str, here: str) -> None:
    """Raises SettingsError when `here` is another node than the one the service is bound to."""
    if here != home_node:
        raise SettingsError(
            f"this process was placed on node {here}, but the service talks over the loopback of node {home_node}, as "
            "`single_node: true` says; take that out of the application's args and deploy again",
            "single_node",
        )
