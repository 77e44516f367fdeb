"""Variables of a proxy that does not answer, for services that must not ask it."""

DEAD = "http://127.0.0.1:9"
DEAD_PROXIES = {
    spelled: DEAD for name in ("http_proxy", "https_proxy", "all_proxy") for spelled in (name, name.upper())
}
