"""TracedAccelerator: fake streams and events over CPU tensors, watched by torch's own CUDA sanitizer.

Operations run at once, but each counts as a kernel of the calling thread's current stream, and an access that nothing
orders after an earlier one on another stream is a Race. What `to_host` copies arrives when an event behind it is
waited for, so a reader who does not wait finds POISON. Memory that threads share by parts is named with `share`;
other tensors count whole. Freed memory goes back to the stream that it was allocated on, as with torch's allocator, and
the next allocation there is taken to reuse it: a Race, if another stream's use of it is not ordered before.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler, TensorInfo
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.workers.platforms.base import Platform
from tests.support.platforms import GpuOnHost

aten = torch.ops.aten
_sanitizer.traceback = SimpleNamespace(  # it would take the stack at every operation
    StackSummary=SimpleNamespace(extract=lambda *args, **kwargs: []), walk_stack=lambda frame: []
)
has_expired = torch.UntypedStorage._expired
"""What StorageWeakRef.expired() comes to, at a third of its cost; it is asked for all memory at every kernel."""
MAIN = 0
POISON = -7
LOOKS = 32
READS_ON_HOST = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
INDEXED = {
    aten.index_select.default,
    aten.index_select.out,
    aten.index_copy_.default,
    aten.index_fill_.int_Scalar,
    aten.index.Tensor,
}


class Race(AssertionError):
    """Two accesses to the same memory that nothing orders."""


class NotActivated(AssertionError):
    """A thread touched the device before it called activate()."""


class TracedEvent:
    """An event; done once waited for, or when the accelerator is not lazy."""

    def __init__(self, accelerator: "TracedAccelerator", number: int, stream: int) -> None:
        self._accelerator = accelerator
        self.number = number
        self.stream = stream
        self.arrivals = len(accelerator.arrivals[stream])

    @property
    def is_over(self) -> bool:
        return self.number <= self._accelerator.reached[self.stream]

    def is_done(self) -> bool:
        if not self.is_over and not self._accelerator.lazy:
            self.finish()
        return self.is_over

    def wait(self) -> None:
        self._accelerator.counts["synchronizations"] += 1
        self.finish()

    def seconds_since(self, earlier: Any) -> float:
        assert self.is_over and earlier.is_over, "a time of an event that is not done"
        return float(self.number - earlier.number)

    def finish(self) -> None:
        """The device has come this far."""
        self._accelerator.handler._handle_event_synchronization(self.number)
        self._accelerator.arrive(self.stream, self.arrivals, self.number)


class TracedStream:
    """A stream by its number."""

    def __init__(self, accelerator: "TracedAccelerator", number: int) -> None:
        self._accelerator = accelerator
        self.number = number

    def wait_event(self, event: Any) -> None:
        self._accelerator.handler._handle_event_wait(event.number, self.number)

    def synchronize(self) -> None:
        accelerator = self._accelerator
        accelerator.counts["synchronizations"] += 1
        if accelerator.before_synchronize is not None:
            hook, accelerator.before_synchronize = accelerator.before_synchronize, None
            hook()
        accelerator.handler._handle_stream_synchronization(self.number)
        accelerator.arrive(self.number, len(accelerator.arrivals[self.number]), next(accelerator.numbers))


class _Here(threading.local):
    """One thread's view: its current stream, and whether it called activate()."""

    stream = MAIN
    mode: "_Trace | None" = None


