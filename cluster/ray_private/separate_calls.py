"""Calls of Serve that belong to no request of Serve's, although one is being answered."""

import contextvars
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_separately(call: Callable[[], T]) -> T:
    """Makes a call through a Serve handle under a number of its own, and returns what it returns.

    Behind Serve's proxy each call that is made for a request has the request's own number, and a router that has two
    calls of one number at once forgets one of them, which then waits for ever. So it would be with a request of several
    prompts. Serve also cancels what bears the number of a request that has gone; gateways do that themselves.

    Lost without it: requests with several prompts under `serve run` and `serve deploy`.
    """

    def apart() -> T:
        from ray.serve.context import _unset_request_context

        _unset_request_context()
        return call()

    return contextvars.copy_context().run(apart)
