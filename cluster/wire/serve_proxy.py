"""The address of Serve's proxy, which forwards requests to gateways under `serve run`: an open service needs loopback.

The application is checked when it is built, if Serve runs then, and each gateway at its start.
"""

from tandem.configs.errors import SettingsError
from tandem.configs.schema import LOOPBACK, Auth


def check_open(auth: Auth | None, host: str | None) -> None:
    """Raises SettingsError for `auth: open` behind a proxy that others can reach. host: where Serve's proxy listens;
    None: on loopback only, or not known yet."""
    if auth == "open" and host not in (None, *LOOPBACK):
        raise SettingsError(f"open: on loopback only, and http_options has host {host}", "auth")
