"""What this machine has, asked without torch: CUDA devices and cores. Memory: workers/rank/memory.py."""

import ctypes
import os


def cuda_device_count() -> int:
    """Devices that the CUDA driver offers; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cuda_memory_bytes() -> int | None:
    """Memory of the first CUDA device, None where there is no device to ask."""
    if cuda_device_count() == 0:
        return None
    driver, device, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.c_size_t(0)
    if driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device):
        return None
    return total.value


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
