"""The demo model's tools: function definitions, the one call that answers a question, its result and the final answer.

Names, parameters, descriptions and values are drawn anew each time, so that the model has to read the tools it is given
and copy from the question. With `held_out`, nouns, parameter names and values are drawn that the training text has not.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tools.demo_model import words
from tools.demo_model.exchange import Exchange

Arguments = dict[str, str | int]


class Tool(NamedTuple):
    """A tool with questions for it.

    definition: OpenAI's. topic: a word of the tool; a question that has it may be meant for the tool. ask: draws a
    question, its one right call, a result and the final answer.
    """

    definition: dict[str, Any]
    topic: str
    ask: Callable[[random.Random], Exchange]


class Parameter(NamedTuple):
    """A parameter of a tool. kind: what its values are. asked: whether questions give it; otherwise it is optional."""

    name: str
    kind: str
    asked: bool = True


VERBS = ("get", "get", "get", "find", "show", "check", "read", "look_up", "fetch", "search", "tell")
_NOUNS = """
    weather weather weather weather temperature temperature price time news score size height colour address forecast
    rating title author summary status balance speed date menu schedule population owner definition recipe route
"""
NOUNS = tuple(_NOUNS.split())
_SUBJECTS = """
    city city city town place country name user person item product word topic query company location id book team shop
    key file code street artist
"""
SUBJECTS = tuple(_SUBJECTS.split())
UNSEEN_SUBJECTS = ("village", "planet", "station", "customer", "label", "region")
NUMBERS = ("days", "limit", "year", "count", "max", "number", "page", "size", "hours", "level", "day")
UNSEEN_NUMBERS = ("weeks", "minutes", "rank")
EXTRAS = ("unit", "language", "format", "style", "currency", "mode")
_CITIES = """
    Paris Rome London Berlin Madrid Oslo Vienna Tokyo Delhi Cairo Lima Boston Chicago Sydney Prague Dublin Zurich Athens
    Lisbon Toronto Seoul Milan Munich Hamburg Brussels Stockholm Copenhagen Amsterdam Barcelona Venice Naples Florence
    Budapest Moscow Beijing Shanghai Mumbai Bangkok Singapore Jakarta Manila Havana Dallas Seattle Denver Miami Houston
    Detroit Montreal Vancouver Melbourne Cologne Frankfurt Lyon Marseille Nice Geneva Basel Porto Krakow Istanbul Nagoya
    Osaka Santiago Quito
