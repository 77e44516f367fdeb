"""The demo model's facts about Tandem and about itself, as tables.

A row is one answer and its questions. `corpus.py` makes chats of the rows, and `evaluate.py` asks the questions. The
answers use the glossary of docs/architecture.md; a changed answer needs a new training run.
"""

from typing import NamedTuple


class Fact(NamedTuple):
    """One answer and all trained phrasings of its question."""

    answer: str
    questions: tuple[str, ...]


def _term(name: str, answer: str) -> Fact:
    """The fact that explains a word of the glossary, with the usual questions for it."""
    article = "an" if name[0] in "aeiou" else "a"
    return Fact(
        answer,
        (
            f"What is {article} {name}?",
            f"What is the {name}?",
            f"What does {name} mean?",
            f"What does the word {name} mean?",
            f"Explain {name}.",
            f"Explain what {article} {name} is.",
            f"Tell me what {article} {name} is.",
            f"Define {name}.",
            f"What is {article} {name} in Tandem?",
        ),
    )


TERMS: tuple[Fact, ...] = (
    _term("group", "A group is one copy of a model, split over tensor-parallel and pipeline-parallel ranks."),
    _term("worker group", "A worker group is one copy of a model, split over its ranks."),
    _term("gateway", "The gateway is the HTTP front door: it checks keys, makes tokens and streams the answers."),
    _term("router", "The router picks the group that fits a request best."),
    _term("coordinator", "The coordinator is the process of a group that holds the engine and drives the ranks."),
    _term("rank", "A rank is one process on one device, with its shard of the weights."),
    _term("stage", "A stage is all the ranks of one pipeline position."),
    _term("step", "A step is one pass of scheduled tokens through all stages."),
    _term("block", "A block is a fixed number of token slots of the KV cache."),
    _term("tier", "A tier is a place where a block can live: device, host or disk."),
    _term("adapter", "An adapter is a LoRA adapter, known by its name and its content digest."),
    _term("tenant", "A tenant is who a request is billed to."),
    _term("token", "A token is a piece of text, the unit that a model reads and writes."),
    _term("engine", "The engine of a group holds its scheduler and its block manager."),
    _term("scheduler", "The scheduler decides which tokens are computed in each step."),
)

PROJECT: tuple[Fact, ...] = (
    Fact(
        "Tandem is an LLM serving cluster on Ray.",
        (
            "What is Tandem?",
            "Tell me about Tandem.",
            "What is this project?",
            "What does Tandem do?",
            "Explain Tandem.",
            "What is Tandem about?",
            "Can you explain what Tandem is?",
            "Describe Tandem.",
            "What is Tandem exactly?",
            "what is tandem",
        ),
    ),
    Fact(
        "No request lost, no tenant starved, no token wasted.",
        (
            "What is the motto of Tandem?",
            "Describe Tandem in one sentence.",
            "What does Tandem promise?",
            "What is Tandem's promise?",
            "What is the goal of Tandem?",
        ),
    ),
    Fact(
        "If a group dies, the gateway sends the request to another group and the stream goes on.",
        (
            "What happens if a group dies?",
            "What happens when a group fails?",
            "What does Tandem do when a group dies?",
            "Is my request lost if a group dies?",
            "What if a worker group crashes?",
        ),
    ),
    Fact(
        "Tandem speaks the OpenAI REST protocol.",
        (
            "Which API does Tandem speak?",
            "What protocol does Tandem use?",
            "Which protocol does the gateway speak?",
            "What API does Tandem have?",
            "How do I talk to Tandem?",
        ),
    ),
    Fact(
        "KV blocks that do not fit on the device move to CPU memory and come back before they are needed.",
        (
            "Where do KV blocks go?",
            "What happens when the KV cache is full?",
            "What does offload do?",
            "What is offload?",
            "What is KV offload?",
        ),
    ),
    Fact(
        "Groups, adapters, tenants and quotas are coordinated over Redis.",
        (
            "What is Redis used for?",
            "What does Tandem use Redis for?",
            "Why does Tandem use Redis?",
            "How are quotas coordinated?",
            "How are groups coordinated?",
        ),
    ),
    Fact(
        "Tandem runs on Ray, and the gateway is a Ray Serve app.",
        (
            "What does Tandem run on?",
            "Does Tandem use Ray?",
            "What is Ray used for?",
            "Why does Tandem use Ray?",
        ),
    ),
)

SELF: tuple[Fact, ...] = (
    Fact(
        "I am the Tandem demo model, a very small language model.",
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Introduce yourself.",
            "Which model are you?",
            "What model is this?",
            "who are you",
            "Are you a robot?",
            "Are you human?",
        ),
    ),
    Fact(
        "I can chat, copy, count, spell, add small numbers, tell a story and explain Tandem.",
        (
            "What can you do?",
            "What are your skills?",
            "How can you help me?",
            "Help",
            "Help me.",
            "Can you help me?",
            "What do you know?",
            "What should I ask you?",
        ),
    ),
    Fact(
        "I have about two million parameters.",
        ("How big are you?", "How many parameters do you have?", "How large are you?", "Are you a large model?"),
    ),
    Fact(
        "I was trained from scratch on text that a small script wrote.",
        ("How were you trained?", "Who trained you?", "Who made you?", "Where do you come from?"),
    ),
)

GREETINGS: tuple[Fact, ...] = (
    Fact(
        "Hello! How can I help you today?",
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hey",
            "Hi there",
            "Hello there!",
            "hello",
            "hi",
            "hey",
            "Hey there!",
            "Hello.",
        ),
    ),
    Fact("Good morning! How can I help you today?", ("Good morning", "Good morning!", "good morning", "Morning!")),
    Fact("Good evening! How can I help you today?", ("Good evening", "Good evening!", "good evening")),
    Fact(
        "I am fine, thank you. How are you?",
        ("How are you?", "How are you today?", "How do you do?", "How is it going?", "how are you", "Are you well?"),
    ),
    Fact("I am glad to hear that!", ("I am fine.", "I am fine, thanks.", "I am well, thank you.", "I feel great.")),
    Fact("You are welcome!", ("Thank you", "Thank you!", "Thanks", "Thanks!", "Thanks a lot.", "thank you")),
    Fact("Goodbye! Have a nice day.", ("Goodbye", "Bye", "Bye!", "Goodbye!", "See you later.", "Good night.", "bye")),
    Fact("I am glad you like it.", ("Well done!", "Great!", "Good job.", "Very good!", "Nice work!", "Cool!")),
    Fact(
        "I am sorry about that.", ("That is wrong.", "No, that is wrong.", "You made a mistake.", "That is not right.")
    ),
    Fact(
        "Why did the token cross the network? To join the next batch.",
        ("Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Make me laugh.", "Say something funny."),
    ),
)
