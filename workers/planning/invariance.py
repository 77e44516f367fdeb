"""Refusals of --batch-invariant: models and settings whose rows would depend on each other. Torch-free.

Called by the launcher before anything starts, by `tandem plan` and by the ranks; kernels that a machine lacks are found
by the platform (workers/platforms/cpu_invariant.py).
"""

from collections.abc import Iterator

from tandem.configs.errors import SettingsError
from tandem.configs.platform_facts import LANES, MOST_HEAD_DIM, MOST_LATENT, PLATFORM_FACTS
from tandem.configs.schema import Device, EngineSettings
from tandem.parallel.mesh import Mesh
from tandem.parallel.quantization.schemes import Coded, Int8Rows
from tandem.workers.models.spec.arch import ArchSpec, Gqa, Mla, Moe, RopeKind
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.planning.resolve import resolve_dtype

FLAG = "--batch-invariant"
INPUTS = 4
"""QUAD of kernels/cpu/cpu_int8_gemm.py, which loads torch."""


def check_batch_invariant(settings: EngineSettings, spec: ArchSpec, device: Device) -> None:
    """Checks that --batch-invariant, if it is given, can be kept with this model on a device. SettingsError names the
    first thing that it cannot be kept with."""
    if settings.model.batch_invariant:
        for reason in _obstacles(settings, spec, device):
            raise SettingsError(f"it is not to be had with {reason}", FLAG)


def _obstacles(settings: EngineSettings, spec: ArchSpec, device: Device) -> Iterator[str]:
    facts = PLATFORM_FACTS[device]
    if FLAG in facts.refused:
        yield facts.refused[FLAG]
        return
    dtype = resolve_dtype(settings, spec, device)
    if dtype not in facts.invariant_dtypes:
        yield f"--dtype {dtype}; {' and '.join(facts.invariant_dtypes)} have the kernels"
    yield from _of_model(spec)
    yield from _of_integers(settings, spec)
    for scheme in spec.weights.schemes:
        if isinstance(scheme, Coded) and not scheme.has_product:
            yield f"{scheme.words} weights, which no kernel multiplies yet"
    if settings.lora.enable_lora:
        yield from _of_adapters(settings, spec)


def _of_model(spec: ArchSpec) -> Iterator[str]:
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, Mla) and attention.head_dim > MOST_LATENT:
            yield f"latents and keys of {attention.head_dim} elements; the kernel takes {MOST_LATENT}"
        elif isinstance(attention, Gqa) and attention.head_dim > MOST_HEAD_DIM:
            yield f"attention heads of {attention.head_dim} elements; the kernel takes {MOST_HEAD_DIM}"
        if isinstance(layer.mlp, Moe) and spec.hidden_size % LANES:
            yield f"experts in a model {spec.hidden_size} wide, which is no multiple of {LANES}"
    if any(rope.kind is RopeKind.DYNAMIC for rope in spec.ropes):
        yield "rope_scaling of type dynamic"


def _of_integers(settings: EngineSettings, spec: ArchSpec) -> Iterator[str]:
    """The kernel of int8 weights takes inputs four at a time; its twin, which takes the others, sums in float32."""
    tp_size = settings.parallel.tensor_parallel_size
    mesh = Mesh(tp_size, expert_parallel=settings.parallel.enable_expert_parallel)
    for weight in parameters_of(spec):
        if weight.scheme == Int8Rows() and (inputs := weight.span(1, mesh).length) % INPUTS:
            yield f"--quantization int8 of {weight.name}, which has {inputs} inputs on a rank: no multiple of {INPUTS}"
            return


def _of_adapters(settings: EngineSettings, spec: ArchSpec) -> Iterator[str]:
    """Adapters go through the compiled kernel, which takes whole vectors; torch would take the rest."""
    rank, tp_size = settings.lora.max_lora_rank, settings.parallel.tensor_parallel_size
    if rank % LANES:
        yield f"adapters of --max-lora-rank {rank}, which is no multiple of {LANES}"
    widths = [spec.hidden_size, *(layer.mlp.width for layer in spec.layers if not isinstance(layer.mlp, Moe))]
    for width in widths:
        if width % (LANES * tp_size):
            yield f"adapters on layers {width} wide, which {tp_size} rank(s) do not divide into multiples of {LANES}"