"""
LONG_CITIES = ("New York", "San Francisco", "Los Angeles", "Hong Kong", "Rio de Janeiro", "Cape Town")
CITIES = (*_CITIES.split(), *LONG_CITIES)
UNSEEN_CITIES = ("Warsaw", "Helsinki", "Nairobi", "Bogota", "Kyoto", "Riga", "Salt Lake City", "Buenos Aires")
LOOKUP_FORMS = (
    "What is the {noun} {prep} {value}",
    "What is the {noun} {prep} {value}",
    "What's the {noun} {prep} {value}",
    "what is the {noun} {prep} {value}",
    "Tell me the {noun} {prep} {value}",
    "Show me the {noun} {prep} {value}",
    "How is the {noun} {prep} {value}",
    "I need the {noun} {prep} {value}",
    "Please get the {noun} {prep} {value}",
    "Can you find the {noun} {prep} {value}",
    "Do you know the {noun} {prep} {value}",
    "{noun} {prep} {value}",
    "What is the {noun} like {prep} {value}",
    "What is the {noun} {prep} {value} today",
    "How is the {noun} {prep} {value} right now",
)
LOOKUP_DESCRIPTIONS = (
    "Get the {noun} of a {subject}",
    "Get the {noun} for a {subject}.",
    "Get the current {noun} in a given {subject}",
    "Returns the {noun} of the {subject}.",
    "The {noun} of a {subject}",
    "Look up the {noun} by {subject}.",
    "Find {noun}",
    "Get {noun} information",
    "Get the current {noun}",
    "Useful to know the {noun} of a {subject}",
)
PARAMETER_DESCRIPTIONS = ("The {}", "Name of the {}", "The {} to use", "{} of the request")


class Action(NamedTuple):
    """A thing to do. parameters: kind and the names it may have, in the question's
    order."""

    names: tuple[str, ...]
    topic: str
    description: str
    forms: tuple[str, ...]
    parameters: tuple[tuple[str, tuple[str, ...]], ...]


_TEXT = ("text", "message", "content", "body")
_WHO = ("to", "person", "recipient", "user", "name")
ACTIONS = (
    Action(
        ("send_message", "send", "send_text", "message_send"),
        "message",
        "Send a message to a person",
        ("Send a message to {}: {}", "Send a message to {} saying {}", "Write a message to {}: {}"),
        (("person", _WHO), ("text", _TEXT)),
    ),
    Action(
        ("send_email", "email", "write_mail"),
        "email",
        "Send an email.",
        ("Send an email to {} saying {}", "Email {}: {}", "Write an email to {}: {}"),
        (("person", _WHO), ("text", _TEXT)),
    ),
    Action(
        ("set_timer", "start_timer", "timer"),
        "timer",
        "Start a timer",
        ("Set a timer for {} minutes", "Start a timer of {} minutes", "Timer for {} minutes"),
        (("number", ("minutes", "duration", "time", "length")),),
    ),
    Action(
        ("book_table", "reserve_table", "table"),
        "table",
        "Book a table in a restaurant",
        ("Book a table for {} in {}", "Reserve a table for {} people in {}", "I want a table for {} in {}"),
        (("number", ("people", "guests", "seats", "size")), ("name", ("city", "place", "location", "town"))),
    ),
    Action(
        ("add_note", "create_note", "save_note", "note"),
        "note",
        "Save a note.",
        ("Save a note: {}", "Add a note: {}", "Note: {}", "Make a note that says {}"),
        (("text", _TEXT),),
    ),
    Action(
        ("add_reminder", "remind", "set_reminder"),
        "remind",
        "Remind the user later",
        ("In {} minutes remind me: {}", "Set a reminder in {} minutes: {}"),
        (("number", ("minutes", "delay", "time")), ("text", _TEXT)),
    ),
    Action(
        ("play_song", "play", "play_music"),
        "play",
        "Play a song by its title",
        ("Play {}", "Play the song {}", "Please play {}", "I want to hear the song {}"),
        (("text", ("title", "song", "name", "track")),),
    ),
    Action(
        ("turn_on", "switch_on", "turn_on_device"),
        "turn on",
        "Turn on a device",
        ("Turn on the {}", "Please turn on the {}", "Switch on the {}"),
        (("word", ("device", "name", "item")),),
    ),
)
SUMS: tuple[tuple[tuple[str, ...], str, tuple[str, ...], Callable[[int, int], int]], ...] = (
    (
        ("add", "add_numbers", "sum", "plus"),
        "Add two numbers",
        ("What is {} + {}?", "Add {} and {}.", "What is {} plus {}?", "{} + {}", "Compute {} + {}."),
        lambda a, b: a + b,
    ),
    (
        ("multiply", "multiply_numbers", "product", "times"),
        "Multiply two numbers.",
        ("What is {} times {}?", "Multiply {} by {}.", "What is {} * {}?", "{} * {}", "Multiply {} and {}"),
        lambda a, b: a * b,
    ),
    (
        ("subtract", "minus", "difference"),
        "Subtract two numbers",
        ("What is {} - {}?", "What is {} minus {}?", "{} - {}", "Compute {} minus {}."),
        lambda a, b: a - b,
    ),
)


SUM_TOPICS = tuple(names[0] for names, *_ in SUMS)


def draw_tool(rng: random.Random, held_out: bool) -> Tool:
    """Draws a tool: something to look up, something to do, or two numbers to compute with."""
    dice = rng.random()
    if dice < 0.62:
        return _draw_lookup(rng, held_out)
    return _draw_action(rng, held_out) if dice < 0.85 else _draw_sum(rng)


def draw_tools(rng: random.Random, number: int, held_out: bool) -> list[Tool]:
    """Draws tools of different topics."""
    tools: list[Tool] = []
    while len(tools) < number:
        tool = draw_tool(rng, held_out)
        if all(tool.topic not in other.topic and other.topic not in tool.topic for other in tools):
            tools.append(tool)
    return tools


def may_be_meant(tool: Tool, exchange: Exchange) -> bool:
    """Returns whether a question of another origin could be answered with the tool."""
    return tool.topic in exchange.question.lower() or (tool.topic in SUM_TOPICS and " + " in exchange.answer)


def _call(name: str, arguments: Arguments) -> str:
    """Writes the assistant's text that calls a tool, in the hermes format."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _draw_lookup(rng: random.Random, held_out: bool) -> Tool:
    noun = "" if held_out or rng.random() < 0.45 else rng.choice(NOUNS)
    while len(noun) < 4:  # a shorter one would be in too many other questions
        noun = words.draw_word(rng, held_out=held_out, invented_share=0.4)
    parameters = [Parameter(rng.choice(UNSEEN_SUBJECTS if held_out else SUBJECTS), "name")]
    dice = rng.random()
    if dice < 0.15:
        parameters.append(Parameter(rng.choice(UNSEEN_NUMBERS if held_out else NUMBERS), "number"))
    elif dice < 0.25:
        parameters.append(Parameter(rng.choice(EXTRAS), "word"))
    elif dice < 0.35:
        parameters.append(Parameter(rng.choice(EXTRAS), "word", asked=False))
    verb, subject = rng.choice(VERBS), parameters[0].name
    camel = verb.split("_")[0] + noun.capitalize()
    name = rng.choice((f"{verb}_{noun}",) * 5 + (noun, camel, f"{noun}_{verb}", f"{verb}_{noun}_by_{subject}"))
    description = rng.choice(LOOKUP_DESCRIPTIONS).format(noun=noun, subject=subject)

    def ask(rng: random.Random) -> Exchange:
        prep = rng.choice(("in", "in", "of", "of", "for"))
        values = [_draw_value(rng, parameter.kind, held_out) for parameter in parameters]
        question = rng.choice(LOOKUP_FORMS).format(noun=noun, prep=prep, value=values[0])
        for parameter, value in zip(parameters[1:], values[1:], strict=True):
            if parameter.asked and parameter.name.endswith("s"):
                question += f" for {value} {parameter.name}"
            elif parameter.asked:
                question += f" with {parameter.name} {value}"
        if rng.random() < 0.75:
            question += "?" if question.lower().startswith(("what", "how", "can", "do")) else "."
        arguments = {p.name: value for p, value in zip(parameters, values, strict=True) if p.asked}
        result, told = _draw_result(rng, held_out)
        answer = told or f"The {noun} {prep} {values[0]} is {result}."
        return Exchange(question, answer, _call(name, arguments), result)

    return Tool(_define(rng, name, description, parameters), noun, ask)


