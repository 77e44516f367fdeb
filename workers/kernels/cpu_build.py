"""Compiles the C kernels for this machine's CPU and loads them: a few seconds, once per user (kept_libraries.py).

Called by the kernels' wrappers. Needs Linux and a C compiler (gcc or cc); without them, or where compilation fails, the
answer is None and callers use the torch twins. The library is built in memory: whatever ends this process, no piece of
a file is left. OpenMP is the one torch has loaded (same soname), so both share one thread pool.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from workers.kernels.kept_libraries import keep, library_name, load_kept

log = logging.getLogger(__name__)
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
STORED = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.bfloat16: 3}
CACHE_SOURCES = ("cpu_decode_attention.c", "cpu_kv_quant.c")
SOURCES = (*CACHE_SOURCES, "cpu_chunk_attention.c", "cpu_fused_ops.c", "cpu_few_rows.c")
LORA_SOURCES = ("cpu_lora.c",)
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
TIMEOUT_S = 60.0


@cache
def cpu_library(dtype: torch.dtype, storage: torch.dtype | None = None) -> ctypes.CDLL | None:
    """The kernels for tensors of `dtype`, or None when there are none for it or no compiler.

    storage: what the KV cache holds, where that is another type; the library has then only the kernels that read it.
    """
    if storage is dtype:
        return cpu_library(dtype)
    return _compiled(SOURCES if storage is None else CACHE_SOURCES, dtype, storage)


@cache
def cpu_lora_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The LoRA kernels, apart so that who serves no adapters does not wait for them; None as above."""
    return _compiled(LORA_SOURCES, dtype, None)


@cache
def _say_once(text: str) -> None:
    log.warning(text)


def _compiled(names: tuple[str, ...], dtype: torch.dtype, storage: torch.dtype | None) -> ctypes.CDLL | None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    folder = Path(__file__).parent
    sources = [folder / name for name in names]
    served = dtype in ELEMENTS and (storage is None or storage in STORED)
    if sys.platform != "linux" or not served or not all(source.exists() for source in sources):
        return None
    if compiler is None:
        _say_once("there is no C compiler (gcc or cc): torch computes instead of kernels for this CPU, slower")
        return None
    types = (f"-DELEMENT={ELEMENTS[dtype]}", f"-DSTORED={0 if storage is None else STORED[storage]}")
    arguments = [*FLAGS, *types, *names]
    name = library_name(compiler, arguments, [*sources, *sorted(folder.glob("*.h"))])
    kept = load_kept(name)
    if kept is not None:
        return kept
    try:
        built = os.memfd_create("tandem-kernels")
    except OSError as error:  # a sandbox
        log.warning("the CPU kernels cannot be compiled, so torch computes, slower: %s", error)
        return None
    library = f"/proc/self/fd/{built}"  # the compiler's own, of the descriptor that it inherits
    command = [compiler, *FLAGS, *types, *map(str, sources), "-o", library, "-lm"]
    try:
        subprocess.run(
            command, check=True, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, pass_fds=(built,)
        )
        loaded = ctypes.CDLL(library)  # the descriptor stays open: the next one must have another name
        keep(name, Path(library).read_bytes())
        return loaded
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
        log.warning("the CPU kernels cannot be compiled, so torch computes, slower: %s", said[-300:].strip())
        os.close(built)
        return None
