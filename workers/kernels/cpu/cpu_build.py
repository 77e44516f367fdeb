"""Compiles the C kernels for this machine's CPU and loads them: a few seconds, once per user (kernel_cache.py).

Called by the kernels' wrappers. Needs Linux and a C compiler (gcc or cc); without them, or when compilation fails, it
returns None and callers use the torch twins. The library is built in memory, so a killed process leaves no partial
file. OpenMP is the one that torch has loaded (same soname), so both share one thread pool.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import torch

from tandem.configs.environment import CpuIsa, cpu_isa
from tandem.workers.kernels.cpu.kernel_cache import compiling, library_name, load_cached, store

log = logging.getLogger(__name__)
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
STORED = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.bfloat16: 3}
LATENT_SOURCES = ("cpu_latent_attention.c",)
DECODE_SOURCES = ("cpu_decode_attention.c",)
CACHE_SOURCES = ("cpu_kv_quant.c",)
SOURCES = (*CACHE_SOURCES, "cpu_fused_ops.c", "cpu_skinny_gemm.c", "cpu_weight_blocks.c")
CHUNK_SOURCES = ("cpu_chunk_attention.c",)
LORA_SOURCES = ("cpu_lora.c",)
INT8_SOURCES = ("cpu_int8_gemm.c",)
CODE_SOURCES = ("cpu_code_gemm.c",)
ROUNDING_SOURCES = ("cpu_code_rounding.c",)
EXPERTS_SOURCES = ("cpu_experts.c", "cpu_grouped_gemm.c")
SAMPLING_SOURCES = ("cpu_sampling.c",)
INVARIANT_SOURCES = ("cpu_row_gemm.c",)
UNROLLED_DIMS = (64, 80, 96, 128)
"""Head sizes that decode attention is compiled for; others have loops of variable length."""
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
UNFUSED = ("-ffp-contract=off",)
"""Flags of sources whose results are those of other implementations to the last bit."""
HIDING = {None: (), CpuIsa.AVX512: ("-mno-avx512bf16",), CpuIsa.AVX2: ("-mno-avx512f",)}
"""Flags that hide instructions from the compiler, by the CPU to imitate. All of AVX512 goes with its foundation."""
TIMEOUT_S = 300.0
"""On cores that many others want, gcc takes more than a minute; without its kernels a service would stay slow."""
NO_COMPILER = "there is no C compiler (gcc or cc)"
failures: list[str] = []
"""Reasons why libraries could not be compiled in this process."""


@cache
def cpu_library(dtype: torch.dtype, storage: torch.dtype | None = None) -> ctypes.CDLL | None:
    """Returns the kernels for tensors of `dtype`; None when there are none for it or no compiler.

    storage: the KV cache's dtype, if it differs; the library then has only what writes and gathers the cache.
    """
    if storage is dtype:
        return cpu_library(dtype)
    return _compiled(SOURCES if storage is None else CACHE_SOURCES, dtype, storage)


@cache
def cpu_decode_library(dtype: torch.dtype, storage: torch.dtype, head_dim: int) -> ctypes.CDLL | None:
    """Returns decode attention for heads of `head_dim` elements; None, and storage, as for cpu_library.

    A library per head size in UNROLLED_DIMS, and one for all others: with all in one, gcc took a minute.
    """
    dim = head_dim if head_dim in UNROLLED_DIMS else 0
    return _compiled(DECODE_SOURCES, dtype, None if storage is dtype else storage, (f"-DHEAD_DIM={dim}",))


@cache
def cpu_chunk_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Returns the softmax of prefill chunks over scores of `dtype`; None as for cpu_library."""
    # A separate library: some CPUs take that of another dtype than the model's, and nothing else of it.
    return _compiled(CHUNK_SOURCES, dtype, None)


@cache
def cpu_latent_library(dtype: torch.dtype, storage: torch.dtype | None = None) -> ctypes.CDLL | None:
    """Returns the kernels of attention over latents; None, and storage, as for cpu_library."""
    # A separate library too: few models have latents.
    return _compiled(LATENT_SOURCES, dtype, None if storage is dtype else storage)


@cache
def cpu_lora_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Returns the LoRA kernels for tensors of `dtype`; None as for cpu_library."""
    # A separate library, so that a service without adapters does not wait for its compilation.
    return _compiled(LORA_SOURCES, dtype, None)


@cache
def cpu_int8_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Returns the products with int8 weights for tensors of `dtype`; None as for cpu_library."""
    return _compiled(INT8_SOURCES, dtype, None)


