"""`tandem complete PROMPT`: one completion of a running service, streamed to the terminal."""

import sys
from typing import Annotated

import typer

from cluster.commands.talking import ApiKey, MaxTokens, Model, Temperature, Url, open_endpoint, sampling, show
from configs.errors import TandemError


def complete(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from; - reads it from stdin.")],
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Let a running service go on from a text."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise TandemError("the text is not valid UTF-8") from error
    try:
        with open_endpoint(url, api_key) as endpoint:
            body = {"model": model or endpoint.first_model(), "prompt": text, **sampling(temperature, max_tokens)}
            show(endpoint.stream("/v1/completions", body), [])
    except KeyboardInterrupt:
        sys.exit(130)
