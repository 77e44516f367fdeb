"""Many groups as one service: gateway, router, groups, Redis, deployment, command line. Alone imports Ray."""

if not __name__.startswith("tandem."):
    raise ImportError(
        "import tandem.cluster instead of cluster: under a second name each of its classes would exist twice"
    )

from tandem.configs.environment import keep_off_proxies

keep_off_proxies()  # every process of a service imports this before it makes a channel, also those that Serve starts
