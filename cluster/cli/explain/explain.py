"""`tandem explain`: where the time of one request went."""

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cluster.cli.client.running_service import on_endpoint

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tandem.cluster.cli.client.endpoint import Endpoint


@on_endpoint
def explain(
    service: "AbstractContextManager[Endpoint]",
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id: x-request-id of its answer.")],
    tenant: Annotated[str, typer.Option(help="Whose request, where several tenants have used the id.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the record itself, as JSON.")] = False,
) -> None:
    """Say why a request took as long as it did.

    Each gateway remembers the last requests that have ended, thousands of them, until it ends itself. Where the service
    has an admin key, --api-key must be one.
    """
    from urllib.parse import quote

    import msgspec

    from tandem.cluster.cli.client.endpoint import EndpointError
    from tandem.cluster.cli.explain.explanation import explanation
    from tandem.cluster.gateway.records.request_record import read_named

    with service as endpoint:
        of_whom = f"?tenant={quote(tenant, safe='')}" if tenant else ""
        found = endpoint.get(f"/admin/requests/{quote(request_id, safe='')}{of_whom}")
    if as_json:
        typer.echo(found)
        return
    try:
        record = read_named(found)
    except (msgspec.DecodeError, TypeError) as error:
        raise EndpointError(f"{endpoint.url} sent what is no record of a request: {error}") from error
    typer.echo("\n".join(explanation(record)))
