"""Block-sparse visibility for attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.errors import DTypeError, OptionError, ShapeError

__all__ = ["BlockMask"]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of keys each block of queries may see.

    Attention intersects it with its other masks and never reads a key of a block that no query
    block sees.

    Parameters
    ----------
    visible : bool array, 2 to 4 axes
        Broadcastable to ``(batch, nheads, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k))``. Blocks
        count from query 0 and key 0; the last block of a side may be short.
    block_q, block_k : int
        Queries and keys per block, at least 1.

    Raises
    ------
    DTypeError
        ``visible`` is not bool, or a block size not an integer.
    ShapeError
        ``visible`` has fewer than 2 or more than 4 axes.
    OptionError
        A block size is less than 1.

    Examples
    --------
    >>> import numpy as np
    >>> from gpu_ops import BlockMask
    >>> mask = BlockMask(np.array([[True, False], [True, True]]), block_q=2, block_k=1)
    >>> mask.expand(3, 2).astype(int)
    array([[1, 0],
           [1, 0],
           [1, 1]])
    """

    visible: Any
    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        if not hasattr(self.visible, "dtype"):  # lists of bools are welcome
            object.__setattr__(self, "visible", np.asarray(self.visible))
        if self.visible.dtype != np.bool_:
            raise DTypeError(
                f"BlockMask.visible must be bool (True: visible), got {self.visible.dtype}; "
                "compare first, for example `weights > 0`"
            )
        if not 2 <= self.visible.ndim <= 4:
            raise ShapeError(
                "BlockMask.visible must have 2 to 4 axes, ([batch,] [nheads,] query blocks, key blocks), "
                f"got shape {tuple(self.visible.shape)}"
            )
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
                raise DTypeError(f"BlockMask.{name} must be an int, got {type(size).__name__}")
            if size < 1:
                raise OptionError(f"BlockMask.{name} must be at least 1, got {size}")
            object.__setattr__(self, name, int(size))

    def num_blocks(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Blocks of queries and of keys that cover the two lengths."""
        return -(-seqlen_q // self.block_q), -(-seqlen_k // self.block_k)

    def expand(self, seqlen_q: int, seqlen_k: int) -> npt.NDArray[np.bool_]:
        """The dense mask ``(..., seqlen_q, seqlen_k)``, leading axes as in ``visible``.

        Raises
        ------
        ShapeError
            ``visible`` does not broadcast to the number of blocks.
        """
        blocks = self.num_blocks(seqlen_q, seqlen_k)
        visible = np.asarray(self.visible)
        for given, need in zip(visible.shape[-2:], blocks, strict=True):
            if given not in (1, need):
                raise ShapeError(
                    f"BlockMask.visible has blocks {visible.shape[-2:]}, but seqlen_q={seqlen_q} and "
                    f"seqlen_k={seqlen_k} with block_q={self.block_q}, block_k={self.block_k} make {blocks}"
                )
        visible = np.broadcast_to(visible, (*visible.shape[:-2], *blocks))
        block_of_query = np.arange(seqlen_q) // self.block_q
        block_of_key = np.arange(seqlen_k) // self.block_k
        return visible[..., block_of_query[:, None], block_of_key[None, :]]
