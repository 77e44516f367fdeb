"""The state of one application as Serve's controller has it: whether it is updated, has failed, or is taken down."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

log = logging.getLogger("ray.serve.tandem")
ASK_S: Final = 5.0


class ApplicationState(NamedTuple):
    """One answer. status: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY, DELETING or NOT_STARTED, as Serve spells it.
    failures: what Serve says of deployments that failed to start, by name."""

    status: str
    message: str
    failures: Mapping[str, str]

    @property
    def is_ending(self) -> bool:
        """True while the whole application is taken down (`serve delete`, `serve shutdown`), and once it is gone."""
        return self.status in ("DELETING", "NOT_STARTED")

    @property
    def why_failed(self) -> str | None:
        """The last line of the error by which a version did not start, which says what was raised; None: none did."""
        if self.status != "DEPLOY_FAILED":
            return None
        told = next(iter(self.failures.values()), self.message)
        lines = [line.strip() for line in told.splitlines() if line.strip()]
        return lines[-1] if lines else "Serve says no reason"


async def autoscaling_in_force(app: str, deployment: str) -> Mapping[str, Any] | None:
    """Asks Serve's controller for the bounds and the policy by which a deployment's replicas are counted, with Serve's
    keys. None when it does not answer in ASK_S, or their number is fixed.

    Lost without it: gateways tell of the bounds of the args, where a section `deployments:` has others.
    """
    from ray.serve._private.config import DeploymentConfig
    from ray.serve.generated.serve_pb2 import DeploymentRoute

    def read(told: bytes) -> Any:
        return DeploymentConfig.from_proto(DeploymentRoute.FromString(told).deployment_info.deployment_config)

    config = await _asked(app, lambda controller: controller.get_deployment_info.remote(deployment, app), read)
    if config is None or (scaling := config.autoscaling_config) is None:
        return None
    policy = {"policy_function": scaling.policy.policy_function, "policy_kwargs": scaling.policy.policy_kwargs or {}}
    return {"min_replicas": scaling.min_replicas, "max_replicas": scaling.max_replicas, "policy": policy}


async def application_state(name: str) -> ApplicationState | None:
    """Asks Serve's controller. None when it does not answer in ASK_S, or Serve does not run.

    Lost without it: the end of an application takes as long as the replacement of its gateways may, and nobody says
    why a new version does not start.
    """
    from ray.serve._private.application_state import StatusOverview
    from ray.serve.generated.serve_pb2 import StatusOverview as Proto

    def read(told: bytes) -> Any:
        return StatusOverview.from_proto(Proto.FromString(told))

    said = await _asked(name, lambda controller: controller.get_serve_status.remote(name), read)
    if said is None:
        return None
    failed = {one.name: one.message for one in said.deployment_statuses if one.status.value == "DEPLOY_FAILED"}
    return ApplicationState(said.app_status.status.value, said.app_status.message, failed)


async def _asked(app: str, call: Callable[[Any], Awaitable[bytes]], read: Callable[[bytes], Any]) -> Any:
    """The answer of Serve's controller, as it is read; None without one in ASK_S, for one that cannot be read, and
    where Serve does not run."""
    from ray.serve.context import _get_global_client

    try:
        async with asyncio.timeout(ASK_S):
            client: Any = await asyncio.to_thread(_get_global_client, raise_if_no_controller_running=False)
            return None if client is None else read(await call(client._controller))
    except Exception as error:  # of many kinds, while the head or Serve's controller is away
        log.info("Serve does not say how %s is: %s", app, str(error).partition("\n")[0] or type(error).__name__)
        return None