class TracedAccelerator:
    """An Accelerator over CPU memory. lazy: events are done only when somebody waits for them. before_synchronize: runs
    once, when a thread is about to wait for a stream whose work is under way."""

    def __init__(self, *, lazy: bool = True) -> None:
        self.handler = EventHandler()
        self.lazy = lazy
        self.before_synchronize: Callable[[], None] | None = None
        self.counts: Counter[str] = Counter()
        self.arrivals: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self.reached: Counter[int] = Counter()
        self.pinned: dict[int, int] = {}
        self._arrived: Counter[int] = Counter()
        self._uploads: dict[int, TracedEvent] = {}
        self._grains: dict[int, int] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int | None]] = {}
        self._young: dict[int, None] = {}  # of them, those since the last look at all
        self._looks = 0
        self._freed: defaultdict[int, list[TensorInfo]] = defaultdict(list)
        self.numbers = iter(range(1, 10**9))
        self._here = _Here()

    # ---- Accelerator ----

    def activate(self) -> None:
        if self._here.mode is None:
            self._here.mode = _Trace(self)
            self._here.mode.__enter__()

    def stream(self) -> TracedStream:
        self._check()
        number = next(self.numbers)
        self.handler._handle_stream_creation(number)
        return TracedStream(self, number)

    def current_stream(self) -> TracedStream:
        self._check()
        return TracedStream(self, self._here.stream)

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        self._check()
        before, self._here.stream = self._here.stream, stream.number
        try:
            yield
        finally:
            self._here.stream = before

    def event(self, *, timed: bool = False) -> TracedEvent:
        self._check()
        number = next(self.numbers)
        self.handler._handle_event_creation(number)
        self.handler._handle_event_record(number, self._here.stream)
        return TracedEvent(self, number, self._here.stream)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        self._check()
        self.counts["uploads"] += 1
        with _untraced():
            on_device = host.clone()
        self.launch("to_device", [], [on_device], [on_device])
        return on_device

    def pinned_memory(self, num_bytes: int) -> torch.Tensor:
        self._check()
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """The device reads pinned memory later: a Race, if the host has written there while a copy could be under
        way."""
        self._check()
        self.counts["uploads"] += 1
        address = host.untyped_storage().data_ptr()
        if (last := self._uploads.get(address)) is not None and last.number > self.reached[last.stream]:
            raise Race("pinned memory is filled again before the device has read it")
        with _untraced():
            content = host.clone()
        self.launch("upload", [], [target])
        with _untraced():
            target.copy_(content)
        self._uploads[address] = self.event()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check()
        self.counts["downloads"] += 1
        self.launch("to_host", [tensor], [])
        with _untraced():
            host, content = torch.empty_like(tensor), tensor.clone()
            host.fill_(POISON if tensor.dtype is not torch.bool else False)
        self.arrivals[self._here.stream].append((host, content))
        return host

    def pin(self, memory: torch.Tensor) -> None:
        self._check()
        self.pinned[memory.data_ptr()] = memory.nbytes

    def unpin(self, memory: torch.Tensor) -> None:
        del self.pinned[memory.data_ptr()]

    def synchronize(self) -> None:
        self.counts["synchronizations"] += 1
        self.handler._handle_device_synchronization()
        for stream, arrivals in self.arrivals.items():
            self.arrive(stream, len(arrivals), next(self.numbers))

    # ---- the trace ----

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Traces the calling thread's operations inside the context."""
        self.activate()
        try:
            yield
        finally:
            mode, self._here.mode = self._here.mode, None
            assert mode is not None
            mode.__exit__(None, None, None)

    @contextmanager
    def on_main(self) -> Iterator[None]:
        """What the steps' thread does meanwhile: its work goes to the main stream."""
        before, self._here.stream = self._here.stream, MAIN
        try:
            yield
        finally:
            self._here.stream = before

    def share(self, *tensors: torch.Tensor, grain: int) -> None:
        """Watches these tensors' memory in parts of `grain` bytes."""
        for tensor in tensors:
            self._grains[tensor.untyped_storage().data_ptr()] = grain

    def arrive(self, stream: int, count: int, event: int) -> None:
        """A stream has come as far as an event, before which there are `count` copies to the host."""
        self.reached[stream] = max(self.reached[stream], event)
        with _untraced(), torch.inference_mode():
            for host, content in self.arrivals[stream][self._arrived[stream] : count]:
                host.copy_(content)
        self._arrived[stream] = max(self._arrived[stream], count)

    def launch(
        self,
        name: str,
        reads: Iterable[torch.Tensor | set[int]],
        writes: Iterable[torch.Tensor | set[int]],
        made: Iterable[torch.Tensor] = (),
    ) -> None:
        """A kernel on the current stream, `made` allocated for it there; Race when it is not ordered after what it
        touches, or after the uses of freed memory that it may have been given."""
        made = list(made)
        if made:
            self._note_freed()
        for tensor in made:
            self._watch(tensor, self._here.stream)
            self._reuse(name)
        for touched in (*reads, *writes):
            if isinstance(touched, torch.Tensor):
                self._watch(touched, None)
        written = set[int]().union(*map(self._cells, writes))
        read = set[int]().union(*map(self._cells, reads)) - written
        aliases: dict[int, list[str]] = {key: [] for key in read | written}
        errors = self.handler._handle_kernel_launch(self._here.stream, read, written, set(), name, aliases)
        if errors:
            now, then = errors[0].current_access, errors[0].previous_access
            raise Race(f"{now.operator} on stream {now.stream} ({now.type}) beside {then.operator} on {then.stream}")

    def _watch(self, tensor: torch.Tensor, stream: int | None) -> None:
        """Notes a tensor's memory until it is freed. stream: where it was allocated; None: not in a trace."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._storages and has_expired(self._storages[address][0].cdata):
            self._note_freed(all_of_it=True)
        if address and address not in self._storages:
            self._storages[address] = StorageWeakRef(storage), stream
            self._young[address] = None

    def _note_freed(self, *, all_of_it: bool = False) -> None:
        """Memory that nobody refers to any more is free on its stream; its address may be another tensor's by now. What
        lives longer, as a capture's tensors do, is looked at once in LOOKS times, or if asked for all of it."""
        self._looks += 1
        looked_at = list(self._young)
        if all_of_it or self._looks % LOOKS == 0:
            looked_at, self._young = list(self._storages), {}
        freed = [at for at in looked_at if has_expired(self._storages[at][0].cdata)]
        for address in freed:
            self._young.pop(address, None)
            _, stream = self._storages.pop(address)
            uses = self.handler.tensors_accessed.accesses.pop(address, None)
            if uses is not None and stream is not None:
                self._freed[stream].append(uses)

    def _reuse(self, name: str) -> None:
        """The current stream allocates: all that was freed there may be given out."""
        here = self._here.stream
        for uses in self._freed.pop(here, []):
            for last in (uses.write, *uses.reads):
                if last is not None and not self.handler.syncs.is_ordered_after(here, last.seq_num, last.stream):
                    raise Race(f"{name} on stream {here} reuses freed memory beside {last.operator} on {last.stream}")

    def _check(self) -> None:
        if self._here.mode is None:
            raise NotActivated(threading.current_thread().name)

    def _cells(self, touched: torch.Tensor | set[int]) -> set[int]:
        if isinstance(touched, set):
            return touched
        storage = touched.untyped_storage().data_ptr()
        if storage not in self._grains or touched.is_mkldnn:
            return {storage} if storage else set()
        return self.cells_at(touched, addresses(touched))

    def cells_at(self, tensor: torch.Tensor, places: torch.Tensor) -> set[int]:
        grain = self._grains[tensor.untyped_storage().data_ptr()]
        return set((places // grain * grain).unique().tolist())

    def is_shared(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in self._grains


def addresses(tensor: torch.Tensor) -> torch.Tensor:
    """The address of every element, in the tensor's shape."""
    places = torch.full(tensor.shape, tensor.data_ptr(), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        along = torch.arange(size) * stride * tensor.element_size()
        places += along.view([-1 if d == dim else 1 for d in range(tensor.dim())])
    return places


@contextmanager
def _untraced() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


@dataclass(frozen=True, slots=True)
class _Signature:
    """An operator, and what it does to its arguments, by place and by name: "r" reads it, "w" writes it, "" makes
    a view of it or finds no tensor there."""

    name: str
    by_place: tuple[str, ...]
    by_name: dict[str, str]
    is_view: bool
    reads_on_host: bool
    is_indexed: bool


@cache
def signature(func: Any) -> _Signature:
    """Returns an operator's, by its schema, which is read once: every call asks."""
    uses = {}
    for argument in func._schema.arguments:
        info, has_tensors = argument.alias_info, "Tensor" in str(argument.type)
        uses[argument.name] = ("r" if info is None else "w" if info.is_write else "") if has_tensors else ""
    return _Signature(str(func), tuple(uses.values()), uses, is_view(func), func in READS_ON_HOST, func in INDEXED)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that an argument or an output is made of."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (list, tuple)) else []


class _Trace(TorchDispatchMode):
    """Feeds every operation of one thread to the accelerator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the guard against that costs more than most operations

    def __init__(self, accelerator: TracedAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        accelerator, kwargs = self._accelerator, kwargs or {}
        uses = signature(func)
        if uses.is_view:
            return func(*args, **kwargs)
        accelerator.counts["operators"] += 1
        accelerator.counts["reads on the host"] += uses.reads_on_host
        touched: dict[str, list[torch.Tensor]] = {"r": [], "w": [], "": []}
        for use, value in zip(uses.by_place, args, strict=False):
            touched[use] += tensors_in(value) if use else ()
        for name, value in kwargs.items():
            use = uses.by_name[name]
            touched[use] += tensors_in(value) if use else ()
        reads, writes = touched["r"], touched["w"]
        places = self._indexed(func, args) if uses.is_indexed and accelerator.is_shared(args[0]) else None
        output = func(*args, **kwargs)
        known = {id(tensor) for tensor in (*reads, *writes)}
        made = [tensor for tensor in tensors_in(output) if id(tensor) not in known]
        part = {id(args[0]): places} if places is not None else {}
        ins, outs = ([part.get(id(t), t) for t in tensors] for tensors in (reads, [*writes, *made]))
        accelerator.launch(uses.name, ins, outs, made)
        return output

    def _indexed(self, func: Any, args: Any) -> set[int]:
        """The cells of its first argument, which is shared memory, that an operation by index touches."""
        target, *where = args[:3]
        if func is aten.index.Tensor:
            at = tuple(slice(None) if index is None else index for index in where[0])
            return self._accelerator.cells_at(target, addresses(target)[at])
        dim, index = where
        return self._accelerator.cells_at(target, addresses(target).index_select(dim, index))


@cache
def is_view(func: Any) -> bool:
    """Whether it only makes another view: its outputs alias inputs that it does not write."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def traced_platform(accelerator: TracedAccelerator) -> Platform:
    """The platform of CUDA ranks on this accelerator; Triton's kernels, which need a device, give way to twins."""
    return GpuOnHost(accelerator)
