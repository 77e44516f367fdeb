"""next_drained: nodes of others are nobody's business, and a Ray that does not answer says nothing."""

import asyncio

from tandem.cluster.group.node_drain import next_drained


async def test_the_first_drained_node_of_ones_own_is_found() -> None:
    answers: list[set[str] | Exception] = [set(), {"other"}, TimeoutError("the head is away"), {"other", "b", "c"}]

    def draining() -> set[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with asyncio.timeout(30):
        assert await next_drained({"b", "c", "d"}, draining, period_s=0.0) == "b"
    assert not answers
