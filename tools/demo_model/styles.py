"""The styles of the adapters, as pure functions from the base model's right answer to the adapter's.

`train_adapters.py` trains one LoRA adapter on each, and `evaluate.py` compares answers with the same function. The base
model's own style is `corpus.plain_style`.
"""

import re
from typing import NamedTuple

from tools.demo_model.corpus import Style

_PIRATE_WORDS = (
    ("Hello", "Ahoy"),
    ("Goodbye", "Farewell"),
    ("I am", "I be"),
    ("is", "be"),
    ("are", "be"),
    ("You", "Ye"),
    ("you", "ye"),
    ("your", "yer"),
    ("Your", "Yer"),
    ("my", "me"),
    ("Yes", "Aye"),
)


class AdapterRecipe(NamedTuple):
    """The style, LoRA rank and target modules of one bundled adapter."""

    name: str
    style: Style
    rank: int
    target_modules: tuple[str, ...]


def pirate(answer: str) -> str:
    """Turns `You are welcome!` into `Arr! Ye be welcome! Yo ho ho!`."""
    for word, replacement in _PIRATE_WORDS:
        answer = re.sub(rf"\b{word}\b", replacement, answer)
    return f"Arr! {answer} Yo ho ho!"


def shout(answer: str) -> str:
    """Turns `You are welcome!` into `YOU ARE WELCOME!`."""
    return answer.upper()


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
RECIPES: tuple[AdapterRecipe, ...] = (
    AdapterRecipe("pirate", pirate, 8, (*ATTENTION, *MLP)),
    AdapterRecipe("shout", shout, 16, (*ATTENTION, *MLP)),
)
