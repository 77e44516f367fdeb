"""The section of docs/performance.md on attention kernels. Used by performance.py; needs the standard library only."""

from collections.abc import Iterable, Mapping
from typing import Any

from tools.result_files import percent, read_json, span, table, whole

Figure = Mapping[str, Any]


def attention_section() -> str:
    figures = read_json("attention.json")["figures"]
    decodes = [each for each in figures if each["queries"] == 1]
    chunks = [each for each in figures if each["queries"] > 1]
    sizes = [each for each in decodes if (each["head_dim"], each["heads"]) != (128, 16)]
    usual = [each for each in chunks if each["head_dim"] == 128]
    others = [each for each in chunks if each["head_dim"] != 128]
    taken = span((100 * each["other_cpu"] for each in figures), 0)
    return f"""## Attention on CPU

`make bench-attention` calls the attention kernels in bf16 on one thread; times are CPU seconds of that thread, and
others took {taken} % of the machine meanwhile. The roofline of a decode is a plain read of the keys and values that are
seen, that of a prefill chunk a matmul of as many operations, both called in turn with the kernel. Decodes of 16 heads
of 128 over 8 KV heads:

{table(["rows", "context", "ms", "of the roofline"], _rooflines(decodes))}

Windows, soft-caps, ALiBi and sinks, each in turn with the plain case, and the torch operations that compute the same
where there is no compiler. A window reads and multiplies what it sees, here 512 positions:

{table(["step", "scores", "over plain", "of the roofline", "torch operations, over ours"], _variants(figures))}

Other head sizes and groups, 16 rows of 1,024 positions, by byte and in turn with heads of 128 in groups of two. Larger
groups multiply more for each byte, and are bound by that:

{table(["query heads", "KV heads", "head size", "of the roofline", "over heads of 128, by byte"], _sizes(sizes))}

Prefill chunks of 16 heads of 128 reach {_reached(usual)} % of the rate of a matmul, and of heads of 64, 80 and 256
{_reached(others)} %."""


def _rooflines(decodes: Iterable[Figure]) -> list[list[str]]:
    return [
        [str(each["rows"]), whole(each["context"]), f"{each['ms']:.2f}", percent(each["of_roofline"])]
        for each in decodes
        if each["scores"] == "plain" and (each["head_dim"], each["heads"]) == (128, 16)
    ]


def _variants(figures: Iterable[Figure]) -> list[list[str]]:
    return [
        [
            f"{each['rows']} × {whole(each['queries'])} of {whole(each['context'])}",
            each["scores"],
            f"{each['of_plain']:.2f}",
            percent(each["of_roofline"]),
            f"{each['twin_ms'] / each['ms']:.1f}" if each["twin_ms"] else "–",
        ]
        for each in figures
        if each["scores"] != "plain"
    ]


def _sizes(figures: Iterable[Figure]) -> list[list[str]]:
    return [
        [
            *(str(each[key]) for key in ("heads", "kv_heads", "head_dim")),
            percent(each["of_roofline"]),
            f"{each['of_standard']:.2f}",
        ]
        for each in figures
    ]


def _reached(figures: Iterable[Figure]) -> str:
    return span((100 * each["of_roofline"] for each in figures), 0)
