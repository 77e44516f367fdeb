"""Prints the quality of the demo model: `python -m tools.demo_model.evaluate [--adapter pirate]`.

It measures exact-match accuracy per skill on held-out exercises (greedy), of tool calls with tools that the training
text has not, accuracy late in a long chat, and bits per byte on fresh documents. It is for changes of the corpus or of
the training.
"""

import argparse
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_model import corpus, skills, tool_use
from tools.demo_model.styles import RECIPES
from tools.demo_model.train import HERE, MAX_POSITIONS


class Case(NamedTuple):
    """A rendered prompt and the answer that counts as right."""

    prompt: str
    answer: str


class Examinee:
    """A loaded model, with an adapter or without, that answers prompts greedily."""

    def __init__(self, model_path: Path, adapter_path: Path | None) -> None:
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model_path, padding_side="left")
        self.model: Any = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        if adapter_path is not None:
            self.model = PeftModel.from_pretrained(self.model, adapter_path).eval()

    def answer(self, prompts: Sequence[str]) -> list[str]:
        """Answers each prompt with at most 160 tokens."""
        batch = self.tokenizer(list(prompts), return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        with torch.inference_mode():
            token_ids = self.model.generate(**batch, max_new_tokens=160, do_sample=False)
        new_ids = token_ids[:, batch["input_ids"].shape[1] :]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in new_ids]

    def nats(self, text: str) -> float:
        """The negative log-likelihood of a text at the start of a document, in nats over all its tokens."""
        token_ids = self.tokenizer(corpus.END_OF_TEXT + text, return_tensors="pt").input_ids[:, :MAX_POSITIONS]
        with torch.inference_mode():
            logits = self.model(input_ids=token_ids).logits[0]
        return float(functional.cross_entropy(logits[:-1], token_ids[0, 1:], reduction="sum"))


def make_case(exchange: skills.Exchange, style: corpus.Style, before: Sequence[skills.Exchange] = ()) -> Case:
    """Makes the case of one exchange after the turns `before`. The prompt ends where the model's answer begins."""
    history = corpus.chat_document(list(before), None, style)
    question = corpus.chat_document([exchange], None, style)[0].text
    return Case(corpus.document_text(history) + question, style(exchange.answer))


def make_tool_cases(exchange: skills.Exchange, tools: list[dict[str, Any]], style: corpus.Style) -> list[Case]:
    """Makes the case of an exchange with tools; for one with a call two, of the call and of the answer after it."""
    document = corpus.chat_document([exchange], None, style, tools)
    ends = [index for index, segment in enumerate(document) if segment.text.endswith("assistant\n")]
    rights = [*([exchange.call] if exchange.call else []), style(exchange.answer)]
    return [Case(corpus.document_text(document[: end + 1]), right) for end, right in zip(ends, rights, strict=True)]


def accuracy(examinee: Examinee, cases: Sequence[Case], batch_size: int, show_wrong: int) -> float:
    """The fraction of answers equal to the right one. Prints the first `show_wrong` wrong ones."""
    wrong: list[tuple[Case, str]] = []
    for start in range(0, len(cases), batch_size):
        part = cases[start : start + batch_size]
        answers = examinee.answer([case.prompt for case in part])
        wrong += [(case, answer) for case, answer in zip(part, answers, strict=True) if answer != case.answer]
    for case, answer in wrong[:show_wrong]:
        print(f"    wanted {case.answer!r}\n    got    {answer!r}")
    return 1.0 - len(wrong) / len(cases)


def print_skills(examinee: Examinee, style: corpus.Style, num_cases: int, show_wrong: int, seed: int) -> None:
    """Prints the accuracy per skill, without stories, which have no single right answer."""
    for skill in skills.SKILLS:
        if skill.name == "story":
            continue
        rng = random.Random(seed)
        cases = [make_case(skill.draw(rng, True), style) for _ in range(num_cases)]
        print(f"{skill.name:15} {accuracy(examinee, cases, 50, show_wrong):6.1%}", flush=True)


def print_tools(examinee: Examinee, style: corpus.Style, num_cases: int, show_wrong: int, seed: int) -> None:
    """Prints the accuracy of calls and of the answers after them, with held-out names, and of questions that no given
    tool fits."""
    rng = random.Random(seed)
    rows: dict[str, list[Case]] = {"call, 1 tool": [], "call, 3 tools": [], "after a call": [], "no tool fits": []}
    for _ in range(num_cases):
        for name, number in (("call, 1 tool", 1), ("call, 3 tools", 3)):
            tools = tool_use.draw_tools(rng, number, held_out=True)
            definitions = [tool.definition for tool in tools]
            call, answer = make_tool_cases(rng.choice(tools).ask(rng), definitions, style)
            rows[name].append(call)
        rows["after a call"].append(answer)
        rows["no tool fits"] += make_tool_cases(corpus.draw_unfit(rng, tools, held_out=True), definitions, style)
    for name, cases in rows.items():
        print(f"{name:15} {accuracy(examinee, cases, 25, show_wrong):6.1%}", flush=True)


def print_late(examinee: Examinee, style: corpus.Style, num_cases: int, show_wrong: int, seed: int) -> None:
    """Prints the accuracy of short exercises at the end of chats of about 1100 and 1700 tokens."""
    drawn = [skill for skill in skills.SKILLS if skill.name in ("fact", "addition", "copy", "greeting")]
    for num_tokens in (1100, 1700):
        rng, cases = random.Random(seed), []
        for _ in range(num_cases):
            before: list[skills.Exchange] = []
            while (
                sum(len(examinee.tokenizer(turn.question + style(turn.answer)).input_ids) + 9 for turn in before)
                < num_tokens
            ):
                before.append(corpus.draw_exchange(rng))
            cases.append(make_case(rng.choice(drawn).draw(rng, True), style, before))
        print(f"{f'after {num_tokens}':15} {accuracy(examinee, cases, 5, show_wrong):6.1%}", flush=True)


def print_bits_per_byte(examinee: Examinee, style: corpus.Style, num_documents: int, seed: int) -> None:
    """Prints bits per byte of fresh documents, for plain text and for chats."""
    rng = random.Random(seed)
    plain = [corpus.document_text(corpus.draw_plain(rng)) for _ in range(num_documents)]
    chats = [corpus.document_text(corpus.draw_chat(rng, style)) for _ in range(num_documents)]
    for name, texts in (("plain text", plain), ("chats", chats)):
        nats = sum(examinee.nats(text) for text in texts)
        num_bytes = sum(len(text.encode()) for text in texts)
        print(f"{name:15} {nats / math.log(2) / num_bytes:6.3f} bits per byte")


def main() -> None:
    """Runs all measurements with the options of the command line."""
    parser = argparse.ArgumentParser(description="Print the demo model's quality.")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--adapter", choices=[recipe.name for recipe in RECIPES])
    parser.add_argument("--adapters", type=Path, default=HERE / "adapters")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--show-wrong", type=int, default=0)
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    style = next((recipe.style for recipe in RECIPES if recipe.name == options.adapter), corpus.plain_style)
    examinee = Examinee(options.model, options.adapters / options.adapter if options.adapter else None)
    print_skills(examinee, style, options.cases, options.show_wrong, options.seed)
    print_tools(examinee, style, options.cases, options.show_wrong, options.seed)
    print_late(examinee, style, max(10, options.cases // 5), options.show_wrong, options.seed)
    print_bits_per_byte(examinee, style, options.cases, options.seed)


if __name__ == "__main__":
    main()
