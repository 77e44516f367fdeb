"""The demo model's tokenizer: byte-level BPE with the full byte alphabet, so that any UTF-8 text round-trips.

`train.py` builds it first, from the text of corpus.py only. Digits stay single tokens, which keeps sums and counts
regular.
"""

import json
import random
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.demo_model.corpus import END_OF_TEXT, TURN_END, TURN_START, draw_document

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0]['role'] == 'system' -%}
{{- messages[0]['content'] + '\\n\\n' -}}
{%- endif -%}
{{- '# Tools\\n<tools>\\n' -}}
{%- for tool in tools -%}
{{- (tool | tojson) + '\\n' -}}
{%- endfor -%}
{{- '</tools>\\nCall one with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- elif message['role'] == 'assistant' and message['tool_calls'] -%}
{{- '<|im_start|>assistant' -}}
{%- if message['content'] -%}
{{- '\\n' + message['content'] -}}
{%- endif -%}
{%- for tool_call in message['tool_calls'] -%}
{%- set function = tool_call['function'] if tool_call['function'] else tool_call -%}
{{- '\\n<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' -}}
{{- (function['arguments'] | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message['role'] in ['system', 'user', 'assistant'] -%}
{%- if not (tools and loop.first and message['role'] == 'system') -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endif -%}
{%- else -%}
{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
# Ordinary tokens, which decoding keeps, after the merges' ids.
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")


def build_tokenizer(seed: int, vocab_size: int, num_documents: int = 12_000) -> Tokenizer:
    """Trains the merges on `num_documents` documents drawn with `seed`, without their special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TOOL_TOKENS),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(random.Random(seed), num_documents), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    return tokenizer


def _plain_texts(rng: random.Random, num_documents: int) -> list[str]:
    """Texts of documents split at their added tokens, so that no merge contains a part of one."""
    texts = []
    added = re.compile("|".join(re.escape(token) for token in (TURN_START, TURN_END, *TOOL_TOKENS)))
    for _ in range(num_documents):
        for segment in draw_document(rng):
            texts += added.sub("\n", segment.text).split("\n")
    return texts


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja. max_length: the context in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
