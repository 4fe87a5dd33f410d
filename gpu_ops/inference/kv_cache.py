"""Key/value cache in pages: sequences of any length that share prefixes, over arrays allocated once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.allocator import typed_memory_errors
from gpu_ops.core.state_arrays import check_device, named_dtype, to_device
from gpu_ops.errors import OptionError, StateError
from gpu_ops.inference.pages import PageArrays, PagePool
from gpu_ops.inference.sequences import CacheSequences, CacheStats, Sequence, requests, token_ids
from gpu_ops.inference.step import Step, check_room, empty_step, filled
from gpu_ops.inference.step_attention import on_device
from gpu_ops.inference.tree import moves, read_parents, read_paths
from gpu_ops.ops.attention.options import QUANTIZED

__all__ = ["PagedKVCache"]

_CLASS = "PagedKVCache"


class PagedKVCache:
    """Keys and values of many sequences in pages of ``page_size`` tokens.

    Use it for a forward over a batch of prompts, parts of prompts and single tokens, in any mixture::

        handle = cache.add(prompt)  # finds the longest prefix that is in the cache
        step = cache.reserve({handle: prompt[cache.length(handle) :], other: [token]})
        ...  # the model's forward, which reads `step`, writes keys and values: see Step
        cache.commit()

    ``reserve`` assigns places to the new tokens, or raises ``OutOfPages`` and changes nothing. Between it and
    ``commit`` a step is open: its tokens count, but its pages cannot be found as a prefix until ``commit`` confirms
    that they are written. On a GPU, call it once the kernels have been launched, since later ones run after them. If
    the forward fails, ``rollback`` removes the tokens. While a step is open, no other may begin, and no sequence may
    be forked, trimmed or freed.

    Parameters
    ----------
    nlayers, nheads_kv, head_dim : int
        Sizes of the model.
    num_pages : int
        Pages of each layer. With a window one of them stays empty: the null page.
    page_size : int
        Tokens per page. Prefixes are shared in whole pages; on average half a page of each sequence is empty.
    dtype : str or dtype
        float16, bfloat16, float32 or float64; or int8 or float8_e4m3fn, in half the bytes of bfloat16. In the latter
        case each head of a token has a scale; see :func:`gpu_ops.rope_append_kv` for the accuracy. Pages of
        float8_e4m3fn are uint8 arrays of its bits, since CuPy has no such dtype.
    device : str
        ``"cuda"``: CuPy arrays on the current device, which must be current in later calls too. ``"cpu"``,
        ``"emulator"``: NumPy arrays.
    window : int
        Number of earlier tokens that a token sees: the left side of attention's ``window_size``, -1 for all.
        ``reserve`` returns the pages that no later token of a sequence sees; its table then names page 0, the null
        page, whose keys attention masks. A cache has one window for all layers.
    keep : int
        Tokens at the start of each sequence that stay in spite of the window. ``window_size`` masks them; they are
        for a separate :func:`~gpu_ops.attention`, merged by :func:`~gpu_ops.attention_merge`.

    Attributes
    ----------
    keys, values : tuples of arrays (num_pages, page_size, nheads_kv, head_dim)
        Pages of each layer, zeros at first. Their addresses stay the same as long as the cache lives.
    key_scales, value_scales : tuples of float32 arrays (num_pages, page_size, nheads_kv), or of None
        Scales of quantized pages. A page and its scales are adjacent in memory, and are copied and moved together.

    Raises
    ------
    OptionError, DTypeError, ShapeError
        Wrong sizes, handles or token ids. Nothing has changed.
    StateError
        A call that must come after ``commit`` or ``rollback``.
    OutOfPages
        Raised by ``reserve``; with ``needed``, ``free`` and ``held``, the pages of each sequence.
    OutOfMemoryError, DeviceError
        The arrays do not fit, or there is no such device.

    Notes
    -----
    The arrays take ``2 * nlayers * num_pages * page_size * nheads_kv * head_dim`` elements, and 4 bytes per scale.

    ``reserve`` of one token for each of 64 sequences takes 0.25 ms on one core of an AMD EPYC, at any length; 50 %
    longer if they share pages for a cascade.

    Tokens themselves are compared, not their hashes: two prompts never share a page by mistake. A page keeps its
    tokens after its last sequence is freed. Pages freed first are reused first; of one sequence, the last pages.

    Keys and values depend on the weights. :class:`Engine` and :func:`generate` find no prefixes of another ``Llama``,
    config or rotation. After a change of weights in place, and before :meth:`add` for a forward by other weights,
    call :meth:`drop_prefixes`.

    Only one thread at a time may call a cache; with several, hold a lock around the calls. Ops that read the arrays
    use no lock: on a GPU, launch them on the stream of the ``reserve`` call, which may copy pages there.

    Examples
    --------
    >>> from gpu_ops.inference import PagedKVCache
    >>> cache = PagedKVCache(2, 4, 64, num_pages=32, page_size=4)
    >>> prompt = [11, 12, 13, 14, 15, 16]
    >>> first = cache.add(prompt)
    >>> cache.reserve({first: prompt}).slot_mapping
    array([0, 1, 2, 3, 4, 5])
    >>> cache.commit()  # after the forward
    >>> second = cache.add([11, 12, 13, 14, 99])
    >>> cache.length(second)  # tokens that need no forward
    4
    >>> step = cache.reserve({first: [17], second: [99]})
    >>> step.block_table
    array([[0, 1],
           [0, 2]], dtype=int32)
    >>> step.seqused_k
    array([7, 5], dtype=int32)
    """

    checks_itself = ("accept", "add", "commit", "free", "length", "reserve", "rollback")

    def __init__(
        self,
        nlayers: int,
        nheads_kv: int,
        head_dim: int,
        *,
        num_pages: int,
        page_size: int = 16,
        dtype: npt.DTypeLike = "float32",
        device: str = "cpu",
        window: int = -1,
        keep: int = 0,
    ) -> None:
        sizes = {"nlayers": nlayers, "nheads_kv": nheads_kv, "head_dim": head_dim, "page_size": page_size}
        size = {name: checks.integer(_CLASS, name, n, low=1) for name, n in sizes.items()}
        self.page_size = size["page_size"]
        self.window = checks.integer(_CLASS, "window", window, low=-1)
        keep = checks.integer(_CLASS, "keep", keep, low=0)
        if keep and self.window < 0:
            raise OptionError(
                f"{_CLASS}: keep={keep} is for a cache with a window; without one, all tokens stay"
            )
        first = int(self.window >= 0)  # page 0 is the null page
        self.num_pages = checks.integer(_CLASS, "num_pages", num_pages, low=1 + first, high=2**31 - 1)
        self.dtype = named_dtype(_CLASS, "dtype", dtype, checks.FLOAT_DTYPES | QUANTIZED)
        self.device = checks.one_of(
            _CLASS, "device", device, ("cpu", "cuda", "emulator"), meant={"gpu": "cuda"}
        )
        check_device(_CLASS, self.device)
        n, page = size["nlayers"], (self.page_size, size["nheads_kv"], size["head_dim"])
        with typed_memory_errors(_CLASS):
            self._pages = PageArrays.zeros(2 * n, self.num_pages, page, self.dtype, self.device)
        numbers, scales = self._pages.numbers, self._pages.scales
        self.keys, self.values = numbers[:n], numbers[n:]
        self.key_scales, self.value_scales = scales[:n], scales[n:]
        pool = PagePool(self.num_pages, self.page_size, first)
        self._sequences = CacheSequences(pool, self.window, -(-keep // self.page_size))

    def add(self, tokens: Any = ()) -> int:
        """Add a sequence; return its handle, an integer.

        Parameters
        ----------
        tokens : list or array of integers
            Prompt, or its known part. The sequence begins with the longest prefix of it that is in the cache, in
            whole pages and without the last token, whose logits are still needed: ``length(handle)`` tokens. Pass
            the others to :meth:`reserve`.
        """
        return self._sequences.add(token_ids("add", tokens))

    def fork(self, handle: int) -> int:
        """Add a sequence with the tokens of another one, in the same pages; return its handle.

        The first of them to grow copies the last page if it is not full.
        """
        return self._sequences.fork(self._get("fork", handle, closed=True))

    def trim(self, handle: int, length: int) -> None:
        """Remove the tokens of a sequence after the first ``length``."""
        sequence = self._get("trim", handle, closed=True)
        length = checks.integer("trim", "length", length, low=0, high=len(sequence.tokens))
        self._sequences.trim(sequence, length)

    def free(self, handle: int) -> None:
        """Free a sequence. Its full pages can be found as a prefix until they are reused."""
        self._get("free", handle, closed=True)
        self._sequences.free(int(handle))

    def drop_prefixes(self) -> None:
        """Drop all prefixes, so that :meth:`add` finds no earlier tokens: their keys and values have other weights.

        Sequences keep their pages, which become free when they end.
        """
        self._sequences.pool.forget_all()

    def reserve(
        self,
        tokens: Mapping[int, Any],
        *,
        parents: Mapping[int, Any] | None = None,
        out: Step | None = None,
    ) -> Step:
        """Reserve places for new tokens of some sequences: for all, or ``OutOfPages`` is raised and nothing changes.

        Parameters
        ----------
        tokens : dict of lists or arrays of integers, by handle
            New tokens, at least one for each sequence.
        parents : dict of lists or arrays of integers, by handle, optional
            For sequences whose new tokens are drafts: the index of each token's parent, -1 for the sequence itself.
            A token sees only its ancestors. The step then has ``logit_rows``, and :meth:`accept` ends it. If any
            token branches, sequences are padded to the same number of tokens.
        out : Step, optional
            Step made by :meth:`empty_step`; its arrays are written and it is returned. The rest is padding. Not with
            ``parents``; such a step has no ``cascade``.
        """
        self._sequences.check_closed("reserve")
        new = requests(self._sequences, tokens)
        drafts = {} if parents is None else read_parents(new, parents)
        if drafts and out is not None:
            raise OptionError("reserve: a step made by empty_step() has no place for parents; omit out")
        plan = self._sequences.plan(new)
        if out is not None:
            check_room(out, plan, self.device)
        self._sequences.evict(plan)
        with typed_memory_errors("reserve"):
            self._sequences.extend(plan, self._pages.copy)
            self._sequences.parents = drafts
            try:
                return on_device(self._sequences, filled(self._sequences, plan, out), out, self.device)
            except BaseException:
                self._sequences.rollback()
                raise

    def commit(self) -> None:
        """End the open step, whose forward is done, or enqueued on a GPU: later steps may share its pages."""
        if self._sequences.parents:
            raise StateError("commit: the open step has drafts; accept() says which of them stay")
        self._sequences.commit()

    def accept(self, paths: Mapping[int, Any]) -> None:
        """End a step as ``commit`` does, and keep only these drafts. Their keys and values follow the sequence.

        Parameters
        ----------
        paths : dict of lists or arrays of integers, by handle
            For each sequence that ``reserve`` had parents for: indices of tokens, each the parent of the next. The
            first has no parent. An empty path keeps no draft.

        Examples
        --------
        >>> from gpu_ops.inference import PagedKVCache
        >>> cache = PagedKVCache(1, 2, 8, num_pages=4)
        >>> text = cache.add()
        >>> step = cache.reserve({text: [5, 6, 7, 8]}, parents={text: [-1, 0, 0, 2]})  # 5 6, or 5 7 8
        >>> step.positions
        array([0, 1, 1, 2], dtype=int32)
        >>> cache.accept({text: [0, 2]})  # after the forward
        >>> cache.tokens(text)
        [5, 7]
        """
        self._sequences.opened("accept")
        kept = read_paths(self._sequences, paths)
        with typed_memory_errors("accept"):
            self._pages.move(*moves(self._sequences, kept))
        self._sequences.keep(kept)
        self._sequences.commit()

    def rollback(self) -> None:
        """Remove the tokens of the open step, whose keys and values were not, or not all, written."""
        self._sequences.rollback()

    def empty_step(
        self, *, tokens: int, batch: int, width: int | None = None, max_seqlen_q: int | None = None
    ) -> Step:
        """Make a step of padding, to pass as ``out=``: steps of up to this size then have one shape and one address,
        as a captured CUDA graph requires.

        Parameters
        ----------
        tokens : int
            New tokens of all sequences.
        batch : int
            Number of sequences. Padding needs separate rows: if a step may have fewer tokens but as many sequences,
            with more than one token each, add one.
        width : int, optional
            Pages of a sequence; default: ``num_pages``. With a window a sequence may become longer than that, since
            its table still has entries from its first page on.
        max_seqlen_q : int, optional
            New tokens of a sequence; default: ``tokens``. 1 for a graph of single tokens.
        """
        requested = {"tokens": tokens, "batch": batch, "width": self.num_pages if width is None else width}
        requested["max_seqlen_q"] = tokens if max_seqlen_q is None else max_seqlen_q
        sizes = {name: checks.integer("empty_step", name, n, low=1) for name, n in requested.items()}
        return empty_step(**sizes, device=self.device)

    def length(self, handle: int) -> int:
        """Number of tokens of a sequence, including those of an open step."""
        return len(self._get("length", handle).tokens)

    def tokens(self, handle: int) -> list[int]:
        """Tokens of a sequence."""
        return self._get("tokens", handle).tokens.copy()

    @property
    def handles(self) -> tuple[int, ...]:
        """Handles of all sequences, in the order of their creation."""
        return tuple(self._sequences.alive)

    def most_pages(self, length: int) -> int:
        """Maximum number of pages in a sequence's table while it grows to ``length`` tokens, one at a time."""
        return self._sequences.most_pages(length)

    @property
    def stats(self) -> CacheStats:
        """Current numbers of pages used, cached and free, and of tokens found by :meth:`add`."""
        return self._sequences.stats

    def csr(self, handles: Iterable[int] | None = None) -> tuple[Any, Any, Any]:
        """Tables of these sequences, or all, in FlashInfer's form: ``kv_indptr, kv_indices, kv_last_page_len``.

        The arrays are int32, on the device. Sequence b has pages ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``; a
        sequence without tokens has none, and a last page of length 0.
        """
        chosen = [self._get("csr", handle) for handle in (self.handles if handles is None else handles)]
        indptr, indices, last = self._sequences.csr(chosen)
        return tuple(to_device(x, self.device, blocking=False) for x in (indptr, indices, last))

    def defragment(self) -> int:
        """Move the used and the cached pages to the front, into free ones; return the number moved.

        Earlier steps, and tables from :meth:`csr`, become invalid.
        """
        self._sequences.check_closed("defragment")
        places = self._sequences.pool.places()
        moved = [page for page, place in places.items() if page != place]
        with typed_memory_errors("defragment"):
            self._pages.copy(moved, [places[page] for page in moved])
        self._sequences.renumber(places)
        return len(moved)

    def _get(self, op: str, handle: Any, *, closed: bool = False) -> Sequence:
        if closed:
            self._sequences.check_closed(op)
        return self._sequences.get(op, handle)
