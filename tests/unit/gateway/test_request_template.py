"""A chat template and documents that come with a request."""

from typing import Any

import pytest

from tandem.configs.schema import GatewaySettings
from tests.unit.gateway.rig import CHAT, USER, Rig, error_of, gateway
from tests.unit.gateway.test_responses import prompt_of
from tests.unit.gateway.test_tool_calls import TOOLS, saying

TRUSTED = GatewaySettings(trust_request_chat_template=True)
OWN = (
    "{% for m in messages %}{{ m.content | upper }}{% endfor %}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
)
SHOWS = "{{ messages[0].content }}{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"
DOCUMENTS = [{"title": "Ä", "text": "One"}, {"title": "B", "text": "Two"}]


async def rendered(rig: Rig, **fields: Any) -> str:
    """The prompt, which /tokenize makes too."""
    assert (await rig.chat(**fields)).status_code == 200
    tokens = (await rig.client.post("/tokenize", json={"messages": USER, **fields})).json()["tokens"]
    assert tokens == rig.backend.requests[-1].prompt_token_ids
    return prompt_of(rig)


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}?"])
async def test_a_trusted_request_brings_its_own_template(template: str | None) -> None:
    async with gateway(saying("x"), settings=TRUSTED, template=template) as rig:
        assert await rendered(rig, chat_template=OWN) == "HI"
        assert await rendered(rig, chat_template=OWN, documents=DOCUMENTS) == "HI[One][Two]"
        assert await rendered(rig, chat_template="{{ mood }}", chat_template_kwargs={"mood": "glad"}) == "glad"
        if template is not None:
            assert await rendered(rig) == "hi?", "the next request has the model's"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_it_is_refused_where_it_is_not_trusted_or_no_template(path: str) -> None:
    for settings, template, words in (
        (GatewaySettings(), OWN, "--trust-request-chat-template"),
        (GatewaySettings(strict_fields=True), OWN, "--trust-request-chat-template"),
        (TRUSTED, "{{ x", "of the request"),
        (TRUSTED, "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "chat_template"),
    ):
        async with gateway(saying("x"), settings=settings) as rig:
            error = error_of(await rig.client.post(path, json={"messages": USER, "chat_template": template}))
            assert error["param"] == "chat_template" and words in error["message"]


async def test_it_runs_in_the_sandbox_and_its_limits() -> None:
    async with gateway(saying("x"), settings=TRUSTED) as rig:
        for template in ("{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}", "{% include '/etc/passwd' %}"):
            answer = await rig.chat(chat_template=template)
            assert answer.status_code == 400 and "root:" not in answer.text
        assert (await rig.chat(chat_template="{% for i in range(1000000) %}x{% endfor %}")).status_code == 400


async def test_documents_are_shown_as_transformers_shows_them() -> None:
    async with gateway(saying("x"), template=SHOWS) as rig:
        assert await rendered(rig, documents=DOCUMENTS) == "hi[Ä: One][B: Two]"
        assert await rendered(rig, documents=[]) == "hi"
        too_much = [{"title": "x", "text": "y" * 2_000_000}]
        assert error_of(await rig.chat(documents=too_much))["code"] == "content_too_large"


async def test_documents_need_a_template_that_shows_them() -> None:
    async with gateway(saying("x")) as rig:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            assert error_of(await rig.chat(documents=DOCUMENTS, **fields))["param"] == "documents"
        assert error_of(await rig.chat(documents=["text"]))["param"] == "documents[0]"
