"""The one table of devices: their data types, formats and implementations, what they refuse and why. Torch-free.

Plans, checks before a start, `tandem doctor`, help and refusals read it; the classes of workers/platforms do as it
says, and tests/unit/rank/test_platform_facts.py compares them with it. What one machine lacks, such as a compiler or an
instruction set, a Platform finds out there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, get_args

from msgspec.structs import replace

from tandem.configs.errors import SettingsError
from tandem.configs.schema import CacheSettings, Device, EngineSettings, Quantization, SchedulerSettings

DTYPES: Final = ("bfloat16", "float16", "float32")
KV_DTYPES: Final = ("bfloat16", "fp8", "fp8_e4m3", "int8")
DEVICE_FLAGS: Final = ("--cpu-threads", "--gpu-memory-utilization", "--tune")
"""Flags that one device has a use for, whatever their value."""
TUNING_S: Final = 30
"""The longest that a start measures tiles of kernels."""
LANES: Final = 16
"""Elements that a kernel compiled for a CPU takes at a time."""
MOST_HEAD_DIM: Final = 256
"""The widest head that attention compiled for a CPU takes."""
MOST_LATENT: Final = 1024
"""The widest latent with its key that attention compiled for a CPU takes."""

_COMPILED = "kernels compiled for this CPU"
_NO_KERNEL = "there is no such kernel for this machine"
_TRITON = "Triton is installed"
_NO_TRITON = "Triton, a C compiler for it or a GPU that it compiles for is missing"
_NO_GPU_KERNEL = "there are no kernels for GPUs yet"
_EAGER = "a decode step contains operations that are no kernels"


class Implementation(NamedTuple):
    """Words on an implementation that a platform may choose."""

    why: str
    """The reason for the choice. {dtype} stands for the dtype."""
    without_kernels: str | None = None
    """The same where a machine compiles no kernels for {missing}; None: `why`."""

    def reason(self, dtype: str, missing: str | None) -> str:
        """Return the reason for the choice. missing: why the machine compiles no kernels, None where it does."""
        if missing is None or self.without_kernels is None:
            return self.why.format(dtype=dtype)
        return self.without_kernels.format(missing=missing)


class StepSizes(NamedTuple):
    """Sizes of a step where no flag gives them, on a device with at least so many GiB."""

    least_gib: int
    max_num_seqs: int
    max_num_batched_tokens: int
    offline_tokens: int  # of an `LLM`, where nobody waits for the next one


SMALL_STEPS: Final = StepSizes(0, SchedulerSettings().max_num_seqs, *[SchedulerSettings().max_num_batched_tokens] * 2)
# Not for more rows: steps of more than are captured (workers/planning/graph_room.py) run eagerly.
LARGE_STEPS: Final = StepSizes(60, 256, 8192, 16384)


@dataclass(frozen=True, slots=True)
class PlatformFacts:
    """Facts of one device that hold on every machine with it."""

    name: Device
    word: str
    """Its name in help."""
    shares_memory: bool
    """Its memory is the machine's, which all its ranks share; else each has a device with memory of its own."""
    packs: tuple[str, ...]
    """Dtypes whose dense matrices are held in a packed form, so that a tied table is there twice."""
    quantizations: tuple[str, ...]
    """Values of --quantization that it multiplies."""
    invariant_dtypes: tuple[str, ...]
    """Dtypes that --batch-invariant computes in; none: it is refused."""
    implementations: Mapping[str, Mapping[str, Implementation]]
    """Choices of what a rank computes with, by subject and by name."""
    refused: Mapping[str, str]
    """Flags that ask for what it has not, and why they are refused."""
    without_effect: Mapping[str, str]
    """Flags that mean nothing on it, and why; they are accepted, and a line says so."""
    computed_as: Mapping[str, str]
    """Dtypes of checkpoints that --dtype auto computes in another."""
    why_dtype: str
    """The reason for the dtype that --dtype auto takes."""
    ray_resources: Mapping[str, float]
    """Resources of Ray that a rank asks for."""
    dtypes: tuple[str, ...] = DTYPES
    """Dtypes that weights and activations may have."""
    kv_dtypes: tuple[str, ...] = KV_DTYPES
    """Values of --kv-cache-dtype, beside auto, that its KV cache may have."""
    step_sizes: tuple[StepSizes, ...] = (SMALL_STEPS,)
    """The largest that a device has memory for is taken."""

    def refusal(self, flag: str) -> SettingsError:
        """Return the error for a flag that is refused."""
        return SettingsError(self.refused[flag], flag)


