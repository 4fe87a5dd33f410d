"""Which device and which backend run a call, and why.

============  =========================  ==============================================================
device        backends, best first       what it is
============  =========================  ==============================================================
``cpu``       ``numba``, ``reference``   compiled kernels on all cores; NumPy, the definition of correct
``cuda``      ``raw``, ``numba``         CUDA C++ kernels, Numba kernels, on a GPU
``emulator``  ``raw``, ``numba``         the same kernels, run on the CPU and checked; slow
============  =========================  ==============================================================

CUDA arrays run on ``cuda``. NumPy arrays run on ``cpu`` unless told otherwise; with ``device="cuda"`` they are
copied to the current device and the results back. The emulator runs only when asked for.

``device=`` and ``backend=`` decide; else the environment variables ``GPU_OPS_DEVICE`` and
``GPU_OPS_BACKEND``; else the first backend that can run the problem. An explicit choice that cannot
run raises; an automatic one moves on, and :func:`explain` tells.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, overload

from gpu_ops.core.checks import one_of
from gpu_ops.core.kinds import ANY_INTEGER, INTEGERS, as_it_lies, kind_of, on_plain_arrays
from gpu_ops.errors import DeviceError, OptionError

if TYPE_CHECKING:
    from gpu_ops.core.arrays import Arrays

__all__ = [
    "BACKENDS",
    "Choice",
    "Plan",
    "choose",
    "explain",
    "has_cuda_kernels",
    "op",
    "planner_of",
    "require_cuda_kernels",
    "unavailable",
]

BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("numba", "reference"),
    "cuda": ("raw", "numba"),
    "emulator": ("raw", "numba"),
}

_with_cuda_kernels: list[str] = []  # filled by the ops themselves: @op(cuda=True)

MAX_KINDS = 1024  # of each op, remembered: some KB each

P = ParamSpec("P")


@dataclass(frozen=True)
class Choice:
    """A device and a backend, with the reason for each one passed over.

    ``copies``: the arrays are in host memory, and the device is a GPU.
    """

    device: str
    backend: str
    reason: str
    passed_over: dict[str, str] = field(default_factory=dict)
    copies: bool = False

    @property
    def compiled(self) -> bool:
        """Whether the CPU's kernels run."""
        return (self.device, self.backend) == ("cpu", "numba")


@dataclass(frozen=True)
class Plan:
    """What a call would do: printable, and runnable once. Made by validation, before anything is touched.

    ``problem`` and ``config`` may be functions that give the text: a call that nobody asks to explain
    itself then spends no time on it. ``writes``: arguments that it changes in place and does not return.

    ``again`` makes a function that takes the op's place in later calls of the same kind, whose shapes and options
    have been checked, and ``out`` too. It holds on to none of this call's arrays, and checks what depends on values.
    """

    op: str
    choice: Choice
    problem: str | Callable[[], str]
    config: str | Callable[[], str]
    run: Callable[[], Any]
    writes: tuple[Any, ...] = ()
    again: Callable[[], Callable[..., Any]] | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.op}: {_text(self.problem)}",
            f"  runs on   {self.choice.device}, backend {self.choice.backend} ({self.choice.reason})"
            + ("; arrays are copied there and back" if self.choice.copies else ""),
            f"  config    {_text(self.config)}",
        ]
        lines += [f"  not       {name}: {why}" for name, why in self.choice.passed_over.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _text(x: str | Callable[[], str]) -> str:
    return x if isinstance(x, str) else x()


@functools.cache
def unavailable(device: str, backend: str) -> str | None:
    """Why a backend cannot run on this machine at all; None when it can."""
    if device == "cpu":
        if backend == "numba" and importlib.util.find_spec("numba") is None:
            return "the package numba is not installed (pip install numba)"
        return None
    from gpu_ops.core import device as devices

    return (devices.cuda_missing() if device == "cuda" else None) or devices.compiler_missing(backend)


def has_cuda_kernels(op: str) -> bool:
    """Whether an op runs on the devices ``cuda`` and ``emulator``."""
    return op in _with_cuda_kernels


def require_cuda_kernels(op: str, because: str) -> None:
    if not has_cuda_kernels(op):
        raise DeviceError(
            f"{op}: {because}, but this op has no CUDA kernels yet; {', '.join(_with_cuda_kernels)} have. "
            "Run it on the CPU: device='cpu' and arrays in host memory (cupy.asnumpy(x), x.cpu())"
        )


def choose(
    op: str,
    device: str | None,
    backend: str | None,
    arrays: Arrays | None = None,
    *,
    cannot: dict[str, str] | Callable[[], dict[str, str]] | None = None,
) -> Choice:
    """Pick device and backend for these arrays.

    ``cannot`` maps a backend, or a device and a backend as in ``"cpu numba"``, to why it cannot run this problem;
    a function that does so is asked on GPU devices only.
    """
    device_source, device = _setting("device", device)
    backend_source, wanted = _setting("backend", backend)
    on_cuda = arrays is not None and arrays.on_cuda
    if callable(cannot):
        cannot = cannot() if on_cuda or device not in (None, "cpu") else {}
    cannot = cannot or {}
    if device is None:
        device = "cuda" if on_cuda else "cpu"
    device = one_of(op, device_source, device, BACKENDS, meant={"gpu": "cuda", "GPU": "cuda"})
    if device != "cpu":
        require_cuda_kernels(op, f"{device_source}={device!r}")
    if on_cuda and device != "cuda":
        raise DeviceError(
            f"{op}: {device_source}={device!r}, but the arrays are on a CUDA device; "
            "copy them to the host first (cupy.asnumpy(x), x.cpu())"
        )
    if device == "cuda":
        from gpu_ops.core.device import cuda_missing

        if missing := cuda_missing():
            raise DeviceError(f"{op}: {device_source}='cuda', but there is no usable CUDA device: {missing}")
    refused: dict[str, str] = {}
    for name in BACKENDS[device]:
        why = (
            unavailable(device, name)
            or _too_old(device, name)
            or cannot.get(f"{device} {name}", cannot.get(name))
        )
        if why is None and wanted in (None, name):
            reason = "asked for" if wanted else "first choice" if not refused else "next choice"
            return Choice(device, name, reason, refused, copies=device == "cuda" and not on_cuda)
        refused[name] = why or "not asked for"
    others = [repr(other) for other, names in BACKENDS.items() if isinstance(wanted, str) and wanted in names]
    if others and repr(device) not in others:
        raise OptionError(
            f"{op}: {backend_source}={wanted!r} is a backend of {' and '.join(others)}, but this call runs on "
            f"{device!r}, whose are {', '.join(map(repr, BACKENDS[device]))}; pass one of them, or device= as well"
        )
    wanted = one_of(op, backend_source, wanted, BACKENDS[device]) if wanted else None
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items() if wanted in (None, name))
    raise DeviceError(f"{op}: no backend on {device} can run this: {reasons}")


