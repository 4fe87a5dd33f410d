"""``Call``: turns an op's arguments into a validated :class:`Bound` call, views by name and a hashable spec.

An op describes its call to a :class:`Call`, argument by argument, and ends with :meth:`Call.bind`::

    call = Call("rmsnorm", device, backend, workspace)
    x_ = call.read("x", x)
    call.write("y", x_.shape, x_.dtype, out, in_place="x", rows=True)
    call.option(eps=checks.number(...))
    return call.bind(problem=..., unsupported=...)

Nothing is allocated or written before ``bind`` has returned. Checks read shapes, dtypes, strides and addresses
only, so they are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_ops.core.arrays import Array, check_writable, host_view, is_row_major, on_cuda, overlap, same_memory
from gpu_ops.core.checks import Axes, native
from gpu_ops.core.dispatch import Choice, choose, is_emulated, require_cuda_kernels
from gpu_ops.errors import DeviceError, OptionError, ShapeError
from gpu_ops.kernels.program import Layout, Spec

if TYPE_CHECKING:
    from gpu_ops.core.cuda_arrays import CudaArrays

__all__ = ["Bound", "Call", "CheckValues", "Finish", "Make", "Output", "Source", "as_integer"]


class Call:
    """The arguments of one call. The first array decides the library of the results."""

    def __init__(
        self, op: str, device: str | None = None, backend: str | None = None, workspace: Any = None
    ) -> None:
        self.op, self.axes = op, Axes(op)
        self.kernels = op  # the op whose kernels run; differs where one function calls another op
        self._device, self._backend, self._workspace = device, backend, workspace
        self._emulated = is_emulated(device)
        self._library: str | None = None
        self._views: dict[str, Array] = {}
        self._sources: dict[str, Source] = {}
        self._copied: set[str] = set()
        self._outputs: list[Output] = []
        self._written: dict[str, Array] = {}
        self._labels: dict[str, str] = {}
        self._updated: list[str] = []
        self._given: dict[str, Any] = {}
        self._options: dict[str, Any] = {}
        self._cuda: CudaArrays | None = None
        self._provided: dict[str, Layout] = {}
        self._held: list[tuple[str, Array]] = []
        self._items: dict[str, list[str]] = {}

    @property
    def on_cuda(self) -> bool:
        """Whether the caller's arrays are on a CUDA device."""
        return self._cuda is not None

    @property
    def views(self) -> Mapping[str, Array]:
        """The arrays read so far, by name."""
        return self._views

    def read(
        self, name: str, x: Any, axes: str | None = None, *, rows: bool = False, contiguous: bool = False
    ) -> Array:
        """A read-only view of ``x``, or a copy if its last axis is not contiguous. ``axes`` names its axes.

        ``rows`` requires that the leading axes also merge into one; ``contiguous`` requires all axes contiguous.
        ``name``: see :meth:`Source.named`. A misaligned array is copied for the emulator, as for a GPU.
        """
        view = self._view(name, x)
        native(self.op, name, view)
        if axes is not None:
            self.axes.bind(name, view, axes)
        strided = view.ndim and view.shape[-1] > 1 and view.strides[-1] != view.itemsize
        misaligned = self._emulated and not self._cuda and not view.flags.aligned
        merged = (not rows or is_row_major(view)) and (not contiguous or view.flags.c_contiguous)
        if misaligned or (not strided and not merged):
            strided = True
            self.hold(name, view)
        if strided:  # kernels need unit stride on the last axis only
            view = self._cuda.contiguous(view) if self._cuda else np.array(view, order="C")
            self._copied.add(name)
        self._views[name], self._sources[name] = view, Source.named(name)
        return view

    def optional(self, name: str, x: Any, axes: str | None = None, *, rows: bool = False) -> Array | None:
        """:meth:`read`, or None for an argument that was not passed."""
        return None if x is None else self.read(name, x, axes, rows=rows)

    def provide(
        self, name: str, layout: Layout | None, argument: str, make: Make, default: Any = None
    ) -> None:
        """Declare an input held by an argument. ``make(argument, device)`` returns it in memory that ``device``
        (None: the emulator) reads. Without a layout it is a number, or meant for the hook. ``default``: the argument
        if none is passed."""
        self._sources[name] = Source(argument, make=make, default=default)
        if layout is not None:
            self._provided[name] = layout

    def number(self, name: str, argument: str) -> None:
        """Declare an integer that varies between calls of one program: a view for hooks and ``Dynamic`` arguments."""
        self._sources[name] = Source(argument, make=as_integer)

    def update(
        self, name: str, x: Any, dtype: Any = None, axes: str | None = None, source: Source | None = None
    ) -> Array:
        """A writable view of an argument that the op changes in place, such as a cache. ``dtype`` None: any."""
        view = self._view(name, x)
        check_writable(self.op, name, x, view, view.dtype if dtype is None else dtype, "")
        self._check_apart(name, view, None, "")
        if axes is not None:
            self.axes.bind(name, view, axes)
        self._views[name] = view  # arrays written later may not overlap it
        self._sources[name] = source or Source(name)
        self._updated.append(name)
        return view

    def write(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        out: Any = None,
        *,
        argument: str = "out",
        in_place: str | None = None,
        rows: bool = False,
        returned: bool = True,
        axes: tuple[int, ...] | None = None,
        item: int | None = None,
        added: bool = False,
    ) -> Array | None:
        """Declare a result; check the caller's array for it and return a view of that array.

        ``out`` may not share memory with another written array or with an input, unless it is exactly the input named
        ``in_place``. ``item``: its index where ``out`` is a tuple of all results; otherwise ``out`` is the first.
        ``rows``: its leading axes merge into one without a copy. ``axes``: the order of a new array's axes in memory.
        ``added``: the result is added to the contents of ``out``.
        """
        self._updated += [name] * added
        label, source = argument, Source(argument)
        if item is not None and isinstance(out, tuple):
            self._items.setdefault(argument, []).append(name)
            self._given.setdefault(argument, out)
            label, source = f"{argument} {name}", Source(argument, item)
            out = out[item] if item < len(out) else None
        elif item:
            out = None
        output = Output(name, Layout.contiguous(shape, dtype), None, returned, None, axes)
        return self._write(output, out, label, source, in_place, rows)

    def write_each(
        self,
        results: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]],
        out: Any,
        *,
        argument: str = "out",
        in_place: Mapping[str, str] | None = None,
        rows: bool = False,
        axes: Mapping[str, tuple[int, ...] | None] | None = None,
        labels: Sequence[str] = (),
        added: bool = False,
    ) -> list[Array]:
        """:meth:`write` for several results by name, which the caller passes as one tuple.

        Returns an empty list when the caller passed none. ``labels``: their names in messages. ``added``: results are
        added to the contents of the caller's arrays.
        """
        labels = tuple(labels or results)
        if out is not None and (
            not isinstance(out, (tuple, list)) or len(out) != len(labels) or any(o is None for o in out)
        ):
            length = f" of {len(out)}" if isinstance(out, (tuple, list)) else ""
            expected = {2: "two", 3: "three", 4: "four", 5: "five"}[len(labels)]
            raise OptionError(
                f"{self.op}: {argument} must be {expected} arrays, ({', '.join(labels)}); "
                f"got {type(out).__name__}{length}"
            )
        views = []
        for i, (name, (shape, dtype)) in enumerate(results.items()):
            order = axes.get(name) if axes else None
            view = self._write(
                Output(name, Layout.contiguous(shape, dtype), None, True, None, order),
                None if out is None else out[i],
                f"{argument} {labels[i]}",
                Source(argument, i),
                (in_place or {}).get(name),
                rows,
            )
            views += [] if view is None else [view]
        self._updated += results if added else []
        if out is not None:
            self._given[argument] = out
        return views

    def option(self, **options: Any) -> None:
        """Add options of the computation; their values are hashable."""
        self._options.update(options)

    def bind(
        self,
        *,
        problem: str | Callable[[], str],
        lowered_as: str = "",
        unsupported: Mapping[str, str] | Callable[[Spec], Mapping[str, str]] | None = None,
        finish: Finish | None = None,
        check_values: CheckValues | None = None,
        flops: float = 0.0,
    ) -> Bound:
        """Return the bound call: choose device and backend, make the spec.

        ``lowered_as``: the name under which kernels register its programs, if not the op's. ``unsupported``:
        backends that cannot run this problem, and why; a function of the spec is called for GPU devices only.
        ``finish`` computes the return value from the arrays by name. ``check_values`` reads, in every call, values
        that the program depends on.
        """
        for argument, names in self._items.items():
            if len(self._given[argument]) != len(names) or any(x is None for x in self._given[argument]):
                raise OptionError(
                    f"{self.op}: {argument} must be the array {names[0]} or a tuple of all results, "
                    f"({', '.join(names)}); got a tuple of {len(self._given[argument])}"
                )
        choice = choose(
            self.op,
            self._device,
            self._backend,
            self.on_cuda,
            unsupported=self._unsupported(unsupported),
            work=(self._nbytes(), flops),
        )
        spec = self._spec(choice.device != "cpu", choice.copies)
        if lowered_as:
            spec = replace(spec, op=lowered_as)
        views = {**self._views, **self._written}
        return Bound(
            self.op, spec, choice, views, self._sources, frozenset(self._copied), tuple(self._outputs),
            tuple(self._updated), self._given, problem, finish, check_values, self._library, self._cuda,
            self._workspace,
        )  # fmt: skip

    def _nbytes(self) -> int:
        total = sum(view.nbytes for view in self._views.values())
        return int(total + sum(o.layout.nbytes for o in self._outputs if o.alias is None))

    def _unsupported(
        self, unsupported: Mapping[str, str] | Callable[[Spec], Mapping[str, str]] | None
    ) -> Mapping[str, str] | Callable[[bool], Mapping[str, str]] | None:
        """Return ``unsupported`` in the form that :func:`choose` takes."""
        if not callable(unsupported):
            return unsupported
        return lambda copies: unsupported(self._spec(True, copies))

    def _spec(self, on_gpu: bool, copies: bool) -> Spec:
        layouts = {n: self._layout(view, on_gpu, copies) for n, view in self._views.items()} | self._provided
        aliases = {o.name: o.alias for o in self._outputs if o.alias}
        for o in self._outputs:
            view = self._written.get(o.name)
            if o.name not in aliases:
                layouts[o.name] = o.layout if view is None else self._layout(view, on_gpu, copies)
                if view is None and o.axes is not None:
                    layouts[o.name] = o.layout.permuted(o.axes)
        return Spec(self.op, tuple(layouts.items()), tuple(self._options.items()), tuple(aliases.items()))

    def _layout(self, view: Array, on_gpu: bool, copies: bool) -> Layout:
        if copies:  # the device's copy is contiguous and aligned
            return Layout.contiguous(view.shape, view.dtype)
        address = 0
        if on_gpu and view.size:
            address = view.__array_interface__["data"][0] if isinstance(view, np.ndarray) else view.data.ptr
        return Layout(tuple(view.shape), tuple(view.strides), view.dtype, address % 16)

    def _write(
        self, output: Output, out: Any, label: str, source: Source, in_place: str | None, rows: bool
    ) -> Array | None:
        if out is None:
            self._outputs.append(output)
            return None
        view = self._view(label, out)
        layout = output.layout
        if view.shape != layout.shape:
            raise ShapeError(f"{self.op}: {label} has shape {view.shape}, expected exactly {layout.shape}")
        check_writable(self.op, label, out, view, layout.dtype, f" or omit {label}=")
        if rows and not is_row_major(view):
            raise ShapeError(
                f"{self.op}: the leading axes of {label} (strides {view.strides}) do not merge into rows; "
                f"pass a C-contiguous array or omit {label}="
            )
        alias = self._check_apart(label, view, in_place, " or omit it")
        self._written[output.name], self._labels[output.name] = view, label
        self._given.setdefault(source.argument, out)
        self._outputs.append(
            Output(output.name, layout, source, output.returned, in_place if alias else None, None)
        )
        return view

    def _check_apart(self, name: str, view: Array, in_place: str | None, else_: str) -> bool:
        """Refuse memory that is read or written elsewhere; return whether ``view`` is the input ``in_place``."""
        alias = False
        written = ((self._labels[n], x) for n, x in self._written.items())
        for other, x in (*self._views.items(), *self._held, *written):
            if overlap(view, x):
                if other != in_place or not same_memory(view, x):
                    allowed = f" other than being {in_place} itself" if in_place else ""
                    raise ShapeError(
                        f"{self.op}: {name} shares memory with {other}{allowed}, which would be overwritten while "
                        f"it is read; pass a separate array{else_}"
                    )
                alias = True
        return alias

    def hold(self, name: str, x: Array) -> None:
        """Record host memory of an argument, which results may not overlap."""
        self._held.append((name, x))

    def _view(self, name: str, x: Any) -> Array:
        if not isinstance(x, np.ndarray) and on_cuda(x):
            return self._cuda_view(name, x)
        if self._cuda is not None:
            raise DeviceError(
                f"{self.op}: {name} is in host memory but {next(iter(self._views))} on a CUDA device; "
                "copy one of them (cupy.asarray, cupy.asnumpy)"
            )
        view, library = host_view(self.op, name, x)
        if not self._views and not self._written:
            self._library = library
        return view

    def _cuda_view(self, name: str, x: Any) -> Array:
        from gpu_ops.core.cuda_arrays import CudaArrays

        require_cuda_kernels(self.kernels, f"{name} is on a CUDA device")
        if self._cuda is None:
            if self._views:
                raise DeviceError(
                    f"{self.op}: {name} is on a CUDA device but {next(iter(self._views))} in host memory; "
                    "copy one of them (cupy.asarray, cupy.asnumpy)"
                )
            self._cuda = CudaArrays(self.op, name, x)
        view: Array = self._cuda.view(name, x)
        return view


