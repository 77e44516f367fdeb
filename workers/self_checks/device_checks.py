"""Checks of a device with memory of its own: its speeds, each of its kernels beside the torch twin there, replayed
beside eager steps, copies to the host and back, and what several devices exchange. For `tandem doctor` and
tools/gpu_run.py.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import permutations
from typing import Any, Final, NamedTuple

import torch

from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.workers.kernels.fused_ops import TorchFusedOps
from tandem.workers.kernels.kv_store import LARGEST, SCALE_DTYPE, LayerKV, as_indexable
from tandem.workers.messages.request import SamplingParams
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.self_checks.kernel_checks import BLOCK, Here, shared_checks
from tandem.workers.self_checks.outcome import Check, NotHere, relative_error, require
from tandem.workers.self_checks.step_checks import kv_round_trip
from tandem.workers.self_checks.two_ranks import sum_of_two
from tandem.workers.tuning.call_timer import device_seconds

BF16 = torch.bfloat16
MOST_BYTES, SQUARE, LINK_BYTES = 2**32, 8192, 2**28
TOLERANCE: Final = 0.02
PROMPTS = [[3 + (7 * row + 5 * place) % 700 for place in range(9 + 20 * row)] for row in range(3)]
STEPS = 24
SETTINGS: Final = EngineSettings(model=ModelSettings(model=str(DEMO_MODEL)))


class DeviceRates(NamedTuple):
    """The best rates of a device: bytes read, bytes read and written by a copy, bf16 operations, bytes over the link
    to it and from it, each in a second."""

    read_bytes_per_s: float
    copied_bytes_per_s: float
    bf16_flop_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes a second that work bound by memory can reach."""
        return max(self.read_bytes_per_s, self.copied_bytes_per_s)


def device_checks(platform: Platform, dtype: torch.dtype = BF16) -> list[Check]:
    """Returns the checks of a rank's device. dtype: of the kernels."""
    if platform.facts.shares_memory:
        return [Check("device", _no_device)]
    here = Here(lambda: platform, dtype)
    return [
        Check("device speeds", partial(_speeds, platform)),
        *(Check(f"device {name}", run) for name, run in shared_checks(here).items()),
        Check("device kernel rotate_store", partial(_rotate_store, here, ((1, 10, 2, 128), (33, 12, 4, 64)))),
        Check("device replayed steps", partial(_replayed_steps, platform)),
        Check("device KV store and load", partial(kv_round_trip, platform)),
        Check("copies between devices", partial(_copies_between, platform)),
        Check("all-reduce of two devices", partial(_all_reduce, platform)),
    ]


def _no_device() -> str:
    raise NotHere("there is no device with memory of its own, such as a GPU; ranks compute on the CPU")


