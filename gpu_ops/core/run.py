"""``run``: a program, arrays by name, a device. The one place that allocates, fills in addresses and launches.

A :class:`Prepared` call is what later calls of the same key go to. It finds their arrays where the first call had
them, allocates results, and runs the program, which is linked to its device once.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from gpu_ops.core import device as devices
from gpu_ops.core.arrays import from_dlpack, give
from gpu_ops.core.call import Bound, Output
from gpu_ops.core.dispatch import lowering
from gpu_ops.errors import DeviceError, DTypeError, OptionError, OutOfMemoryError, ShapeError
from gpu_ops.kernels.program import ALIGNMENT, Layout, Limits, Program, Spec, Workspace, lower

__all__ = ["Linked", "Prepared", "forget", "program_of"]

Views: TypeAlias = "dict[str, Any]"

_NOTHING = contextlib.nullcontext()


@functools.lru_cache(4096)
def program_of(spec: Spec, backend: str, limits: Limits) -> Program:
    """The program of a spec; kept."""
    return lower(spec, backend, limits)[0]


def forget() -> None:
    """Drop the kept programs, so that what was tuned since counts."""
    program_of.cache_clear()


class Linked:
    """A program whose steps are functions of one device."""

    def __init__(self, program: Program, device: Any) -> None:
        self.program, self.device = program, device
        self._steps = [device.link(step) for step in program.steps]

    def __call__(self, views: Views, workspace: Any = None) -> None:
        """``run(program, views, device)``."""
        program = self.program
        for constant in program.constants:
            views[constant.name] = self.device.constant(constant)
        if program.workspaces:
            self._add_workspaces(views, workspace)
        for step in self._steps:
            step(views)

    def _add_workspaces(self, views: Views, workspace: Any) -> None:
        device, offset = self.device, 0
        if workspace is None and device.is_capturing:
            raise DeviceError(
                f"this call needs {self.program.workspace_bytes} bytes of workspace, and the stream is captured: "
                "pass workspace=, a uint8 array of gpu_ops.workspace_size(op, ...) bytes on the device that lives "
                "as long as the graph"
            )
        for w in self.program.workspaces:
            if workspace is None:
                views[w.name] = device.empty(w.shape, w.dtype, w.name)
            else:
                views[w.name] = device.carve(workspace, offset, w.shape, w.dtype)
                offset += -(-w.nbytes // ALIGNMENT) * ALIGNMENT
            if w.zeroed:
                device.zero(w.name, views)


class Prepared:
    """A bound call without its arrays."""

    def __init__(self, bound: Bound, parameters: tuple[str, ...]) -> None:
        self.op, self.spec, self.choice = bound.op, bound.spec, bound.choice
        self.backend = lowering(bound.choice)
        self.device: Any = None  # the emulator's knows the arrays of one call only
        if bound.cuda is not None:
            self.device = bound.cuda.device
        elif bound.choice.device != "emulator":
            self.device = devices.current_device(bound.choice.device)
        self._library = bound.cuda.library if bound.cuda else bound.library
        self._on_cuda, self._copied, self._updated = bound.cuda is not None, bound.copied, bound.updated
        self._outputs, self._finish, self._look = bound.outputs, bound.finish, bound.look
        self._returned = tuple(o.name for o in bound.outputs if o.returned)
        self._new = [
            (o.name, *_allocation(bound.spec, o)) for o in bound.outputs if o.source is None and o.returned
        ]
        self._hidden = tuple(
            Workspace(o.name, o.layout.shape, o.layout.dtype)
            for o in bound.outputs
            if o.source is None and not o.returned
        )
        given = {o.name: o.source for o in bound.outputs if o.source is not None}
        self._given = frozenset(given)
        self._aliases = [(o.name, o.alias) for o in bound.outputs if o.alias is not None]
        self._sources = [
            (name, parameters.index(s.argument), s) for name, s in (bound.sources | given).items()
        ]
        self._linked: tuple[dict[str, Any], Linked] | None = None
        places = [o.source and (o.source.argument, o.source.item) for o in bound.outputs if o.returned]
        results = places[0][0] if places and places[0] else ""
        whole = len(places) > 1 and places == [(results, i) for i in range(len(places))]
        self.tuple_argument = results if whole and bound.finish is None else None
        """The argument that is the tuple of all results; the call returns it."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A later call: its arrays are where those of the first were."""
        if self._on_cuda and self._library is not None:
            return self._foreign(args, kwargs)
        views: Views = {}
        own: Views = {}
        for name, position, source in self._sources:
            x = args[position] if position < len(args) else kwargs[source.argument]
            if source.make is not None:
                views[name] = source.make(x, self.device)
                continue
            if source.item is not None:
                x = getattr(x, source.item) if type(source.item) is str else x[source.item]  # type: ignore[index]
            if name in self._given:
                own[name] = x
            if not self._on_cuda and type(x) is not np.ndarray:
                x = x.view(np.ndarray) if isinstance(x, np.ndarray) else from_dlpack(x, self._library)
            if name in self._copied:
                x = self._contiguous(x)
            views[name] = x
        device = self.device
        if not self._on_cuda or device.is_current:
            return self.execute(views, own, kwargs.get("workspace"))
        with device:
            return self.execute(views, own, kwargs.get("workspace"))

    def _foreign(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """CUDA arrays of other libraries: on their own stream."""
        from gpu_ops.core.cuda_arrays import CudaArrays

        raw: Views = {}
        for name, position, source in self._sources:
            x = args[position] if position < len(args) else kwargs[source.argument]
            if source.item is not None:
                x = getattr(x, source.item) if type(source.item) is str else x[source.item]  # type: ignore[index]
            raw[name] = x
        first = next(name for name, _, source in self._sources if source.make is None)
        arrays = CudaArrays(self.op, first, raw[first])
        views = {
            name: source.make(raw[name], self.device) if source.make else arrays.view(name, raw[name])
            for name, _, source in self._sources
        }
        with arrays.active():
            views |= {name: self._contiguous(views[name]) for name in self._copied}
            own = {name: raw[name] for name in self._given}
            return self.execute(views, own, kwargs.get("workspace"))

    def first(self, bound: Bound, arguments: dict[str, Any]) -> Any:
        """The call that was bound."""
        own: Views = {}
        views = dict(bound.views)
        for name, _, source in self._sources:
            x = arguments[source.argument]
            if source.make is not None:
                views[name] = source.make(x, self.device)
            elif name in self._given:
                own[name] = x if source.item is None else x[source.item]  # type: ignore[index]
        with bound.cuda.active() if bound.cuda else _NOTHING:
            return self.execute(views, own, bound.workspace)

    def execute(self, views: Views, own: Views, workspace: Any) -> Any:
        """``own``: the caller's objects for results."""
        values: dict[str, Any] = {}
        if self._look is not None:
            values, more = self._look(views, self.backend)
            views.update(more)
        device = devices.EmulatorDevice() if self.device is None else self.device
        if self.choice.copies:
            host = {name: views[name] for name in (*self._given, *self._updated)}
            _copy_to_device(views)
        linked = self._program(values, device)
        if workspace is not None:
            workspace = _check_workspace(self.op, workspace, linked.program, self.choice.device)
        if self.device is None:
            self._name(views, device)
        for name, shape, dtype, axes in self._new:
            view = self._allocate(device, shape, dtype, name)
            views[name] = view if axes is None else view.transpose(axes)
        for name, alias in self._aliases:
            views[name] = views[alias]
        linked(views, workspace)
        if self.choice.copies:
            for name, target in host.items():
                target[...] = _to_host(views[name])
        if self._finish is not None:
            return self._finish(views, device, lambda name: self._give(name, views, own))
        if len(self._returned) == 1:
            return self._give(self._returned[0], views, own)
        return tuple([self._give(name, views, own) for name in self._returned])

    def limits(self) -> Limits:
        device = devices.EmulatorDevice() if self.device is None else self.device
        limits: Limits = device.limits
        return limits

    def program(self, values: dict[str, Any], limits: Limits) -> Program:
        """The program for what :data:`gpu_ops.core.call.Look` found, results that nobody asked for as workspaces."""
        spec = replace(self.spec, options=(*self.spec.options, *values.items())) if values else self.spec
        program = program_of(spec, self.backend, limits)
        return replace(program, workspaces=(*self._hidden, *program.workspaces)) if self._hidden else program

    def _program(self, values: dict[str, Any], device: Any) -> Linked:
        last = self._linked  # other threads may replace it
        if self.device is None:
            return Linked(self.program(values, device.limits), device)
        if last is None or last[0] != values:
            self._linked = last = values, Linked(self.program(values, device.limits), device)
        return last[1]

    def use(self, program: Program) -> None:
        """Take another program from now on: a candidate that is measured."""
        program = replace(program, workspaces=(*self._hidden, *program.workspaces))
        self._linked = {}, Linked(program, self.device)

    def _name(self, views: Views, device: devices.EmulatorDevice) -> None:
        for name, x in views.items():
            if name not in self._given and isinstance(x, np.ndarray):
                device.name(name, x)
        for name in self._given:
            device.name(name, views[name], written=False)

    def _allocate(self, device: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Any:
        try:
            return device.empty(shape, dtype, name)
        except OptionError:  # of the pool
            raise
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address has bits
            required = Layout.contiguous(shape, dtype).nbytes
            raise OutOfMemoryError(
                f"{self.op}: no memory for a result of shape {shape}, {required / 2**30:.1f} GiB", required
            ) from error

    def _give(self, name: str, views: Views, own: Views) -> Any:
        if name in own:
            return own[name]
        view = views[name]
        if self.choice.copies:
            return _to_host(view)
        if self._library is None:
            return view
        if not self._on_cuda:
            return give(view, self._library)
        from gpu_ops.core.cuda_arrays import give_cuda

        return give_cuda(view, self._library)

    def _contiguous(self, x: Any) -> Any:
        if not self._on_cuda:
            return np.ascontiguousarray(x)
        import cupy

        return cupy.ascontiguousarray(x)


def _allocation(spec: Spec, o: Output) -> tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...] | None]:
    """Shape and dtype to allocate, and the axes that make the result of it."""
    shape, axes = o.layout.shape, o.axes
    if axes is None:
        return shape, o.layout.dtype, None
    inverse = tuple(axes.index(i) for i in range(len(axes)))
    return tuple(shape[a] for a in axes), o.layout.dtype, inverse


