"""Runs the source of a warp-specialised Gluon kernel on numpy arrays, all its warps concurrently in a random order.
Implements the parts of Gluon that the kernels of this tree use.

Copies and products that are asynchronous on a chip are asynchronous here too, and finish at a random moment: a block that is
read before it arrives, or overwritten before it is read, gives NaN, and warps that wait for each other raise a Deadlock."""

import inspect
import random
import textwrap
import threading
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.kernels import ptx_model


class Deadlock(Exception):
    pass


class Number(int):
    """A scalar of the kernel."""

    def to(self, _kind: object) -> "Number":
        return self


def _wrapped(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def operate(self: int, other: object) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented
        result = plain(self, int(other))  # type: ignore[call-overload]
        return result if result is NotImplemented else Number(result)

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    for _side in ("", "r"):
        setattr(Number, f"__{_side}{_name}__", _wrapped(f"__{_side}{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _wrapped(f"__{_name}__"))
Number.__hash__ = int.__hash__  # type: ignore[assignment]


class BFloat16:
    """Stands for the type, which numpy lacks: such numbers lie in float32."""


class Tensor(np.ndarray):
    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, kind: object, bitcast: bool = False) -> "Tensor":
        if bitcast:
            return self.view(kind)  # type: ignore[no-any-return, call-overload]
        if kind is BFloat16:
            return tensor(torch.from_numpy(np.asarray(self)).bfloat16().float().numpy())
        if kind is None and self.dtype == np.bool_:  # to integers
            return self.astype(np.int32)
        return self.astype(kind) if isinstance(kind, type) else self

    def permute(self, order: tuple[int, ...]) -> "Tensor":
        return self.transpose(order)

    def split(self) -> tuple["Tensor", "Tensor"]:
        return self[..., 0], self[..., 1]


def tensor(values: Any) -> Tensor:
    return np.asarray(values).view(Tensor)


class Pointer:
    def __init__(self, numbers: np.ndarray, place: Any = 0) -> None:
        self.numbers, self.place = numbers, place
        self.dtype = SimpleNamespace(element_ty=numbers.dtype.type)

    def __add__(self, more: Any) -> "Pointer":
        made = Pointer(self.numbers, self.place + more)
        made.dtype = self.dtype
        return made


class Descriptor:
    """Describes a matrix that is read in blocks; elements outside are zero."""

    layout = None

    def __init__(self, numbers: np.ndarray, block: tuple[int, int]) -> None:
        self.numbers, self.dtype = numbers, numbers.dtype.type
        self.block_type = SimpleNamespace(shape=block)

    def read(self, at: list[int]) -> np.ndarray:
        block = np.zeros(self.block_type.shape, self.dtype)
        part = self.numbers[at[0] : at[0] + block.shape[0], at[1] : at[1] + block.shape[1]]
        block[: part.shape[0], : part.shape[1]] = part
        return block


class Shared:
    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers
        self.dtype = numbers.dtype.type

    def index(self, index: int) -> "Shared":
        assert 0 <= index < len(self.numbers)
        return Shared(self.numbers[index])

    def _reinterpret(self, _kind: object, shape: list[int], _layout: object) -> "Shared":
        return Shared(self.numbers.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.numbers.transpose(order))

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.numbers[start : start + length])

    def store(self, values: np.ndarray) -> None:
        self.numbers[:] = values

    def load(self, _layout: object) -> Tensor:
        return tensor(self.numbers.copy())


class Barrier:
    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count
        assert self.missing >= 0


class Barriers:
    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]

    def index(self, index: int) -> Barrier:
        assert 0 <= index < len(self.each)
        return self.each[index]