@cache
def cpu_code_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Returns the products with weights that are codes for tensors of `dtype`; None as for cpu_library."""
    return _compiled(CODE_SOURCES, dtype, None)


@cache
def cpu_rounding_library() -> ctypes.CDLL | None:
    """Returns what rounds weights to codes, for models of every dtype; None as for cpu_library."""
    return _compiled(ROUNDING_SOURCES, torch.float32, None)


@cache
def cpu_experts_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Returns the kernels of mixtures of experts for tensors of `dtype`; None as for cpu_library."""
    return _compiled(EXPERTS_SOURCES, dtype, None)


@cache
def cpu_invariant_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Returns the row GEMM for tensors of `dtype`, of --batch-invariant and of CPUs that do not multiply pairs of bf16;
    None as for cpu_library."""
    return _compiled(INVARIANT_SOURCES, dtype, None)


@cache
def cpu_sampling_library() -> ctypes.CDLL | None:
    """Returns the sampling kernels, which take float32 logits of models of every dtype; None as for cpu_library."""
    return _compiled(SAMPLING_SOURCES, torch.float32, None, UNFUSED)


def obstacle(dtype: torch.dtype) -> str | None:
    """Returns why there are no compiled kernels for `dtype`, in words; None where nothing has kept them from being
    compiled so far."""
    if sys.platform != "linux":
        return "kernels are compiled on Linux only"
    if dtype not in ELEMENTS:
        return f"there are no kernels for {str(dtype).removeprefix('torch.')}"
    if _compiler() is None:
        return NO_COMPILER
    return "the C compiler does not compile the kernels" if failures else None


def compiler_words() -> str:
    """Returns the compiler's words about the first failure in this process, in one line; "" without one."""
    return " ".join(failures[0].split()) if failures else ""


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


def _note_failure(words: str) -> None:
    failures.append(words)
    log.warning("the CPU kernels cannot be compiled, so torch computes, slower: %s", words)


def _compiled(
    names: tuple[str, ...], dtype: torch.dtype, storage: torch.dtype | None, more: tuple[str, ...] = ()
) -> ctypes.CDLL | None:
    compiler = _compiler()
    folder = Path(__file__).parent / "src"
    sources = [folder / name for name in names]
    has_kernels = dtype in ELEMENTS and (storage is None or storage in STORED)
    if sys.platform != "linux" or not has_kernels or not all(source.exists() for source in sources):
        return None
    if compiler is None:
        _warn_once(f"{NO_COMPILER}: torch computes instead of kernels for this CPU, slower")
        return None
    types = (f"-DELEMENT={ELEMENTS[dtype]}", f"-DSTORED={0 if storage is None else STORED[storage]}")
    flags = (*FLAGS, *more, *HIDING[cpu_isa()], *types)
    arguments = [*flags, *names]
    name = library_name(compiler, arguments, [*sources, *sorted(folder.glob("*.h"))])
    cached = load_cached(name)
    if cached is not None:
        return cached
    with compiling(name) as waited:
        found = load_cached(name) if waited else None
        return found or _compile(name, [compiler, *flags, *map(str, sources)])


def _compile(name: str, command: list[str]) -> ctypes.CDLL | None:
    """Runs the compiler, and stores and loads what it makes; None if it fails."""
    try:
        built = os.memfd_create("tandem-kernels")
    except OSError as error:  # a sandbox
        _note_failure(str(error))
        return None
    library = f"/proc/self/fd/{built}"  # a path of the compiler's process, for the descriptor it inherits
    try:
        _run([*command, "-o", library, "-lm"], built)
        loaded = ctypes.CDLL(library)  # the descriptor stays open, so that the next one has another name
        store(name, Path(library).read_bytes())
        return loaded
    except (OSError, subprocess.SubprocessError) as error:
        _note_failure(_words_of(error, command[0])[-300:].strip())
        os.close(built)
        return None


def _run(command: list[str], inherited: int) -> None:
    """Runs the compiler, which is ended with all that it has started when it takes too long or a signal comes: gcc's
    cc1 would compute on, with a gigabyte of memory."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=(inherited,)
    ) as compiler:
        try:
            errors = compiler.communicate(timeout=TIMEOUT_S)[1]
        except BaseException:
            _end(psutil.Process(compiler.pid))
            raise
    if compiler.returncode:
        raise subprocess.CalledProcessError(compiler.returncode, command, stderr=errors)


def _end(compiler: psutil.Process) -> None:
    """Ends a compiler, which removes its temporary files on SIGTERM, and its descendants."""
    with suppress(psutil.Error):
        below = compiler.children(recursive=True)
        compiler.terminate()
        psutil.wait_procs([compiler], timeout=1.0)
        for process in [*below, compiler]:
            with suppress(psutil.Error):
                process.kill()


def _words_of(error: Exception, compiler: str) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr.decode(errors="replace")) or f"{compiler} ended with exit status {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{compiler} has not ended within {error.timeout:g} s"
    return str(error)
