"""The skills of the demo model. Each is a pure function that draws one question with its one right answer.

`corpus.py` mixes them into chats, `evaluate.py` asks held-out exercises. With `held_out` a skill draws exercises that
are not in the training text: unseen words, or unseen pairs of numbers and wording.
"""

import json
import random
import zlib
from collections.abc import Callable
from typing import NamedTuple

from tools.demo_model import facts, tool_use, words
from tools.demo_model.exchange import Exchange
from tools.demo_model.stories import ANIMALS, compose_story


class Skill(NamedTuple):
    """A named skill. share: its fraction of the training mix. draw: draws an exercise, given `held_out`."""

    name: str
    share: float
    draw: Callable[[random.Random, bool], Exchange]


COPY_FORMS = (
    "Repeat after me: {}",
    "Copy: {}",
    "Copy this: {}",
    "Say: {}",
    "Repeat: {}",
    "Please repeat: {}",
    "Echo: {}",
)
SPELL_FORMS = ("Spell {}.", "Spell the word {}.", "How do you spell {}?", "Spell: {}", "Please spell {}.", "Spell {}")
CAPITAL_FORMS = ("Write in capitals: {}", "Shout: {}", "In capitals: {}", "Uppercase: {}")
COUNT_FORMS = (
    "Count from {} to {}.",
    "Count from {} to {}",
    "Please count from {} to {}.",
    "Can you count from {} to {}?",
    "Count from {} to {}, please.",
    "count from {} to {}",
)
ADD_FORMS = (
    "What is {} + {}?",
    "What is {} plus {}?",
    "Add {} and {}.",
    "{} + {}",
    "{} + {} = ?",
    "How much is {} + {}?",
    "Compute {} + {}.",
    "what is {}+{}",
    "What's {} + {}?",
    "{}+{}",
)
UNKNOWN_FORMS = (
    "What is the capital of {}?",
    "Who wrote {}?",
    "Who invented the {}?",
    "How do I cook {}?",
    "How do I make a {}?",
    "What is the weather in {}?",
    "Explain the theory of {}.",
    "Write a program that sorts {}.",
    "What do you think about {}?",
    "When was the {} built?",
    "Translate {} into French.",
    "What is the meaning of {}?",
    "Why is the {} so {}?",
    "Do you like {}?",
    "Write a poem about {}.",
    "How old is the {}?",
    "Where can I buy a {}?",
    "Who is {}?",
    "What is {}?",
    "What is a {}?",
    "Tell me about {}.",
    "Explain {}.",
    "What does {} mean?",
    "Where is {}?",
    "Can you {}?",
)
FACT_OPENINGS = (
    "Please tell me: ",
    "One more question: ",
    "Quick question: ",
    "Now tell me: ",
    "Hello! ",
    "Hi. ",
    "Thanks. ",
    "OK. ",
    "And ",
    "So, ",
    "I want to know: ",
    "Please answer. ",
    "Good morning. ",
)
JSON_FORMS = (
    "Write JSON with the key{s} {keys} for {values}",
    "Write JSON with the key{s} {keys} for {values}.",
    "Give me JSON with the key{s} {keys} for {values}",
    "Write a JSON object with the key{s} {keys} and the value{s} {values}.",
    "JSON with key{s} {keys}: {values}",
    "{values}. Write JSON with the key{s} {keys}.",
    "Write JSON with {told}.",
    "Give me JSON for {told}.",
    "Answer in JSON: {told}",
)
JSON_SENTENCES = (
    "{name} is {age} years old. Write JSON with the keys {keys}.",
    "{name} is {age} years old. Give me JSON with {keys}.",
    "Write JSON with the keys {keys}: {name} is {age}.",
    "Write JSON with {keys}: {name} is {age} years old.",
    "Extract {keys} as JSON: {name} is {age} years old.",
)
_JSON_KEYS = """
    name age city country title author year color size price id count user email type value unit day month total
    first_name last_name zip_code item_id user_name
"""
JSON_KEYS = tuple(_JSON_KEYS.split())
UNKNOWN_ANSWER = "I am only a tiny demo model, so I do not know that. Ask me about Tandem!"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
ALPHABET = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
COLOURS = ("red", "orange", "yellow", "green", "blue", "violet")


def _pick_form(rng: random.Random, forms: tuple[str, ...], values: tuple[int, int], held_out: bool) -> str:
    """Draws a question with two numbers, "" when none is left. About one (wording, numbers) in twelve is held out."""
    kept = [form for form in forms if (zlib.crc32(form.format(*values).encode()) % 12 == 0) == held_out]
    return rng.choice(kept).format(*values) if kept else ""


