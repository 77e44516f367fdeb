"""The official JSON-Schema-Test-Suite (draft 2020-12), where its folder lies beside the repository: a schema is refused
by name, or its grammar accepts no instance that is not valid. What `make chaos` prints is how much is accepted."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tandem.workers.structured.grammar_store import GrammarRefused, GrammarStore
from tandem.workers.text.grammars import GrammarError, check, json_schema
from tandem.workers.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "configs" / "demo" / "model"
SUITE = ROOT.parent / "shared" / "data" / "json_schema" / "test_suite_draft2020-12"
VOCAB = 768


@pytest.mark.chaos
@pytest.mark.skipif(not SUITE.is_dir(), reason="the suite is not beside the repository")
def test_no_invalid_instance_is_a_text_of_the_grammar() -> None:
    store, tokenizer = GrammarStore(DEMO, VOCAB, ()), load_tokenizer(DEMO)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for file in sorted(SUITE.glob("*.json")):
        for group in json.loads(file.read_text()):
            try:
                grammar = json_schema(group["schema"])
                check(grammar)
                store.compile("now", grammar)
            except (GrammarError, GrammarRefused) as refusal:
                counts["schemas refused" if str(refusal).strip() else "refused without a word"] += 1
                continue
            counts["schemas compiled"] += 1
            start = store.start("now")
            assert start is not None
            for test in group["tests"]:
                ids = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False)
                matcher = start.deep_copy()
                is_text = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
                kind = "valid" if test["valid"] else "invalid"
                counts[f"{kind} {'accepted' if is_text else 'not accepted'}"] += 1
                if is_text and not test["valid"]:
                    wrong.append(f"{file.name}: {group['description']}: {test['description']}")
    print(dict(counts))
    assert not wrong, wrong
    assert not counts["refused without a word"]
