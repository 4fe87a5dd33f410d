"""Context parallelism for the models: each rank has a part of the tokens of every sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.checks import one_of
from gpu_ops.core.device import cuda_missing
from gpu_ops.core.state_arrays import to_device
from gpu_ops.distributed.comm import Comm
from gpu_ops.distributed.ring import ring_attention, ring_attention_backward
from gpu_ops.distributed.sequence import sequence_positions
from gpu_ops.errors import DeviceError, ShapeError
from gpu_ops.models.block import Sequences

__all__ = ["ContextParallel"]


class ContextParallel(Sequences):
    """Value of ``sequences=`` for the functions of :mod:`gpu_ops.models` if ranks divide the sequence.

    Attention is :func:`ring_attention`; everything else in a model is computed token by token. A rank's gradients
    are those of its tokens: their sum over the ranks is the gradient of the sequence.

    Parameters
    ----------
    comm : Comm
        The ranks, such as ``mesh.cp``.
    seqlen : int
        Length of the whole sequences; all have the same.
    layout : {"zigzag", "contiguous", "striped"}
        See :func:`sequence_positions`.
    device : {"cpu", "cuda"}
        Device of the model.

    Attributes
    ----------
    positions : int64 array (seqlen / p,), on the device
        Positions of the tokens that this rank holds.

    Raises
    ------
    OptionError, ShapeError, DeviceError

    Notes
    -----
    The mean loss of the batch is the mean over ranks if all have the same number of targets. Otherwise pass
    ``denominator=``, the number of targets of all ranks, and ``mean=False`` to :class:`DataParallel`.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import distributed, models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> mesh = distributed.Mesh(cp=distributed.world().size)
    >>> context = distributed.ContextParallel(mesh.cp, 64)
    >>> parallel = distributed.DataParallel(config, mesh.group("dp", "cp"))
    >>> parallel.assign(models.initial_weights(config))
    >>> ids = np.arange(128).reshape(2, 64)
    >>> mine, targets = context.part(ids), context.part(ids + 1)
    >>> loss = parallel.loss_and_grads(mine, targets, sequences=context)
    >>> parallel.step(lr=3e-3)
    """

    def __init__(self, comm: Comm, seqlen: int, *, layout: str = "zigzag", device: str = "cpu") -> None:
        rows = sequence_positions(comm, seqlen, layout)
        if one_of("ContextParallel", "device", device, ("cpu", "cuda")) == "cuda" and (
            missing := cuda_missing()
        ):
            raise DeviceError(f"ContextParallel: device='cuda': {missing}")
        super().__init__(positions=to_device(rows, device), seqlen=int(seqlen))
        vars(self).update(comm=comm, layout=layout, rows=rows)

    comm: Comm
    seqlen: int
    layout: str
    rows: npt.NDArray[np.int64]

    def part(self, x: Any) -> Any:
        """This rank's tokens of whole sequences, ``x[:, positions]``: ids, targets, or an array (batch, seqlen, ...).

        Examples
        --------
        >>> import numpy as np
        >>> from gpu_ops import distributed
        >>> context = distributed.ContextParallel(distributed.world(), 4)
        >>> context.part(np.array([[5, 6, 7, 8]]))
        array([[5, 6, 7, 8]])
        """
        shape = tuple(getattr(x, "shape", ()))
        if shape[1:2] != (self.seqlen,):
            raise ShapeError(
                f"ContextParallel.part: x has shape {shape}, expected (batch, {self.seqlen}, ...)"
            )
        return x[:, self.rows]

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        return ring_attention(self.comm, q, k, v, layout=self.layout, **options, return_lse=True)

    def attention_backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        grads: tuple[Any, Any, Any],
        **options: Any,
    ) -> None:
        options["layout"] = self.layout
        results = ring_attention_backward(self.comm, dout, q, k, v, out, lse, **options)
        for target, grad in zip(grads, results, strict=True):
            target[...] = grad