W8A8_HELPS: Final = "--quantization w8a8 is two to four times as fast"

CPU: Final = PlatformFacts(
    name="cpu",
    word="CPU",
    shares_memory=True,
    packs=("bfloat16", "float32"),
    quantizations=get_args(Quantization),
    invariant_dtypes=("bfloat16", "float32"),
    implementations={
        "attention": {
            "cpu-paged": Implementation(_COMPILED),
            "cpu-one-query": Implementation("--batch-invariant computes each row alone"),
            "torch-sdpa": Implementation(_NO_KERNEL, "{missing}"),
        },
        "fused ops": {"compiled": Implementation(_COMPILED), "torch": Implementation(_NO_KERNEL, "{missing}")},
        "linear": {
            "skinny GEMM, oneDNN above 64 rows": Implementation("this CPU multiplies pairs of bf16"),
            "row GEMM": Implementation(
                f"this CPU multiplies no pairs of bf16, and oneDNN is slower without; with AVX512-VNNI {W8A8_HELPS}"
            ),
            "oneDNN": Implementation("the skinny GEMM needs a CPU and a compiler with AVX512-BF16", "{missing}"),
            "torch": Implementation("oneDNN packs no {dtype} on this CPU"),
        },
        "experts": {
            "grouped products": Implementation(_COMPILED),
            "torch, expert by expert": Implementation("the kernel needs a CPU and a compiler with AVX512", "{missing}"),
        },
        "LoRA ops": {"compiled": Implementation(_COMPILED), "torch": Implementation(_NO_KERNEL, "{missing}")},
        "sampling": {"compiled": Implementation(_COMPILED), "torch": Implementation(_NO_KERNEL, "{missing}")},
        "collectives": {
            "shared memory": Implementation("ranks of a stage share this node"),
            "gloo": Implementation("shared memory relies on x86's order of stores"),
        },
        "graphs": {
            "replayed steps": Implementation(
                "decode steps of at most 64 rows with TP 1 consist of kernels, views and copies"
            ),
            "none": Implementation(_EAGER, f"{_EAGER}: {{missing}}"),
        },
    },
    refused={},
    without_effect={
        "--gpu-memory-utilization": "it is a share of a GPU's memory; on CPU --kv-cache-memory-bytes sets the KV cache",
        "--tune": "it is about kernels for GPUs",
    },
    # float16 matmul is slow on CPU: 512 x 1024 x 3072 took 61 ms, bfloat16 3.5 ms, on a Zen 5
    computed_as={"float16": "bfloat16"},
    ray_resources={"CPU": 0.1},  # ranks choose their threads: whole cores would only keep groups from starting
    why_dtype="but bfloat16 for float16, whose products are slow on CPUs",
)

CUDA: Final = PlatformFacts(
    name="cuda",
    word="GPU",
    shares_memory=False,
    packs=(),
    quantizations=CPU.quantizations,
    invariant_dtypes=(),
    implementations={
        "attention": {"triton-paged": Implementation(_TRITON), "torch-sdpa": Implementation(_NO_TRITON)},
        "fused ops": {"Triton": Implementation(_TRITON), "torch": Implementation(_NO_TRITON)},
        "linear": {
            "cuBLAS": Implementation(
                "but for up to 8 rows where a start measures a Triton kernel as faster, and for quantized weights"
            )
        },
        "experts": {"Triton": Implementation(_TRITON), "torch, expert by expert": Implementation(_NO_TRITON)},
        "LoRA ops": {"Triton": Implementation(_TRITON), "torch": Implementation(_NO_TRITON)},
        "sampling": {"Triton": Implementation(_TRITON), "torch": Implementation(_NO_TRITON)},
        "collectives": {"nccl": Implementation("between GPUs")},
        "graphs": {
            "CUDA graphs": Implementation(
                "of whole steps of up to 1024 tokens, padded, made at the start; other steps run eagerly"
            )
        },
    },
    refused={
        "--cpu-threads": "is for ranks on CPU",
        "--batch-invariant": "--device cuda: it is for ranks on CPU",
    },
    without_effect={},
    computed_as={},
    ray_resources={"GPU": 1.0, "CPU": 1.0},
    why_dtype="GPUs multiply all of them",
    step_sizes=(SMALL_STEPS, LARGE_STEPS),
)

