"""`tandem chat` and `tandem complete`: requests to a running service from the terminal."""

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.client.running_service import on_endpoint
from tandem.configs.errors import TandemError

if TYPE_CHECKING:
    from tandem.cluster.cli.client.endpoint import Endpoint

Model = Annotated[
    str | None, typer.Option("--model", help="Model or adapter. Default: the first that the service lists.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="Sampling temperature; 0 is greedy. Default: the service's.")
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Longest answer in tokens. Default: the service's.")
]


@on_endpoint
def chat(
    service: "AbstractContextManager[Endpoint]",
    model: Model = None,
    system: Annotated[str | None, typer.Option("--system", help="System message at the start. Default: none.")] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Chat with a running service, line by line.

    /reset starts a new conversation, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer.
    """
    from tandem.cluster.cli.client.dialogue import Dialogue

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with service as endpoint:
        fields = _fields(endpoint, model, temperature, max_tokens)
        if interactive:
            import readline  # noqa: F401  # line editing and history for input()

            keys = "/reset forgets, /exit or Ctrl-D ends, Ctrl-C ends an answer"
            say(f"talking to {fields['model']} on {endpoint.url}; {keys}")
        Dialogue(endpoint, fields, system, interactive).run()


@on_endpoint
def complete(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.")],
    service: "AbstractContextManager[Endpoint]",
    model: Model = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Continue a text with a running service."""
    from tandem.cluster.cli.client.dialogue import show

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise TandemError("the text is not valid UTF-8") from error
    with service as endpoint:
        fields = _fields(endpoint, model, temperature, max_tokens)
        show(endpoint.stream("/v1/completions", {**fields, "prompt": text}), [])


def _fields(
    endpoint: "Endpoint", model: str | None, temperature: float | None, max_tokens: int | None
) -> dict[str, Any]:
    """The fields of every request, those that were not given left out."""
    fields = {"model": model or endpoint.first_model(), "temperature": temperature, "max_tokens": max_tokens}
    return {name: value for name, value in fields.items() if value is not None}