def draw_copy(rng: random.Random, held_out: bool) -> Exchange:
    phrase = words.draw_phrase(rng, held_out=held_out)
    return Exchange(rng.choice(COPY_FORMS).format(phrase), phrase)


def draw_spelling(rng: random.Random, held_out: bool) -> Exchange:
    word = words.draw_word(rng, held_out=held_out)
    return Exchange(rng.choice(SPELL_FORMS).format(word), "-".join(word))


def draw_capitals(rng: random.Random, held_out: bool) -> Exchange:
    phrase = " ".join(words.draw_word(rng, held_out=held_out, invented_share=0.2) for _ in range(rng.randint(1, 5)))
    return Exchange(rng.choice(CAPITAL_FORMS).format(phrase), phrase.upper())


def draw_counting(rng: random.Random, held_out: bool) -> Exchange:
    """Draws a count of at most 31 numbers, which starts below 100; one in eight counts down."""
    while True:
        first = rng.randint(0, 12) if rng.random() < 0.6 else rng.randint(0, 99)
        last = first + (rng.randint(1, 12) if rng.random() < 0.7 else rng.randint(1, 30))
        numbers = [str(number) for number in range(first, last + 1)]
        if rng.random() < 0.12 and not held_out:
            return Exchange(f"Count down from {last} to {first}.", ", ".join(reversed(numbers)))
        if first == 1 and not held_out and rng.random() < 0.7:
            return Exchange(
                rng.choice(("Count to {}.", "Count to {}", "Please count to {}.")).format(last), ", ".join(numbers)
            )
        if question := _pick_form(rng, COUNT_FORMS, (first, last), held_out):
            return Exchange(question, ", ".join(numbers))


def count_far(rng: random.Random) -> Exchange:
    """Draws a count of 41 to 151 numbers, for positions far into the context."""
    first = rng.randint(0, 3)
    last = first + rng.randint(40, 150)
    return Exchange(f"Count from {first} to {last}.", ", ".join(str(number) for number in range(first, last + 1)))


def draw_addition(rng: random.Random, held_out: bool) -> Exchange:
    while True:
        left, right = rng.randint(0, 9), rng.randint(0, 9)
        if question := _pick_form(rng, ADD_FORMS, (left, right), held_out):
            return Exchange(question, f"{left} + {right} = {left + right}")


def _draw_fact(rng: random.Random, table: tuple[facts.Fact, ...]) -> Exchange:
    fact = rng.choice(table)
    return Exchange(_careless(rng, rng.choice(fact.questions)), fact.answer)


def _careless(rng: random.Random, question: str) -> str:
    """Makes some questions lower case, or removes their last punctuation, as people type them."""
    if rng.random() < 0.08:
        question = question.lower()
    if rng.random() < 0.08:
        question = question.rstrip("?.!") or question
    return question


def draw_fact(rng: random.Random, held_out: bool) -> Exchange:
    """Draws a fact about Tandem or the model. A held-out question has an opening that is not in the training text."""
    dice = rng.random()
    exchange = _draw_fact(rng, facts.TERMS if dice < 0.45 else facts.PROJECT if dice < 0.75 else facts.SELF)
    opening = rng.choice(FACT_OPENINGS) if rng.random() < 0.2 else ""
    return Exchange(("I have a question. " if held_out else opening) + exchange.question, exchange.answer)


def draw_greeting(rng: random.Random, held_out: bool) -> Exchange:
    return _draw_fact(rng, facts.GREETINGS)


def draw_list(rng: random.Random, held_out: bool) -> Exchange:
    """Draws a question for a whole fixed list, or for the neighbour of one of its entries."""
    what, items = rng.choice(
        (
            ("the days of the week", DAYS),
            ("the months of the year", MONTHS),
            ("the alphabet", ALPHABET),
            ("the colours of the rainbow", COLOURS),
        )
    )
    if items is not COLOURS and rng.random() < 0.6:
        index = rng.randrange(len(items) - 1)
        if rng.random() < 0.55:
            return Exchange(f"What comes after {items[index]}?", f"{items[index + 1]} comes after {items[index]}.")
        return Exchange(f"What comes before {items[index + 1]}?", f"{items[index]} comes before {items[index + 1]}.")
    form = rng.choice(("List {}.", "Name {}.", "What are {}?", "Tell me {}.", "Say {}."))
    return Exchange(form.format(what), ", ".join(items))


def draw_json(rng: random.Random, held_out: bool) -> Exchange:
    name, age = rng.choice(words.NAMES), rng.randint(1, 99)
    form = rng.choice(
        ("Write JSON with name {} and age {}.", "Give me JSON for name {} and age {}.", "JSON: name {}, age {}")
    )
    return Exchange(form.format(name, age), json.dumps({"name": name, "age": age}))


