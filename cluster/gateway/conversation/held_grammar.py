"""The grammar that a chat answer is held to, behind the thinking: forced tool calls, or the form that is asked for.

Marks that are special tokens of the tokenizer are written as tokens, which no other text can spell.
"""

import re
from collections.abc import Mapping
from functools import cache

from tandem.cluster.gateway.conversation.chat_output import ChatOutput
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.text.grammars import GrammarError, after, check, schema_fault
from tandem.workers.text.output.formats import SchemaNotExpressible
from tandem.workers.text.output.grammar_text import SpecialTokens, arguments_schema, quoted
from tandem.workers.text.tokenizer import ModelTokenizer

_START = re.compile(r"^start\s*:", re.MULTILINE)


def held_grammar(output: ChatOutput, text: TextServices, answer: str | None) -> str | None:
    """Returns a grammar for SamplingParams, None for free text. answer: the grammar of the form that the body asks for;
    where the model may choose to call a tool instead, either is allowed. RequestRefused for tools that cannot be
    forced."""
    if not output.is_forced and answer is None:
        return None
    special = special_tokens(text.tokenizer)
    rules = _call_rules(output, special)
    _check_calls(output, rules, text.settings.max_grammar_bytes)
    thinking, thinking_rules = _thinking(output, special)
    if output.is_forced:
        return f"start: {thinking} calls\n{thinking_rules}{rules}"
    assert answer is not None
    if not thinking and not rules:
        return answer
    body = "(calls | @body)" if rules else "@body"
    return after(f"start: {thinking} {body}\n{thinking_rules}{rules}", answer)


@cache
def special_tokens(tokenizer: ModelTokenizer) -> Mapping[str, int]:
    """Texts and ids of the special tokens."""
    pieces = ((tokenizer.piece(token_id), token_id) for token_id in tokenizer.hidden_token_ids)
    return {piece: token_id for piece, token_id in pieces if piece}


def _call_rules(output: ChatOutput, special: SpecialTokens) -> str:
    """Rules of the calls, the first of which is named `calls`; "" without tools."""
    if output.tool_format is None:
        return ""
    try:
        grammar = output.tool_format.grammar(output.tools, parallel=not output.one_call, special_tokens=special)
    except SchemaNotExpressible as error:
        raise _refused(str(error)) from None
    return _START.sub("calls:", grammar, count=1)


def _check_calls(output: ChatOutput, rules: str, most: int) -> None:
    """Refuses what is too long, or what llguidance cannot compile with any vocabulary."""
    if (size := len(rules.encode())) > most:
        raise _refused(
            f"to force a call takes a grammar of {size} bytes, above the limit of {most} (--max-grammar-bytes)"
        )
    if rules:
        try:
            check(f"start: calls\n{rules}")
        except GrammarError as error:
            raise _refused(_fault(output, str(error))) from None


def _fault(output: ChatOutput, reason: str) -> str:
    """Returns the reason with the tool whose parameters are at fault and the place in them, if one alone is."""
    for tool in output.tools:
        if found := schema_fault(arguments_schema(tool)):
            return f"the parameters of '{tool.name}': {found}"
    return reason


def _refused(message: str) -> RequestRefused:
    return RequestRefused(f"tools: {message}", code="invalid_grammar", param="tools")


def _thinking(output: ChatOutput, special: SpecialTokens) -> tuple[str, str]:
    """Returns what stands before the rest of the answer in its rule, and rules for that; ("", "") without thinking.

    A model that closes its thinking goes on in a new paragraph, which must stay possible.
    """
    form = output.reasoning_format
    if form is None or output.thinking is None:
        return "", ""
    start, end = _spelled(form.start, special), _spelled(form.end, special)
    rules = f'think: {start} thought\nparagraph: ("\\n" "\\n"?)?\n'
    if end == quoted(form.end):
        rules += f"thought: thought_text paragraph\nthought_text[suffix={end}]: /(?s:.*)/\n"
    else:
        rules += f"thought: thought_text {end} paragraph\nthought_text: /(?s:.*)/\n"
    return ("thought" if output.thinking.inside else "think?"), rules


def _spelled(mark: str, special: SpecialTokens) -> str:
    """A mark in Lark: its special tokens as tokens, what is between them as text."""
    found = [one for one in special if one in mark]
    if not found:
        return quoted(mark)
    pieces = re.split("(" + "|".join(map(re.escape, sorted(found, key=len, reverse=True))) + ")", mark)
    return " ".join(f"<[{special[one]}]>" if one in special else quoted(one) for one in pieces if one)
