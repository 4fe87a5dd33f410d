"""A key/value cache in pages: sequences of any length that share prefixes, over arrays allocated once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy.typing as npt

from gpu_ops.core import checks
from gpu_ops.core.out_of_memory import typed_memory_errors
from gpu_ops.core.state_arrays import check_device, named_dtype, to_device
from gpu_ops.errors import OptionError, StateError
from gpu_ops.inference.page_arrays import PageArrays
from gpu_ops.inference.pages import PagePool
from gpu_ops.inference.sequences import CacheStats, Sequence, Sequences, requests, token_ids
from gpu_ops.inference.step import Step, check_room, empty_step, filled
from gpu_ops.inference.step_attention import on_device
from gpu_ops.inference.tree import moves, read_parents, read_paths
from gpu_ops.ops.attention.quantized_pages import QUANTIZED

__all__ = ["PagedKVCache"]

_CLASS = "PagedKVCache"


class PagedKVCache:
    """Keys and values of many sequences in pages of ``page_size`` tokens.

    One forward over a batch of prompts, parts of prompts and single tokens, in any mixture::

        handle = cache.add(prompt)  # finds the longest prefix that is in the cache
        step = cache.reserve({handle: prompt[cache.length(handle) :], other: [token]})
        ...  # the model's forward, which reads `step`, writes keys and values: see Step
        cache.commit()

    ``reserve`` gives the new tokens their places, or raises ``OutOfPages`` and changes nothing. Between it and
    ``commit`` a step is open: its tokens count, and its pages cannot be found as a prefix before ``commit`` says that
    they are written. On a GPU that is when the kernels have been launched, since later ones run after them. If the
    forward fails, ``rollback`` takes the tokens back. While a step is open, no other may begin, and no sequence
    may be forked, trimmed or freed.

    Parameters
    ----------
    nlayers, nheads_kv, head_dim : int
        Of the model.
    num_pages : int
        Pages of each layer. With a window one of them stays empty: the null page.
    page_size : int
        Tokens per page. Prefixes are shared by whole pages; half a page of each sequence is empty on average.
    dtype : str or dtype
        float16, bfloat16, float32 or float64. Or int8 or float8_e4m3fn, in half the bytes of bfloat16: each head of a
        token then has a scale, and :func:`gpu_ops.rope_append_kv` says how exact its elements are. Pages of
        float8_e4m3fn are uint8 arrays of its bits, since CuPy has no such dtype.
    device : str
        ``"cuda"``: CuPy arrays on the current device, which is the current one in later calls too. ``"cpu"``,
        ``"emulator"``: NumPy arrays.
    window : int
        How far back a token sees: the left side of attention's ``window_size``, -1 for all. ``reserve`` gives back
        the pages that no later token of a sequence sees; its table then names page 0, the null page, whose keys
        attention masks. A cache has one window for all its layers.
    keep : int
        Tokens at the start of each sequence that stay whatever the window. ``window_size`` masks them; they are for
        an :func:`~gpu_ops.attention` of their own, merged by :func:`~gpu_ops.attention_merge`.

    Attributes
    ----------
    keys, values : tuples of arrays (num_pages, page_size, nheads_kv, head_dim)
        Of each layer, zeros at first. They stay where they are as long as the cache lives.
    key_scales, value_scales : tuples of float32 arrays (num_pages, page_size, nheads_kv), or of None
        The same for quantized pages. A page and its scales lie side by side, and are copied and moved together.

    Raises
    ------
    OptionError, DTypeError, ShapeError
        Wrong sizes, handles, token ids. Nothing has changed.
    StateError
        A call that has to wait for ``commit`` or ``rollback``.
    OutOfPages
        Of ``reserve``; with ``needed``, ``free`` and ``held``, the pages of each sequence.
    OutOfMemoryError, DeviceError
        The arrays do not fit, or there is no such device.

    Notes
    -----
    The arrays take ``2 * nlayers * num_pages * page_size * nheads_kv * head_dim`` elements, and 4 bytes per scale.

    ``reserve`` of one token for each of 64 sequences takes 0.25 ms on one core of an AMD EPYC, at any length; half as
    long again where they share pages for a cascade.

    Tokens are compared, not hashes of them: two prompts never share a page by mistake. A page keeps its tokens after
    its last sequence is freed; those that were freed first are used again first, of one sequence the last pages.

    Keys and values depend on the weights. :class:`Engine` and :func:`generate` find no prefixes of another ``Llama``,
    config or rotation. After weights were changed in place, and before :meth:`add` for a forward by other weights,
    call :meth:`drop_prefixes`.

    One thread at a time may call a cache; hold a lock around the calls of several. The ops that read the arrays take
    part in no lock: on a GPU, launch them on the stream that ``reserve`` was called on, which may copy pages there.

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
        self._sequences = Sequences(pool, self.window, -(-keep // self.page_size))

    def add(self, tokens: Any = ()) -> int:
        """A new sequence: its handle, an integer.

        Parameters
        ----------
        tokens : list or array of integers
            The prompt, or what is known of it. The sequence begins with the longest prefix of it that is in the
            cache, in whole pages, and without its last token, whose logits are still wanted: ``length(handle)``
            tokens. Pass the others to :meth:`reserve`.
        """
        return self._sequences.add(token_ids("add", tokens))

    def fork(self, handle: int) -> int:
        """A new sequence with the tokens of another one, in the same pages.

        Whichever of them grows first copies the last page, if it is not full, for itself.
        """
        return self._sequences.fork(self._get("fork", handle, closed=True))

    def trim(self, handle: int, length: int) -> None:
        """Take back the tokens of a sequence after the first ``length``."""
        sequence = self._get("trim", handle, closed=True)
        length = checks.integer("trim", "length", length, low=0, high=len(sequence.tokens))
        self._sequences.trim(sequence, length)

    def free(self, handle: int) -> None:
        """End a sequence. Its full pages can be found as a prefix until they are used again."""
        self._get("free", handle, closed=True)
        self._sequences.free(int(handle))

    def drop_prefixes(self) -> None:
        """Let :meth:`add` find none of the tokens so far: their keys and values are those of other weights.

        Sequences keep their pages, which are free after them.
        """
        self._sequences.pool.forget_all()

    def reserve(
        self,
        tokens: Mapping[int, Any],
        *,
        parents: Mapping[int, Any] | None = None,
        out: Step | None = None,
    ) -> Step:
        """Places for new tokens of some sequences: all of them, or ``OutOfPages`` and nothing changes.

        Parameters
        ----------
        tokens : dict of lists or arrays of integers, by handle
            At least one for each.
        parents : dict of lists or arrays of integers, by handle, optional
            For sequences whose new tokens are drafts: the index of the one before each of them, -1 for the sequence
            itself. A token sees its ancestors alone. The step then has ``logit_rows``, and :meth:`accept` ends it.
            Where any token branches, sequences are padded to one number of tokens.
        out : Step, optional
            Made by :meth:`empty_step`; its arrays are written and it is returned. The rest is padding. Without
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
        """The forward of the open step is done, or enqueued on a GPU: later steps may share its pages."""
        if self._sequences.parents:
            raise StateError("commit: the open step has drafts; accept() says which of them stay")
        self._sequences.commit()

    def accept(self, paths: Mapping[int, Any]) -> None:
        """End a step as ``commit`` does, and keep these drafts alone. Their keys and values follow the sequence.

        Parameters
        ----------
        paths : dict of lists or arrays of integers, by handle
            For each sequence that ``reserve`` had parents for: indices of tokens, each the parent of the next. The
            first has no parent. An empty path keeps none.

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
        """Take back the tokens of the open step, whose keys and values were not written, or not all."""
        self._sequences.rollback()

    def empty_step(
        self, *, tokens: int, batch: int, width: int | None = None, max_seqlen_q: int | None = None
    ) -> Step:
        """A step of padding, to pass as ``out=``: steps of up to this size then have one shape and one address, as a
        captured CUDA graph needs it.

        Parameters
        ----------
        tokens : int
            New tokens of all sequences.
        batch : int
            Sequences. Padding needs rows of its own: where a step may have fewer tokens, but as many sequences, with
            more than one token each, add one.
        width : int, optional
            Pages of a sequence; default: ``num_pages``. With a window a sequence may become longer than that: its
            table goes on from its first page.
        max_seqlen_q : int, optional
            New tokens of a sequence; default: ``tokens``. 1 for a graph of single tokens.
        """
        given = {"tokens": tokens, "batch": batch, "width": self.num_pages if width is None else width}
        given["max_seqlen_q"] = tokens if max_seqlen_q is None else max_seqlen_q
        sizes = {name: checks.integer("empty_step", name, n, low=1) for name, n in given.items()}
        return empty_step(**sizes, device=self.device)

    def length(self, handle: int) -> int:
        """Tokens of a sequence, those of an open step included."""
        return len(self._get("length", handle).tokens)

    def tokens(self, handle: int) -> list[int]:
        """The tokens of a sequence."""
        return self._get("tokens", handle).tokens.copy()

    @property
    def handles(self) -> tuple[int, ...]:
        """Of all sequences, in the order in which they came."""
        return tuple(self._sequences.alive)

    def most_pages(self, length: int) -> int:
        """Pages that a sequence names at a time on its way to ``length`` tokens, a token at a time."""
        return self._sequences.most_pages(length)

    @property
    def stats(self) -> CacheStats:
        """Pages used, cached and free, and tokens found by :meth:`add`, as of now."""
        return self._sequences.stats

    def csr(self, handles: Iterable[int] | None = None) -> tuple[Any, Any, Any]:
        """Tables in FlashInfer's form, of these sequences or all: ``kv_indptr, kv_indices, kv_last_page_len``.

        int32 arrays on the device. The pages of sequence b are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``; a
        sequence without tokens has none, and a last page of length 0.
        """
        chosen = [self._get("csr", handle) for handle in (self.handles if handles is None else handles)]
        indptr, indices, last = self._sequences.csr(chosen)
        return tuple(to_device(x, self.device, blocking=False) for x in (indptr, indices, last))

    def defragment(self) -> int:
        """Move the used and the cached pages to the front, into free ones; how many moved.

        Steps from before, and tables from :meth:`csr`, are void.
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
