"""A chat template that comes with a request (--trust-request-chat-template), as vLLM has it. It renders in the same
sandbox and limits as the service's own. Work for the threads of text_workers.py."""

from dataclasses import replace

from tandem.cluster.gateway.schemas.chat_body import ChatBody, TokenizeBody
from tandem.cluster.gateway.schemas.reading import invalid, unsupported
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.workers.messages.errors import SettingsError
from tandem.workers.text.chat_template import ChatTemplate


def with_own_template(text: TextServices, body: ChatBody | TokenizeBody) -> TextServices:
    """Returns the services with the template of the body, if it has one. RequestRefused where requests are not trusted
    with it, and for one that is no template."""
    if body.chat_template is None:
        return text
    if not text.settings.trust_request_chat_template:
        raise unsupported(
            "chat_template", "chat_template is served only by a service with --trust-request-chat-template."
        )
    try:
        template = ChatTemplate(body.chat_template, text.tokenizer.special_tokens, source_name="of the request")
    except SettingsError as error:
        raise invalid("chat_template", f"chat_template: {error}.") from None
    except RecursionError:
        raise invalid("chat_template", "chat_template is nested too deeply.") from None
    return replace(text, chat_template=template)
