"""A simulated GPU: work waits in the queues of streams, and runs in a random order that the waits allow.

Tensors on `DEVICE` are the GPU's while a `FakeGpu` is entered. Operations of torch or of a Triton kernel on them are
queued in the current stream, and run on the CPU once the host waits for them. `torch.cuda`'s streams and events order
queues; without a wait there is no order between streams. Memory that the host has released belongs to the stream in
which it was allocated. It is poisoned after the work of that stream, as soon as CUDA's allocator might give it to
another tensor there.

A `FakeGraph` keeps the operations that a computation queues, with addresses and without tensors, like a CUDA graph.
"""

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum, auto
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
"""Device of the GPU's tensors: besides the CPU, the only device that every build of torch has."""
aten = torch.ops.aten
EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default)
COPIES = (aten.copy_.default, aten._to_copy.default)
READ_BY_HOST = (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)
INDEXED = (aten.index.Tensor, aten.index_put_.default)
Run = Callable[[], Any]


class Wait(Enum):
    """Kinds of waits that can be left out."""

    STREAM_FOR_EVENT = auto()
    HOST_FOR_STREAM = auto()
    HOST_FOR_EVENT = auto()


class Point:
    """A point in a queue, which is done once the work before it is."""

    is_done = False


class Memory:
    """Memory that tensors over the same bytes share, released with the last. `tape`: the capture that owns it."""

    def __init__(self, tape: "Tape | None") -> None:
        self.tape = tape


class DeviceTensor(torch.Tensor):
    """A tensor of the GPU. `content`: its bytes after all work so far, for use by queued work only."""

    content: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, memory: Memory) -> "DeviceTensor":
        strides, offset = values.stride(), values.storage_offset()
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides, offset, dtype=values.dtype, device=DEVICE
        )
        made.content, made.memory = values, memory
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, at: Any) -> Tensor:
        # A list would become a meta tensor, which has no values.
        parts = at if isinstance(at, tuple) else (at,)
        return super().__getitem__(tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} of a device tensor while its GPU is not entered")


class Queues:
    """Queues of work, in order within each stream."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._work: dict[Stream, deque[Run | Point]] = {}
        # From streams that alternate to streams that pause for long.
        self._change = 10 ** chance.uniform(-4, 0)

    def add(self, stream: "Stream", work: Run | Point) -> None:
        """Append work, or a point to wait for."""
        if stream not in self._work:
            self._work[stream] = deque()
            self._shuffle()
        self._work[stream].append(work)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Run work until a condition holds, or all of it; a stream pauses until the point that it waits for is done."""
        while until is None or not until():
            ready = [stream for stream, work in self._work.items() if self._is_ready(work)]
            if not ready:
                assert until is None, "the host waits for what was never queued"
                assert not any(self._work.values()), "streams wait for each other"
                return
            work = self._work[ready[0]].popleft()
            if self._chance.random() < self._change:
                self._shuffle()
            if not isinstance(work, Point):
                with _disable_current_modes(), torch.inference_mode():
                    work()

    def _shuffle(self) -> None:
        """Reorder the streams."""
        self._work = dict(self._chance.sample(list(self._work.items()), len(self._work)))

    def _is_ready(self, work: "deque[Run | Point]") -> bool:
        return bool(work) and (not isinstance(work[0], Point) or work[0].is_done)


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, gpu: "FakeGpu", device: object = None) -> None:
        self._gpu = gpu

    def point(self) -> Point:
        """Return the current end of the queue."""
        point = Point()
        self._gpu.queue(partial(setattr, point, "is_done", True), self, point)
        return point

    def wait_event(self, event: "Event") -> None:
        if event.point is not None and self._gpu.keeps(Wait.STREAM_FOR_EVENT):
            self._gpu.queue(event.point, self)

    def synchronize(self) -> None:
        self._gpu.host_waits()
        if self._gpu.keeps(Wait.HOST_FOR_STREAM):
            self._gpu.wait_for(self.point())


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, gpu: "FakeGpu") -> None:
        self._gpu = gpu
        self.point: Point | None = None

    def record(self) -> None:
        self.point = self._gpu.current.point()

    def synchronize(self) -> None:
        self._gpu.host_waits()
        if self.point is not None and self._gpu.keeps(Wait.HOST_FOR_EVENT):
            self._gpu.wait_for(self.point)


