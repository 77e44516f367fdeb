"""CUDA devices of this machine, read without torch.

Memory of the host is read in workers/planning/budget.py.
"""

import ctypes

from tandem.configs.platform_facts import PLATFORM_FACTS
from tandem.configs.schema import Device
from tandem.workers.planning.budget import available_bytes


def cuda_device_count() -> int:
    """The number of devices that the CUDA driver has; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cuda_driver_version() -> int | None:
    """The newest CUDA that the driver runs, as 1000 * major + 10 * minor; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_int(0)
    return found.value if driver.cuDriverGetVersion(ctypes.byref(found)) == 0 else None


def cuda_memory_bytes() -> int | None:
    """Memory of the first CUDA device; None without a device."""
    if cuda_device_count() == 0:
        return None
    driver, device, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.c_size_t(0)
    if driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device):
        return None
    return total.value


def cuda_device_names() -> tuple[str, ...]:
    """Names of the CUDA devices and their memory in GiB, such as "NVIDIA H200, 139.8 GiB"; () without a device."""
    if (count := cuda_device_count()) == 0:
        return ()
    driver, found = ctypes.CDLL("libcuda.so.1"), []
    for number in range(count):
        device, name, total = ctypes.c_int(0), ctypes.create_string_buffer(128), ctypes.c_size_t(0)
        if driver.cuDeviceGet(ctypes.byref(device), number) or driver.cuDeviceGetName(name, len(name), device):
            continue
        driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        found.append(f"{name.value.decode(errors='replace')}, {total.value / 2**30:.1f} GiB")
    return tuple(found)


def device_memory(asked: Device | None) -> tuple[Device, int | None]:
    """The device `asked`, else cuda where the driver has one, else cpu; and the bytes of one such device here: what is
    available of the machine on cpu, None for cuda without a device."""
    on_cuda = cuda_memory_bytes()
    device = asked or ("cpu" if on_cuda is None else "cuda")
    return device, available_bytes() if PLATFORM_FACTS[device].shares_memory else on_cuda