def _copy_to_device(views: Views) -> None:
    import cupy

    moved: dict[int, Any] = {}
    for name, x in views.items():
        if isinstance(x, np.ndarray):
            if id(x) not in moved:
                bits = x.view(np.uint16) if x.dtype.name == "bfloat16" else x
                moved[id(x)] = cupy.asarray(np.ascontiguousarray(bits)).view(x.dtype)
            views[name] = moved[id(x)]


def _to_host(x: Any) -> Any:
    import cupy

    bits = x.view(np.uint16) if x.dtype.name == "bfloat16" else x
    return cupy.asnumpy(bits).view(x.dtype)


def _check_workspace(op: str, workspace: Any, program: Program, device: str) -> Any:
    """The caller's workspace as the device takes it; None where none is needed."""
    if device == "cpu":
        return None
    need = program.workspace_bytes
    dtype = getattr(workspace, "dtype", None)
    if str(dtype).removeprefix("torch.") != "uint8":
        raise DTypeError(f"{op}: workspace is {dtype or type(workspace).__name__}, expected a uint8 array")
    if len(workspace.shape) != 1 or workspace.shape[0] < need:
        raise ShapeError(f"{op}: workspace has shape {tuple(workspace.shape)}, expected ({need},) or more")
    if device == "cuda" and not hasattr(workspace, "data_ptr") and isinstance(workspace, np.ndarray):
        raise DeviceError(f"{op}: workspace is in host memory; allocate it on the device")
    return workspace