PLATFORM_FACTS: Final[Mapping[Device, PlatformFacts]] = {facts.name: facts for facts in (CPU, CUDA)}


def only_on(flag: str) -> str:
    """Return the devices that a flag has a meaning on, for its help: "CPU only"."""
    words = [facts.word for facts in PLATFORM_FACTS.values() if flag not in {*facts.refused, *facts.without_effect}]
    return f"{' and '.join(words)} only"


def invariant_words() -> str:
    """Return what --batch-invariant can be had with, for its help: "CPU, bfloat16 and float32"."""
    return "; ".join(
        f"{facts.word}, {' and '.join(facts.invariant_dtypes)}"
        for facts in PLATFORM_FACTS.values()
        if facts.invariant_dtypes
    )


def computed_as_words() -> str:
    """Return where --dtype auto is not the checkpoint's, for its help: "on CPU, bfloat16 for a float16 checkpoint"."""
    return "; ".join(
        f"on {facts.word}, {dtype} for a {stored} checkpoint"
        for facts in PLATFORM_FACTS.values()
        for stored, dtype in facts.computed_as.items()
    )


def sized(settings: EngineSettings, device: Device, memory_bytes: int | None, offline: bool = False) -> EngineSettings:
    """Return settings with the sizes of steps that no flag gave: those of the device, as far as given ones allow.
    memory_bytes: of one device, None where it is not known. offline: for an `LLM`."""
    scheduler, memory_gib = settings.scheduler, (memory_bytes or 0) / 2**30
    sizes = [one for one in PLATFORM_FACTS[device].step_sizes if one.least_gib <= memory_gib][-1]
    seqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if "max_num_batched_tokens" in scheduler.by_device:
        tokens = max(sizes.offline_tokens if offline else sizes.max_num_batched_tokens, seqs)
    if "max_num_seqs" in scheduler.by_device:
        seqs = min(sizes.max_num_seqs, tokens)
    return replace(
        settings, scheduler=replace(scheduler, max_num_seqs=seqs, max_num_batched_tokens=tokens, by_device=())
    )


def steps_line(settings: EngineSettings, device: Device) -> str | None:
    """Return a line on the sizes of steps where a device's memory decides them, for its start."""
    if len(PLATFORM_FACTS[device].step_sizes) == 1:
        return None
    seqs, tokens = settings.scheduler.max_num_seqs, settings.scheduler.max_num_batched_tokens
    return f"steps: up to {seqs:,} sequences and {tokens:,} tokens (--max-num-seqs, --max-num-batched-tokens)"


def check_device(settings: EngineSettings, device: Device) -> None:
    """Check that a device has what the settings ask for. SettingsError."""
    check_formats(settings, device)


def idle_flags(settings: EngineSettings, device: Device) -> list[str]:
    """Return a line for each flag that differs from its default and means nothing on a device."""
    is_set = {
        "--gpu-memory-utilization": settings.cache.gpu_memory_utilization != CacheSettings().gpu_memory_utilization,
        "--tune": not settings.device.tune,
    }
    return idle_lines([flag for flag, given in is_set.items() if given], device)


def idle_lines(flags: Iterable[str], device: Device) -> list[str]:
    """Return a line for each of the flags that means nothing on a device."""
    idle = PLATFORM_FACTS[device].without_effect
    return [f"{flag} has no effect: {idle[flag]}" for flag in flags if flag in idle]


def check_formats(settings: EngineSettings, device: Device) -> None:
    """Check that quantization and KV dtype can be had on a device. SettingsError."""
    facts, quantization, kv_dtype = PLATFORM_FACTS[device], settings.model.quantization, settings.cache.kv_cache_dtype
    if quantization is not None and quantization not in facts.quantizations:
        raise SettingsError(f"{quantization} is not to be had with --device {device}", "--quantization")
    if kv_dtype not in ("auto", *facts.kv_dtypes):
        raise SettingsError(f"{kv_dtype} is not to be had with --device {device}", "--kv-cache-dtype")
