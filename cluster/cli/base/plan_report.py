"""The text that `tandem plan` prints, made from the data that `--json` prints. Pure functions."""

from typing import Any

from tandem.cluster.cli.base.terminal import table
from tandem.workers.planning.planner import CONVERSATION_TOKENS, Memory, gib


def report(found: dict[str, Any]) -> str:
    """The whole text. Every line ends with a line feed."""
    plan, quantization = found["plan"], found["quantization"]
    weights = found["dtype"] if quantization is None else f"{quantization} (the rest in {found['dtype']})"
    lines = [
        f"{found['model']}: {found['architecture']}, {found['num_layers']} layers, "
        f"{found['num_parameters'] / 1e6:,.1f} M parameters, weights in {weights}, KV in {found['kv_dtype']}",
        _checkpoint_line(found["checkpoint"]),
        _memory_line(found["memory"], plan),
        f"steps of up to {found['max_num_seqs']:,} sequences and {found['max_num_batched_tokens']:,} tokens",
        "",
        *table(_rank_rows(plan, found["lora"]["max_lora_rank"])),
        *_draft(plan),
        "",
        *table(_tier_rows(plan)),
        *_windows(plan),
        "",
        *_adapters(plan, found["lora"]),
        *_verdict(plan),
        *_streaming(plan),
        *_proposal(found),
        *([found["hint"]] if found["hint"] else []),
    ]
    return "\n".join(lines) + "\n"


def _checkpoint_line(checkpoint: dict[str, Any] | None) -> str:
    if checkpoint is None:
        return "checkpoint: no .safetensors files here; sizes are config.json's"
    kinds = ", ".join(f"{gib(size)} of {dtype}" for dtype, size in sorted(checkpoint["bytes_by_dtype"].items()))
    line = f"checkpoint: {gib(checkpoint['total_bytes'])} in {checkpoint['num_files']} file(s): {kinds}"
    if checkpoint["quantized_with"] is not None:
        line += f", quantized with {checkpoint['quantized_with']}"
    elif checkpoint["num_elements"] != checkpoint["num_parameters"]:
        line += (
            f"; its tensors hold {checkpoint['num_elements']:,} values, config.json makes it "
            f"{checkpoint['num_parameters']:,}"
        )
    return line


def _memory_line(memory: dict[str, Any], plan: dict[str, Any]) -> str:
    ranks = plan["tp_size"] * plan["pp_size"]
    shared = f"of a machine for all {ranks} rank(s)" if Memory(**memory).is_shared else "of each GPU"
    return (
        f"TP {plan['tp_size']} x PP {plan['pp_size']}, {memory['device']}: {gib(memory['device_bytes'])} {shared}, "
        f"context {plan['max_model_len']:,} tokens"
    )


def _rank_rows(plan: dict[str, Any], lora_rank: int) -> list[list[str]]:
    """A title row, and a row for one rank of each stage. lora_rank: the rank of the adapter whose size is shown."""
    rows = [
        [
            "stage", "ranks", "layers", "weights/rank", "on device", "in host", "activations", "graphs", "KV/token",
            f"LoRA r{lora_rank}", "KV room",
        ]
    ]  # fmt: skip
    for stage in plan["stages"]:
        rows.append(
            [
                str(stage["stage"]),
                str(plan["tp_size"]),
                str(stage["num_layers"]),
                *(gib(stage[key]) for key in ("weight_bytes", "device_weight_bytes", "host_weight_bytes")),
                *(gib(stage[key]) for key in ("activation_bytes", "graph_bytes")),
                *(gib(stage[key]) for key in ("kv_bytes_per_token", "adapter_bytes")),
                gib(stage["kv_budget_bytes"]) if stage["kv_budget_bytes"] >= 0 else "none",
            ]
        )
    return rows


def _draft(plan: dict[str, Any]) -> list[str]:
    """Returns what a draft model takes, which is whole on one rank; nothing without one."""
    stage = plan["stages"][-1]
    if not stage["draft_bytes"]:
        return []
    weights, kv = gib(stage["draft_bytes"]), gib(stage["draft_bytes_per_token"])
    return [f"The draft is on the first rank of stage {stage['stage']}: {weights} of weights, and {kv} of its KV"]


