"""An application under Serve, found from outside: the id of its service, its Redis, and what Serve says of it."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.cluster.service import ray_node
from tandem.configs.errors import SettingsError, TandemError

if TYPE_CHECKING:
    from tandem.cluster.ray_private.application_state import ApplicationState

ASK_S = 20.0


class Application(NamedTuple):
    """One application. service_id, redis_url: as its identity (wire/identity.py) says. state: None where Serve
    does not say. addresses: of the nodes of its Ray, by their ids, also of those that are gone."""

    service_id: str
    redis_url: str
    state: "ApplicationState | None" = None
    addresses: Mapping[str, str] = {}


def find_application(app: str, address: str) -> Application:
    """Finds an application. address: of the Ray that it is in. Raises SettingsError when no Ray answers, or none of
    that name is there; TandemError when it does not say where its Redis is."""
    ray_node.prepare_environment(None)
    ray_node.load()
    ray_node.join(address, may_be_open=True)
    try:
        import ray

        from tandem.cluster.wire.identity import NAMESPACE, identity_name

        try:
            actor = ray.get_actor(identity_name(app), namespace=NAMESPACE)
        except ValueError as error:
            raise SettingsError(f"{app}: no application of this name serves there", "--app") from error
        try:
            service_id, url = ray.get(actor.whereabouts.remote(), timeout=ASK_S)
        except (ray.exceptions.RayError, AttributeError) as error:
            raise TandemError(f"the identity of {app} does not answer: {str(error).partition(chr(10))[0]}") from error
        if url is None:
            raise TandemError(f"{app} has not found its Redis yet")
        from tandem.cluster.ray_private.application_state import application_state

        addresses = {node["NodeID"]: _address(node) for node in ray.nodes()}
        return Application(service_id, url, asyncio.run(application_state(app)), addresses)
    finally:
        ray_node.shut_down()


def _address(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerAddress']}{'' if node['Alive'] else ' (no longer in the cluster)'}"
