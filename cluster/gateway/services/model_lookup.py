"""The model that a request means: the base by any of its names, or an adapter that its tenant may use."""

from contextlib import ExitStack
from typing import NamedTuple

from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.http.auth import Principal
from tandem.cluster.gateway.http.error_answers import model_not_found
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.workers.messages.request import AdapterRef

Names = tuple[str, ...]


Adapters = AdapterService | None


class ServedModel(NamedTuple):
    """The name to answer as, and the adapter if `model` names one."""

    name: str
    entry: AdapterEntry | None = None

    @property
    def adapter(self) -> AdapterRef | None:
        """The adapter as the request carries it: a later listing under the name does not change it."""
        return self.entry.ref if self.entry is not None else None


def served_model(names: Names, adapters: Adapters, name: str | None, principal: Principal) -> ServedModel:
    """The model of a request. RequestRefused 404, with the same text, for an unknown name and another tenant's."""
    if name is None:
        return ServedModel(names[0])
    return _find(names, adapters, name, principal.tenant)


def shown_model(names: Names, adapters: Adapters, name: str, principal: Principal) -> ServedModel:
    """One that may be looked at: by an admin, others' adapters too. RequestRefused 404 as of a request."""
    return _find(names, adapters, name, _looks_for(principal))


def all_shown(names: Names, adapters: Adapters, principal: Principal) -> list[ServedModel]:
    """Every name that this tenant may send as `model`, each once: the base's, then its adapters'. For an admin: every
    adapter's."""
    entries = adapters.visible(_looks_for(principal)) if adapters is not None else []
    return [*map(ServedModel, names), *(ServedModel(entry.name, entry) for entry in entries)]


def _find(names: Names, adapters: Adapters, name: str, tenant: str | None) -> ServedModel:
    if name in names:
        return ServedModel(name)
    entry = adapters.entry(name, tenant) if adapters is not None else None
    if entry is None:
        raise model_not_found(name)
    return ServedModel(name, entry)


def _looks_for(principal: Principal) -> str | None:
    """Returns the tenant whose adapters are shown, None: all."""
    return None if principal.is_admin else principal.tenant


def held_model(
    text: TextServices, context: GatewayContext, name: str | None, principal: Principal, held: ExitStack
) -> ServedModel:
    """The model of that name, whose adapter is in use from now on."""
    adapters = context.adapters
    model = served_model(text.model_names, adapters, name, principal)
    if adapters is not None:
        held.enter_context(adapters.request(model.adapter))
    return model