def device_rates(platform: Platform, most_bytes: int = MOST_BYTES, square: int = SQUARE) -> DeviceRates:
    """Measures a device, in at most a quarter of its free memory: a reduction, a copy, a product, and copies from and
    to pinned memory."""
    accelerator, device, memory = platform.accelerator, platform.device, platform.memory()
    size = most_bytes if memory is None else min(most_bytes, memory.free_bytes // 4)
    values = torch.ones(size // 4, dtype=torch.int32, device=device)
    half = len(values) // 2
    read_s = device_seconds(accelerator, values.max)
    copy_s = device_seconds(accelerator, lambda: values[:half].copy_(values[half : 2 * half]))
    matrix = torch.randn(square, square, device=device).to(BF16)
    product_s = device_seconds(accelerator, lambda: matrix @ matrix)
    bytes_here = values.view(torch.uint8)[: min(LINK_BYTES, size)]
    host = accelerator.pinned_memory(len(bytes_here))
    up_s = device_seconds(accelerator, lambda: accelerator.upload(host, bytes_here), 4)
    down_s = device_seconds(accelerator, lambda: host.copy_(bytes_here, non_blocking=True), 4)
    link = len(bytes_here)
    return DeviceRates(size / read_s, 8 * half / copy_s, 2 * square**3 / product_s, link / up_s, link / down_s)


def _speeds(platform: Platform) -> str:
    rates = device_rates(platform)
    return (
        f"reads {rates.read_bytes_per_s / 1e9:,.0f} GB/s, copies {rates.copied_bytes_per_s / 1e9:,.0f} GB/s, "
        f"multiplies {rates.bf16_flop_per_s / 1e12:,.0f} TFLOP/s in bfloat16; over the link "
        f"{rates.to_device_bytes_per_s / 1e9:.0f} GB/s to it, {rates.to_host_bytes_per_s / 1e9:.0f} back"
    )


def _rotate_store(here: Here, shapes: Sequence[tuple[int, int, int, int]]) -> str:
    """q, k and v to the cache: norms and rotations are near the twin's, codes and scales are its own to the last bit.
    shapes: tokens, heads of q, of k, and elements of a head."""
    ops, twin, errors = here.platform.fused_ops(here.dtype), TorchFusedOps(), []
    if type(ops) is TorchFusedOps:
        raise here.no_kernel()
    for tokens, q_heads, kv_heads, dim in shapes:
        blocks = -(-tokens // BLOCK) + 1
        slots = torch.randperm(blocks * BLOCK, generator=torch.Generator().manual_seed(1))[:tokens]
        slots_T = slots.to(here.platform.device)
        phase = here.noise(tokens, 1, dim, dtype=torch.float32)
        angles = phase.cos().to(here.dtype), phase.sin().to(here.dtype)
        for storage in (here.dtype, *LARGEST):
            exact = storage == here.dtype
            weight = here.noise(q_heads + kv_heads, dim) if exact else None
            found = []
            for each, wide in ((ops, here.dtype), (twin, torch.float32 if exact else here.dtype)):
                kv = _cache(here, (blocks, BLOCK, kv_heads), dim, wide if exact else storage)
                qk, v = here.noise(tokens, q_heads + kv_heads, dim), here.noise(tokens, kv_heads, dim).flip(0)
                normed = None if weight is None else weight.to(wide)
                cos, sin = [angle.to(wide) if exact else None for angle in angles]
                v = v.to(wide).contiguous()
                found.append((each.rotate_store(qk.to(wide), v, normed, 1e-6, cos, sin, kv, slots_T), kv))
            (ours, mine), (expected, theirs) = found
            if exact:
                pairs = (ours, expected), (mine.keys, theirs.keys), (mine.values, theirs.values)
                errors += [relative_error(*pair) for pair in pairs]
                continue
            for name in ("keys", "values", "key_scales", "value_scales"):
                a, b = (as_indexable(getattr(kv, name)) for kv in (mine, theirs))
                require(torch.equal(a, b), f"{name} in {storage} differ from the torch twin's")
    require(max(errors) <= TOLERANCE, f"differs from its torch twin by {max(errors):.2g} of the largest value")
    return f"{len(shapes)} shapes, largest difference {max(errors):.1g}; quantized caches equal bit for bit"


def _cache(here: Here, memory: tuple[int, int, int], dim: int, storage: torch.dtype) -> LayerKV:
    """Returns an empty cache of one layer."""
    device = here.platform.device
    planes = [torch.zeros(*memory, dim, dtype=storage, device=device) for _ in range(2)]
    scales = [torch.zeros(memory, dtype=SCALE_DTYPE, device=device) for _ in range(2 if storage in LARGEST else 0)]
    return LayerKV.of(planes, scales)


def _replayed_steps(platform: Platform) -> str:
    """Greedy tokens of the demo model in float32 are the same."""
    from tandem.workers.offline.llm import LLM

    params, found, replayed = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True), [], 0.0
    small: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 2**26,
    }
    for eager in (False, True):
        with LLM("demo", device=platform.name, dtype="float32", enforce_eager=eager, tune=False, **small) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            launches = [one for one in llm.get_metrics() if one.name.endswith(":step_launches_total")]
            replayed += sum(one.value for one in launches if one.labels["launch"] == "replayed")
    require(replayed > 0, "no decode step of the demo model was replayed")
    require(found[0] == found[1], "replayed steps of the demo model write other tokens than eager ones")
    return f"{replayed:.0f} replayed decode steps of the demo model, the same tokens"


def _all_devices(platform: Platform) -> list[Platform]:
    """Returns a platform for each device that this process sees, `platform` first."""
    found = [platform]
    while (other := open_platform(SETTINGS, rank=len(found), ranks_on_node=1)).device != found[0].device:
        found.append(other)
    platform.accelerator.activate()
    return found


def _two_or_more(platform: Platform) -> list[Platform]:
    if len(found := _all_devices(platform)) == 1:
        raise NotHere("there is one device")
    return found


def _copies_between(platform: Platform) -> str:
    """Every device has what another one had; the rate says whether they reach each other directly."""
    devices, rates = _two_or_more(platform), {}
    for a, b in permutations(range(len(devices)), 2):
        source = torch.arange(LINK_BYTES // 4, dtype=torch.int32, device=devices[a].device)
        target = torch.zeros_like(source, device=devices[b].device)
        times = []
        for _ in range(3):
            devices[a].accelerator.synchronize()
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            for end in (a, b):
                devices[end].accelerator.synchronize()
            times.append(time.perf_counter() - began_s)
        require(torch.equal(target.cpu(), source.cpu()), f"what device {b} got is not what device {a} has")
        rates[a, b] = source.nbytes / min(times)
    least = min(rates, key=lambda pair: rates[pair])
    slowest = f"{rates[least] / 1e9:.0f} ({least[0]} to {least[1]})"
    return f"{len(devices)} devices, {slowest} to {max(rates.values()) / 1e9:.0f} GB/s"


def _all_reduce(platform: Platform) -> str:
    _two_or_more(platform)
    return sum_of_two(platform)
