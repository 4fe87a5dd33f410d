"""A model's parameters, gradients and optimiser states in one array each, updated by one step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.allocator import out_of_memory
from gpu_ops.core.device import cuda_missing
from gpu_ops.core.state_arrays import StateArray, named_dtype, zeros
from gpu_ops.errors import DeviceError, DTypeError, OptionError, ShapeError
from gpu_ops.ops.rows.adamw import adamw_step

__all__ = ["FlatParams"]

_SEGMENT = 256  # elements of every buffer: 512 bytes in 16-bit ones; 8-bit moments have a scale per segment
_MOST = 1 << 48  # elements of a parameter, far more than memory can hold
_CLASS = "FlatParams"


@dataclass(frozen=True)
class _Segment:
    start: int
    shape: tuple[int, ...]

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + math.prod(self.shape))


class FlatParams:
    """Parameters by name as views of flat arrays, made by :meth:`from_shapes`.

    Segments start at multiples of 512 bytes. Parameters that decay come first: a step is two calls of
    :func:`gpu_ops.adamw_step`, with ``weight_decay`` and without; a mask would move one more byte per parameter.
    """

    def __init__(
        self,
        segments: Mapping[str, _Segment],
        ends: tuple[int, int],
        arrays: Mapping[str, Any],
        device: str | None,
    ) -> None:
        self.buffers: Mapping[str, Any] = MappingProxyType(dict(arrays))
        """Flat arrays: ``params``, ``grads``, ``m``, ``v``, ``master`` if there is one, and with moments in
        8 bits ``m_scale`` and ``v_scale``."""
        self._segments = segments
        self.params = self.views("params")
        """Views of the parameters, by name."""
        self.grads = self.views("grads")
        """Views of the gradients, by name; accumulate into them."""
        self._values = [self.params, *(self.views(n) for n in ("master",) if n in arrays)]
        self.device, self._module = device, _module(device)
        decayed, size = ends
        whole = (slice(0, decayed), slice(decayed, size))
        # made once, so that later calls find their program by the arrays
        self._parts = [_part(arrays, part) for part in whole]
        self._next = zeros((), np.dtype(np.int64), device)
        self._taken = zeros((), np.dtype(np.bool_), device)
        self._next.fill(1)

    @classmethod
    def from_shapes(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: npt.DTypeLike,
        master: bool = True,
        grad_dtype: npt.DTypeLike | None = None,
        moment_bits: int = 32,
        decay: Collection[str] | None = None,
        device: str | None = None,
    ) -> FlatParams:
        """Make zeros for parameters of these shapes.

        Parameters
        ----------
        shapes : dict of tuples
        dtype : str or dtype
            Dtype of the parameters: float16, bfloat16, float32 or float64.
        master : bool
            Keep 16-bit parameters in float32 as well. Without it, bfloat16 is rounded stochastically, float16
            refused.
        grad_dtype : str or dtype, optional
            Dtype of the gradients; default: float32 (float64 for float64).
        moment_bits : int
            32, or 8: m and v in bytes, with one scale per 256 elements. Moments of float64 are float64.
        decay : names, optional
            Parameters that decay; default: those with two or more axes.
        device : str, optional
            ``"cuda"``: CuPy arrays on the current device. Otherwise NumPy arrays; the value is the device of a step:
            see :func:`gpu_ops.explain`.

        Examples
        --------
        >>> import numpy as np
        >>> from gpu_ops.training.flat import FlatParams
        >>> flat = FlatParams.from_shapes({"weight": (2, 3), "bias": (2,)}, dtype="float32", device="cpu")
        >>> flat.assign({"weight": np.ones((2, 3)), "bias": np.ones(2)})
        >>> flat.grads["weight"][0] = 5.0
        >>> flat.step(lr=0.1, weight_decay=0.5)
        >>> flat.params["weight"]
        array([[0.85, 0.85, 0.85],
               [0.95, 0.95, 0.95]], dtype=float32)
        """
        if device is not None:
            checks.one_of(_CLASS, "device", device, ("cpu", "cuda", "emulator"), meant={"gpu": "cuda"})
        if device == "cuda" and (missing := cuda_missing()):
            raise DeviceError(f"{_CLASS}: device='cuda', but there is no usable CUDA device: {missing}")
        param_dtype = named_dtype(_CLASS, "dtype", dtype)
        acc_dtype = checks.computing_dtype(param_dtype.name)
        has_master = checks.flag(_CLASS, "master", master) and param_dtype != acc_dtype
        if param_dtype == np.float16 and not has_master:
            raise OptionError(
                f"{_CLASS}: float16 parameters need master=True: in float16 small updates vanish"
            )
        segments, ends = _layout(shapes, decay)
        dtypes = {
            "params": param_dtype,
            "grads": acc_dtype if grad_dtype is None else named_dtype(_CLASS, "grad_dtype", grad_dtype),
        }
        dtypes |= {"m": acc_dtype, "v": acc_dtype} | ({"master": acc_dtype} if has_master else {})
        lengths = dict.fromkeys(dtypes, ends[1])
        if checks.integer(_CLASS, "moment_bits", moment_bits) not in (8, 32):
            raise OptionError(f"{_CLASS}: moment_bits must be 8 or 32, got {moment_bits}")
        if moment_bits == 8:
            if param_dtype == np.float64:
                raise OptionError(
                    f"{_CLASS}: moment_bits=8 is for parameters of at most 32 bits, not float64"
                )
            dtypes |= {
                "m": np.dtype(np.int8),
                "v": np.dtype(np.uint8),
                "m_scale": acc_dtype,
                "v_scale": acc_dtype,
            }
            lengths |= dict.fromkeys(("m_scale", "v_scale"), ends[1] // _SEGMENT)
        try:
            arrays = {name: zeros((lengths[name],), dt, device) for name, dt in dtypes.items()}
        except MemoryError as error:
            raise out_of_memory(f"{_CLASS}.from_shapes", error, "parameters and their states") from error
        return cls(segments, ends, arrays, device)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of each flat array."""
        return {name: int(x.nbytes) for name, x in self.buffers.items()}

    @property
    def steps(self) -> int:
        """Number of steps taken. On a GPU this waits for them."""
        return int(self._next) - 1

    def views(self, buffer: str) -> Mapping[str, Any]:
        """Views of one of ``buffers``, by the names of the parameters; not of the scales of 8-bit moments."""
        flat = self.buffers[checks.one_of(f"{_CLASS}.views", "buffer", buffer, self.buffers)]
        return MappingProxyType({n: flat[s.place].reshape(s.shape) for n, s in self._segments.items()})

    def state(self) -> dict[str, Any]:
        """State for :func:`gpu_ops.training.save_state` and ``load_state(like=)``: the flat arrays except the
        gradients, and the step of the next update. A run that resumes from it is the same to the bit."""
        return {name: x for name, x in self.buffers.items() if name != "grads"} | {"next_step": self._next}

    def assign(self, values: Mapping[str, Any]) -> None:
        """Set parameters by name, and their masters, from arrays in host memory, after checking all of them."""
        arrays = {}
        for name, value in values.items():
            try:
                arrays[name] = np.asarray(value)
            except (TypeError, ValueError) as error:
                raise DTypeError(f"{_CLASS}: {name} is no array: {error}") from error
        for name, value in arrays.items():
            shape = self.params[checks.one_of(_CLASS, "name", name, self.params)].shape
            if value.shape != shape:
                raise ShapeError(f"{_CLASS}: {name} has shape {value.shape}, expected {shape}")
            if value.dtype.kind not in "fiub" and value.dtype.name != "bfloat16":
                raise DTypeError(f"{_CLASS}: {name} is {value.dtype}, expected real numbers")
        for name, value in arrays.items():
            for target in (views[name] for views in self._values):
                with np.errstate(all="ignore"):
                    cast = value.astype(target.dtype)
                StateArray(_CLASS, name, target).write(cast)

    def zero_grad(self) -> None:
        """Fill the gradients with zeros."""
        self.buffers["grads"].view(np.uint8).fill(0)  # CuPy cannot fill bfloat16

    def step(
        self,
        *,
        lr: Any,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        grad_scale: Any = 1.0,
        skip: Any = None,
        rounding: str | None = None,
        seed: int = 0,
        backend: str | None = None,
        workspace: Any = None,
    ) -> None:
        """Take one step of :func:`gpu_ops.adamw_step`, which documents the options. Skipped steps do not count.

        ``rounding``: default ``"stochastic"`` for bfloat16 without masters, else ``"nearest"``.
        """
        if rounding is None:
            without_master = "master" not in self.buffers and self.buffers["params"].dtype.name == "bfloat16"
            rounding = "stochastic" if without_master else "nearest"
        for i, (part, decays) in enumerate(zip(self._parts, (weight_decay, 0.0), strict=True)):
            adamw_step(
                **part,
                step=self._next,
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=decays,
                grad_scale=grad_scale,
                skip=skip,
                rounding=rounding,
                seed=2 * seed + i,  # both parts count their elements from 0
                device=self.device,
                backend=backend,
                workspace=workspace,
            )
        if skip is None:
            self._taken.fill(1)
        else:
            self._module.logical_not(skip, out=self._taken)
        self._module.add(self._next, self._taken, out=self._next)


