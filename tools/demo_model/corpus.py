"""The demo model's training text: documents (chats, stories, plain facts) and fixed-length rows packed from them.

`train.py` and `train_adapters.py` read rows, `build_tokenizer.py` and `evaluate.py` read documents. Functions draw from
the caller's `random.Random`, and read no file or network.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tools.demo_model import facts, tool_use, words
from tools.demo_model.exchange import Exchange
from tools.demo_model.skills import SKILLS, count_far, draw_unlisted
from tools.demo_model.stories import compose_story

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the Tandem demo model.",
    "You are a friendly assistant. Answer in short sentences.",
    "Answer the question.",
    "Be brief.",
    "You are an assistant of the Tandem cluster.",
)
NAME_WEIGHT = 4.0  # loss weight of the name of a called tool
PROMPT_WEIGHT = 0.1  # loss weight of text that a user writes, against 1.0 for the text of the model


TOOLS_OPENING = "# Tools\n<tools>\n"
TOOLS_CLOSING = '</tools>\nCall one with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'


class Segment(NamedTuple):
    """A run of text and the loss weight of its tokens."""

    text: str
    weight: float


Document = list[Segment]
Style = Callable[[str], str]


class Row(NamedTuple):
    """`length` tokens and the loss weight of each."""

    token_ids: list[int]
    weights: list[float]


def plain_style(answer: str) -> str:
    """The base model's style: returns the answer unchanged."""
    return answer


def draw_exchange(rng: random.Random) -> Exchange:
    """Draws one exchange of the training mix."""
    skill = rng.choices(SKILLS, weights=[skill.share for skill in SKILLS])[0]
    return skill.draw(rng, False)


def draw_exchanges(rng: random.Random, num_turns: int) -> list[Exchange]:
    """Draws the turns of a chat. In one chat of ten the user gives a name and asks for it later."""
    turns = [draw_exchange(rng) for _ in range(num_turns)]
    if rng.random() < 0.10:
        name = rng.choice(words.NAMES)
        told = rng.choice(("My name is {}.", "I am {}.", "My name is {}", "Call me {}.")).format(name)
        where = rng.randint(0, len(turns))
        turns.insert(where, Exchange(told, f"Nice to meet you, {name}!"))
        turns.insert(rng.randint(where + 1, len(turns)), Exchange("What is my name?", f"Your name is {name}."))
    elif rng.random() < 0.015:
        turns.append(Exchange("What is my name?", "You have not told me your name."))
    return turns


def system_text(system: str | None, tools: Sequence[dict[str, Any]] = ()) -> str:
    """The text of the system turn: the system prompt, then the tools in the hermes layout. "" without both."""
    if not tools:
        return system or ""
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return f"{system}\n\n" * bool(system) + TOOLS_OPENING + lines + TOOLS_CLOSING


def chat_document(
    exchanges: list[Exchange],
    system: str | None,
    style: Style = plain_style,
    tools: Sequence[dict[str, Any]] = (),
) -> Document:
    """Renders the chat exactly as `chat_template.jinja` does, with loss weights. Calls of tools have no style."""
    opening = system_text(system, tools)
    document = [Segment(f"{TURN_START}system\n{opening}{TURN_END}\n", PROMPT_WEIGHT)] if opening else []
    for question, answer, call, result in exchanges:
        asked, answered = question, style(answer)
        if call:
            document += _turns(question, *_call_segments(call))
            asked = f"<tool_response>\n{result}\n</tool_response>"
        document += _turns(asked, Segment(answered, 1.0))
    return document


def _call_segments(call: str) -> Document:
    """Gives the tool's name its own weight: one choice among tools, against many tokens that are copied after it."""
    before, mark, rest = call.partition('"name": "')
    name, *_ = rest.partition('"')
    return [Segment(before + mark, 1.0), Segment(name, NAME_WEIGHT), Segment(rest.removeprefix(name), 1.0)]


