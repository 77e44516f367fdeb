"""Settings of a gateway that change while it runs: `user_config` of its deployment in a Serve file.

    deployments:
      - name: tandem-gateway
        user_config: {queue_timeout: 30, max_text_bytes: 2000000}

Serve hands it to reconfigure() of every gateway that runs, and of each that starts. What it no longer names is again as
the args say. One that names anything else is refused whole: the gateway goes on as before, and says why in its log
and in `tandem status --app`. Raised to Serve, the error would end the gateway instead.
"""

import logging
from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict, replace

from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.options import OPTIONS
from tandem.configs.schema import GatewaySettings

log = logging.getLogger("tandem.gateway")
LIVE = (
    "queue_timeout",
    "max_text_bytes",
    "max_grammar_bytes",
    "max_logprobs",
    "max_answer_bytes",
    "strict_fields",
    "enable_force_include_usage",
    "trust_request_chat_template",
)
"""The options that are read for each request anew."""


class LiveSettings:
    """settings: as the args have them. use: takes those that count from now on. refused: why the last user_config was
    not taken; empty: it was."""

    def __init__(self, settings: GatewaySettings, use: Callable[[GatewaySettings], None]) -> None:
        self._settings = self._used = settings
        self._use = use
        self.refused = ""

    def take(self, user_config: Any) -> None:
        """Uses what a user_config says, or refuses it."""
        try:
            settings = changed(self._settings, user_config)
        except SettingsError as error:
            self.refused = f"user_config: {error}"
            log.error("%s; this gateway goes on as before", self.refused)
            return
        self.refused = ""
        self._use(settings)
        if settings != self._used:
            log.info("user_config is in force: %s", user_config)
        self._used = settings


def changed(settings: GatewaySettings, user_config: Any) -> GatewaySettings:
    """Returns the settings with the values of a user_config. SettingsError for a key that is not LIVE, or a bad
    value."""
    if not isinstance(user_config, dict):
        raise SettingsError(f"{user_config!r} must be a mapping", "user_config")
    values = {str(name).replace("-", "_"): value for name, value in user_config.items()}
    for name in values:
        if name not in LIVE:
            known = ", ".join(LIVE)
            raise SettingsError(f"{name} does not change without a restart; put it into args (here: {known})", name)
    read = asdict(build_settings("m", values).gateway)
    fields = [option.path.removeprefix("gateway.") for option in OPTIONS if option.name in values]
    return replace(settings, **{field: read[field] for field in fields})
