"""Platforms without their devices: what a rank on CUDA asks torch for, which memory is pinned, which kernels are
warm."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.schema import DeviceSettings, EngineSettings, ModelSettings
from tandem.offload.copies.host_slab import HostSlab
from tandem.parallel import groups
from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.collectives import SingleRank
from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.parallel.linear import LinearPart
from tandem.parallel.params import Param, Scheme, Source, Span
from tandem.parallel.quantization.coded import CodedMethod, UndoneMethod
from tandem.parallel.quantization.int8 import Int8Method, W8A8Method
from tandem.parallel.quantization.schemes import Coded, Codes, Inputs, Int8Rows, Undone
from tandem.parallel.quantization.side_by_side import SideBySide
from tandem.parallel.quantization.weight_plan import AT_LOAD, DENSE
from tandem.workers.attention.latents.torch_latents import TorchLatents
from tandem.workers.attention.pieces import WORKSPACE_BYTES
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.build import offline_settings
from tandem.workers.graphs.cuda_graphs import CudaGraphs
from tandem.workers.kernels.lora_ops import TorchLora
from tandem.workers.lora.device.layout import ShardShape
from tandem.workers.lora.device.lora_layers import LoraLayers
from tandem.workers.lora.device.slab import AdapterSlab
from tandem.workers.models.spec.arch import Mla
from tandem.workers.planning.budget import ATTENTION_BYTES
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.platforms.cuda import CudaAccelerator, CudaCapture, CudaPlatform, _triton_obstacle
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.platforms.platform_choices import choices
from tests.support.traced_accelerator import TracedAccelerator

SETTINGS = EngineSettings(model=ModelSettings(model="m"))


class Asked:
    """torch.cuda of a machine with two devices; notes what is asked of which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        facts = SimpleNamespace(
            total_memory=79 * 2**30, multi_processor_count=114, shared_memory_per_multiprocessor=100 * 1024
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
        for name in ("set_device", "Stream", "current_stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda device, name=name: self.calls.append((name, device)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    yield Asked(monkeypatch)
    torch.set_num_threads(threads)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


@pytest.fixture
def cuda(asked: Asked) -> Platform:
    return open_platform(SETTINGS, rank=3, ranks_on_node=4)


def test_a_rank_on_cuda_activates_its_own_device(asked: Asked, cuda: Platform) -> None:
    """A process may see several: without it Triton launches on device 0, and pinning opens a context there."""
    device = torch.device("cuda", 1)
    assert cuda.device == device and asked.calls == [("set_device", device)]
    assert isinstance(cuda.accelerator, CudaAccelerator)
    cuda.accelerator.stream(), cuda.accelerator.current_stream(), cuda.accelerator.synchronize()
    assert [name for name, _ in asked.calls] == ["set_device", "Stream", "current_stream", "synchronize"]
    assert all(on == device for _, on in asked.calls), "streams are asked for with their device"


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("visible", "gpu", "place"), [(None, "1", 1), ("5, 3", "3", 1), ("GPU-a,GPU-b", "GPU-a", 0)])
def test_a_rank_takes_the_gpu_that_it_was_given(
    visible: str | None, gpu: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one of its number: the second group's first rank would share a GPU with the first group's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert open_platform(SETTINGS, rank=0, ranks_on_node=4, gpu=gpu).device == torch.device("cuda", place)
    with pytest.raises(SettingsError, match="Ray gave a rank GPU 7, and its process sees ") as refused:
        open_platform(SETTINGS, rank=0, ranks_on_node=4, gpu="7")
    assert refused.value.flag == "--device"


class Runtime:
    """CUDA's runtime that refuses to register memory; the error stays until somebody asks for the last one, as torch
    does after each kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last_error = 0
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch, "ones", self.launch)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.last_error = 2
        return 2

    def cudaHostUnregister(self, address: int) -> int:
        self.last_error = 713
        return 713

    def launch(self, *shape: int, device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


def test_memory_that_cannot_be_pinned_leaves_no_error_for_the_next_kernel(
    cuda: Platform, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, memory = Runtime(monkeypatch), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(OSError, match=r"8 bytes of host memory could not be pinned: CUDA error 2"):
        cuda.accelerator.pin(memory)
    assert runtime.last_error == 0
    cuda.accelerator.unpin(memory)
    assert runtime.last_error == 0 and "713" in caplog.text


def test_attention_on_cuda_is_a_kernels_or_bounded_and_not_cudnns(cuda: Platform) -> None:
    has_kernel = _triton_obstacle() is None
    of_kernel: list[tuple[Any, ...]] = [(torch.bfloat16, 128), (torch.float16, 256, torch.int8), (torch.float32, 80)]
    of_torch: list[tuple[Any, ...]] = [
        (torch.float32, 256), (torch.float32, 64, torch.int8), (torch.bfloat16, 512),
    ]  # fmt: skip
    assert [cuda.attention(*asked).name for asked in of_kernel] == ["triton-paged" if has_kernel else "torch-sdpa"] * 3
    if has_kernel:
        assert cuda.attention(torch.bfloat16, 128)._kept.multiprocessors == (114, 100 * 1024)  # type: ignore[attr-defined]
    for asked in of_torch:
        backend = cuda.attention(*asked)
        assert isinstance(backend, TorchAttention) and backend._is_bounded
    of_kernel = [(torch.bfloat16, 512, 64), (torch.float16, 512, 64, torch.int8), (torch.float32, 100, 64)]
    asked_latents = [(dtype, Mla(16, None, rank, 128, rope, 128), *more) for dtype, rank, rope, *more in of_kernel]
    for asked in asked_latents:
        assert cuda.latent_attention(*asked).name == ("triton-paged" if has_kernel else "torch-sdpa")
    for dtype, rank, rope, *more in [(torch.bfloat16, 513, 63), (torch.bfloat16, 512, 65), (torch.float32, 512, 64)]:
        latents = cuda.latent_attention(dtype, Mla(16, None, rank, 128, rope, 128), *more)
        assert isinstance(latents, TorchLatents) and latents._is_bounded
    assert WORKSPACE_BYTES == ATTENTION_BYTES, "what the planner counts"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not cuda.packs(torch.bfloat16) and cuda.backend.name == "nccl" and not cuda.facts.shares_memory


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("a new device", "the device has compute capability 7.5, and they are for 8.0 and newer"),
        ("a compiler", "there is no C compiler (gcc, clang or cc)"),
        ("headers", "/empty has no Python.h (Debian: python3-dev)"),
        ("triton", "the package triton is not installed"),
    ],
)
def test_without_what_triton_needs_torch_computes_and_a_note_says_why(
    cuda: Platform, missing: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if missing == "triton" else name)
    (tmp_path / "Python.h").touch()
    headers = "/empty" if missing == "headers" else str(tmp_path)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": headers})
    monkeypatch.setenv("CC", "cc")
    if missing == "a compiler":
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", str(tmp_path))
    capability = (7, 5) if missing == "a new device" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert isinstance(cuda.attention(torch.bfloat16, 128), TorchAttention)
    assert isinstance(cuda.lora_ops(torch.bfloat16), TorchLora)
    assert cuda.kernel_notes(torch.bfloat16, DENSE) == (f"torch computes instead of Triton's kernels, slower: {words}",)


@pytest.mark.skipif(_triton_obstacle() is not None, reason="Triton's kernels cannot be had")
@pytest.mark.parametrize("reason", ["a window: results differ by 0.7", None])
def test_prompts_are_the_flash_kernels_where_it_passes_a_look(
    cuda: Platform, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each kind of heads and cache; else a note says why."""
    looks: list[Any] = []

    def look(varlen: Any, *asked: Any) -> str | None:
        looks.append(asked)
        return reason

    monkeypatch.setattr("tandem.workers.attention.prompts.flash_probe.flash_obstacle", look)
    kinds: list[tuple[Any, ...]] = [(torch.bfloat16, 128), (torch.bfloat16, 128, torch.int8), (torch.float32, 80)]
    found = [cuda.attention(*kind)._large_chunks is not None for kind in kinds * 2]  # type: ignore[attr-defined]
    assert found == [reason is None, reason is None, False] * 2
    assert looks == [(cuda.device, torch.bfloat16, 128, dtype) for dtype in (torch.bfloat16, torch.int8)]
    words = f"Triton's kernel attends prompts instead of torch's flash attention, slower: {reason}"
    assert cuda.kernel_notes(torch.bfloat16, DENSE) == (() if reason is None else (words,))


@pytest.mark.usefixtures("asked")
def test_an_llm_plans_ahead_of_a_gpu_and_of_ranks_of_their_own_alone() -> None:
    def is_ahead(**flags: Any) -> bool:
        return offline_settings(build_settings("m", flags).engine).scheduler.async_scheduling

    assert is_ahead() and is_ahead(device="cpu", tensor_parallel_size=2) and not is_ahead(device="cpu")


@pytest.mark.usefixtures("asked")
def test_an_llm_on_a_large_gpu_has_large_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tandem.offline")

    def steps(**flags: Any) -> tuple[int, int]:
        scheduler = offline_settings(build_settings("m", flags).engine).scheduler
        return scheduler.max_num_seqs, scheduler.max_num_batched_tokens

    assert steps() == (256, 16384) and "up to 256 sequences and 16,384 tokens" in caplog.text
    assert steps(max_num_seqs=7) == (7, 16384) and steps(device="cpu") == (64, 2048)


def test_captured_graphs_share_a_pool_and_let_lanes_copy(cuda: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[tuple[Any, str]] = []

    @contextmanager
    def capturing(graph: Any, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
        captures.append((pool, capture_error_mode))
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: "replayed"))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    capture = CudaCapture()
    made = [capture(lambda: (torch.ones(2),)) for _ in range(2)]
    assert all(replay() == "replayed" and output.tolist() == [1, 1] for replay, (output,) in made)
    assert captures[0] == captures[1] and captures[0][1] == "thread_local"
    assert cuda.scratch_blocks == 1 and isinstance(
        cuda.graphs(lambda: None, True, StepCollectives(SingleRank(), 1)), CudaGraphs
    )


@pytest.mark.parametrize("has_triton", [True, False], ids=["Triton", "torch"])
def test_methods_of_quantized_weights_on_cuda(
    has_triton: bool, cuda: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the class of the scheme; those of merged matrices with several stand side by side."""
    pytest.importorskip("triton")
    from tandem.workers.kernels.triton.codes.triton_coded import Fp8Method, TritonCodedMethod, TritonInt8Method

    monkeypatch.setattr(cuda, "has_triton", lambda: has_triton)
    tried: list[torch.device] = []

    def obstacle(device: torch.device) -> str | None:
        tried.append(device)
        return "no such product" if len(tried) > 1 else None

    monkeypatch.setattr("tandem.workers.kernels.triton.codes.scheme_methods.fp8_obstacle", obstacle)
    fp8 = Coded(Codes.E4M3, 8, None, inputs=Inputs.FP8)

    def made(*schemes: Scheme, dtype: torch.dtype = torch.bfloat16, platform: Platform = cuda) -> type[object]:
        weights = [
            Param(name="w.weight", shape=(64, 64), role="w", source=Source(("w.weight",)), scheme=scheme)
            for scheme in schemes
        ]
        return type(platform.linear(weights, ParallelContext.single(), dtype=dtype))

    ours = (TritonCodedMethod, TritonInt8Method, TritonInt8Method, Fp8Method)
    twins = (CodedMethod, Int8Method, W8A8Method, CodedMethod)
    schemes = (Coded(), Int8Rows(), Int8Rows(Inputs.INT8), fp8)
    assert tuple(map(made, schemes)) == (ours if has_triton else twins)
    assert made(Undone(Coded())) is UndoneMethod and made(Coded(), Coded(group=32)) is SideBySide
    assert made(Coded(), Coded()) is (TritonCodedMethod if has_triton else CodedMethod)
    assert made(fp8, fp8) is (Fp8Method if has_triton else CodedMethod) and len(tried) == has_triton, "tried once"
    assert not has_triton or made(fp8, dtype=torch.float16) is TritonCodedMethod, "torch gives bf16"
    other = CudaPlatform(cuda.device, cuda.accelerator, cuda.backend)
    monkeypatch.setattr(other, "has_triton", lambda: has_triton)
    assert made(fp8, platform=other) is (TritonCodedMethod if has_triton else CodedMethod)
    monkeypatch.setattr("tandem.workers.platforms.cuda._triton_obstacle", lambda: None)
    words = "weights in fp8 are multiplied by inputs as they are: no such product"
    assert other.kernel_notes(torch.bfloat16, DENSE) == ((words,) if has_triton else ())


def test_cpu_is_taken_when_asked_for(asked: Asked) -> None:
    settings = EngineSettings(model=ModelSettings(model="m"), device=DeviceSettings(device="cpu", cpu_threads=1))
    platform = open_platform(settings, 0, 1)
    assert platform.name == "cpu" and platform.memory() is None and asked.calls == []


def test_collectives_are_bound_to_the_ranks_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "elsewhere")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    groups.use_interface("eth7")
    assert [groups.os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")] == ["eth7", "=eth7"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "the user's")
    groups.use_interface("eth7")
    assert groups.os.environ["NCCL_SOCKET_IFNAME"] == "the user's"


def test_a_slab_pins_its_own_bytes_and_no_more() -> None:
    accelerator = TracedAccelerator()
    with accelerator.tracing():
        slab = HostSlab.allocate(3, 5000, accelerator)
        assert list(accelerator.pinned.values()) == [15_000]
        slab.close()
        slab.close()
        assert not accelerator.pinned


def test_triton_kernels_are_not_compiled_again_for_other_numbers() -> None:
    pytest.importorskip("triton")
    from tandem.workers.kernels.triton import triton_lora

    kernels = [triton_lora.shrink_tokens, triton_lora.expand_tokens, triton_lora.shrink_tiles, triton_lora.expand_tiles]
    for kernel in kernels:
        params = {param.name: param for param in kernel.params}
        changing = set(triton_lora.CHANGING) & set(params)
        assert changing and all(params[name].do_not_specialize for name in changing)
        assert params["slots"].do_not_specialize_on_alignment
        left = {name for name, p in params.items() if not (p.do_not_specialize or p.is_constexpr)}
        stable = {"slab", "shrunk", "room", "x", "y", "slots"}
        assert {name for name in left - stable if not name.startswith(("a_rows", "b_rows", "ranks", "scales"))} == set()
    source = inspect.getsource(triton_lora)
    assert source.count("enable_fp_fusion=FP_FUSION") == len(kernels)


def test_triton_draws_for_any_step_by_one_variant_that_fuses_nothing() -> None:
    pytest.importorskip("triton")
    from tandem.workers.kernels.triton.sampling import triton_sampling

    kernels = [triton_sampling.draw_parts, triton_sampling.choose_part, triton_sampling.pair_part]
    for kernel in kernels:
        params = {param.name: param for param in kernel.params if not param.is_constexpr}
        own = {"scores", "part_ids", "pairs"} | ({"ids"} if kernel is triton_sampling.draw_parts else set())
        pointers = set(params) - set(triton_sampling.CHANGING)
        assert all(params[name].do_not_specialize for name in set(params) - pointers)
        assert all(params[name].do_not_specialize_on_alignment for name in pointers - own)
    assert inspect.getsource(triton_sampling).count("enable_fp_fusion=False") == len(kernels)


class Recorder:
    """LoraOps that notes tokens and inputs of every call."""

    warm_up_tokens = (1, 257)

    def __init__(self) -> None:
        self.calls: set[tuple[int, int]] = set()

    def add(self, y_TO: Any, x_TI: Any, slab: Any, projections: Any, rows: Any) -> None:
        self.calls.add((len(x_TI), projections[0].inputs))


def test_both_paths_of_every_layer_and_of_the_embedding_are_warm() -> None:
    pytest.importorskip("triton")
    from tandem.workers.kernels.triton.triton_lora import TOKEN_STEP, TritonLora

    assert min(TritonLora.warm_up_tokens) <= TOKEN_STEP < max(TritonLora.warm_up_tokens)
    parts = [
        LinearPart("q", Span(16, 0, 16), Span(32, 0, 32)),
        LinearPart("table", Span(20, 0, 20), Span(16, 0, 16)),
    ]
    slab = AdapterSlab(ShardShape.of(parts, 8), 3, torch.float32, CpuPlatform(), with_identity=True)
    recorder = Recorder()
    layers = LoraLayers(slab, recorder)
    layers.head(0, 1)
    layers.embedding(1, 2)
    layers.warm_up()
    assert recorder.calls == {(tokens, inputs) for tokens in (1, 257) for inputs in (16, 8)}


def test_tables_hold_a_slot_for_every_page_and_begin_aligned() -> None:
    parts = [LinearPart(f"{n}", Span(16, 0, 16), Span(32, 0, 32)) for n in range(3)]
    slab = AdapterSlab(ShardShape.of(parts, 3), 5, torch.float32, CpuPlatform())
    first = slab.tables[0]
    for table in slab.tables:
        for name in ("a_rows", "b_rows", "ranks", "scales"):
            tensor, start = getattr(table, name), getattr(first, name)
            assert tensor.shape[0] >= 5 and (tensor.data_ptr() - start.data_ptr()) % 16 == 0, name


def test_quantized_weights_without_a_kernel_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.workers.platforms import cpu

    monkeypatch.setattr(cpu, "obstacle", lambda dtype: None)
    monkeypatch.setattr("tandem.workers.kernels.cpu.cpu_int8_gemm.int8_kernel", lambda dtype: None)
    (said,) = cpu.CpuPlatform().kernel_notes(torch.float16, AT_LOAD["w8a8"])
    assert said == "torch multiplies w8a8 weights, slower: there is no kernel for float16 on this CPU"
    assert cpu.CpuPlatform().kernel_notes(torch.float16, DENSE) == ()


def test_a_cpu_without_products_of_bf16_pairs_is_told_of_w8a8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where VNNI multiplies bytes, and nothing has been chosen."""
    from tandem.workers.platforms import cpu

    kernel = "tandem.workers.kernels.cpu.cpu_int8_gemm.int8_kernel"
    monkeypatch.setattr(cpu, "multiplies_by_row", lambda _: True)
    monkeypatch.setattr(kernel, lambda _: object())
    monkeypatch.setattr(cpu, "obstacle", lambda _: None)
    platform = cpu.CpuPlatform()
    (said,) = platform.kernel_notes(torch.bfloat16, DENSE)
    assert "--quantization w8a8 is two to four times as fast" in said
    assert all("w8a8" not in note for note in platform.kernel_notes(torch.bfloat16, AT_LOAD["int4"]))
    monkeypatch.setattr(cpu, "skinny_gemm", lambda _: None)
    (linear,) = [choice for choice in choices(platform) if choice.subject == "linear"]
    assert "--quantization w8a8 is two to four times as fast" in linear.why, "what `tandem doctor` prints"
    monkeypatch.setattr(kernel, lambda _: None)
    assert platform.kernel_notes(torch.bfloat16, DENSE) == ()