def _turns(asked: str, *answered: Segment) -> Document:
    """A user turn and an assistant turn."""
    *first, (last, weight) = answered
    return [
        Segment(f"{TURN_START}user\n{asked}{TURN_END}\n{TURN_START}assistant\n", PROMPT_WEIGHT),
        *first,
        Segment(last + TURN_END, weight),
        Segment("\n", PROMPT_WEIGHT),
    ]


def draw_tool_exchanges(rng: random.Random, tools: list[tool_use.Tool]) -> list[Exchange]:
    """Draws one to three turns with the tools given: mostly calls, else questions that no tool fits."""
    return [
        rng.choice(tools).ask(rng) if rng.random() < 0.72 else draw_unfit(rng, tools)
        for _ in range(rng.choices((1, 2, 3), weights=(30, 35, 35))[0])
    ]


def draw_unfit(rng: random.Random, tools: list[tool_use.Tool], held_out: bool = False) -> Exchange:
    """Draws an exchange that none of the tools fits: one of the other skills, or a question for a tool not given."""
    while True:
        exchange = draw_unlisted(rng, held_out) if rng.random() < 0.25 else draw_exchange(rng)
        if not any(tool_use.may_be_meant(tool, exchange) for tool in tools):
            return exchange


def draw_tool_chat(rng: random.Random, style: Style = plain_style) -> Document:
    """Draws a chat with one to three tools."""
    tools = tool_use.draw_tools(rng, rng.choices((1, 2, 3), weights=(25, 40, 35))[0], held_out=False)
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.25 else None
    return chat_document(draw_tool_exchanges(rng, tools), system, style, [tool.definition for tool in tools])


def draw_chat(rng: random.Random, style: Style = plain_style, *, long: bool = False) -> Document:
    """Draws a chat of one to four turns. long: of ten to forty, with one long count (skills.count_far)."""
    if long:
        exchanges = draw_exchanges(rng, rng.randint(10, 40))
        exchanges.insert(rng.randint(0, len(exchanges)), count_far(rng))
    else:
        exchanges = draw_exchanges(rng, rng.choices((1, 2, 3, 4), weights=(6, 2, 1, 1))[0])
    return chat_document(exchanges, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else None, style)


def draw_plain(rng: random.Random) -> Document:
    """Draws text without roles: one to three stories, or two to six facts."""
    if rng.random() < 0.85:
        text = "\n\n".join(compose_story(rng) for _ in range(rng.choices((1, 2, 3), weights=(6, 2, 1))[0]))
    else:
        table = (*facts.TERMS, *facts.PROJECT)
        text = " ".join(fact.answer for fact in rng.sample(table, rng.randint(2, 6)))
    return [Segment(text, 1.0)]


def draw_document(rng: random.Random, style: Style = plain_style, *, long_share: float = 0.0) -> Document:
    """Draws one document of the training mix: 11 % plain text, the rest chats; chats only in an adapter's style.
    long_share: the fraction of long chats."""
    if style is plain_style and rng.random() < 0.11:
        return draw_plain(rng)
    if rng.random() < (0.20 if style is plain_style else 0.08):
        return draw_tool_chat(rng, style)
    return draw_chat(rng, style, long=rng.random() < long_share)


def document_text(document: Document) -> str:
    """The whole text of a document."""
    return "".join(segment.text for segment in document)


def encode(document: Document, tokenizer: Tokenizer) -> Row:
    """Encodes a document and its end-of-text token, which has weight 1."""
    token_ids: list[int] = []
    weights: list[float] = []
    for text, weight in [*document, Segment(END_OF_TEXT, 1.0)]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        token_ids += ids
        weights += [weight] * len(ids)
    return Row(token_ids, weights)


def pack_row(rng: random.Random, tokenizer: Tokenizer, length: int, style: Style = plain_style) -> Row:
    """Packs documents one after the other, truncated at `length` tokens. A row starts at the start of a document."""
    token_ids: list[int] = []
    weights: list[float] = []
    while len(token_ids) < length:
        row = encode(draw_document(rng, style, long_share=0.3 if length >= 1024 else 0.01), tokenizer)
        token_ids += row.token_ids
        weights += row.weights
    return Row(token_ids[:length], weights[:length])
