"""`tandem chat` and `tandem complete`: requests to a running service from the terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.client.running_service import certificate_of, newest
from tandem.configs.environment import API_KEY
from tandem.configs.errors import TandemError
from tandem.configs.secrets import read_secret

if TYPE_CHECKING:
    from tandem.cluster.cli.client.endpoint import Endpoint

Url = Annotated[
    str | None, typer.Option("--url", help="Address of any OpenAI-compatible service. Default: the newest one here.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="Model or adapter. Default: the first that the service lists.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=API_KEY,
        show_envvar=False,
        help=f"API key to send (or env:NAME, file:PATH). Default: ${API_KEY}.",
    ),
]
CertFile = Annotated[
    str | None,
    typer.Option("--ssl-certfile", help="PEM file with a certificate to show to the service. Default: none is shown."),
]
KeyFile = Annotated[
    str | None,
    typer.Option(
        "--ssl-keyfile", help="PEM file with that certificate's private key. Default: it is in --ssl-certfile."
    ),
]
CaCerts = Annotated[
    str | None,
    typer.Option(
        "--ssl-ca-certs",
        help="PEM file with the CA certificates to trust. Default: a service of yours here is known, for others what "
        "the machine trusts.",
    ),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="Sampling temperature; 0 is greedy. Default: the service's.")
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Longest answer in tokens. Default: the service's.")
]


def chat(
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option("--system", help="System message at the start. Default: none.")] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    ssl_certfile: CertFile = None,
    ssl_keyfile: KeyFile = None,
    ssl_ca_certs: CaCerts = None,
) -> None:
    """Chat with a running service, line by line.

    /reset starts a new conversation, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer.
    """
    from tandem.cluster.cli.client.dialogue import Dialogue

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with _service(url, api_key, (ssl_certfile, ssl_keyfile, ssl_ca_certs)) as endpoint:
        fields = _fields(endpoint, model, temperature, max_tokens)
        if interactive:
            import readline  # noqa: F401  # line editing and history for input()

            keys = "/reset forgets, /exit or Ctrl-D ends, Ctrl-C ends an answer"
            say(f"talking to {fields['model']} on {endpoint.url}; {keys}")
        Dialogue(endpoint, fields, system, interactive).run()


def complete(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.")],
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    ssl_certfile: CertFile = None,
    ssl_keyfile: KeyFile = None,
    ssl_ca_certs: CaCerts = None,
) -> None:
    """Continue a text with a running service."""
    from tandem.cluster.cli.client.dialogue import show

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise TandemError("the text is not valid UTF-8") from error
    with _service(url, api_key, (ssl_certfile, ssl_keyfile, ssl_ca_certs)) as endpoint:
        fields = _fields(endpoint, model, temperature, max_tokens)
        show(endpoint.stream("/v1/completions", {**fields, "prompt": text}), [])


@contextmanager
def _service(
    url: str | None, api_key: str | None, files: tuple[str | None, str | None, str | None]
) -> "Iterator[Endpoint]":
    """The service at `url`, else the newest one of this user on this machine. files: --ssl-certfile, --ssl-keyfile and
    --ssl-ca-certs. Ctrl-C inside ends with status 130."""
    from tandem.cluster.cli.client.endpoint import Endpoint
    from tandem.cluster.gateway.http.tls import ClientFiles

    if url is None:
        run = newest("--url")
        url, certificate = run.url, run.certificate
    else:
        certificate = certificate_of(url)
    key = None if api_key is None else read_secret(api_key, "--api-key")
    try:
        with Endpoint(url, key, certificate, ClientFiles(*files)) as endpoint:
            yield endpoint
    except KeyboardInterrupt:
        sys.exit(130)


def _fields(
    endpoint: "Endpoint", model: str | None, temperature: float | None, max_tokens: int | None
) -> dict[str, Any]:
    """The fields of every request, those that were not given left out."""
    fields = {"model": model or endpoint.first_model(), "temperature": temperature, "max_tokens": max_tokens}
    return {name: value for name, value in fields.items() if value is not None}
