"""Words for the demo corpus: lists of real words and a generator of invented ones.

UNSEEN_WORDS and, by checksum, one invented word in ten are held out: only evaluation draws them.
"""

import random
import zlib

_REAL_WORDS = """
    the a an and or but of to in on at with from for by as is are was it he she they we you my your his her our this
    cat dog fox bird fish horse mouse bear wolf lion tiger rabbit duck sheep goat cow pig frog snake whale eagle owl
    bee apple bread cake milk water tea coffee rice soup salt sugar honey cheese lemon orange banana grape carrot
    potato red green blue yellow black white brown purple pink grey silver gold dark light bright small big little
    large tall short long old new young fast slow warm cold hot dry wet soft hard sweet happy sad kind brave quiet
    loud clever house home door window table chair bed lamp book page letter paper pencil picture music song story
    garden tree leaf flower grass river lake sea ocean mountain hill forest road bridge city village castle island
    beach cloud rain snow wind storm sun moon star sky night day morning evening winter summer spring autumn week
    month year hour minute man woman child boy girl friend king queen teacher doctor farmer sailor driver mother
    father brother baby run walk jump swim fly sing dance read write talk listen look see hear think know learn play
    work sleep eat drink give take make find keep open close start stop come go stay turn move help build draw paint
    wash cook carry bring computer machine server network memory token model cluster engine worker request answer
    question language number train car boat ship plane bicycle wheel clock key box bag hat coat shoe ring ball toy
    cup plate knife spoon bottle quick jumps over lazy hello world love time place name word line point world people
    hand head eye ear nose mouth yes no not very well good bad nice great more less many few all some every each one
    two three four five six seven eight nine ten first second last next again always never often soon here there
    where when what who why how rocket pepper window butter winter yellow pocket basket market school office kitchen
    station window museum
"""
_TEXT_WORDS = """
    after ago along and animals around asked back became behind came danced day days every everyone ever evening
    found friends from gave golden good grass happily happy heard here home house joy known liked lived looked lost
    loved magic mine morning named near news once please road said seen shared singing sky slept small smile stars
    stone sunny that their then time told trees under upon walked warm week were wooden would adapter answers are
    billed blocks cache checks computed coordinated copy decides demo device digest disk dies drives each fixed fits
    front gateway goes group groups holds host keys known language live lives makes memory moves needed number one
    pass picks pipeline place position process protocol quotas ranks router scheduled scheduler sends serving shard
    slots speaks split stage stages step stream streams tenant tenants tier tokens Tandem Redis Ray LLM KV HTTP LoRA
    CPU OpenAI API Hello Once Monday Friday January May The What This welcome thank thanks sorry today help can do
    could chat count spell add explain Please
"""
_UNSEEN_WORDS = """
    pumpkin thunder ladder candle hammer blanket turtle monkey violin garage planet desert tomato pillow mirror
    jacket finger sister holiday balloon cactus dragon wizard pirate helmet lantern velvet copper
"""
_NAMES = """
    Ada Alan Alice Amir Anna Ben Bob Carla Chen Clara David Dora Elena Emil Emma Eva Felix Finn Grace Hana Hugo Ida
    Igor Ivan Jack Jane Joan John Jonas Julia Karl Kate Lena Leo Lily Lucas Lucy Maria Mark Mary Maya Mia Mila Nina
    Noah Nora Olga Oscar Otto Paul Peter Rosa Ruth Sam Sara Sofia Tim Tom Vera Zoe
"""
REAL_WORDS: tuple[str, ...] = tuple(_REAL_WORDS.split())
UNSEEN_WORDS: tuple[str, ...] = tuple(_UNSEEN_WORDS.split())
TEXT_WORDS: tuple[str, ...] = tuple(_TEXT_WORDS.split())
NAMES: tuple[str, ...] = tuple(_NAMES.split())
_ONSETS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr pl sh sl st th tr ch qu y x"
_VOWELS = "a e i o u a e i o u ai ea ee oa oo ou ie"
_CODAS = "n r s t l m d k p ck ll ng nt st rd x"  # or none, in two syllables of five
_UNUSUAL = (
    "café",
    "naïve",
    "über",
    "señor",
    "Ωmega",
    "東京",
    "こんにちは",
    "привет",
    "🙂",
    "🚀",
    "⭐",
    "→",
    "€5",
    "½",
    "10%",
    "C++",
    "x=1",
    "#42",
)


def is_held_out(invented: str) -> bool:
    """Returns True for invented words that are held out of the training text: one in ten."""
    return zlib.crc32(invented.encode()) % 10 == 0


def invented_word(rng: random.Random) -> str:
    """Draws a pronounceable word of one to four syllables."""
    syllables = rng.choices((1, 2, 3, 4), weights=(3, 5, 3, 1))[0]
    return "".join(_syllable(rng) for _ in range(syllables))


def _syllable(rng: random.Random) -> str:
    coda = rng.choice(_CODAS.split()) if rng.random() < 0.6 else ""
    return rng.choice(_ONSETS.split()) + rng.choice(_VOWELS.split()) + coda


def draw_word(rng: random.Random, *, held_out: bool = False, invented_share: float = 0.5) -> str:
    """Draws a lower-case word, from the held-out words or from the others. invented_share: of invented ones."""
    if rng.random() >= invented_share:
        return rng.choice(UNSEEN_WORDS if held_out else REAL_WORDS)
    while True:
        word = invented_word(rng)
        if len(word) > 1 and is_held_out(word) == held_out:
            return word


def draw_phrase(rng: random.Random, *, held_out: bool = False, max_words: int = 10) -> str:
    """Draws a phrase of one to `max_words` words. With held_out, 30 % of them are held-out words."""
    phrase = [
        _dressed(rng, draw_word(rng, held_out=held_out and rng.random() < 0.3, invented_share=0.3))
        for _ in range(rng.randint(1, max_words))
    ]
    if rng.random() < 0.4:
        phrase[0] = phrase[0][0].upper() + phrase[0][1:]
    if rng.random() < 0.12:
        phrase.insert(rng.randint(0, len(phrase)), rng.choice(_UNUSUAL))
    text = " ".join(phrase) + rng.choice(("", "", "", ".", "!", "?"))
    return f'"{text}"' if rng.random() < 0.04 else text


def _dressed(rng: random.Random, word: str) -> str:
    """Varies a word: mostly the word itself or a word of stories and facts, sometimes a capital, a comma, a number or a
    name."""
    dice = rng.random()
    if dice < 0.55:
        return word
    if dice < 0.80:
        return rng.choice(TEXT_WORDS)
    if dice < 0.85:
        return word.capitalize()
    if dice < 0.87:
        return word.upper()
    if dice < 0.91:
        return word + ","
    if dice < 0.96:
        return str(rng.randint(0, 999))
    return rng.choice(NAMES)