def _draw_action(rng: random.Random, held_out: bool) -> Tool:
    action = rng.choice(ACTIONS)
    name = rng.choice(action.names)
    parameters = [Parameter(rng.choice(names), kind) for kind, names in action.parameters]
    order = list(range(len(parameters)))
    if rng.random() < 0.4:
        order.reverse()

    def ask(rng: random.Random) -> Exchange:
        values = [_draw_value(rng, parameter.kind, held_out) for parameter in parameters]
        result = rng.choice(("ok", "done", "sent", "saved", "success", words.draw_word(rng, held_out=held_out)))
        arguments = {parameters[index].name: values[index] for index in order}
        question = rng.choice(action.forms).format(*values)
        return Exchange(question, f"Done: {result}.", _call(name, arguments), result)

    return Tool(_define(rng, name, action.description, [parameters[index] for index in order]), action.topic, ask)


def _draw_sum(rng: random.Random) -> Tool:
    names, description, forms, compute = rng.choice(SUMS)
    name = rng.choice(names)
    keys = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))

    def ask(rng: random.Random) -> Exchange:
        most = rng.choice((9, 99, 99, 999))
        left, right = rng.randint(0, most), rng.randint(0, most)
        result = str(compute(left, right))
        call = _call(name, {keys[0]: left, keys[1]: right})
        return Exchange(rng.choice(forms).format(left, right), f"The result is {result}.", call, result)

    return Tool(_define(rng, name, description, [Parameter(key, "number") for key in keys]), names[0], ask)