def _layout(
    shapes: Mapping[str, Any], decay: Collection[str] | None
) -> tuple[dict[str, _Segment], tuple[int, int]]:
    """Segments in the order of ``shapes``, and the ends of those that decay and of all."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        lengths = shape if isinstance(shape, (tuple, list)) else (shape,)
        sizes[name] = tuple(checks.integer(_CLASS, f"a length of {name}", n, low=0) for n in lengths)
        if math.prod(n or 1 for n in sizes[name]) > _MOST:
            raise ShapeError(
                f"{_CLASS}: {name} has shape {sizes[name]}, more than the {_MOST} elements allowed"
            )
    for name in decay or ():
        checks.one_of(_CLASS, "decay", name, sizes)
    decays = {name: len(shape) >= 2 if decay is None else name in decay for name, shape in sizes.items()}
    starts: dict[str, int] = {}
    ends: list[int] = []
    end = 0
    for decayed in (True, False):
        for name in (n for n, d in decays.items() if d == decayed):
            starts[name] = end
            end += -(-math.prod(sizes[name]) // _SEGMENT) * _SEGMENT
        ends.append(end)
    return {name: _Segment(starts[name], shape) for name, shape in sizes.items()}, (ends[0], ends[1])


def _part(arrays: Mapping[str, Any], part: slice) -> dict[str, Any]:
    """Array arguments of a step; ``part`` starts and ends at segments, and so at scales."""
    views = {name: x[part] for name, x in arrays.items() if not name.endswith("_scale")}
    scales = slice(part.start // _SEGMENT, part.stop // _SEGMENT)
    return views | {n: (views[n], arrays[f"{n}_scale"][scales]) for n in ("m", "v") if f"{n}_scale" in arrays}


def _module(device: str | None) -> Any:
    if device != "cuda":
        return np
    import cupy

    return cupy
