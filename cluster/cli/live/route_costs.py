"""`tandem routes explain`: where a prompt would go, and why, without sending it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cluster.cli.base.flags import Command
from tandem.cluster.cli.client.running_service import on_endpoint
from tandem.configs.errors import SettingsError

if TYPE_CHECKING:
    from tandem.cluster.cli.client.endpoint import Endpoint

ROUTE = "/admin/routes/explain"
HEADS = ("group", "cost", "to come", "on device", "below", "adapter", "")


@on_endpoint
def explain_routes(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; with --chat what the user says.")],
    service: "AbstractContextManager[Endpoint]",
    chat: Annotated[bool, typer.Option("--chat", help="Render it as a message of a conversation.")] = False,
    model: Annotated[str, typer.Option(help="Name of the model or an adapter. Default: the base model.")] = "",
    tenant: Annotated[str, typer.Option(help="Whose request it would be. Default: the key's.")] = "",
    session: Annotated[str, typer.Option(help="Its session, as in the header x-session-id.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Limit of its answer. Default: the context's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer itself, as JSON.")] = False,
) -> None:
    """Print what each group would cost a prompt, the cheapest first.

    The prompt is not sent to a group. Where the service has an admin key, --api-key must be one.
    """
    import msgspec

    from tandem.cluster.cli.client.endpoint import EndpointError

    if max_tokens is not None and max_tokens < 1:
        raise SettingsError(f"{max_tokens} must be at least 1", "--max-tokens")
    said: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    more = {"model": model, "tenant": tenant, "max_tokens": max_tokens}
    headers = {"x-session-id": session} if session else {}
    with service as endpoint:
        found = endpoint.post(ROUTE, said | {name: value for name, value in more.items() if value}, headers)
    if as_json:
        typer.echo(found)
        return
    try:
        typer.echo("\n".join(shown(msgspec.json.decode(found))))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise EndpointError(f"{endpoint.url} sent what is no table of groups: {error}") from error


def shown(table: Mapping[str, Any]) -> list[str]:
    """Words the answer of the gateway: a head, and a line for each group."""
    rows = [HEADS, *(_row(one) for one in table["groups"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sizes = f"prompt {table['prompt_tokens']} tokens, {table['cost_tokens']} with the expected output"
    return [f"policy {table['policy']}; {sizes}", *lines]


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    words = [word for word, is_so in (("home", one["is_home"]), ("last", one["is_last"])) if is_so]
    numbers = (f"{one['cost']:.0f}", str(one["outstanding"]), str(one["device"]), str(one["below"]))
    return (one["group"], *numbers, one["adapter"], " ".join(words))


VERBS: Mapping[str, Command] = {"explain": explain_routes}
