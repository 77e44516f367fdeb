"""What `tandem chat` and `tandem complete` share: their flags, finding the service, showing text as it comes."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from configs.errors import TandemError

if TYPE_CHECKING:
    from cluster.endpoint import Endpoint

Url = Annotated[str | None, typer.Option("--url", help="Service to talk to. Default: the one that runs here.")]
Model = Annotated[str | None, typer.Option("--model", help="Default: the first that the service lists.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Key to send. Default: $TANDEM_API_KEY.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy. Default: the service's.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Longest answer. Default: the service's.")]

_CONTROLS = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def open_endpoint(url: str | None, api_key: str | None) -> "Endpoint":
    """The service at `url`, else the newest one of this user on this machine."""
    from cluster.endpoint import Endpoint
    from cluster.run_files import running_services
    from configs import environment

    api_key = api_key if api_key is not None else environment.api_key()
    if url is not None:
        return Endpoint(url, api_key)
    runs = running_services()
    if not runs:
        raise TandemError(
            "no service of this user is running on this machine; start one with `tandem serve`, or give --url"
        )
    if len(runs) > 1:
        say(f"{len(runs)} services run here; talking to the newest, {runs[0].url} (--url chooses another)")
    return Endpoint(runs[0].url, api_key)


def sampling(temperature: float | None, max_tokens: int | None) -> dict[str, float | int]:
    """The fields of a request that were asked for."""
    given = {"temperature": temperature, "max_tokens": max_tokens}
    return {name: value for name, value in given.items() if value is not None}


def show(pieces: Iterable[str], into: list[str]) -> None:
    """Prints an answer as it comes, then ends the line. `into` holds it too, however it ends.

    On a terminal control characters are shown as U+FFFD: a model may say anything, also escape sequences.
    """
    terminal = sys.stdout.isatty()
    try:
        for piece in pieces:
            into.append(piece)
            print(piece.translate(_CONTROLS) if terminal else piece, end="", flush=True)
    finally:
        if into and not into[-1].endswith("\n"):
            print(flush=True)


def say(text: str) -> None:
    """A line about the conversation, not of it."""
    print(f"tandem: {text}", file=sys.stderr, flush=True)
