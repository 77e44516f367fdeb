"""Requests that schemathesis makes so that they do not fit an OpenAPI document, and the rules of their answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from schemathesis import Case

HANG_S = 5.0
WRONG, RIGHT = 9, 1
"""Of ten cases of a route that takes anything, so many do not fit the document."""
MANY, FEW = 3, 1
"""Cases of a route that takes anything for those of one that does not."""


def check_error(body: Any, headers: Any, path: str = "") -> None:
    """The contract's shape of an error, or Anthropic's for a path of that API, and nothing beside it."""
    assert headers["x-request-id"] and headers["content-type"] == "application/json", headers
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"} and body["type"] == "error", body
        assert set(body["error"]) == {"type", "message"} and all(body["error"].values()), body
        return
    assert isinstance(body, dict) and set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, body
    assert isinstance(error["message"], str) and error["message"], body
    assert isinstance(error["type"], str) and error["type"], body
    assert error["param"] is None or isinstance(error["param"], str), body
    assert isinstance(error["code"], str) and error["code"], body
    assert headers["x-request-id"] and headers["content-type"] == "application/json", headers


def check_answer(answer: Any, documented: set[str], path: str) -> None:
    """The rules of every answer. documented: the statuses that the document has for the route of this path."""
    status, headers = answer.status_code, {name: values[0] for name, values in answer.headers.items()}
    assert status < 500 and status != 422, (status, answer.text)
    assert str(status) in documented, (status, answer.text)
    assert headers["x-request-id"]
    if status >= 400:
        check_error(answer.json(), headers, path)


def send_bad_requests(
    url: str, document: dict[str, Any], headers: Sequence[Mapping[str, str]], count: int
) -> tuple[dict[str, int], list[str]]:
    """Sends a case that fits to each route and then `count` cases, one after the other, each with one of `headers`.
    Returns the number of answers by route and status, and what broke the rules: of each kind one, as a command that
    sends it again."""
    import schemathesis  # takes a second, which collecting tests should not
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    session = requests.Session()
    seen: dict[str, int] = {}
    broken: dict[str, str] = {}

    def send(case: "Case[Any]", key: Mapping[str, str]) -> None:
        place = f"{case.method} {case.path}"
        try:
            answer = case.call(base_url=url, session=session, headers=dict(key), timeout=HANG_S)
            seen[f"{place} {answer.status_code}"] = seen.get(f"{place} {answer.status_code}", 0) + 1
            documented = set(document["paths"][case.path][case.method.lower()]["responses"])
            check_answer(answer, documented, case.path)
        except Exception as error:  # go on: each kind of fault is told
            broken.setdefault(
                f"{place}: {type(error).__name__} {str(error)[:400]}", case.as_curl_command(headers=dict(key))
            )

    for operation in operations:
        draw(send, 1, case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE), key=st.sampled_from(headers))
    draw(send, count, case=cases(operations), key=st.sampled_from(headers))
    session.close()
    return seen, [f"{fault}\n  {command[:2000]}" for fault, command in broken.items()]


def draw(test: Callable[..., None], count: int, **drawn: st.SearchStrategy[Any]) -> None:
    """Calls test with `count` examples."""
    every = settings(
        max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None
    )
    every(given(**drawn)(test))()


def cases(operations: Sequence[Any]) -> "st.SearchStrategy[Case[Any]]":
    """Cases of all these routes, MANY for a route that takes anything to FEW for one that does not."""
    weighed = [index for index, one in enumerate(operations) for _ in range(MANY if _takes_any(one) else FEW)]
    return st.sampled_from(weighed).flatmap(lambda index: _cases(operations[index]))


def _cases(operation: Any) -> "st.SearchStrategy[Case[Any]]":
    """Of a route that takes a body or parameters: nearly all wrong. Others take nothing that could be wrong.

    A number is drawn first: st.one_of would take a strategy that is there nine times as one."""
    from schemathesis import GenerationMode

    right = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if not _takes_any(operation):
        return right
    wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    return st.integers(0, WRONG + RIGHT - 1).flatmap(lambda number: wrong if number < WRONG else right)


def _takes_any(operation: Any) -> bool:
    return bool(operation.body or operation.path_parameters)