def _too_old(device: str, backend: str) -> str | None:
    if device == "cpu":
        return None
    from gpu_ops.core.device import too_old

    return too_old(device, backend)


def _setting(name: str, argument: str | None) -> tuple[str, str | None]:
    """(where the choice comes from, the choice): the argument, else the environment."""
    if argument is not None:
        return name, argument
    variable = f"GPU_OPS_{name.upper()}"
    return variable, os.environ.get(variable) or None


@overload
def op(planner: Callable[P, Plan]) -> Callable[P, Any]: ...
@overload
def op(*, cuda: bool, late: str | None = None) -> Callable[[Callable[P, Plan]], Callable[P, Any]]: ...
def op(planner: Callable[P, Plan] | None = None, *, cuda: bool = False, late: str | None = None) -> Any:
    """Make a public function of a planner: it validates and returns a :class:`Plan`; the function runs it.

    ``cuda``: the op has kernels for the devices ``cuda`` and ``emulator``. ``late``: a keyword argument of which
    later calls look at the value, where it is an integer.
    """
    if planner is None:
        return functools.partial(op, cuda=cuda, late=late)
    name = planner.__name__
    if cuda:
        _with_cuda_kernels.append(name)

    @functools.wraps(planner)
    def plan(*args: P.args, **kwargs: P.kwargs) -> Plan:
        made = planner(*args, **kwargs)
        if not made.choice.copies:
            return made
        from gpu_ops.core.cuda_arrays import through_the_device

        return replace(made, run=lambda: through_the_device(name, planner, args, kwargs))

    known: dict[Any, Callable[..., Any]] = {}

    @functools.wraps(planner)
    def public(*args: P.args, **kwargs: P.kwargs) -> Any:
        if late is not None and type(kwargs.get(late)) in INTEGERS:
            kind = kind_of(args, {**kwargs, late: ANY_INTEGER})
        else:
            kind = kind_of(args, kwargs)
        again = known.get(kind)
        if again is not None:
            return again(*args, **kwargs)
        made = plan(*args, **kwargs)
        if kind is not None and made.again is not None and all(map(as_it_lies, (*args, *kwargs.values()))):
            if len(known) >= MAX_KINDS:
                known.clear()
            known[kind] = on_plain_arrays(made.again(), args, kwargs)
        return made.run()

    signature = inspect.signature(planner)
    public.__signature__ = signature.replace(return_annotation=inspect.Signature.empty)  # type: ignore[attr-defined]
    public.plan = plan  # type: ignore[attr-defined]
    return public


def explain(op: str | Callable[..., Any], *arrays: Any, **options: Any) -> Plan:
    """What ``op``, a public function or its name, would do with these arguments: device, backend, tiles, and why.
    Runs nothing.

    Examples
    --------
    >>> import numpy as np, gpu_ops
    >>> x = np.ones((4, 64), np.float32)
    >>> print(gpu_ops.explain("rmsnorm", x, np.ones(64, np.float32), backend="reference"))
    rmsnorm: 4 rows of 64 float32, casting fp32
      runs on   cpu, backend reference (asked for)
      config    NumPy, float64
      not       numba: not asked for
    """
    return planner_of("explain", op)(*arrays, **options)


def planner_of(asked_by: str, op: str | Callable[..., Any]) -> Callable[..., Plan]:
    """The planner of a public op, or of its name."""
    import gpu_ops

    ops = {n: f for n in gpu_ops.__all__ if hasattr(f := getattr(gpu_ops, n), "plan")}
    name = next((n for n, f in ops.items() if f is op), op)
    found: Callable[..., Plan] = ops[one_of(asked_by, "op", name, ops)].plan
    return found