def draw_json_keys(rng: random.Random, held_out: bool) -> Exchange:
    """Draws a question for JSON with given keys and values, one to four of them. Numbers stay numbers."""
    known = () if held_out else JSON_KEYS
    number = rng.choices((1, 2, 3, 4), weights=(1, 5, 3, 1))[0]
    if rng.random() < 0.25:
        pairs: dict[str, str | int] = {"name": rng.choice(words.NAMES), "age": rng.randint(1, 99)}
        if number > 2:
            pairs["city"] = rng.choice(tool_use.UNSEEN_CITIES if held_out else tool_use.CITIES)
    else:
        pairs = {}
        while len(pairs) < number:
            key = rng.choice(known) if known and rng.random() < 0.5 else words.draw_word(rng, held_out=held_out)
            pairs[key] = rng.randint(0, 999) if rng.random() < 0.4 else _json_value(rng, held_out)
    keys, values = _listed(list(pairs)), ", ".join(str(value) for value in pairs.values())
    told = _listed([f"{key} {value}" for key, value in pairs.items()])
    plural = "s" if len(pairs) > 1 else ""
    question = rng.choice(JSON_FORMS).format(keys=keys, values=values, told=told, s=plural)
    if list(pairs) == ["name", "age"] and rng.random() < 0.4:
        question = rng.choice(JSON_SENTENCES).format(keys=keys, **pairs)
    return Exchange(question, json.dumps(pairs))


def _json_value(rng: random.Random, held_out: bool) -> str:
    if rng.random() < 0.3:
        return rng.choice(words.NAMES)
    value = " ".join(words.draw_word(rng, held_out=held_out) for _ in range(rng.choice((1, 1, 1, 2))))
    return value.capitalize() if rng.random() < 0.3 else value


def _listed(parts: list[str]) -> str:
    """Joins with commas and a last "and"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def draw_unlisted(rng: random.Random, held_out: bool) -> Exchange:
    """Draws a question for a tool that the model was not given. Its right answer is UNKNOWN_ANSWER."""
    while True:
        asked = tool_use.draw_tool(rng, held_out).ask(rng)
        if not any(sign in asked.question.lower() for sign in ("+", "plus", "add ", "say")):
            return Exchange(asked.question, UNKNOWN_ANSWER)


def draw_several_times(rng: random.Random, held_out: bool) -> Exchange:
    word = words.draw_word(rng, held_out=held_out)
    times, number = rng.choice((("two", 2), ("three", 3), ("four", 4), ("five", 5), ("six", 6)))
    return Exchange(f"Say {word} {times} times.", " ".join([word] * number))


def draw_story(rng: random.Random, held_out: bool) -> Exchange:
    hero = rng.choice(ANIMALS)
    article = "an" if hero[0] in "aeiou" else "a"
    if rng.random() < 0.3:
        return Exchange(rng.choice(("Tell me a story.", "Tell me a story", "Write a short story.")), compose_story(rng))
    form = rng.choice(("Tell me a story about {} {}.", "Write a story about {} {}.", "Tell a story about {} {}"))
    return Exchange(form.format(article, hero), compose_story(rng, hero))


def draw_unknown(rng: random.Random, held_out: bool) -> Exchange:
    """Draws a question outside the skills. Its right answer is UNKNOWN_ANSWER."""
    first = _unknown_topic(rng) if rng.random() < 0.7 else words.draw_phrase(rng, max_words=3)
    form = rng.choice(UNKNOWN_FORMS)
    topic = first.capitalize() if rng.random() < 0.4 else first
    return Exchange(_careless(rng, form.replace("{}", topic, 1).replace("{}", words.draw_word(rng))), UNKNOWN_ANSWER)


def _unknown_topic(rng: random.Random) -> str:
    """Draws a word that is in no fact."""
    known = " ".join(fact.answer for fact in (*facts.TERMS, *facts.PROJECT))
    while (word := words.draw_word(rng)) in known:
        continue
    return word


SKILLS: tuple[Skill, ...] = (
    Skill("greeting", 0.08, draw_greeting),
    Skill("fact", 0.17, draw_fact),
    Skill("addition", 0.12, draw_addition),
    Skill("counting", 0.12, draw_counting),
    Skill("copy", 0.19, draw_copy),
    Skill("spelling", 0.11, draw_spelling),
    Skill("capitals", 0.07, draw_capitals),
    Skill("list", 0.06, draw_list),
    Skill("json", 0.02, draw_json),
    Skill("json of keys", 0.07, draw_json_keys),
    Skill("several times", 0.03, draw_several_times),
    Skill("story", 0.02, draw_story),
    Skill("unknown", 0.05, draw_unknown),
    Skill("unlisted tool", 0.025, draw_unlisted),
)
