"""An application under Serve, found from outside: the id of its service, its Redis, and what Serve says of it."""

import asyncio
from typing import TYPE_CHECKING

from tandem.cluster.service import ray_node
from tandem.configs.errors import SettingsError, TandemError

if TYPE_CHECKING:
    from tandem.cluster.ray_private.application_state import ApplicationState

ASK_S = 20.0


def find_application(app: str, address: str) -> "tuple[str, str, ApplicationState | None]":
    """Return the service's id and the URL of its Redis, from the identity of the application (wire/identity.py), and
    its state, None where Serve does not say. address: of the Ray that it is in. Raises SettingsError when no Ray
    answers, or none of that name is there; TandemError when it does not say."""
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

        return service_id, url, asyncio.run(application_state(app))
    finally:
        ray_node.shut_down()
