"""`tandem plan`: what it says of a model before loading it, against what a rank finds when it loads."""

import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from tandem.cluster.cli.base.planned_model import memory_of
from tandem.cluster.cli.main import run_verb
from tandem.cluster.deploy import devices
from tandem.cluster.deploy.preflight import cpu_weight_bytes
from tandem.configs.errors import SettingsError
from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    ParallelSettings,
)
from tandem.offload.kv.disk_io import file_bytes
from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.planning import sizes
from tandem.workers.planning.budget import ATTENTION_BYTES, GIB, MIB, KVNeeds, cpu_blocks
from tandem.workers.planning.graph_room import graph_bytes
from tandem.workers.planning.planner import GroupPlan, Memory, best_of, gib, layouts, least_bytes, plan_group
from tandem.workers.planning.stored_model import open_checkpoint
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.loading import load_single
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tests.support.verbs import invoked

CONTEXT = 256
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["qwen2"], tmp_path_factory.mktemp("models"))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


def settings_for(
    folder: Path,
    tp: int = 1,
    pp: int = 1,
    offload_gib: float = 0.0,
    lora: LoraSettings = LoraSettings(),
    **cache: Any,
) -> EngineSettings:
    return EngineSettings(
        lora=lora,
        model=ModelSettings(model=str(folder), dtype="bfloat16"),
        parallel=ParallelSettings(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        cache=CacheSettings(**cache),
        device=DeviceSettings(device="cpu", cpu_threads=1, cpu_offload_gib=offload_gib),
    )


def plan_on_gpu(folder: Path, gib: float, context: int = 32768, **settings: Any) -> GroupPlan:
    memory = Memory("cuda", int(gib * GIB))
    return plan_group(settings_for(folder, **settings), load_spec(folder), memory, "bfloat16", "bfloat16", context)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: what it prints, and its exit status."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setattr(sys, "argv", ["tandem", "plan", *arguments])
        with pytest.raises(SystemExit) as end:
            run_verb()
    assert isinstance(end.value.code, int | None)
    return subprocess.CompletedProcess(arguments, end.value.code or 0, out.getvalue(), err.getvalue())


def run_as_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem.cluster.cli.main", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("offload_gib", [0.0, 1.0])
def test_a_cpu_plan_is_what_a_rank_finds(folder: Path, offload_gib: float) -> None:
    """The pool, the weights, the layers that stream. To so small a model the machine's memory makes no difference. A
    plan, which may be for another machine, assumes that matrices are packed, which a CPU without AVX512 does not do."""
    settings = settings_for(folder, offload_gib=offload_gib)
    plan = plan_group(settings, load_spec(folder), Memory("cpu", 8 * GIB), "bfloat16", "bfloat16", CONTEXT)
    loaded = load_single(settings)
    [stage] = plan.stages
    facts = loaded.facts
    unpacked = 0 if CpuPlatform().packs(torch.bfloat16) else stage.weights.packed_table_bytes
    assert plan.device_tokens == facts.num_blocks * 16
    assert stage.weights.total_bytes - unpacked == facts.weight_bytes
    assert stage.kv_token_bytes * 16 == facts.block_bytes
    assert len(stage.placement.streamed) == facts.streamed_layers
    loaded.decoder.close()


def test_a_plan_of_quantized_weights_is_what_a_rank_finds(folder: Path) -> None:
    settings = settings_for(folder)
    settings = replace(settings, model=replace(settings.model, quantization="int8"))
    spec = load_spec(folder, quantization="int8")
    plan = plan_group(settings, spec, Memory("cpu", 8 * GIB), "bfloat16", "bfloat16", CONTEXT)
    loaded = load_single(settings)
    [stage] = plan.stages
    assert stage.weights.total_bytes == loaded.facts.weight_bytes
    assert cpu_weight_bytes(spec, "bfloat16") == loaded.facts.weight_bytes
    loaded.decoder.close()


def test_a_plan_with_windows_is_what_a_rank_finds(tmp_path: Path) -> None:
    """Blocks of one of two groups, as many as the contexts of all rows hold at once."""
    folder = save_tiny_model(BY_NAME["gemma3"], tmp_path)
    settings = settings_for(folder)
    settings = replace(settings, scheduler=replace(settings.scheduler, max_num_batched_tokens=64))
    plan = plan_group(settings, load_spec(folder), Memory("cpu", 8 * GIB), "bfloat16", "bfloat16", CONTEXT)
    loaded = load_single(settings)
    [stage], facts = plan.stages, loaded.facts
    assert plan.kv_groups.windows == (None, 24) and facts.num_kv_groups == 2
    assert 2 * stage.kv_token_bytes == stage.kv_layers_bytes
    assert stage.kv_token_bytes * 16 * facts.num_blocks == facts.block_bytes * facts.num_blocks
    assert plan.tiers[0].size_bytes == facts.block_bytes * facts.num_blocks
    assert plan.device_tokens > plan.tokens_kept_whole == facts.num_blocks // 2 * 16
    loaded.decoder.close()
    shown = run(str(folder), "--device", "cpu").stdout
    assert "a window of 24 tokens" in shown and "With --disable-hybrid-kv-cache-manager the device holds" in shown
    whole = replace(settings, cache=replace(settings.cache, disable_hybrid_kv_cache_manager=True))
    plan = plan_group(whole, load_spec(folder), Memory("cpu", 8 * GIB), "bfloat16", "bfloat16", CONTEXT)
    assert plan.kv_groups.windows == (None,) and plan.device_tokens == plan.tokens_kept_whole
    one = replace(settings, cache=replace(settings.cache, num_blocks=1))
    plan = plan_group(one, load_spec(folder), Memory("cpu", 8 * GIB), "bfloat16", "bfloat16", CONTEXT)
    assert [problem.flag for problem in plan.problems] == ["--num-gpu-blocks-override"]
    with pytest.raises(SettingsError, match="1 hold no token: each of the model's 2 groups"):
        load_single(one)


def test_the_command_takes_quantization_on_every_device(folder: Path) -> None:
    shown = run(str(folder), "--device", "cpu", "--quantization", "w8a8")
    assert shown.returncode == 0 and "weights in w8a8 (the rest in float32)" in shown.stdout, shown.stderr
    on_gpu = run(str(folder), "--device", "cuda", "--device-memory", "80", "-q", "int8")
    assert on_gpu.returncode == 0 and "weights in int8" in on_gpu.stdout, on_gpu.stderr


def test_the_command_says_what_is_faster_on_this_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.configs.environment.lacks_bf16_products", lambda: True)
    given, said = (str(folder), "--device", "cpu", "--dtype", "bfloat16"), "w8a8 is two to four times as fast"
    assert said in run(*given).stdout
    assert said not in run(*given, "-q", "int4").stdout and said not in run(str(folder), "--device", "cpu").stdout


@pytest.mark.parametrize("asked", [{}, {"memory_bytes": 2**18}], ids=["by --max-loras", "by --lora-memory-bytes"])
def test_room_for_adapters_is_what_a_rank_finds(folder: Path, asked: dict[str, int]) -> None:
    settings = settings_for(folder, lora=LoraSettings(enable_lora=True, max_loras=3, **asked))
    plan = plan_group(settings, load_spec(folder), Memory("cpu", 8 * GIB), "bfloat16", "bfloat16", CONTEXT)
    loaded = load_single(settings)
    [stage] = plan.stages
    room = stage.adapter_room
    assert (room.num_pages, room.page_bytes) == (loaded.facts.adapter_pages, loaded.facts.adapter_page_bytes)
    assert plan.device_tokens == loaded.facts.num_blocks * 16
    loaded.decoder.close()


def test_a_cpu_pool_is_sized_as_ranks_size_it(folder: Path) -> None:
    """When memory is short: 40 % of what the weights of all ranks leave, shared by the ranks."""
    spec, settings = load_spec(folder), settings_for(folder, tp=2)
    plan = plan_group(settings, spec, Memory("cpu", 2 * 2**20), "bfloat16", "bfloat16", CONTEXT)
    [stage] = plan.stages
    left = 2 * 2**20 - 2 * stage.weights.total_bytes
    needs = KVNeeds(stage.kv_token_bytes * 16, 16, CONTEXT, settings.scheduler.max_num_seqs)
    assert plan.device_tokens == 16 * cpu_blocks(settings.cache, needs, left, 2)


@pytest.mark.parametrize("flag", ["num_blocks", "kv_cache_memory_bytes"])
def test_a_cpu_pool_that_a_flag_sizes_is_bound_by_memory_alone(folder: Path, flag: str) -> None:
    """Neither by 40 % of it nor by the contexts of all rows, of which there is one."""
    spec, settings = load_spec(folder), settings_for(folder)
    settings = replace(settings, scheduler=replace(settings.scheduler, max_num_seqs=1))
    [stage] = plan_group(settings, spec, Memory("cpu", 8 * GIB), "bfloat16", "bfloat16", CONTEXT).stages
    block = 16 * stage.kv_token_bytes
    needs, num_blocks = KVNeeds(block, 16, CONTEXT, 1), 40
    assert needs.most_blocks < num_blocks
    size = num_blocks if flag == "num_blocks" else num_blocks * block
    settings = replace(settings, cache=replace(settings.cache, **{flag: size}))

    def plan(left: int) -> GroupPlan:
        memory = Memory("cpu", stage.weights.total_bytes + left)
        return plan_group(settings, spec, memory, "bfloat16", "bfloat16", CONTEXT)

    left = num_blocks * block
    assert plan(left).fits and plan(left).device_tokens == 16 * num_blocks
    assert cpu_blocks(settings.cache, needs, left, 1) == num_blocks
    [problem] = plan(left - 1).problems
    with pytest.raises(SettingsError) as refused:
        cpu_blocks(settings.cache, needs, left - 1, 1)
    assert problem.flag == refused.value.flag


def test_a_gpu_plan_adds_up(large: Path) -> None:
    plan = plan_on_gpu(large, 80, tp=4, pp=2)
    assert plan.fits and len(plan.stages) == 2
    for stage in plan.stages:
        used = stage.device_weight_bytes + stage.activation_bytes + stage.graph_bytes + stage.kv_budget_bytes
        assert used == int(0.9 * 80 * GIB)
        assert stage.graph_bytes > ATTENTION_BYTES, "of captures, and the scratch block"
        assert not stage.placement.streamed
    assert plan.device_tokens == min(s.kv_budget_bytes // (16 * s.kv_token_bytes) for s in plan.stages) * 16
    assert plan.tiers[0].full_conversations == plan.device_tokens // 32768
    assert plan.tiers[0].short_conversations == plan.device_tokens // 2048


def test_a_gpu_that_replays_steps_keeps_room_for_them(large: Path) -> None:
    spec, settings = load_spec(large), settings_for(large)
    (stage,) = plan_group(settings, spec, Memory("cuda", 640 * GIB), "bfloat16", "bfloat16", 32768).stages
    of_graphs = graph_bytes(spec, Mesh(), settings, 2, 32768)
    assert stage.graph_bytes == of_graphs + 16 * stage.kv_token_bytes
    assert ATTENTION_BYTES + 60 * MIB < of_graphs < 2 * GIB
    (stage,) = plan_group(settings, spec, Memory("cpu", 640 * GIB), "bfloat16", "bfloat16", 32768).stages
    assert stage.graph_bytes == 0


def test_tiers_count_the_kv_of_all_ranks(large: Path) -> None:
    memory = Memory("cuda", 80 * GIB, host_tier_bytes=64 * GIB, disk_tier_bytes=640 * GIB)
    plan = plan_group(settings_for(large, tp=8), load_spec(large), memory, "bfloat16", "bfloat16", 32768)
    token_bytes = 2 * 80 * 8 * 128 * 2
    assert plan.tiers[1].tokens == 64 * GIB // (16 * token_bytes) * 16
    assert plan.tiers[2].tokens == 640 * GIB // (8 * file_bytes(2 * token_bytes)) * 16
    wide = plan_group(settings_for(large, tp=16), load_spec(large), memory, "bfloat16", "bfloat16", 32768)
    assert wide.tiers[1].tokens == pytest.approx(plan.tiers[1].tokens / 2, abs=16), (
        "eight KV heads on sixteen ranks are held twice"
    )


def test_quantized_kv_holds_nearly_twice_as_much(large: Path) -> None:
    spec, memory = load_spec(large), Memory("cuda", 80 * GIB)
    plain, fp8 = (
        plan_group(settings_for(large, tp=8), spec, memory, "bfloat16", kind, 4096).device_tokens
        for kind in ("bfloat16", "fp8_e4m3")
    )
    assert fp8 / plain == pytest.approx(256 / (128 + 4), rel=1e-3)


def test_a_model_larger_than_the_device_streams_what_it_must(large: Path) -> None:
    plan = plan_on_gpu(large, 80)
    [stage] = plan.stages
    assert plan.fits and 0 < len(stage.placement.streamed) < 80
    assert stage.kv_budget_bytes >= 32768 * stage.kv_token_bytes
    assert stage.kv_budget_bytes - 32768 * stage.kv_token_bytes < stage.weights.layer_bytes
    assert len(plan_on_gpu(large, 80, offload_gib=100).stages[0].placement.streamed) > len(stage.placement.streamed)


@pytest.mark.parametrize(
    ("gib", "context", "cache", "flag", "words"),
    [
        (4, 32768, {}, "--tensor-parallel-size", "with 80 of 80 layers in host memory"),
        (12, 131072, {}, "--max-model-len", "--max-model-len 9584 would do"),
        (80, 4096, {"kv_cache_memory_bytes": 70 * GIB}, "--kv-cache-memory-bytes", "70 GiB of KV on a rank"),
        (80, 4096, {"num_blocks": 10**6}, "--num-gpu-blocks-override", "are left for it"),
    ],
)
def test_what_does_not_fit_names_the_flag(
    large: Path, gib: float, context: int, cache: dict[str, Any], flag: str, words: str
) -> None:
    plan = plan_on_gpu(large, gib, context, **cache)
    assert not plan.fits
    assert plan.problems[0].flag == flag
    assert words in plan.problems[0].message


def test_host_memory_counts_where_it_is_known(large: Path) -> None:
    memory = Memory("cuda", 80 * GIB, host_bytes=64 * GIB)
    plan = plan_group(settings_for(large), load_spec(large), memory, "bfloat16", "bfloat16", 32768)
    assert [problem.flag for problem in plan.problems] == ["--cpu-offload-gb"]


def test_on_cpu_the_host_tier_shares_the_machine(folder: Path) -> None:
    spec, settings = load_spec(folder), settings_for(folder)
    small, large = (
        plan_group(settings, spec, Memory("cpu", GIB, host_tier_bytes=size), "bfloat16", "bfloat16", CONTEXT)
        for size in (GIB // 2, GIB)
    )
    assert small.fits
    assert [problem.flag for problem in large.problems] == ["--kv-offloading-size"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_adapters_in_host_memory_count(large: Path, device: Literal["cpu", "cuda"]) -> None:
    """With room for one, not for 600 of them."""
    one, many = (
        settings_for(large, lora=LoraSettings(enable_lora=True, max_loras=1, max_cpu_loras=count), num_blocks=2048)
        for count in (1, 600)
    )
    memory = Memory(device, 160 * GIB, host_bytes=200 * GIB)
    plans = [plan_group(s, load_spec(large), memory, "bfloat16", "bfloat16", 32768) for s in (one, many)]
    copies = [plan.stages[0].adapter_room.host_bytes for plan in plans]
    assert copies[1] == 600 * copies[0] > 200 * GIB
    assert [[problem.flag for problem in plan.problems] for plan in plans] == [[], ["--max-cpu-loras"]]


def test_the_best_layout_needs_no_streaming_and_stays_in_a_node(large: Path) -> None:
    spec: ArchSpec = load_spec(large)
    assert layouts(spec, 8) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert layouts(spec, 6) == [(2, 3), (1, 6)]
    assert layouts(spec, 7) == [(1, 7)]

    made = sizes._table_of.cache_info().misses

    def best(num_ranks: int, gib: float) -> tuple[int, int] | None:
        found = best_of([plan_on_gpu(large, gib, tp=tp, pp=pp) for tp, pp in layouts(spec, num_ranks)])
        return None if found is None else (found.tp_size, found.pp_size)

    assert best(8, 80) == (8, 1)
    assert best(16, 80) == (8, 2)
    assert best(6, 80) == (2, 3)
    assert best(1, 3) is None
    assert sizes._table_of.cache_info().misses <= made + 1, "a table of 61 layers of 256 experts takes a second"


def test_what_must_fit_is_what_was_asked_for(large: Path) -> None:
    spec = load_spec(large)

    def least(**cache: Any) -> int:
        return least_bytes(settings_for(large, **cache), spec, Mesh(), "bfloat16", "bfloat16", 1000)

    token = 2 * 80 * 8 * 128 * 2
    assert least(kv_cache_memory_bytes=1) + 63 * 16 * token - 1 == least()
    assert least(num_blocks=100) - least() == (100 - 63) * 16 * token


def test_headers_tell_what_a_checkpoint_holds(folder: Path, tmp_path: Path) -> None:
    spec = load_spec(folder)
    tensors = open_checkpoint(folder, spec).tensors
    assert sum(tensor.nbytes for tensor in tensors) == 4 * parameters_of(spec).num_elements
    for wrong in (b"\xff" * 20, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a": {}}'):
        (tmp_path / "model.safetensors").write_bytes(wrong)
        with pytest.raises(SettingsError, match="is not a safetensors file"):
            open_checkpoint(tmp_path, spec)


def test_a_checkpoint_that_ranks_could_not_load_fits_nowhere(folder: Path, tmp_path: Path) -> None:
    """Refused with the words of loading, from the headers alone."""
    shutil.copytree(folder, broken := tmp_path / "broken")
    fewer, wider = {"num_hidden_layers": 1}, {"intermediate_size": 8}
    with pytest.raises(
        SettingsError, match=r"^--hf-overrides: .* does not belong to the model; config.json alone fits"
    ):
        open_checkpoint(broken, load_spec(broken, fewer), fewer)
    with pytest.raises(
        SettingsError, match=r", config.json with --hf-overrides makes it \[.*8.*; config.json alone fits"
    ):
        open_checkpoint(broken, load_spec(broken, wider), wider)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(SettingsError, match=r"broken: tensor model.norm.weight is in none of its safetensors files"):
        planned(broken)
    with pytest.raises(SettingsError, match=r"^MODEL: .*broken.* does not belong to the model$"):
        open_checkpoint(broken, load_spec(broken, fewer), fewer)
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(SettingsError, match=r"pytorch_model.bin: such files are pickles, which can run code"):
        planned(broken)
    (broken / "pytorch_model.bin").rename(broken / "model-q4.gguf")
    with pytest.raises(SettingsError, match=r"model-q4.gguf is not a GGUF file that is read: it does not begin as one"):
        planned(broken)


def planned(folder: Path) -> None:
    """Runs the verb in this process."""
    found = invoked(["plan", str(folder), "--device", "cpu"])
    if found.exception is not None:
        raise found.exception


def test_the_command_prints_tables_or_json(large: Path) -> None:
    shown = run_as_process(
        str(large), "--device", "cuda", "--device-memory", "80", "--ranks", "8", "-tp", "8", "--max-model-len", "32K"
    )
    assert shown.returncode == 0, shown.stderr
    for words in ("70,553.7 M parameters", "TP 8 x PP 1", "conversations of 32,768", "It fits.", "-tp 8 -pp 1."):
        assert words in shown.stdout
    asked = (
        "--device",
        "cuda",
        "--device-memory",
        "80",
        "--kv-offloading-size",
        "16",
        "--kv-disk-size",
        "100",
        "--json",
    )
    found = json.loads(run(str(large), *asked).stdout)
    assert found["plan"]["stages"][0]["streamed_layers"] > 0
    assert [tier["size_bytes"] for tier in found["plan"]["tiers"][1:]] == [16 * GIB, 100 * GIB]


def test_the_command_says_what_adapters_take(large: Path) -> None:
    flags = ("--device", "cuda", "--device-memory", "80", "-tp", "4", "--enable-lora", "--max-lora-rank", "64")
    shown = run(str(large), *flags, "--max-cpu-loras", "100")
    assert shown.returncode == 0, shown.stderr
    assert "steps of up to 256 sequences and 8,192 tokens\n" in shown.stdout
    [title, numbers] = [line for line in shown.stdout.splitlines() if "adapters, to r64" in line or "stage 0" in line]
    assert "100 copies in host" in title
    [stage] = json.loads(run(str(large), *flags, "--json").stdout)["plan"]["stages"]
    assert stage["adapter_device_bytes"] == stage["adapter_pages"] * stage["adapter_page_bytes"]
    assert stage["adapter_host_bytes"] == 64 * stage["adapter_copy_bytes"]
    assert gib(stage["adapter_device_bytes"]) in numbers and gib(stage["adapter_copy_bytes"]) in numbers
    assert " LoRA r64 " in shown.stdout
    plain = run(str(large), *flags[:6]).stdout
    assert "adapters, to" not in plain and " LoRA r16 " in plain
    tiny = run(str(large), *flags, "--lora-memory-bytes", "1K")
    assert tiny.returncode == 2 and "--lora-memory-bytes 1024 is less than one page" in tiny.stderr


@pytest.mark.parametrize(("context", "lengths"), [("2K", ["2,048"]), ("500", ["500"]), ("4K", ["4,096", "2,048"])])
def test_conversations_are_counted_in_different_lengths(large: Path, context: str, lengths: list[str]) -> None:
    shown = run(str(large), "--device", "cuda", "--device-memory", "80", "-tp", "4", "--max-model-len", context)
    [title] = [line for line in shown.stdout.splitlines() if line.startswith("KV tier")]
    assert title.split("conversations of ")[1].split("  of ") == lengths


def test_a_pool_below_one_context_is_not_simply_a_fit(folder: Path) -> None:
    flags = ("--device-memory", "8", "--device", "cpu", "--num-gpu-blocks-override")
    short = run(str(folder), *flags, "4")
    assert short.returncode == 0, "it starts, and says the same then"
    assert "It fits." not in short.stdout
    said = f"It fits, but:\n  --num-gpu-blocks-override 4 holds 64 tokens, less than one context of {CONTEXT}: "
    assert said in short.stdout and "16 blocks would hold it all" in short.stdout
    [note] = json.loads(run(str(folder), *flags, "4", "--json").stdout)["plan"]["notes"]
    assert note in short.stdout
    assert "It fits.\n" in run(str(folder), *flags, "16").stdout


def test_the_command_says_what_does_not_fit(large: Path) -> None:
    shown = run(str(large), "--device", "cuda", "--device-memory", "2")
    assert shown.returncode == 1
    assert "It does not fit:\n  --tensor-parallel-size: a rank of stage 0 lacks" in shown.stdout
    assert "No TP x PP of 1 rank(s) fits: more --ranks" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-memory", "0"], "--device-memory: 0 must be above 0"),
        (["--device-memory", "nan"], "--device-memory"),
        (["--kv-disk-size", "-1"], "--kv-disk-size: -1 must be at least 0"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype: 'int3' is not one of auto"),
        (["--ranks", "0"], "--ranks: 0 must be"),
        (["--cpu-offload-gb", "-2"], "--cpu-offload-gb: -2.0 must be at least 0"),
        (["-tp", "3"], "--tensor-parallel-size 3 does not divide"),
        (["--device", "cpu", "--cpu-offload-gb", "1000000"], "--cpu-offload-gb 1e+06 is more than the "),
    ],
)
def test_bad_values_are_one_line_that_names_the_flag(large: Path, arguments: list[str], words: str) -> None:
    shown = run(str(large), *arguments)
    assert shown.returncode == 2 and words in shown.stderr and shown.stderr.count("\n") == 1


def test_a_machine_without_gpu_is_asked_for_its_size(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_memory_bytes", lambda: None)
    settings = EngineSettings(model=ModelSettings(model=str(large)), device=DeviceSettings(device="cuda"))
    with pytest.raises(SettingsError, match="no CUDA device here") as refused:
        memory_of(settings, None, 0.0, 0.0)
    assert refused.value.flag == "--device-memory"
    monkeypatch.setattr(devices, "cuda_memory_bytes", lambda: 7 * GIB)
    assert memory_of(settings, None, 0.0, 0.0).device_bytes == 7 * GIB
