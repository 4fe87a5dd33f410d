"""Cross-entropy of a linear layer on the CPU, a chunk of rows at a time, by :mod:`gpu_ops.kernels.gemm.cpu.gemm`
and :mod:`.cross_entropy`.

logits     x w^T + bias, float32 from the accumulators       once per chunk: w is read in place
dlogits    in x's dtype, over the logits                     by the kernel of the losses
dx         dlogits w                                         of dlogits, panels of one block at a time
dweight    dlogits^T x, added up in place
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gpu_ops.kernels.common.cpu.dtype import aligned_empty
from gpu_ops.kernels.common.cpu.packing import pack, packed, panel_bytes
from gpu_ops.kernels.gemm.cpu import linear
from gpu_ops.kernels.gemm.cpu.gemm import matmul, private_bytes
from gpu_ops.kernels.gemm.cpu.linear import spans
from gpu_ops.kernels.loss.cpu import cross_entropy
from gpu_ops.kernels.weights.cpu.packed import rows_of

Array = np.ndarray[Any, Any]

# of dlogits, packed at a time for dx: 1 MiB of float32. Half of either is up to 10 % slower, all at once as fast
ROWS, CLASSES = 512, 512
PIECE = 16 * CLASSES  # classes of a packed weight that are unpacked at a time


def scratch_bytes(
    rows: int, vocab: int, hidden: int, *, dtype: np.dtype[Any], wide: np.dtype[Any], grads: bool
) -> int:
    """Scratch bytes of a chunk of ``rows`` rows: its logits, and the largest scratch of any product."""
    logits, (of_x, _, of_dweight) = (
        rows * vocab * wide.itemsize,
        linear.scratch_bytes(rows, vocab, hidden, dtype.name),
    )
    if not grads:
        return logits + of_x
    part, classes, element = min(rows, ROWS), min(vocab, CLASSES), packed(dtype.name)
    of_dx = panel_bytes(classes, part, element) + private_bytes(hidden, part, classes, element, trans_a=True)
    of_dx += rows * hidden * wide.itemsize if dtype != wide else 0
    return logits + max(of_x, of_dx, of_dweight)


Weights = Iterable[tuple[slice, Array]]
"""Classes and their weights, all of them in order, each time anew. A piece is valid until the next one."""


class PackedWeights:
    """Rows of a packed matrix, unpacked PIECE at a time; once, if there are no more."""

    def __init__(self, matrix: Any, vocab: int, dtype: np.dtype[Any]) -> None:
        self.matrix, self.vocab = matrix, vocab
        self.piece = aligned_empty((min(vocab, PIECE), matrix.shape[1]), dtype)
        self.weights = rows_of(matrix, 0, self.piece) if vocab <= PIECE else None

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        if self.weights is not None:
            yield slice(0, self.vocab), self.weights
            return
        for v in spans(self.vocab, PIECE):
            yield v, rows_of(self.matrix, v.start, self.piece[: v.stop - v.start])


class Chunks:
    """Loss, lse and gradients of runs of rows, which share the memory of their logits."""

    def __init__(
        self, weights: Weights, bias: Array | None, logits: Array, options: tuple[Array, Any]
    ) -> None:
        """logits (rows of a chunk, vocab); options: class weights and numbers for the kernels of the losses."""
        self.weights, self.logits, self.options = weights, logits, options
        self.bias = None if bias is None else bias.astype(logits.dtype)

    def forward(self, x: Array, targets: Array, loss: Array, lse: Array) -> None:
        logits, (class_weight, numbers) = self._logits_of(x), self.options
        cross_entropy.forward(logits, targets, class_weight, loss, lse, numbers)

    def forward_backward(self, dloss: Array, x: Array, targets: Array, loss: Array, lse: Array) -> Array:
        """Return dlogits, which stay valid until the next chunk."""
        logits, (class_weight, numbers) = self._logits_of(x), self.options
        dlogits = logits.view(x.dtype)[:, : logits.shape[1]]
        cross_entropy.forward_backward(dloss, logits, targets, class_weight, loss, lse, dlogits, numbers)
        return dlogits

    def _logits_of(self, x: Array) -> Array:
        logits = self.logits[: len(x)]
        for v, weight in self.weights:
            bias = None if self.bias is None else self.bias[v]
            linear.forward(x, weight, bias, None, logits[:, v])
        return logits

    def backward_input(self, dlogits: Array, dx: Array) -> None:
        """Compute dx by blocks of a fixed size, so that the bits are the same for any chunk."""
        element, vocab = packed(dx.dtype.name), dlogits.shape[1]
        total = dx if dx.dtype == self.logits.dtype else np.empty(dx.shape, self.logits.dtype)
        for classes, weight in self.weights:
            for r, part in itertools.product(spans(len(dx), ROWS), spans(len(weight), CLASSES)):
                v = slice(classes.start + part.start, classes.start + part.stop)
                panels = pack(dlogits[r, v], element, trans=True)
                ends = {"first": v.start == 0, "last": v.stop == vocab}
                matmul(weight[part], panels, dx[r], trans_a=True, trans_out=True, total=total[r], **ends)
                del panels  # before the next panels are made
