"""Door: the gateway's app over ServeDispatch and a group whose engine is a fake, all in this process."""

import httpx
from prometheus_client import CollectorRegistry

from tandem.cluster.gateway.app.routes import build_gateway_app
from tandem.cluster.gateway.generation.gateway_context import GatewayTimes
from tandem.cluster.gateway.generation.serve_dispatch import ServeDispatch
from tandem.cluster.gateway.http.auth import StaticKeys
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.gateway.services.accounts import Accounts
from tandem.configs.schema import GatewaySettings
from tandem.workers.text.chat_template import ChatTemplate
from tests.support.fake_engine import FakeEngine
from tests.support.fake_group import FakeFleet, FakeGroup, FakeHandle, serving
from tests.unit.gateway.rig import MODEL, TEMPLATE, ListLedger, make_context, make_text, make_tokenizer

SECRET = "cd" * 32


class Door:
    """A gateway over one group, with a client in this process."""

    def __init__(self, engine: type[FakeEngine]) -> None:
        self.group = FakeGroup(SECRET, "g", engine)
        self.backend = ServeDispatch(FakeHandle([self.group]), FakeFleet(serving()), SECRET, "127.0.0.1", "tandem")
        self.ledger = ListLedger()
        settings, metrics = GatewaySettings(), GatewayMetrics(CollectorRegistry(), "tandem", MODEL)
        tokenizer = make_tokenizer()
        template = ChatTemplate(TEMPLATE, tokenizer.special_tokens)
        self.text = make_text(settings, metrics, tokenizer, chat_template=template)
        accounts = Accounts(auth=StaticKeys(), ledger=self.ledger)
        times = GatewayTimes(drain_s=60.0)  # what it would take if the group were not told
        self.context = make_context(settings, self.backend, accounts, metrics, times=times)
        self.app = build_gateway_app(self.text, accounts, self.context)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost")

    async def close(self) -> None:
        await self.client.aclose()
        await self.backend.close()
        self.group.close()
        self.text.workers.close()
