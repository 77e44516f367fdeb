"""Clients that ask again and again until a service has grown."""

import threading
from typing import Any

from tests.support.service import Service, wait_for


def groups_of(service: Service) -> int:
    return int(service.get("/load").json()["groups"])


def ask_until_it_grows(service: Service, asked: dict[str, Any], to: int) -> None:
    """Four clients ask until there are that many groups; none of their requests fails, and the groups become fewer."""
    done = threading.Event()
    statuses: list[int] = []

    def keep_asking() -> None:
        while not done.is_set():
            statuses.append(service.post("/v1/completions", asked).status_code)

    threads = [threading.Thread(target=keep_asking) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: groups_of(service) == to, 60, f"{to} groups: {service.output}")
    finally:
        done.set()
        for thread in threads:
            thread.join()
    wait_for(lambda: groups_of(service) < to, 60, "back to fewer")
    assert set(statuses) == {200}, "no request failed on the way up or down"