class FakeGpu:
    """Queue the work of one host thread; `with gpu:` replaces `torch.cuda`'s streams and events.

    Args:
        seed: seed of the order in which queues run.
        dropped: a kind of wait that is ignored, to test what fails without it.
    """

    def __init__(self, seed: int = 0, dropped: Wait | None = None) -> None:
        self._chance = random.Random(seed)
        self._dropped, self.num_dropped = dropped, 0
        # How often the host has waited for work.
        self.num_waits = 0
        self._queues = Queues(self._chance)
        self._tape: Tape | None = None
        # Memory without an owner, the stream that it belongs to, and the capture that owns it, if any.
        self._freed: list[tuple[Stream, Tape | None, Tensor]] = []
        self.main = self.current = Stream(self)
        # The work of another host thread while this one waits, with the main stream as its current one.
        self.meanwhile: Run | None = None

    def __enter__(self) -> "FakeGpu":
        cuda = {
            "Stream": partial(Stream, self),
            "Event": partial(Event, self),
            "stream": self._stream,
            "current_stream": lambda device=None: self.current,
        }
        changes: list[Any] = [patch.object(torch.cuda, name, fake) for name, fake in cuda.items()]
        changes += [patch.object(torch, "tensor", _tensor), _launches_queued(self)]
        self._changes = ExitStack()
        for change in (*changes, torch.inference_mode(), _Dispatch(self)):
            self._changes.enter_context(change)
        return self

    def __exit__(self, *error: Any) -> None:
        self._changes.close()

    # Waits of the host.
    def synchronize(self) -> None:
        """Run everything."""
        self._check_not_capturing()
        self.num_waits += 1
        self._queues.run()

    def wait_for(self, point: Point) -> None:
        """Run work in random order until a point is done."""
        self._check_not_capturing()
        self.num_waits += 1
        self._queues.run(lambda: point.is_done)

    def host_waits(self) -> None:
        """Let the other host thread run, if there is one."""
        if self.meanwhile is not None:
            goes_on, self.meanwhile = self.meanwhile, None
            with self._stream(self.main):
                goes_on()
            self.meanwhile = goes_on

    def keeps(self, kind: Wait) -> bool:
        """Return whether waits of this kind have an effect."""
        self.num_dropped += kind == self._dropped
        return kind != self._dropped

    # Queued work.
    def queue(self, work: Run | Point, stream: "Stream | None" = None, point: Point | None = None) -> None:
        """Append work to a stream, or to the capture in progress; it completes `point`."""
        stream = stream or self.current
        if self._tape is not None:
            self._tape.add(stream, work, point)
        else:
            self._queues.add(stream, work)

    def note(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Record what the capture in progress, if any, reads or writes."""
        if self._tape is not None:
            self._tape.note(what, [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)])

    @contextmanager
    def captured(self) -> Iterator["Tape"]:
        """Capture the queued work instead of running it.

        Raises:
            RuntimeError: the host would have to wait.
        """
        assert self._tape is None
        tape = self._tape = Tape()
        try:
            yield tape
        finally:
            self._tape = None

    def play(self, tape: "Tape") -> None:
        """Run captured work, in a new order of its streams, as one piece of work of the current stream."""
        self.queue(lambda: tape.run(Queues(self._chance)))

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _check_not_capturing(self) -> None:
        if self._tape is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    def new(self, like: Tensor) -> DeviceTensor:
        """Return a tensor of this shape, strides and dtype, with arbitrary content."""
        values = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        poison(values)
        memory = Memory(self._tape)
        weakref.finalize(memory, self._free, values, self.current, self._tape).atexit = False
        self._reuse(self.current)
        return DeviceTensor(values, memory)

    def _free(self, values: Tensor, stream: Stream, tape: "Tape | None") -> None:
        self._freed.append((stream, tape, values))
        self._reuse(self.main)

    def _reuse(self, stream: Stream) -> None:
        """Poison memory that a stream may reuse: the main stream at any time, others when they create a tensor."""
        freed, self._freed = self._freed, []
        for owner, tape, values in freed:
            if owner is stream and tape is self._tape:
                self.queue(partial(poison, values), stream)
            else:
                self._freed.append((owner, tape, values))


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queue torch's operations on a GPU's tensors."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if not types and all(map(_is_of_host, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_ours = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        lost = [tensor for tensor in tensors if tensor.device == DEVICE and not isinstance(tensor, DeviceTensor)]
        assert not lost, f"{func} of a tensor without values"
        to = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        if not is_ours and to != DEVICE:
            return func(*args, **kwargs)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view:
            whole = args[0]
            return tree_map(lambda part: DeviceTensor(part, whole.memory), func(whole.content, *args[1:], **kwargs))
        is_written = any(info.alias_info is not None for info in func._schema.arguments)
        is_async = kwargs.get("non_blocking", False) or (func is aten.copy_.default and args[2:] == (True,))
        goes_to_host = func in COPIES and (to or args[0].device) != DEVICE and not is_async
        is_read = func in READ_BY_HOST or goes_to_host
        self._gpu.note(str(func), tensors)
        if func in INDEXED and any(map(_is_waited_for, args[1])):
            self._gpu.wait_for(self._gpu.current.point())
        if is_read:
            self._gpu.wait_for(self._gpu.current.point())
            found = func(*_values(args), **kwargs)
            return args[0] if is_written else found
        if is_written:
            made = args[0]
            _shapes(func, args, kwargs, leaves)  # raises immediately if shapes do not fit
            self._gpu.queue(partial(func, *_values(args), **_values(kwargs)))
        else:
            made = self._queued(func, args, kwargs, leaves)
        if func in COPIES and not is_async and not all(isinstance(tensor, DeviceTensor) for tensor in tensors):
            self._gpu.wait_for(self._gpu.current.point())
        return made

    def _queued(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        """Return new tensors of what a function returns, and queue its work."""
        shapes = _shapes(func, args, kwargs, leaves)
        made = tree_map(lambda like: self._gpu.new(like) if isinstance(like, Tensor) else like, shapes)
        targets = [tensor.content for tensor in tree_leaves(made) if isinstance(tensor, DeviceTensor)]
        if func not in EMPTY:
            here = {"device": "cpu"} if "device" in kwargs else {}
            self._gpu.queue(partial(_compute, func, _values(args), _values(kwargs) | here, targets))
        return made


def _is_of_host(arg: Any) -> bool:
    """Return whether an argument has nothing to do with a GPU; False if this would take long to determine."""
    if isinstance(arg, Tensor):
        return arg.device != DEVICE
    return isinstance(arg, (int, float, torch.dtype, torch.layout)) or arg is None


def _is_waited_for(index: Tensor | None) -> bool:
    """Return whether the host waits for the device to use an index: it is copied there by a blocking copy, or its ones
    are counted."""
    return index is not None and (not isinstance(index, DeviceTensor) or index.dtype == torch.bool)


class Tape:
    """The work that a capture has queued."""

    def __init__(self) -> None:
        self._work: list[tuple[Stream, Run | Point]] = []
        self._points: list[tuple[Stream, Point]] = []
        self._outside: dict[weakref.ref[Memory], str] = {}

    def note(self, what: str, tensors: Iterable[DeviceTensor]) -> None:
        """Record the memory of tensors that were created before the capture."""
        for tensor in tensors:
            if tensor.memory.tape is not self:
                self._outside.setdefault(weakref.ref(tensor.memory), f"{what}: {tuple(tensor.shape)} {tensor.dtype}")

    def lost(self) -> list[str]:
        """Return the memory that the captured work reads or writes although nothing keeps it alive."""
        return [what for memory, what in self._outside.items() if memory() is None]

    def add(self, stream: Stream, work: Run | Point, point: Point | None = None) -> None:
        """Append work to a stream; it completes `point`."""
        self._work.append((stream, work))
        if point is not None:
            self._points.append((stream, point))

    def run(self, queues: Queues) -> None:
        """Run everything."""
        for _, point in self._points:
            point.is_done = False
        for stream, work in self._work:
            queues.add(stream, work)
        queues.run()


class FakeGraph:
    """A CUDA graph: addresses of a computation that has run before. It keeps only its output alive."""

    def __init__(self, gpu: FakeGpu, compute: Callable[[], Tensor]) -> None:
        self._gpu, self.num_replays = gpu, 0
        with gpu.captured() as self._tape:
            self.output = compute()

    def lost(self) -> list[str]:
        """Return the memory that a replay reads or writes although nothing keeps it alive."""
        return self._tape.lost()

    def replay(self) -> None:
        self.num_replays += 1
        self._gpu.play(self._tape)


def poison(values: Tensor) -> None:
    """Fill with NaN, or with integers that are not valid indices."""
    values.fill_(
        float("nan") if values.is_floating_point() else 0xFF if values.dtype == torch.uint8 else _lowest(values)
    )


def _lowest(values: Tensor) -> int:
    return 0 if values.dtype == torch.bool else torch.iinfo(values.dtype).min


def _compute(func: Any, args: Any, kwargs: Any, targets: list[Tensor]) -> None:
    found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    for target, value in zip(targets, found, strict=True):
        target.copy_(value)


def _values(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.content if isinstance(leaf, DeviceTensor) else leaf, tree)


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


_known_shapes: dict[tuple[Any, ...], Any] = {}


def _shapes(func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
    """Return the shapes of a function's result; Python computes them, and they are the same in every step."""
    lists = tuple(len(arg) if isinstance(arg, (list, tuple)) else None for arg in args)
    key = (func, lists, *kwargs, *map(_kind_of, leaves))
    if key not in _known_shapes:
        _known_shapes[key] = func(*tree_map(_shape_only, args), **tree_map(_shape_only, kwargs))
    return _known_shapes[key]


def _kind_of(leaf: Any) -> Any:
    """Return the properties of an argument that shapes depend on."""
    if isinstance(leaf, Tensor):
        return leaf.size(), leaf.stride(), leaf.dtype
    return type(leaf), leaf


def _shape_only(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


_host_tensor = torch.tensor


def _tensor(data: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
    """Replace `torch.tensor`, which knows that meta tensors have no values."""
    made = _host_tensor(data, **options)
    return made if device is None else made.to(device)


def _launches_queued(gpu: FakeGpu) -> Any:
    """Return a patch that queues Triton's interpreted kernels."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return nullcontext()
    launch = GridExecutor.__call__

    def queued(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, DeviceTensor)]
        if not tensors:
            launch(self, *args, **kwargs)
            return
        gpu.note(self.fn.__name__, tensors)
        gpu.queue(partial(launch, self, *_values(args), **_values(kwargs)))

    return patch.object(GridExecutor, "__call__", queued)
