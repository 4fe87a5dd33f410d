"""The second half of a tile of the attention backward pass: from P and dS to dQ, dK and dV.

The products of dK and dV take, per group of keys, the panels that see one of them; the product of dQ takes, per
panel, the keys that some lane of it sees. Neighbours with the same range go together.
"""

from gpu_ops.kernels.numba_cpu.attention_gradient_operands import packing
from gpu_ops.kernels.numba_cpu.attention_gradient_tile import KEY_GROUP
from gpu_ops.kernels.numba_cpu.attention_operands import k_unroll, transpose
from gpu_ops.kernels.numba_cpu.codegen.attention_gradient import PANEL
from gpu_ops.kernels.numba_cpu.codegen.gemm import gemm_columns, gemm_rows, takes_tiles
from gpu_ops.kernels.numba_cpu.codegen.memory import round_up, smaller
from gpu_ops.kernels.numba_cpu.dtype import load, read_row
from gpu_ops.kernels.numba_cpu.jit import device_function, generic, noinline_function


@device_function
def panels_of(w, panels, key):
    """First and last + 1 of the panels that see a key of the group from row ``key``."""
    first, last = panels, 0
    for i in range(panels):
        if w.rows[i, 0] < key + KEY_GROUP and key < w.rows[i, 1]:
            first, last = smaller(first, i), i + 1
    return first, last


@device_function
def add_products(w, width, dk, dv, at, n_keys):
    """dV += P^T dO, dK += dS^T Q from row ``at`` on, and dQ += dS K."""
    rows, panels, pack = round_up(n_keys, k_unroll(w.p)), width // PANEL, packing(w.p)
    dim, dim_v = dk.shape[1], dv.shape[1]
    key = 0
    while key < rows:
        first, last = panels_of(w, panels, key)
        stop = key + KEY_GROUP
        while stop < rows and panels_of(w, panels, stop) == (first, last):
            stop += KEY_GROUP
        m, k, lane = smaller(stop, rows) - key, (last - first) * PANEL // pack, first * PANEL // pack
        if k > 0:
            a, row, ld, ld_v = key * w.p.shape[1] + lane, at + key, w.q_pairs.shape[1], w.do_pairs.shape[1]
            gemm_rows(
                dv, row * dim_v, dim_v, w.p, a, w.p.shape[1], w.do_pairs, lane * ld_v, ld_v, m, dim_v, k, True
            )
            gemm_rows(dk, row * dim, dim, w.ds, a, w.ds.shape[1], w.q_pairs, lane * ld, ld, m, dim, k, True)
        key = stop
    i = 0
    while i < panels:
        start, end = w.rows[i, 0], w.rows[i, 1]
        stop = i + 1
        while stop < panels and w.rows[stop, 0] == start and w.rows[stop, 1] == end:
            stop += 1
        m, k, key, lane = (stop - i) * PANEL, (end - start) // pack, start // pack, i * PANEL
        if k > 0:
            add_queries(w, w.ds_keys, lane, m, key, k, dim)
        i = stop


@generic
def add_queries(w, ds, lane, m, key, k, dim):
    """dQ += dS K of ``m`` lanes and ``k`` steps from ``key`` on; ``ds`` is ``w.ds_keys``."""

    def tiles(w, ds, lane, m, key, k, dim):
        ld, ld_ds, ld_dq, ld_k = w.ds_rows.shape[1], ds.shape[1], w.dq.shape[1], w.k_pairs.shape[1]
        at_dq, at = lane * ld_dq, lane * ld + key
        transpose(w.ds_rows, at, ld, ds, key * ld_ds + lane, ld_ds, k, m)
        gemm_rows(w.dq, at_dq, ld_dq, w.ds_rows, at, ld, w.k_pairs, key * ld_k, ld_k, m, dim, k, True)

    def vectors(w, ds, lane, m, key, k, dim):
        ld_ds, ld_dq, ld_k = ds.shape[1], w.dq.shape[1], w.k_pairs.shape[1]
        at_dq, at = lane * ld_dq, key * ld_ds + lane
        gemm_columns(w.dq, at_dq, ld_dq, ds, at, ld_ds, w.k_pairs, key * ld_k, ld_k, m, dim, k, True)

    return tiles if takes_tiles(ds) else vectors


@device_function
def add_products_carefully(w, call, b, head_kv, n, dk, dv, at, first, n_keys, dout, q, k, sequences):
    """The same without the terms whose weight is 0: there the other factor may be NaN or infinite."""
    kb = 0 if call.packed else b
    for c in range(n):
        row = (kb, sequences[b, 0] + w.query[c], w.head[c])
        gradient, query = read_row(dout, row), read_row(q, row)
        for j in range(n_keys):
            p, ds = w.s[j, c], w.dp[j, c]
            if p != 0:
                add_row(dv[at + j], p, gradient, call.head_dim_v)
            if ds != 0:
                key = read_row(k, (kb, sequences[b, 2] + first + j, head_kv))
                add_row(dk[at + j], ds, query, call.head_dim)
                add_row(w.dq[c], ds, key, call.head_dim)


@noinline_function
def add_row(total, weight, row, dim):
    for d in range(dim):
        total[d] += weight * load(row, d)
