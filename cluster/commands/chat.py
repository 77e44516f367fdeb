"""`tandem chat`: a conversation with a running service, a line at a time."""

import sys
from typing import Annotated

import typer

from cluster.commands.talking import ApiKey, MaxTokens, Model, Temperature, Url, open_endpoint, sampling, say


def chat(
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Talk with a running service, line by line.

    /reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C ends an answer only.
    """
    from cluster.conversation import Conversation

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        with open_endpoint(url, api_key) as endpoint:
            name = model or endpoint.first_model()
            if interactive:
                import readline  # noqa: F401  # line editing and history for input()

                say(f"talking to {name} on {endpoint.url}; /reset forgets, /exit or Ctrl-D ends, Ctrl-C ends an answer")
            Conversation(endpoint, {"model": name, **sampling(temperature, max_tokens)}, system, interactive).run()
    except KeyboardInterrupt:
        sys.exit(130)
