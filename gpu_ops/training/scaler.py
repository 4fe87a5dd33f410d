"""Loss scaling for float16: the state machine of ``torch.amp.GradScaler`` with a floor; and gradient clipping.

The loss is multiplied by a scale, so that its gradients do not vanish in float16, and the gradients are divided by
it. If a gradient overflows, the step is skipped and the scale halved; after 2000 steps without overflow, it is
doubled.

One step, in which the host reads no value if the arrays are on a GPU::

    dlogits = gpu_ops.cross_entropy_backward(scaler.scale, logits, targets, lse)
    ...                                                          # gradients, all multiplied by the scale
    norm, found_inf = gpu_ops.global_norm(grads)
    factor = scaler.inv_scale * clip_coefficient(norm * scaler.inv_scale, 1.0)
    ...                                                          # a step with factor * gradient, unless found_inf
    scaler.update(found_inf)

bfloat16 and float32 need no scaling.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_ops.core import checks
from gpu_ops.core.arrays import check_writable, on_cuda, overlap
from gpu_ops.core.call_key import extent
from gpu_ops.core.device import cuda_missing
from gpu_ops.errors import DeviceError, DTypeError, LossScaleError, OptionError, ShapeError, StateError
from gpu_ops.ops.rows.global_norm import global_norm

__all__ = ["GradScaler", "clip_coefficient"]

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def clip_coefficient(norm: Any, max_norm: float) -> Any:
    """Factor that limits gradients of this norm to at most ``max_norm``, on the norm's device.

    ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``. 0 for an infinite norm, NaN for
    NaN: skip such a step by the ``found_inf`` of :func:`gpu_ops.global_norm`.

    Parameters
    ----------
    norm : array () or number
        An array of NumPy, CuPy, torch or JAX.
    max_norm : float
        At least 0.

    Returns
    -------
    array () of norm's dtype

    Examples
    --------
    >>> import numpy as np
    >>> round(float(clip_coefficient(np.array(4.0), 1.0)), 6)
    0.25
    """
    who = "clip_coefficient"
    if not hasattr(norm, "dtype"):
        norm = np.asarray(checks.real(who, "norm", norm), np.float64)
    dtype = norm.dtype
    if isinstance(dtype, np.dtype) and dtype.kind not in "fiu" and dtype not in checks.FLOAT_DTYPES.values():
        raise DTypeError(f"{who}: norm is {dtype}, expected a number, such as global_norm(grads)[0]")
    if isinstance(norm, (np.ndarray, np.generic)) and np.less(norm, 0).any():
        raise OptionError(f"{who}: norm must be at least 0, got {norm}")
    width = "float64" if str(dtype).endswith("64") else "float32"
    limit = checks.computable(who, "max_norm", max_norm, width, low=0.0)
    return _array((limit / (norm + 1e-6)).clip(None, 1.0))


class GradScaler:
    """Scale of a loss, and its update after each step.

    Parameters
    ----------
    init_scale : float
        Initial scale, at least ``min_scale``.
    growth_factor, backoff_factor : float
        The scale is multiplied by the first, > 1, after ``growth_interval`` steps in a row without an overflow,
        unless the product overflows float32; and by the second, in (0, 1), after a step with one.
    growth_interval : int
        At least 1.
    min_scale : float
        The scale does not fall below it; 0 for no floor, as in torch. See :meth:`update`.
    device : str, optional
        Device of scale and tracker: ``"cpu"``, the default, for NumPy arrays; ``"cuda"`` for CuPy arrays on the
        current device, for which only :meth:`check` and :meth:`state_dict` wait.

    Notes
    -----
    Scales have the same bits as those of ``torch.amp.GradScaler``; products are rounded from float64 to float32.
    ``scale``, float32, and ``growth_tracker``, int32, are arrays of shape () that are never replaced, so that a CUDA
    graph can hold them.

    Examples
    --------
    >>> import numpy as np
    >>> scaler = GradScaler(init_scale=8.0, growth_interval=2)
    >>> scales = []
    >>> for found_inf in (0, 0, 1, 0):
    ...     scaler.update(found_inf)
    ...     scales.append(float(scaler.scale))
    >>> scales
    [8.0, 16.0, 8.0, 8.0]
    """

    scale: Any
    """Factor of the loss, or of ``dloss``."""
    growth_tracker: Any
    """Number of steps without an overflow since the scale changed."""
    _found_inf: Any

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        device: str | None = None,
    ) -> None:
        self.min_scale = checks.computable("GradScaler", "min_scale", min_scale, "float32", low=0.0)
        self.device = checks.one_of("GradScaler", "device", device or "cpu", ("cpu", "cuda"))
        self._xp: Any = np
        if self.device == "cuda":
            if missing := cuda_missing():
                raise DeviceError(f"GradScaler: device='cuda', but there is no usable CUDA device: {missing}")
            import cupy

            self._xp = cupy
        scale = self._set(init_scale, growth_factor, backoff_factor, growth_interval, 0)
        self.scale = self._xp.asarray(scale)
        self.growth_tracker = self._xp.asarray(np.zeros((), np.int32))

    @property
    def inv_scale(self) -> Any:
        """float32 ``1 / scale``, rounded once: the factor of gradients in a step."""
        with np.errstate(all="ignore"):  # without a floor the scale may reach 0
            return _array((1.0 / self.scale.astype(np.float64)).astype(np.float32))

    def unscale(self, grads: Any) -> Any:
        """Multiply gradients by ``inv_scale``, in place.

        Passing ``inv_scale`` to the step instead saves this pass over all gradients.

        Parameters
        ----------
        grads : array, or list or tuple of arrays
            NumPy or CuPy; bfloat16, float32 or float64. Not float16, in which they would vanish.

        Returns
        -------
        found_inf : array (), float32
            1 if one of them was not finite, else 0. :meth:`update` takes it by default.

        Raises
        ------
        StateError
            They were unscaled before, and :meth:`update` has not followed.
        ShapeError, DTypeError, DeviceError
            Raised before anything is written.
        """
        if self._found_inf is not None:
            raise StateError("unscale: gradients were unscaled before; call update() first, once a step")
        arrays = list(grads) if isinstance(grads, (list, tuple)) else [grads]
        found_inf = global_norm(arrays)[1]
        for i, x in enumerate(arrays):
            self._check_gradient(f"grads[{i}]", x)
        _check_apart(arrays)
        inverse = self.inv_scale
        for x in arrays:
            x[...] = x * inverse
        self._found_inf = found_inf
        return found_inf

    def update(self, found_inf: Any = None) -> None:
        """Compute the scale of the next step.

        Parameters
        ----------
        found_inf : array () or number, optional
            Not 0 if a gradient of this step was not finite: a result of :func:`gpu_ops.global_norm`. Default: the
            result of :meth:`unscale` since the last update.

        Raises
        ------
        LossScaleError
            The scale would fall below ``min_scale``: float16 does not fit this model. Scale and tracker are not
            changed. On ``device="cuda"`` the scale falls, as torch's does, and :meth:`check` raises.
        StateError
            There is no ``found_inf``.
        """
        if found_inf is None:
            found_inf = self._found_inf
        if found_inf is None:
            raise StateError(
                "update: nothing was checked since the last update; pass found_inf or call unscale()"
            )
        if self.device == "cpu" and not isinstance(found_inf, np.ndarray) and on_cuda(found_inf):
            raise DeviceError("update: found_inf is on a CUDA device; make GradScaler(device='cuda')")
        xp, scale = self._xp, self.scale.astype(np.float64)
        flag = xp.asarray(found_inf)
        if flag.dtype.kind not in "fiub":
            raise DTypeError(f"update: found_inf is {flag.dtype}, expected a number")
        if flag.shape != ():
            raise ShapeError(f"update: found_inf has shape {flag.shape}, expected ()")
        overflowed = flag != 0
        tracker = xp.where(overflowed, 0, self.growth_tracker.astype(np.int64) + 1)  # int32 would wrap
        with np.errstate(all="ignore"):
            grown = (scale * self.growth_factor).astype(np.float32)
        grows = tracker >= self.growth_interval
        kept = xp.where(grows & xp.isfinite(grown), grown, self.scale)
        new = xp.where(overflowed, (scale * self.backoff_factor).astype(np.float32), kept)
        if xp is np and new < self.min_scale:
            raise self._too_small(float(new))
        self.scale[...] = new
        self.growth_tracker[...] = xp.where(grows, 0, tracker)
        self._found_inf = None

    def check(self) -> None:
        """Raise LossScaleError if the scale has fallen below ``min_scale``; waits for the device."""
        if float(self.scale) < self.min_scale:
            raise self._too_small(float(self.scale))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers by torch's keys; waits for the device."""
        values = (
            float(self.scale),
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
            int(self.growth_tracker),
        )
        return dict(zip(_KEYS, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`, or one of torch's. ``min_scale`` is not changed.

        Raises
        ------
        OptionError
            A key is missing or a value out of range; the scaler is unchanged.
        """
        missing = [key for key in _KEYS if key not in state]
        if missing:
            raise OptionError(
                f"load_state_dict: {', '.join(missing)} missing; pass what state_dict() returned"
            )
        scale = self._set(*(state[key] for key in _KEYS))
        self.scale[...] = float(scale)
        self.growth_tracker[...] = int(state["_growth_tracker"])

    def _set(self, scale: Any, growth: Any, backoff: Any, interval: Any, tracker: Any) -> Any:
        """Check all values, then set the options; return the scale in float32."""
        name = "GradScaler"
        least = max(self.min_scale, 2.0**-149)  # 0 would stay 0
        with np.errstate(all="ignore"):
            single = np.asarray(checks.number(name, "init_scale", scale, low=least), np.float32)
        checks.number(name, "init_scale", float(single))
        growth = checks.number(name, "growth_factor", growth, above=1.0)
        backoff = checks.number(name, "backoff_factor", backoff, above=0.0)
        if backoff >= 1:
            raise OptionError(f"{name}: backoff_factor must lie in (0, 1), got {backoff!r}")
        interval = checks.integer(name, "growth_interval", interval, low=1, high=2**31 - 1)
        checks.integer(name, "_growth_tracker", tracker, low=0, high=2**31 - 1)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth, backoff, interval
        self._found_inf = None
        return single

    def _check_gradient(self, name: str, x: Any) -> None:
        if not isinstance(x, self._xp.ndarray):
            type_name = f"{type(x).__module__}.{type(x).__name__}"
            raise DTypeError(
                f"unscale: {name} is {type_name}, expected {self._xp.__name__}.ndarray for device='{self.device}'; "
                "convert it, or pass inv_scale to the step"
            )
        if x.dtype == np.float16:
            raise DTypeError(
                f"unscale: {name} is float16, in which unscaled gradients vanish; keep float32 gradients, or pass "
                "inv_scale to the step"
            )
        check_writable("unscale", name, x, x, x.dtype, "")

    def _too_small(self, scale: float) -> LossScaleError:
        return LossScaleError(
            f"the loss scale falls to {scale:g}, below min_scale {self.min_scale:g}, as gradients still overflow: "
            "float16 does not fit this model; use bfloat16 or float32, or look for what is not finite"
        )


def _array(x: Any) -> Any:
    """Convert a NumPy scalar back to an array of shape ()."""
    return np.asarray(x) if isinstance(x, np.generic) else x


def _check_apart(arrays: list[Any]) -> None:
    """Refuse arrays that share an element, which would be scaled twice."""
    ordered = sorted(arrays, key=extent)
    for a, b in itertools.pairwise(ordered):
        if overlap(a, b):
            raise ShapeError(
                "unscale: two of grads share memory, which would be scaled twice; pass each array once"
            )
