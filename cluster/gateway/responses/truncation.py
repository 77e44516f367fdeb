"""`truncation: "auto"`: a conversation that is too long for the model loses its oldest items, as few as it takes.

Instructions and leading system messages stay, and so does the last item. What is left begins with a message of the
user; where even the last one of these leaves too much, the items behind it go, oldest first. A result goes with its
call. The stored conversation keeps all items.
"""

from bisect import bisect_left
from collections.abc import Sequence

from tandem.cluster.gateway.conversation.chat_prompt import chat_prompt
from tandem.cluster.gateway.responses.items_to_chat import Placed, chat_of
from tandem.cluster.gateway.responses.response_items import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
)
from tandem.cluster.gateway.responses.responses_body import ResponsesBody
from tandem.cluster.gateway.schemas.ignored_fields import IgnoredFields
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.workers.messages.errors import RequestRefused

TOO_LONG = ("context_length_exceeded", "content_too_large")


def shortened(text: TextServices, body: ResponsesBody, items: Sequence[Placed]) -> list[Placed]:
    """The items that are left; all of them where nothing helps. Work for the threads of text_workers.py: it renders the
    conversation about as often as its length has binary digits."""
    needed = body.max_output_tokens or 1

    def fits(kept: list[Placed]) -> bool:
        unnamed = IgnoredFields()
        try:
            chat, _ = chat_of(body, kept, text.settings, unnamed)
            return len(chat_prompt(text, chat, unnamed).token_ids) + needed <= text.max_model_len
        except RequestRefused as error:
            if error.code in TOO_LONG:
                return False
            raise

    for candidates in _candidates(items):
        if candidates and fits(candidates[-1]):
            return candidates[bisect_left(candidates, True, key=fits)]
    return list(items)


def _candidates(items: Sequence[Placed]) -> list[list[list[Placed]]]:
    """The items that may be left, from most to least: from one of the user's messages on; the last of these, and from
    one of the items behind it on."""
    head = next((i for i, one in enumerate(items) if not _is_by(one, ("system", "developer"))), 0)
    fixed, rest = list(items[:head]), list(items[head:])
    asked = [i for i, one in enumerate(rest) if _is_by(one, ("user",))]
    first = [[*fixed, *rest[at:]] for at in asked if at]
    last = [rest[at] for at in asked[-1:]]
    begin = asked[-1] + 2 if asked else 1
    later = [[*fixed, *last, *rest[at:]] for at in range(begin, len(rest)) if _may_begin(rest[at])]
    return [[_without_orphans(one) for one in found] for found in (first, later)]


def _is_by(one: Placed, roles: Sequence[str]) -> bool:
    return isinstance(one.item, MessageItem) and one.item.role in roles


def _may_begin(one: Placed) -> bool:
    return not isinstance(one.item, FunctionOutputItem | CustomOutputItem)


def _without_orphans(items: list[Placed]) -> list[Placed]:
    """The items without results of calls that are gone."""
    calls = {one.item.call_id for one in items if isinstance(one.item, FunctionCallItem | CustomCallItem)}
    results = FunctionOutputItem | CustomOutputItem
    return [one for one in items if not isinstance(one.item, results) or one.item.call_id in calls]