class Warps:
    """Threads of which one runs at a time: at every point where others could interleave, a thread waits for its turn."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.under_way: list[Callable[[], None]] = []  # copies
        self._ready: dict[int, tuple[Callable[[], bool], threading.Semaphore]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.fault: BaseException | None = None
        self.local = threading.local()

    def start(self, program: int, work: Callable[[], None]) -> None:
        index, turn = len(self._threads), threading.Semaphore(0)

        def run() -> None:
            self.local.index, self.local.program, self.local.products = index, program, []
            turn.acquire()
            try:
                if self.fault is None:
                    work()
            except BaseException as fault:
                self.fault = self.fault or fault
            self._next()

        self._ready[index] = (lambda: True), turn
        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def run(self) -> None:
        self._next()
        for thread in self._threads:
            thread.join(30)
        for finish in self.under_way:
            finish()
        if self.fault is not None:
            raise self.fault

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        turn = threading.Semaphore(0)
        self._ready[self.local.index] = until, turn
        self._next()
        turn.acquire()
        if self.fault is not None:
            raise self.fault

    def _next(self) -> None:
        """Finish some copies, then resume a random thread that can continue."""
        while self._ready:
            while self.under_way and self.random.random() < 0.3:
                self._finish_one()
            able = [index for index, (until, _) in self._ready.items() if self.fault is not None or until()]
            if able:
                self._ready.pop(self.random.choice(able))[1].release()
                return
            if not self.under_way:
                self.fault = Deadlock(f"{len(self._ready)} groups of warps wait")
            else:
                self._finish_one()

    def _finish_one(self) -> None:
        finish = self.under_way.pop(self.random.randrange(len(self.under_way)))
        try:
            finish()
        except AssertionError as fault:  # a barrier's assertion fails in any thread's turn: raise it in all threads
            self.fault = self.fault or fault


class Language:
    """The namespaces `gl`, `mbarrier` and `tma`, and the functions that a kernel imports by name."""

    int64 = int32 = constexpr = tensor = None
    float16, float32, bfloat16, int16 = np.float16, np.float32, BFloat16, np.int16

    def __init__(self, warps: Warps, num_programs: int) -> None:
        self._warps, self._num_programs = warps, num_programs
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None, init=self._init, wait=self._wait, expect=self._expect, arrive=self._arrive
        )
        self.tma = SimpleNamespace(async_copy_global_to_shared=self._copy)

    def program_id(self, _axis: int) -> Number:
        return Number(self._warps.local.program)

    def num_programs(self, _axis: int) -> Number:
        return Number(self._num_programs)

    @staticmethod
    def SliceLayout(*_: object) -> None:
        return None

    NVMMADistributedLayout = DistributedLinearLayout = BlockedLayout = SwizzledSharedLayout = SliceLayout

    @staticmethod
    def arange(begin: int, end: int, _layout: object) -> Tensor:
        return tensor(np.arange(begin, end))

    @staticmethod
    def zeros(shape: tuple[int, ...], kind: Any, _layout: object) -> Tensor:
        return tensor(np.zeros(shape, kind))

    @staticmethod
    def zeros_like(like: Tensor) -> Tensor:
        return tensor(np.zeros(like.shape, like.dtype))

    static_range = staticmethod(range)

    @staticmethod
    def exp(value: Tensor) -> Tensor:
        with np.errstate(over="ignore"):  # infinity, as on a chip
            return tensor(np.exp(value))

    @staticmethod
    def convert_layout(value: Tensor, _layout: object) -> Tensor:
        return value

    @staticmethod
    def cdiv(a: int, b: int) -> Number:
        return Number(-(-int(a) // int(b)))

    @staticmethod
    def full(shape: tuple[int, ...], value: float, kind: Any, _layout: object) -> Tensor:
        return tensor(np.full(shape, value, np.int32 if kind is None else kind))

    @staticmethod
    def multiple_of(value: Tensor, _count: int) -> Tensor:
        return value

    max_contiguous = multiple_of

    @staticmethod
    def reshape(value: Tensor, shape: list[int]) -> Tensor:
        return value.reshape(shape)

    @staticmethod
    def permute(value: Tensor, order: list[int]) -> Tensor:
        return tensor(np.ascontiguousarray(value.transpose(order)))

    @staticmethod
    def sum(value: Tensor, axis: int) -> Tensor:
        return tensor(np.asarray(value).sum(axis, dtype=value.dtype))

    @staticmethod
    def inline_asm_elementwise(
        assembly: str, constraints: str, args: list[Tensor], dtype: Any, is_pure: bool, pack: int
    ) -> Tensor:
        shape = np.broadcast_shapes(*(arg.shape for arg in args))
        bits = ptx_model.run(assembly, constraints, [np.broadcast_to(arg, shape).copy() for arg in args], pack)
        return tensor(bits.view(np.int32 if dtype is None else dtype).reshape(shape))

    @staticmethod
    def expand_dims(value: Any, axis: int) -> Tensor:
        return tensor(np.expand_dims(value, axis))

    @staticmethod
    def split(value: Tensor) -> tuple[Tensor, Tensor]:
        return value.split()

    @staticmethod
    def minimum(a: Any, b: int) -> Any:
        return tensor(np.minimum(a, b)) if isinstance(a, np.ndarray) else Number(min(int(a), int(b)))

    @staticmethod
    def maximum(a: int, b: int) -> Number:
        return Number(max(int(a), int(b)))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        if any(isinstance(part, np.ndarray) for part in (condition, a, b)):
            # A plain number takes the other's type.
            return tensor(np.where(condition, a, b).astype(np.result_type(a, b), copy=False))
        return Number(int(a) if condition else int(b))

    @staticmethod
    def join(a: Tensor, b: Tensor) -> Tensor:
        return tensor(np.stack([a, b], axis=-1))

    def thread_barrier(self) -> None:
        self._warps.pause()

    def load(self, at: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Tensor:
        self._warps.pause()
        place = np.asarray(at.place) if mask is None else np.where(mask, at.place, 0)
        assert place.min() >= 0 and place.max() < at.numbers.size
        found = at.numbers[place]
        return tensor(found if mask is None else np.where(mask, found, at.numbers.dtype.type(other)))

    def store(self, at: Pointer, values: Any, mask: Any = None) -> None:
        self._warps.pause()
        if mask is None:
            at.numbers[at.place] = values
        else:
            at.numbers[at.place[mask]] = values[mask]

    def atomic_add(self, at: Pointer, value: int, sem: str, scope: str) -> Number:
        self._warps.pause()
        assert (sem, scope) == ("acq_rel", "gpu")
        before = Number(at.numbers[at.place])
        at.numbers[at.place] += value
        return before

    @staticmethod
    def allocate_shared_memory(kind: Any, shape: list[int], _layout: object) -> Shared | Barriers:
        return Barriers(shape[0]) if kind is None else Shared(np.full(shape, np.nan, kind))

    def warp_specialize(self, parts: list[Any], _warps: list[int], _registers: list[int]) -> None:
        for function, args in parts:
            self._warps.start(self._warps.local.program, lambda function=function, args=args: function(*args))  # type: ignore[misc]

    @staticmethod
    def _init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def _wait(self, barrier: Barrier, phase: int) -> None:
        self._warps.pause(lambda: barrier.phase & 1 != int(phase))

    def _expect(self, barrier: Barrier, num_bytes: int) -> None:
        self._warps.pause()
        barrier.bytes, barrier.missing = barrier.bytes + num_bytes, barrier.missing - 1
        barrier.settle()

    def _arrive(self, barrier: Barrier, count: int, pred: Any = True) -> None:
        self._warps.pause()
        if pred:
            barrier.missing -= count
            barrier.settle()

    def _copy(self, source: Descriptor, at: list[int], barrier: Barrier, to: Shared) -> None:
        self._warps.pause()
        block = source.read([int(place) for place in at])
        assert to.numbers.shape == block.shape
        to.numbers[:] = np.nan

        def finish() -> None:
            to.numbers[:] = block
            barrier.bytes -= block.nbytes
            barrier.settle()

        self._warps.under_way.append(finish)

    def warpgroup_mma(self, left: Shared, right: Shared, acc: Tensor, use_acc: Any, is_async: bool) -> Tensor:
        assert is_async
        self._warps.pause()

        def finish() -> None:
            sums = left.numbers.astype(np.float32) @ right.numbers.astype(np.float32)
            acc[:] = acc + sums if use_acc else sums

        self._warps.local.products.append(finish)
        return acc

    def warpgroup_mma_wait(self, num_outstanding: int, deps: list[Tensor]) -> Any:
        self._warps.pause()
        products = self._warps.local.products
        while len(products) > num_outstanding:
            products.pop(0)()
        return deps[0] if len(deps) == 1 else tuple(deps)


def environment(helpers: dict[str, Any], num_programs: int, program: int) -> dict[str, Any]:
    """Return a kernel's functions as one program's warps would call them, for functions that do not wait."""
    warps = Warps(0)
    warps.local.program = program
    return _environment(helpers, Language(warps, num_programs))


def _environment(helpers: dict[str, Any], language: Language) -> dict[str, Any]:
    env: dict[str, Any] = {}
    for name, value in helpers.items():
        raw = getattr(value, "fn", None)
        if isinstance(raw, types.FunctionType):
            env[name] = types.FunctionType(raw.__code__, env, name, raw.__defaults__)
        elif type(value).__name__ == "constexpr":
            env[name] = value.value
        elif isinstance(value, type) and hasattr(value, "__triton_aggregate__"):
            env[name] = _record(value)
    env |= {"gl": language, "mbarrier": language.mbarrier, "tma": language.tma}
    env |= {"warpgroup_mma": language.warpgroup_mma, "warpgroup_mma_wait": language.warpgroup_mma_wait}
    env |= {"gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}
    return env


def run(name: str, helpers: dict[str, Any], num_programs: int, seed: int, args: tuple[Any, ...]) -> None:
    """Run the kernel of that name. `helpers`: the globals of its modules."""
    warps = Warps(seed)
    body = _environment(helpers, Language(warps, num_programs))[name]
    for program in range(num_programs):
        warps.start(program, lambda: body(*args))
    warps.run()


def changed(function: Any, old: str, new: str) -> Any:
    """Return the function with a fault in it: `old` replaced by `new`."""
    source = textwrap.dedent(inspect.getsource(function.fn))
    source = source[source.index("def ") :]
    assert source.count(old) == 1
    found: dict[str, Any] = {}
    exec(compile(source.replace(old, new), "changed", "exec"), dict(function.fn.__globals__), found)
    (made,) = found.values()
    return SimpleNamespace(fn=made)


def _record(kind: Any) -> Callable[..., SimpleNamespace]:
    _self, *names = inspect.signature(kind.hash_attrs[0].fn).parameters
    return lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True)))
