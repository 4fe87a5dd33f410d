"""Running a program on a device, with arrays by name. Only this module allocates, fills in addresses and launches.

Later calls with the same key go to a :class:`PreparedCall` call. It finds their arrays where the first call had them,
allocates results, and runs the program, which is linked to its device once.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from gpu_ops.core import device as devices
from gpu_ops.core.allocator import IN_USE, Allocator, allocator, out_of_memory
from gpu_ops.core.arrays import as_bits, from_dlpack, give
from gpu_ops.core.call import Bound, Output, Source, as_integer
from gpu_ops.core.dispatch import lowering
from gpu_ops.errors import DeviceError, DTypeError, OptionError, OutOfMemoryError, ShapeError
from gpu_ops.kernels.program import ALIGNMENT, LaunchTooLarge, Layout, Limits, Program, Spec, Workspace, lower
from gpu_ops.memory_pool import FROM_BYTES

__all__ = ["Allocation", "Linked", "Place", "PreparedCall", "forget", "program_of"]

Views: TypeAlias = "dict[str, Any]"

_NOTHING = contextlib.nullcontext()


@functools.lru_cache(4096)
def program_of(spec: Spec, backend: str, limits: Limits) -> Program:
    """The program of a spec; cached."""
    try:
        return lower(spec, backend, limits)[0]
    except LaunchTooLarge as error:
        raise DeviceError(f"{spec.op}: {error}; split the arrays into several calls") from error
    except OverflowError as error:  # np.int32(2**31)
        raise DeviceError(
            f"{spec.op}: a size of 2^31 or more is beyond what the {backend} kernels count in 32 bits; "
            "split the arrays into several calls"
        ) from error


def forget() -> None:
    """Drop the cached programs, so that later tuning takes effect."""
    program_of.cache_clear()


class Linked:
    """A program whose steps are functions of one device. ``op``: its op, for the labels of workspaces."""

    def __init__(self, program: Program, device: Any, op: str = "") -> None:
        self.program, self.device, self.op = program, device, op
        self._steps = [device.link(step) for step in program.steps]

    def __call__(self, views: Views, workspace: Any = None) -> None:
        """Run the program on these views."""
        program, current = self.program, allocator() if IN_USE else None
        for constant in program.constants:
            views[constant.name] = self.device.constant(constant)
        if program.workspaces:
            self._add_workspaces(views, workspace, current)
        if current is None:
            for step in self._steps:
                step(views)
            return
        with current.scratch(program.scratch_bytes, self.op):
            for step in self._steps if current.runs else ():
                step(views)

    def _add_workspaces(self, views: Views, workspace: Any, instead: Allocator | None) -> None:
        device, offset = self.device, 0
        if workspace is None and (instead is None or instead.from_device) and device.is_capturing:
            raise DeviceError(
                f"this call needs {self.program.workspace_bytes} bytes of workspace, and the stream is captured: "
                "pass workspace=, a uint8 array of gpu_ops.workspace_size(op, ...) bytes on the device that lives "
                "as long as the graph"
            )
        for w in self.program.workspaces:
            if workspace is not None:
                views[w.name] = device.carve(workspace, offset, w.shape, w.dtype)
                offset += -(-w.nbytes // ALIGNMENT) * ALIGNMENT
            elif instead is not None:
                views[w.name] = instead.allocate(w.shape, w.dtype, f"{self.op} workspace: {w.name}", device)
            else:
                views[w.name] = device.empty(w.shape, w.dtype, w.name)
            if w.zeroed and (instead is None or instead.runs):
                device.zero(w.name, views)


class PreparedCall:
    """A bound call without its arrays."""

    def __init__(
        self, bound: Bound, parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.op, self.spec, self.choice = bound.op, bound.spec, bound.choice
        self.backend = lowering(bound.choice)
        self.device: Any = None  # an emulator device knows the arrays of one call only
        if bound.cuda is not None:
            self.device = bound.cuda.device
        elif bound.choice.device != "emulator":
            self.device = devices.current_device(bound.choice.device)
        self._library = bound.cuda.library if bound.cuda else bound.library
        self._on_cuda, self._copied, self._updated = bound.cuda is not None, bound.copied, bound.updated
        self._finish, self._check_values = bound.finish, bound.check_values
        new = [o for o in bound.outputs if o.source is None]
        # no graph is captured on the CPU: results that the caller does not get are allocated with the rest
        on_host = self.device is devices.HOST
        self._returned = tuple(o.name for o in bound.outputs if o.returned)
        self._new = [Allocation(bound.spec, o, self.device) for o in new if o.returned or on_host]
        self._hidden = tuple(
            Workspace(o.name, o.layout.shape, o.layout.dtype) for o in new if not o.returned and not on_host
        )
        self._aliases = [(o.name, o.alias) for o in bound.outputs if o.alias is not None]
        outputs = {o.name: o.source for o in bound.outputs if o.source is not None}
        self._given = frozenset(outputs)
        places = [
            Place(name, source, parameters.index(source.argument), len(args))
            for name, source in (bound.sources | outputs).items()
        ]
        self._places = places
        # as_they_are: every array and number is used as it is, except those made from an argument
        computed = [p for p in places if p.source.make not in (None, as_integer)]
        direct = [p for p in places if p not in computed]
        as_they_are = self._library is None and all(
            p.is_direct and p.name not in bound.copied for p in direct
        )
        if not self._on_cuda:
            arrays = [p.find(args, kwargs) for p in direct if p.source.make is None]
            as_they_are = as_they_are and all(type(x) is np.ndarray for x in arrays)
        arguments = [p for p in direct if p.source.item is None]
        self._by_position = (
            [(p.name, p.position) for p in arguments if p.by_position] if as_they_are else None
        )
        self._by_keyword = [(p.name, p.source.argument) for p in arguments if not p.by_position]
        in_items = [p for p in direct if p.source.item is not None]
        self._items_by_position = [(p.name, p.position, p.source.item) for p in in_items if p.by_position]
        self._items = [(p.name, p.source.argument, p.source.item) for p in in_items if not p.by_position]
        self._made = [(p.name, p.find, p.source.make) for p in computed if p.source.make is not None]
        self._returns_own = not bound.choice.copies and self._library is None and bound.finish is None
        self._linked: tuple[dict[str, Any], Linked] | None = None
        items = [o.source and (o.source.argument, o.source.item) for o in bound.outputs if o.returned]
        argument = items[0][0] if items and items[0] else ""
        whole = len(items) > 1 and items == [(argument, i) for i in range(len(items))]
        self.tuple_argument = argument if whole and bound.finish is None else None
        """The argument that is the tuple of all results; the call returns it."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a later call, whose arrays are where those of the first were."""
        if self._by_position is None:
            return self._from_places(args, kwargs)
        views = {name: args[i] for name, i in self._by_position}
        for name, keyword in self._by_keyword:
            views[name] = kwargs[keyword]
        for name, keyword, item in self._items:
            views[name] = kwargs[keyword][item]
        for name, i, item in self._items_by_position:
            views[name] = args[i][item]
        if not self._on_cuda or self.device.is_current:
            return self._as_they_are(views, args, kwargs)
        with self.device:
            return self._as_they_are(views, args, kwargs)

    def _as_they_are(self, views: Views, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name, find, make in self._made:
            views[name] = make(find(args, kwargs), self.device)
        return self.execute(views, views, kwargs.get("workspace"))

    def _from_places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a later call whose arrays need conversion or a copy, or are attributes of arguments."""
        objects = {p.name: p.find(args, kwargs) for p in self._places}
        if not self._on_cuda:
            views = {p.name: self._on_host(p, objects[p.name]) for p in self._places}
            return self.execute(views, objects, kwargs.get("workspace"))
        from gpu_ops.core.cuda_arrays import CudaArrays

        first = next(p.name for p in self._places if p.source.make is None)
        arrays = CudaArrays(self.op, first, objects[first])
        with arrays.active():
            views = {
                p.name: p.source.make(x, self.device) if p.source.make else arrays.view(p.name, x)
                for p, x in zip(self._places, objects.values(), strict=True)
            }
            views |= {name: arrays.contiguous(views[name]) for name in self._copied}
            return self.execute(views, objects, kwargs.get("workspace"))

    def _on_host(self, place: Place, x: Any) -> Any:
        if place.source.make is not None:
            return place.source.make(x, self.device)
        if type(x) is not np.ndarray:
            x = x.view(np.ndarray) if isinstance(x, np.ndarray) else from_dlpack(x, self._library)
        return np.array(x, order="C") if place.name in self._copied else x

    def first(self, bound: Bound, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call that was bound."""
        objects = {p.name: p.find(args, kwargs) for p in self._places}
        with bound.cuda.active() if bound.cuda else _NOTHING:
            return self.execute(self.views(bound, args, kwargs), objects, bound.workspace)

    def views(self, bound: Bound, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Views:
        """The arrays of the call that was bound, including those held by arguments."""
        held = [p for p in self._places if p.source.make is not None]
        return bound.views | {p.name: p.source.make(p.find(args, kwargs), self.device) for p in held}  # type: ignore[misc]

    def execute(self, views: Views, own: Views, workspace: Any) -> Any:
        """Read values, allocate, run. ``own``: the caller's objects; those for results are returned unchanged."""
        values: dict[str, Any] = _NO_VALUES
        if self._check_values is not None:
            views = dict(views)
            values, extra_views = self._check_values(views, self.backend)
            views.update(extra_views)
        device = devices.EmulatorDevice() if self.device is None else self.device
        host: Views = {}
        if self.choice.copies:
            host = {name: views[name] for name in (*self._given, *self._updated)}
            views = _copied_to_device(views)
        linked = self._link(values, device)
        if workspace is not None:
            workspace = _check_workspace(self.op, workspace, linked.program, self.choice.device)
        if self.device is None:
            self._name(views, device)
        for new in self._new:
            views[new.name] = new.allocate(self.op, device)
        for name, alias in self._aliases:
            views[name] = views[alias]
        linked(views, workspace)
        for name, target in host.items():
            target[...] = _to_host(views[name])
        if self._returns_own:
            names, by_name = self._returned, views if own is views else {**views, **own}
            return by_name[names[0]] if len(names) == 1 else tuple([by_name[name] for name in names])
        if self._finish is not None:
            return self._finish(views, device, lambda name: self._give(name, views, own))
        result = tuple([self._give(name, views, own) for name in self._returned])
        return result[0] if len(result) == 1 else result

    def limits(self) -> Limits:
        """Limits of the device that runs the call."""
        limits: Limits = (devices.EmulatorDevice() if self.device is None else self.device).limits
        return limits

    def program(self, values: dict[str, Any], limits: Limits) -> Program:
        """The program for the hook's values; results that are not returned are workspaces."""
        spec = replace(self.spec, options=(*self.spec.options, *values.items())) if values else self.spec
        return self._with_hidden(program_of(spec, self.backend, limits))

    def link(self, program: Program) -> Linked:
        """Make a program of another lowering of this call ready to run: a candidate to measure."""
        return Linked(self._with_hidden(program), self.device, self.op)

    def use(self, linked: Linked) -> None:
        """Use another program from now on."""
        self._linked = _NO_VALUES, linked

    def _with_hidden(self, program: Program) -> Program:
        if not self._hidden:
            return program
        return replace(program, workspaces=(*self._hidden, *program.workspaces))

    def _link(self, values: dict[str, Any], device: Any) -> Linked:
        last = self._linked  # other threads may replace it
        if last is not None and (last[0] is values or last[0] == values):
            return last[1]
        linked = Linked(self.program(values, device.limits), device, self.op)
        if self.device is not None:
            self._linked = values, linked
        return linked

    def _name(self, views: Views, device: devices.EmulatorDevice) -> None:
        for name, x in views.items():
            if name not in self._given and isinstance(x, np.ndarray):
                device.name(name, x)
        for name in self._given:
            device.name(name, views[name], written=name in self._updated)

    def _give(self, name: str, views: Views, own: Views) -> Any:
        """A result in the form that the caller gets."""
        if name in self._given:
            return own[name]
        view = views[name]
        if self.choice.copies:
            view = _to_host(view)
        if self._library is None:
            return view
        if not self._on_cuda:
            return give(view, self._library)
        from gpu_ops.core.cuda_arrays import give_cuda

        return give_cuda(view, self._library)


_NO_VALUES: dict[str, Any] = {}


def _copied_to_device(views: Views) -> Views:
    """Copy NumPy arrays to the current device; an array with several names is copied once."""
    import cupy

    by_id: dict[int, Any] = {}
    copies: Views = {}
    for name, x in views.items():
        if isinstance(x, np.ndarray):
            if id(x) not in by_id:
                by_id[id(x)] = cupy.asarray(np.ascontiguousarray(as_bits(x))).view(x.dtype)
            x = by_id[id(x)]
        copies[name] = x
    return copies


def _to_host(x: Any) -> Any:
    """Copy to host memory, with the axes in the order that they have in the device's memory."""
    import cupy

    axes = sorted(range(x.ndim), key=lambda i: -x.strides[i])
    host = cupy.asnumpy(as_bits(x.transpose(axes))).view(x.dtype)
    return host.transpose([axes.index(i) for i in range(x.ndim)])


def _check_workspace(op: str, workspace: Any, program: Program, device: str) -> Any:
    """Check the caller's workspace and return it; None where none is needed."""
    need = program.workspace_bytes
    dtype = getattr(workspace, "dtype", None)
    if str(dtype).removeprefix("torch.") != "uint8":
        raise DTypeError(f"{op}: workspace is {dtype or type(workspace).__name__}, expected a uint8 array")
    if device == "cpu":
        return None
    if len(workspace.shape) != 1 or workspace.shape[0] < need:
        raise ShapeError(f"{op}: workspace has shape {tuple(workspace.shape)}, expected ({need},) or more")
    if device == "cuda" and not hasattr(workspace, "data_ptr") and isinstance(workspace, np.ndarray):
        raise DeviceError(f"{op}: workspace is in host memory; allocate it on the device")
    return workspace


class Place:
    """Location of an array in the arguments of calls with one key."""

    def __init__(self, name: str, source: Source, position: int, given: int) -> None:
        self.name, self.source, self.position = name, source, position
        self.by_position = position < given

    @property
    def is_direct(self) -> bool:
        """Whether it is an argument, or an item of a tuple or list passed as an argument."""
        return self.source.make in (None, as_integer) and not isinstance(self.source.item, str)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = self.source
        x = args[self.position] if self.by_position else kwargs.get(source.argument, source.default)
        item = source.item
        if item is None:
            return x
        return getattr(x, item) if isinstance(item, str) else x[item]


class Allocation:
    """A result that each call allocates."""

    def __init__(self, spec: Spec, o: Output, device: Any) -> None:
        self.name, self.shape, self.dtype, self.axes = o.name, *_allocation(spec, o)
        # allocations that the pool leaves to NumPy
        self._small = device is devices.HOST and o.layout.nbytes < FROM_BYTES

    def allocate(self, op: str, device: Any) -> Any:
        try:
            current = allocator() if IN_USE else None
            if current is not None:
                array = current.allocate(self.shape, self.dtype, f"{op}: {self.name}", device)
            elif self._small:
                array = np.empty(self.shape, self.dtype)
            else:
                array = device.empty(self.shape, self.dtype, self.name)
        except (OptionError, OutOfMemoryError):  # from the pool or the allocator
            raise
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address can hold
            required = Layout.contiguous(self.shape, self.dtype).nbytes
            raise out_of_memory(op, error, f"a result of shape {self.shape}", required) from error
        return array if self.axes is None else array.transpose(self.axes)


def _allocation(spec: Spec, o: Output) -> tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...] | None]:
    """Shape and dtype to allocate, and the transposition that turns it into the result."""
    shape, axes = o.layout.shape, o.axes
    if axes is None:
        return shape, o.layout.dtype, None
    inverse = tuple(axes.index(i) for i in range(len(axes)))
    return tuple(shape[a] for a in axes), o.layout.dtype, inverse