CheckValues: TypeAlias = Callable[[dict[str, Any], str], tuple[dict[str, Any], dict[str, Any]]]
"""A hook that reads values: (the call's arrays, backend) -> (options that depend on them, further views)."""


Make: TypeAlias = Callable[[Any, Any], Any]
"""A function that makes the array or number that kernels read from an argument: (argument, device) -> value."""


Finish: TypeAlias = Callable[[dict[str, Any], Any, Callable[[str], Any]], Any]
"""A function that makes the return value: (arrays by name, device, name -> result in the caller's library)."""


@dataclass(frozen=True)
class Source:
    """Location of an array in the arguments of a later call with the same key."""

    argument: str
    item: int | str | None = None
    """An index into the argument, or an attribute of it."""
    make: Make | None = None
    """For an argument that is not itself an array."""
    default: Any = None
    """Value of an argument that is not passed."""

    @classmethod
    def named(cls, name: str) -> Source:
        """Parse a name: ``x`` is an argument, ``x.part`` an attribute of it, ``x[1]`` an item."""
        argument, bracket, index = name.partition("[")
        if bracket:
            return cls(argument, int(index[:-1]))
        argument, _, attribute = name.partition(".")
        return cls(argument, attribute or None)


@dataclass(frozen=True)
class Output:
    """A result, or a hidden array that is allocated like one."""

    name: str
    layout: Layout
    source: Source | None
    """Location of the caller's array for it; None: it is allocated."""
    returned: bool
    alias: str | None
    """Name of the input that it overwrites in place."""
    axes: tuple[int, ...] | None = None
    """Order of its axes in newly allocated memory, slowest first."""


@dataclass
class Bound:
    """A validated call, ready to be lowered and run."""

    op: str
    spec: Spec
    choice: Choice
    views: dict[str, Any]
    """The call's arrays by name, including results that the caller passed."""
    sources: dict[str, Source]
    copied: frozenset[str]
    """Inputs whose layout kernels cannot read; kernels read a copy."""
    outputs: tuple[Output, ...]
    updated: tuple[str, ...]
    """Inputs that are changed in place, and results that are added to the contents of the caller's arrays."""
    given: dict[str, Any]
    """The caller's objects for results, by argument."""
    problem: str | Callable[[], str]
    finish: Finish | None
    check_values: CheckValues | None
    library: str | None
    cuda: CudaArrays | None
    workspace: Any


def as_integer(value: Any, device: Any) -> int:
    """Convert an argument of :meth:`Call.number`; a later call may pass on the argument itself."""
    return int(value)
