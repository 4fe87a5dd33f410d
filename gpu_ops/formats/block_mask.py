"""Block-sparse masks for attention: builders of the usual patterns, intersection and union."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.call_key import array_key
from gpu_ops.errors import DTypeError, OptionError, ShapeError
from gpu_ops.formats import block_patterns

__all__ = ["BlockMask"]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Mask of the blocks of keys that each block of queries may see.

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

    Notes
    -----
    ``causal``, ``sliding_window``, ``prefix_lm``, ``document`` and ``strided`` build the usual masks, ``&`` and ``|``
    combine masks of equal block sizes. A block mask is coarse: it *covers* the pattern. It never hides a pair that
    the pattern shows, and keeps no block without such a pair, but it shows every pair of a block it keeps. Where
    attention has the exact option (``causal=``, ``window_size=``) pass that too: the block mask then only selects the
    blocks to skip. With blocks of 1 x 1 every pattern is exact, but is looked up pair by pair: several times
    slower than ``causal=`` or a ``bias`` of 0 and -inf.

    Builders return NumPy arrays; for arrays on a GPU: ``BlockMask(cupy.asarray(m.visible), m.block_q, m.block_k)``.

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
        if not hasattr(self.visible, "dtype"):  # lists of bools are accepted
            try:
                visible = np.asarray(self.visible)
            except ValueError as error:  # rows of different lengths
                raise ShapeError(f"BlockMask.visible is no array: {error}") from error
            object.__setattr__(self, "visible", visible)
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
            object.__setattr__(self, name, block_patterns.block_size(name, getattr(self, name)))

    @property
    def call_key(self) -> tuple[Any, ...] | None:
        """Key of calls with this mask; the values of ``visible`` are not part of it."""
        visible = array_key(self.visible)
        return None if visible is None else (visible, self.block_q, self.block_k)

    @property
    def call_arrays(self) -> tuple[Any, ...]:
        """Arrays that it holds, which results may not overlap."""
        return (self.visible,)

    def num_blocks(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Number of blocks of queries and of keys that cover the two lengths."""
        return -(-seqlen_q // self.block_q), -(-seqlen_k // self.block_k)

    @typed_memory_errors("BlockMask.expand")
    def expand(self, seqlen_q: int, seqlen_k: int) -> npt.NDArray[np.bool_]:
        """The dense mask ``(..., seqlen_q, seqlen_k)``, leading axes as in ``visible``.

        Raises
        ------
        ShapeError
            ``visible`` does not broadcast to the number of blocks.
        """
        blocks = self.num_blocks(seqlen_q, seqlen_k)
        visible = np.asarray(self.visible)
        for size, expected in zip(visible.shape[-2:], blocks, strict=True):
            if size not in (1, expected):
                raise ShapeError(
                    f"BlockMask.visible has blocks {visible.shape[-2:]}, but seqlen_q={seqlen_q} and "
                    f"seqlen_k={seqlen_k} with block_q={self.block_q}, block_k={self.block_k} make {blocks}"
                )
        visible = np.broadcast_to(visible, (*visible.shape[:-2], *blocks))
        block_of_query = np.arange(seqlen_q) // self.block_q
        block_of_key = np.arange(seqlen_k) // self.block_k
        return visible[..., block_of_query[:, None], block_of_key[None, :]]

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int, *, block_q: int = 64, block_k: int = 64) -> BlockMask:
        """The blocks of ``attention(..., causal=True)``: query i sees keys up to i + seqlen_k - seqlen_q.

        A cover: blocks on the diagonal also show later keys, so pass ``causal=True`` as well to make the result
        exact.

        Parameters
        ----------
        seqlen_q, seqlen_k : int
            Lengths, at least 0.
        block_q, block_k : int
            Queries and keys per block, at least 1.

        Raises
        ------
        DTypeError, OptionError
            A block size is not an integer; a length or a block size is out of range.

        Examples
        --------
        >>> from gpu_ops import BlockMask
        >>> BlockMask.causal(256, 320).visible.astype(int)
        array([[1, 1, 0, 0, 0],
               [1, 1, 1, 0, 0],
               [1, 1, 1, 1, 0],
               [1, 1, 1, 1, 1]])
        """
        return cls(*block_patterns.causal(seqlen_q, seqlen_k, block_q, block_k))

    @classmethod
    def sliding_window(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window_size: tuple[int, int],
        *,
        block_q: int = 64,
        block_k: int = 64,
    ) -> BlockMask:
        """The blocks of ``attention(..., window_size=(left, right))``.

        A cover: blocks at the window's ends also show keys outside it, so pass ``window_size=`` as well to make the
        result exact.

        Parameters
        ----------
        seqlen_q, seqlen_k, block_q, block_k
            Same as in :meth:`causal`.
        window_size : (left, right)
            Query i sees keys from i + seqlen_k - seqlen_q - left to ... + right; -1: no limit.

        Raises
        ------
        DTypeError, OptionError
            A block size is not an integer; a length, a block size or a side of the window is out of range.

        Examples
        --------
        >>> from gpu_ops import BlockMask
        >>> BlockMask.sliding_window(256, 256, (64, 0)).visible.astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
        """
        return cls(*block_patterns.sliding_window(seqlen_q, seqlen_k, window_size, block_q, block_k))

    @classmethod
    def prefix_lm(
        cls, seqlen_q: int, seqlen_k: int, prefix_len: Any, *, block_q: int = 64, block_k: int = 64
    ) -> BlockMask:
        """Mask where every query sees the first ``prefix_len`` keys, and the keys up to its own position.

        A cover, and attention has no option for the exact pattern: blocks on the diagonal show later keys, and the
        block where the prefix ends shows all its keys. If that matters, add a ``bias`` of -inf there.

        Parameters
        ----------
        seqlen_q, seqlen_k, block_q, block_k
            Same as in :meth:`causal`, with the same alignment.
        prefix_len : int or int array (batch,)
            Number of keys in the prefix, in [0, seqlen_k]; an array makes a mask (batch, 1, query blocks, key
            blocks).

        Raises
        ------
        DTypeError, OptionError, ShapeError
            ``prefix_len`` or a block size is not of integers; a value is out of range; ``prefix_len`` has two axes.

        Examples
        --------
        >>> from gpu_ops import BlockMask
        >>> BlockMask.prefix_lm(256, 256, 100).visible.astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
        """
        return cls(*block_patterns.prefix_lm(seqlen_q, seqlen_k, prefix_len, block_q, block_k))

    @classmethod
    def document(
        cls,
        document_ids_q: Any,
        document_ids_k: Any = None,
        *,
        causal: bool = False,
        block_q: int = 64,
        block_k: int = 64,
    ) -> BlockMask:
        """Mask where queries see their own document: the keys whose id is the query's.

        A cover, exact if documents start and end with a block and ``causal`` is False (otherwise pass attention
        ``causal=True`` as well). Other documents need a ``bias`` of -inf, or ``attention_varlen``, which is exact and
        faster if each document is contiguous.

        Parameters
        ----------
        document_ids_q : int array (seqlen_q,) or (batch, seqlen_q)
            Any ids in any order. With a batch the mask is (batch, 1, query blocks, key blocks).
        document_ids_k : int array (seqlen_k,) or (batch, seqlen_k), default document_ids_q
        causal : bool
            Only keys up to the query's position, bottom-right aligned.
        block_q, block_k : int
            Same as in :meth:`causal`.

        Raises
        ------
        DTypeError, OptionError, ShapeError
            Ids or a block size are not integers; an option is out of range; the batches differ.

        Examples
        --------
        >>> import numpy as np
        >>> from gpu_ops import BlockMask
        >>> BlockMask.document(np.repeat([0, 1, 2], [128, 100, 28])).visible.astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 1],
               [0, 0, 1, 1]])
        """
        return cls(*block_patterns.document(document_ids_q, document_ids_k, causal, block_q, block_k))

    @classmethod
    def strided(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        stride: int,
        *,
        local: int | None = None,
        block_q: int = 64,
        block_k: int = 64,
    ) -> BlockMask:
        """Mask where queries see the blocks of keys around them, and every ``stride``-th block counted from their
        own.

        A query's own block is that of key i + seqlen_k - seqlen_q. The pattern consists of blocks, so the mask is
        exact if no block of queries spans two blocks of keys (for example block_q = block_k and equal lengths);
        otherwise it is a cover. For the causal pattern of Sparse Transformers ``&`` it with :meth:`causal`, and pass
        attention ``causal=True`` as well.

        Parameters
        ----------
        seqlen_q, seqlen_k, block_q, block_k
            Same as in :meth:`causal`.
        stride : int
            Stride in blocks of keys, at least 1.
        local : int, default stride
            Number of blocks of keys seen on either side, counting the query's own block: 1 is only that block, 0
            none.

        Raises
        ------
        DTypeError, OptionError
            A block size is not an integer; an option is out of range.

        Notes
        -----
        Source: Child et al., Generating Long Sequences with Sparse Transformers, 2019, section 4.3, on blocks.

        Examples
        --------
        >>> from gpu_ops import BlockMask
        >>> (BlockMask.strided(384, 384, 3, local=1) & BlockMask.causal(384, 384)).visible.astype(int)
        array([[1, 0, 0, 0, 0, 0],
               [0, 1, 0, 0, 0, 0],
               [0, 0, 1, 0, 0, 0],
               [1, 0, 0, 1, 0, 0],
               [0, 1, 0, 0, 1, 0],
               [0, 0, 1, 0, 0, 1]])
        """
        return cls(*block_patterns.strided(seqlen_q, seqlen_k, stride, local, block_q, block_k))

    def __and__(self, other: BlockMask) -> BlockMask:
        """Mask of blocks that both show: a cover of the pairs that both patterns show, not always the tightest."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._matches(other)
        return BlockMask(self.visible & other.visible, self.block_q, self.block_k)

    def __or__(self, other: BlockMask) -> BlockMask:
        """Mask of blocks that either shows: a cover of the pairs that either pattern shows, tight if both are."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._matches(other)
        return BlockMask(self.visible | other.visible, self.block_q, self.block_k)

    def _matches(self, other: BlockMask) -> None:
        for name in ("block_q", "block_k"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise OptionError(f"BlockMask: masks with {name} {mine} and {theirs} do not combine")
        shapes = tuple(self.visible.shape), tuple(other.visible.shape)
        try:
            np.broadcast_shapes(*shapes)
        except ValueError:
            raise ShapeError(
                f"BlockMask: masks of shapes {shapes[0]} and {shapes[1]} do not combine: axes must be equal or 1"
            ) from None
