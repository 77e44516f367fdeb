"""A story grammar: plain text for the demo model's completions, and the answers to "Tell me a story".

A story has one hero, one friend, one place and one thing in a fixed plot. Called by `corpus.py` and `skills.py`.
"""

import random

from tools.demo_model.words import NAMES

ANIMALS = (
    "fox",
    "cat",
    "dog",
    "bear",
    "owl",
    "mouse",
    "rabbit",
    "wolf",
    "duck",
    "lion",
    "frog",
    "horse",
    "goat",
    "whale",
)
PLACES = ("forest", "village", "castle", "garden", "valley", "city", "cave", "house by the sea", "farm", "mountain")
THINGS = (
    "golden key",
    "red ball",
    "silver lamp",
    "blue hat",
    "magic stone",
    "wooden box",
    "old map",
    "warm coat",
    "small bell",
)
MOODS = ("brave", "kind", "clever", "quiet", "happy", "curious", "lonely", "little", "young", "old")
TIMES = ("One day", "One morning", "One evening", "One cold night", "One sunny afternoon")


def compose_story(rng: random.Random, hero: str | None = None) -> str:
    """Draws a story of eight or nine sentences about `hero`, by default a random animal."""
    hero = hero or rng.choice(ANIMALS)
    mood, name = rng.choice(MOODS), rng.choice(NAMES)
    place, thing = rng.choice(PLACES), rng.choice(THINGS)
    friend = rng.choice([animal for animal in ANIMALS if animal != hero])
    article = "an" if mood[0] in "aeiou" else "a"
    opening = f"Once upon a time, there was {article} {mood} {hero} named {name} who lived in a {place}."
    parts = [opening, *_habit(rng, name, place), *_find(rng, name, thing), *_meeting(rng, name, friend, thing)]
    return " ".join([*parts, _ending(rng, name, friend, hero)])


def _habit(rng: random.Random, name: str, place: str) -> list[str]:
    habits = (
        f"Every day {name} walked through the {place} and looked at the sky.",
        f"{name} loved to sing when the sun was warm.",
        f"{name} liked to sleep under a tall tree.",
        f"Every morning {name} drank cold water from the river.",
        f"All the animals in the {place} knew {name}.",
    )
    return rng.sample(habits, rng.randint(1, 2))


def _find(rng: random.Random, name: str, thing: str) -> list[str]:
    where = rng.choice(("in the grass", "near the river", "under a tree", "behind a stone"))
    article = "an" if thing[0] in "aeiou" else "a"
    first = f"{rng.choice(TIMES)}, {name} found {article} {thing} {where}."
    second = (
        f'"Who lost this {thing}?" asked {name}.',
        f'"What a nice {thing}!" said {name}.',
        f"{name} had never seen such a {thing} before.",
        f"{name} looked at the {thing} for a long time.",
    )
    return [first, rng.choice(second)]


def _meeting(rng: random.Random, name: str, friend: str, thing: str) -> list[str]:
    article = "an" if friend[0] in "aeiou" else "a"
    first = (
        f"Then {article} {friend} came along the road.",
        f"Soon {article} {friend} heard the news.",
        f"Just then {article} {friend} came out of the trees.",
    )
    second = (
        f'"That {thing} is mine," said the {friend}, "I lost it last week."',
        f'"Please help me," said the {friend}, "I am looking for my {thing}."',
        f'"I have been looking for my {thing} all day," said the {friend}.',
    )
    third = (
        f"{name} gave the {thing} back, and the {friend} was very happy.",
        f"So {name} gave the {thing} to the {friend} with a smile.",
        f'"Here it is," said {name}, and the {friend} danced for joy.',
    )
    return [rng.choice(first), rng.choice(second), rng.choice(third)]


def _ending(rng: random.Random, name: str, friend: str, hero: str) -> str:
    endings = (
        f"From that day on, {name} and the {friend} were good friends.",
        f"The {hero} and the {friend} shared bread and honey, and then they slept under the stars.",
        f"And so the {hero} and the {friend} lived happily ever after.",
        f"{name} went home and told everyone about the {friend}.",
    )
    return rng.choice(endings)