def _draw_name(rng: random.Random, held_out: bool) -> str:
    """Draws a name to look up: a city, a first name, a word or two."""
    dice = rng.random()
    if dice < 0.35:
        return rng.choice(UNSEEN_CITIES if held_out else CITIES)
    if dice < 0.45:
        return rng.choice(words.NAMES)
    word = words.draw_word(rng, held_out=held_out, invented_share=0.6)
    if dice < 0.70:
        return word.capitalize()
    if dice < 0.85:
        return word
    second = words.draw_word(rng, held_out=held_out)
    return f"{word} {second}" if rng.random() < 0.5 else f"{word.capitalize()} {second.capitalize()}"


def _draw_value(rng: random.Random, kind: str, held_out: bool) -> str | int:
    """Draws a value of a kind: name, number, person, word, text."""
    if kind == "number":
        return rng.randint(1, 90)
    if kind == "name":
        return _draw_name(rng, held_out)
    if kind == "person":
        return words.draw_word(rng, held_out=held_out).capitalize() if rng.random() < 0.3 else rng.choice(words.NAMES)
    most = 1 if kind == "word" else 4
    return " ".join(words.draw_word(rng, held_out=held_out, invented_share=0.2) for _ in range(rng.randint(1, most)))


def _draw_result(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """Draws what a look-up found, and the final answer where that is not composed from the question."""
    word = words.draw_word(rng, held_out=held_out)
    number = rng.randint(-9, 40) if rng.random() < 0.6 else rng.randint(41, 2000)
    unit = rng.choice(("degrees", "euros", "C", "km", "years", "dollars", "meters"))
    plain = (word, str(number), f"{number} {unit}", f"{word} and {number} {unit}", f"{word}, {number} {unit}", "sunny")
    dice = rng.random()
    if dice < 0.62:
        return rng.choice(plain), ""
    if dice < 0.80:
        sentence = rng.choice(("It is {}.", "There are {}.", "The answer is {}.", "Sunny with {}.", "Today: {}."))
        told = sentence.format(rng.choice(plain))
        return told, told
    keys = rng.sample((*NOUNS[2:12], "sky", "wind", "rain", "value", "total", words.draw_word(rng)), rng.randint(1, 2))
    values: list[str | int] = [word, number][: len(keys)] if rng.random() < 0.5 else [number, word][: len(keys)]
    found = dict(zip(keys, values, strict=True))
    return json.dumps(found), ", ".join(f"{key}: {value}" for key, value in found.items())


def _define(rng: random.Random, name: str, description: str, parameters: list[Parameter]) -> dict[str, Any]:
    """Writes the definition of a tool in OpenAI's format, with the variations that clients have."""
    properties: dict[str, dict[str, str]] = {}
    described = rng.random() < 0.12
    for parameter in parameters:
        properties[parameter.name] = {"type": "integer" if parameter.kind == "number" else "string"}
        if described:
            told = {"description": rng.choice(PARAMETER_DESCRIPTIONS).format(parameter.name)}
            typed = properties[parameter.name]
            properties[parameter.name] = typed | told if rng.random() < 0.7 else told | typed
    required = [parameter.name for parameter in parameters if parameter.asked]
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    dice = rng.random()
    if dice < 0.75:
        schema["required"] = required
    elif dice < 0.85:
        schema = {"properties": properties, "required": required, "type": "object"}
    if rng.random() < 0.06:
        schema["additionalProperties"] = False
    function: dict[str, Any] = {"name": name, "description": description, "parameters": schema}
    if rng.random() < 0.08:
        del function["description"]
    if rng.random() < 0.04:
        function["strict"] = True
    return {"type": "function", "function": function}