def _tier_rows(plan: dict[str, Any]) -> list[list[str]]:
    """A title row, and a row per tier. Short conversations are left out where the context is not longer."""
    lengths = {f"conversations of {plan['max_model_len']:,}": "full_conversations"}
    if plan["max_model_len"] > CONVERSATION_TOKENS:
        lengths[f"of {CONVERSATION_TOKENS:,}"] = "short_conversations"
    rows = [["KV tier", "size", "tokens", *lengths]]
    for tier in plan["tiers"]:
        numbers = (tier[key] for key in ("tokens", *lengths.values()))
        rows.append([tier["tier"], gib(tier["size_bytes"]), *(f"{number:,}" for number in numbers)])
    return rows


def _windows(plan: dict[str, Any]) -> list[str]:
    """Return what layers with a window save on the device; nothing for a model without any."""
    windows = [window for window in plan["kv_windows"] if window is not None]
    if not windows:
        return []
    sizes, count = ", ".join(map(str, sorted(set(windows)))), len(plan["kv_windows"])
    return [
        f"Layers with a window of {sizes} tokens give back what it has passed (KV groups: {count}, {len(windows)} of "
        f"them with a window).",
        f"With --disable-hybrid-kv-cache-manager the device holds {plan['kv_tokens_kept_whole']:,} tokens.",
    ]


def _adapters(plan: dict[str, Any], lora: dict[str, Any]) -> list[str]:
    """Return a table of the memory for adapters on one rank of each stage, device and host, with --enable-lora."""
    if not lora["enable_lora"]:
        return []
    rows = [
        [
            f"adapters, to r{lora['max_lora_rank']}", "pages/rank", "on device", "largest copy",
            f"{lora['max_cpu_loras']} copies in host",
        ]
    ]  # fmt: skip
    for stage in plan["stages"]:
        sizes = (stage[f"adapter_{key}_bytes"] for key in ("device", "copy", "host"))
        rows.append([f"stage {stage['stage']}", f"{stage['adapter_pages']:,}", *map(gib, sizes)])
    return [*table(rows), ""]


def _verdict(plan: dict[str, Any]) -> list[str]:
    notes = [f"  {note}" for note in plan["notes"]]
    if plan["fits"]:
        return ["It fits, but:", *notes] if notes else ["It fits."]
    return ["It does not fit:", *(f"  {problem['flag']}: {problem['message']}" for problem in plan["problems"])]


def _streaming(plan: dict[str, Any]) -> list[str]:
    """The bytes that each step copies from host memory, for stages with streamed layers."""
    return [
        f"Stage {stage['stage']}: {stage['streamed_layers']} of {stage['num_layers']} layers stream from host memory; "
        f"a rank copies {gib(stage['host_weight_bytes'])} in every step."
        for stage in plan["stages"]
        if stage["streamed_layers"]
    ]


def _proposal(found: dict[str, Any]) -> list[str]:
    """The best TP x PP of --ranks, after a table of all when there are several."""
    ranks, best = found["num_ranks"], found["best"]
    if not found["cuts"]:
        return [f"No TP x PP of {ranks} ranks divides this model."]
    lines = []
    if len(found["cuts"]) > 1:
        rows = [[f"{ranks} ranks as", "weights/rank", "layers streamed", "KV tokens", "fits"]]
        for layout in found["cuts"]:
            most = max(stage["weight_bytes"] for stage in layout["stages"])
            streamed = sum(stage["streamed_layers"] for stage in layout["stages"])
            tokens = layout["tiers"][0]["tokens"]
            name = f"-tp {layout['tp_size']} -pp {layout['pp_size']}"
            rows.append([name, gib(most), str(streamed), f"{tokens:,}", "yes" if layout["fits"] else "no"])
        lines = ["", *table(rows)]
    if best is None:
        more = "more memory" if Memory(**found["memory"]).is_shared else "more --ranks"
        return [*lines, f"No TP x PP of {ranks} rank(s) fits: {more}, or a shorter --max-model-len."]
    return [*lines, f"Best for {ranks} rank(s): -tp {best['tp_size']} -pp {best['pp_size']}."]
