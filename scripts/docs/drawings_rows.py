"""Drawings of row-wise kernels, matrix products, ternary weights, and a call."""

from __future__ import annotations

from scripts.docs.drawing import Drawing


def norm_rows() -> Drawing:
    """A row is read once and stays on the chip between sum and output. Adjacent threads read adjacent vectors."""
    d = Drawing(760, 250)
    d.text(90, 45, "row of x", "end", 12)
    d.cells(
        100, 26, 72, 30, ("v0", "v1", "...", "v(T-1)", "v(T)", "v(T+1)", "...", "v(2T-1)"), "aaaabbbb", 12
    )
    d.text(90, 80, "thread", "end", 12)
    d.cells(100, 64, 72, 24, ("0", "1", "...", "T-1", "0", "1", "...", "T-1"), "n", 11)
    d.box(100, 124, 150, 50, "registers\n2 or 4 vectors each", "a", 12)
    d.box(310, 124, 150, 50, "sum of squares\nwarp, then block", "d", 12)
    d.box(520, 124, 150, 50, "y = s r w\none rounding", "c", 12)
    d.arrow(175, 92, 175, 122)
    d.arrow(252, 149, 308, 149)
    d.arrow(462, 149, 518, 149)
    d.text(385, 212, "longer rows: in shared memory; still longer: a team of blocks shares a row", size=12)
    d.text(385, 234, "bytes: x in, y out; with a residual also residual in, s out", size=12)
    return d


def norm_dweight() -> Drawing:
    """The gradient of the weight, without atomics: sums over a block's rows, then over parts, in a fixed order."""
    d = Drawing(760, 230)
    for i in range(3):
        d.box(40, 20 + i * 64, 170, 54, f"rows of block {i}\ndy n, down each column", "a", 12)
        d.arrow(212, 47 + i * 64, 288, 47 + i * 64)
        d.box(290, 26 + i * 64, 150, 42, f"partial[{i}] (cols,)", "d", 12)
        d.arrow(442, 47 + i * 64, 538, 111)
    d.box(540, 84, 180, 54, "norm_dweight\nKahan sum of the parts", "c", 12)
    d.text(385, 218, "no float takes more than about 60 additions", size=12)
    return d


def rope_pairs() -> Drawing:
    """Components of a head that form a pair. A thread owns a unit of two vectors."""
    d = Drawing(700, 230)
    for row, (name, first) in enumerate(
        (("half-split", [0, 1, 2, 3, 0, 1, 2, 3]), ("interleaved", [0, 0, 1, 1, 2, 2, 3, 3]))
    ):
        y = 34 + row * 92
        d.text(110, y + 22, name, "end", 13)
        for i, pair in enumerate(first):
            d.box(120 + i * 62, y, 62, 34, f"pair {pair}", "abcd"[pair], 12)
        d.text(
            368,
            y + 54,
            "rotary_dim components" if row == 0 else "each lane rotates all its heads by one set of angles",
            size=12,
        )
    d.text(
        350,
        218,
        "y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin,  angle = position / theta^(2 i / rotary_dim)",
        size=12,
    )
    return d


def append_kv() -> Drawing:
    """One launch in place of a norm, a rotation and two copies: each element of q, k and v moves once."""
    d = Drawing(760, 210)
    for i, (name, colour) in enumerate((("q", "a"), ("k", "b"), ("v", "c"))):
        y = 16 + i * 60
        d.box(20, y, 80, 42, name, colour)
        if name != "v":
            d.box(150, y, 130, 42, "rmsnorm of a head", "n", 12)
            d.box(330, y, 110, 42, "rope", "n", 12)
            d.arrow(102, y + 21, 148, y + 21)
            d.arrow(282, y + 21, 328, y + 21)
        d.arrow(442 if name != "v" else 102, y + 21, 518, y + 21)
    d.box(520, 16, 200, 42, "out", "a")
    d.box(520, 76, 200, 42, "k_cache[page, row]", "b")
    d.box(520, 136, 200, 42, "v_cache[page, row]", "c")
    d.text(620, 200, "slot_mapping, or block_table and seqused_k", size=11, soft=True)
    return d


def softmax_rows() -> Drawing:
    """A row in registers: one maximum, one sum, two exponentials for each element. Longer rows are read twice."""
    d = Drawing(760, 170)
    d.box(20, 30, 150, 50, "t = scale x + mask\nregisters", "a", 12)
    d.box(220, 30, 130, 50, "m = max(t)\nshuffles", "d", 12)
    d.box(400, 30, 150, 50, "l = sum exp(t - m)", "d", 12)
    d.box(600, 30, 140, 50, "y = exp(t - m) / l", "c", 12)
    for x in (172, 352, 552):
        d.arrow(x, 55, x + 46, 55)
    d.text(380, 120, "a row without visible elements: l = 0, and y = 0", size=12)
    d.text(380, 144, "backward: dx = scale y (dy - sum dy y), one sum for each row", size=12)
    return d


def swiglu_layouts() -> Drawing:
    """Gate and up in separate arrays, or packed as the halves of one row. A thread has the same columns of both."""
    d = Drawing(760, 190)
    d.text(84, 46, "packed", "end", 13)
    d.box(96, 26, 270, 34, "gate: columns 0 .. d-1", "a", 12)
    d.box(366, 26, 270, 34, "up: columns d .. 2d-1", "b", 12)
    d.box(96, 120, 270, 34, "y = act(gate) up", "c", 12)
    d.arrow(231, 62, 231, 118)
    d.arrow(501, 62, 300, 118)
    d.text(470, 128, "3 d elements move forward, 5 d backward;", "start", 12)
    d.text(470, 148, "y = gate and dgate = gate work in place", "start", 12)
    return d


def gemm_tiles() -> Drawing:
    """A block computes a tile of C and iterates over K, with three or four stages of A and B in flight."""
    d = Drawing(760, 300)
    d.box(40, 110, 200, 150, "", "n")
    d.box(40, 160, 200, 50, "A: BLOCK_M rows", "a", 12)
    d.box(270, 20, 190, 76, "", "n")
    d.box(330, 20, 60, 76, "B", "b", 12)
    d.box(270, 110, 190, 150)
    d.text(286, 130, "C", size=12)
    d.box(330, 160, 60, 50, "tile", "c", 12)
    d.arrow(44, 150, 236, 150, "K, BLOCK_K at a time")
    d.text(620, 30, "shared memory, a ring of stages", size=12)
    for i, (name, colour) in enumerate(
        (("multiplied", "c"), ("arrived", "d"), ("on its way", "d"), ("on its way", "d"))
    ):
        d.box(520, 44 + i * 46, 200, 38, f"stage {i}: A and B, {name}", colour, 12)
    d.text(620, 250, "epilogue: bias, residual, or act(gate) up;\none rounding, one store", size=12)
    d.text(250, 286, "split K: each part into float32, and gemm_sum adds them in order", size=12)
    return d


def chunked_loss() -> Drawing:
    """linear_cross_entropy: logits of some rows at a time. Only one chunk of them is ever in memory."""
    d = Drawing(760, 240)
    for i in range(4):
        d.box(20, 20 + i * 46, 90, 40, f"rows {i}" if i != 1 else "x: chunk 1", "a" if i == 1 else "n", 12)
    d.box(170, 60, 150, 54, "logits of the chunk\n= x W^T", "d", 12)
    d.box(380, 20, 150, 42, "loss, lse", "c", 12)
    d.box(380, 84, 150, 54, "dlogits, in the\nplace of the logits", "d", 12)
    d.box(590, 60, 150, 42, "dx = dlogits W", "c", 12)
    d.box(590, 120, 150, 42, "dW += dlogits^T x", "c", 12)
    d.arrow(112, 86, 168, 86)
    d.arrow(322, 80, 378, 44)
    d.arrow(322, 96, 378, 108)
    d.arrow(532, 104, 588, 84)
    d.arrow(532, 118, 588, 140)
    d.text(
        380, 222, "dW is float32: the sum over chunks loses nothing that the dtype would round off", size=12
    )
    return d


def embedding_sort() -> Drawing:
    """The gradient of a table without atomics: sorted keys, sums by tiles of 32; a sum that continues into the next
    tile is carried."""
    d = Drawing(760, 190)
    d.text(106, 44, "sorted ids", "end", 12)
    d.cells(116, 26, 50, 30, tuple("335555555578"), "aabbbbbbbbcd", 12)
    for i in range(3):
        d.box(116 + i * 200, 62, 200, 28, f"tile {i}", "n", 12)
    d.box(116, 116, 190, 34, "dweight[3], first part of 5", "c", 12)
    d.box(326, 116, 180, 34, "partial: more of 5", "d", 12)
    d.box(526, 116, 190, 34, "partial; dweight[7], [8]", "c", 12)
    for x in (211, 416, 621):
        d.arrow(x, 92, x, 114)
    d.text(416, 178, "carry adds the partial sums of 5 in the order of the tiles", size=12)
    return d


def philox() -> Drawing:
    """Random bits from a counter: an element's number and the seed give its bits, wherever it is computed."""
    d = Drawing(760, 160)
    d.box(20, 34, 190, 60, "counter: number / 4, offset\nkey: seed", "a", 12)
    d.box(270, 34, 150, 60, "10 rounds of\nwide products", "n", 12)
    d.cells(480, 44, 62, 40, ("bits 0", "bits 1", "bits 2", "bits 3"), "d", 12)
    d.arrow(212, 64, 268, 64)
    d.arrow(422, 64, 478, 64)
    d.text(604, 112, "one call: four elements", size=12)
    d.text(
        380,
        148,
        "kept if its bits reach a threshold that p gives; none is stored, and the backward draws them again",
        size=12,
    )
    return d


def adamw_bytes() -> Drawing:
    """A step moves each array once: 28 bytes per float32 parameter. The step's scalars stay on the device."""
    d = Drawing(760, 190)
    for i, (name, colour) in enumerate(
        (("params 4 B", "a"), ("grads 4 B", "b"), ("m 4 B", "d"), ("v 4 B", "d"))
    ):
        d.box(20, 16 + i * 42, 130, 36, name, colour, 12)
        d.arrow(152, 34 + i * 42, 298, 92)
    d.box(300, 62, 160, 60, "g, m, v, p\nno fused operation", "n", 12)
    for i, (name, colour) in enumerate((("params 4 B", "a"), ("m 4 B", "d"), ("v 4 B", "d"))):
        d.box(610, 32 + i * 46, 130, 38, name, colour, 12)
        d.arrow(462, 92, 608, 51 + i * 46)
    d.text(380, 152, "factors: step, lr, clip, skip,\nread on the device", size=11, soft=True)
    return d


def sample_digits() -> Drawing:
    """The threshold of top-k without a sort: digits of the logits' bits, from the highest. Here k = 5."""
    d = Drawing(760, 190)
    d.text(116, 46, "first digit", "end", 12)
    d.cells(126, 24, 80, 36, ("2047: 0", "2046: 1", "2045: 2", "2044: 6", "..."), "nccdn", 12)
    d.text(540, 46, "3 tokens above; the edge is in 2044", "start", 12)
    d.text(116, 116, "second digit", "end", 12)
    d.cells(126, 94, 80, 36, ("900: 1", "811: 1", "640: 3", "12: 1"), "ccnn", 12)
    d.text(540, 116, "2 more: the edge is found", "start", 12)
    d.arrow(406, 62, 286, 92, "")
    d.text(
        380,
        168,
        "bins count tokens for top-k, and add integer weights for top-p: sums have no order",
        size=12,
    )
    return d


def ternary_word() -> Drawing:
    """A word of w2: codes t + 1 of 16 weights. A mask and a shift give four codes as the bytes of a dot product."""
    d = Drawing(760, 220)
    d.text(100, 44, "bits", "end", 12)
    for byte in range(4):
        for pair in range(4):
            d.box(110 + (byte * 4 + pair) * 39, 26, 39, 32, f"c{4 * pair + byte}", "abcd"[pair], 11)
        d.text(110 + byte * 156 + 78, 74, f"byte {byte}", size=11, soft=True)
    d.text(60, 124, "w & 0x03030303", size=12)
    d.cells(150, 106, 60, 30, ("c0", "c1", "c2", "c3"), "a", 12)
    d.text(480, 124, "(w >> 2) & 0x03030303", size=12)
    d.cells(570, 106, 44, 30, ("c4", "c5", "c6", "c7"), "b", 12)
    d.text(
        380,
        176,
        "sum of code q - sum of q = sum of trit q: the offset is taken out once for each token",
        size=12,
    )
    return d


def ternary_gemv() -> Drawing:
    """Few tokens: a warp reads several rows of packed weights at a time; the tokens are in shared memory as int8."""
    d = Drawing(760, 210)
    d.text(104, 30, "x, quantised", "end", 12)
    d.box(116, 14, 500, 26, "int8, in shared memory, for all rows of the block", "a", 12)
    for row in range(4):
        d.text(104, 78 + row * 30, f"row {row} of W", "end", 12)
        d.cells(116, 60 + row * 30, 100, 26, ("lanes 0 .. 31", "next step", "...", "", ""), "bdnnn", 11)
        d.arrow(620, 73 + row * 30, 660, 73 + row * 30)
        d.box(662, 60 + row * 30, 80, 26, f"y[{row}]", "c", 11)
    d.text(380, 200, "n k / 4 bytes of weights, once; 2048 codes of a row for each step of a warp", size=12)
    return d


def ternary_gemm() -> Drawing:
    """Many tokens: weights stay packed in shared memory, and are unpacked for tensor cores in registers."""
    d = Drawing(760, 170)
    d.box(20, 50, 130, 50, "codes, packed\n16 B for 64 weights", "b", 12)
    d.box(200, 50, 130, 50, "shared memory\nstill packed", "b", 12)
    d.box(380, 50, 130, 50, "registers: masks\nand shifts", "d", 12)
    d.box(560, 50, 180, 50, "mma.sync, int8 in,\nint32 sums: exact", "c", 12)
    for x in (152, 332, 512):
        d.arrow(x, 75, x + 46, 75)
    d.text(380, 140, "so activations take most of the shared memory, and tiles are larger", size=12)
    return d


def call() -> Drawing:
    """A call, from the public function to the launch. A later call with the same key goes straight to its program."""
    d = Drawing(760, 330)
    d.box(20, 30, 130, 56, "gpu_ops.rmsnorm\n(x, weight)", "a", 12)
    d.box(210, 30, 130, 56, "call key\ndtypes, shapes, ...", "n", 12)
    d.arrow(152, 58, 208, 58)
    d.box(210, 140, 130, 56, "bind\nchecks, views", "b", 12)
    d.box(400, 140, 130, 56, "lower\nSpec to Program", "b", 12)
    d.box(590, 140, 140, 56, "Program\nlaunches, workspaces", "d", 12)
    d.arrow(275, 88, 275, 138)
    d.text(268, 118, "new", "end", 11, True)
    d.arrow(342, 168, 398, 168, "Spec")
    d.arrow(532, 168, 588, 168)
    d.arrow(342, 58, 640, 138)
    d.text(500, 76, "known: 3 to 17 us of Python", "start", 11, True)
    d.box(590, 250, 140, 56, "run\nallocate, launch", "c", 12)
    d.arrow(660, 198, 660, 248)
    d.box(400, 250, 130, 56, "jit: NVRTC,\nNumba; cache", "n", 12)
    d.arrow(588, 278, 532, 278)
    d.text(465, 322, "compiled once, kept on disk", size=11, soft=True)
    d.text(
        150,
        250,
        "also made of programs: explain,\nautotune, memory.estimate,\nCUDA graphs, tests without a GPU",
        size=12,
    )
    return d


def emulator() -> Drawing:
    """The emulator: the PTX of a kernel, instruction by instruction, for all threads of many blocks at once."""
    d = Drawing(760, 150)
    for i, (text, colour) in enumerate(
        (
            ("CUDA C++\nor Numba", "a"),
            ("PTX\nNVRTC, libNVVM", "b"),
            ("closures, one for\neach instruction", "d"),
            ("NumPy, all\nthreads at once", "c"),
        )
    ):
        d.box(20 + i * 188, 20, 140, 56, text, colour, 12)
        if i < 3:
            d.arrow(162 + i * 188, 48, 206 + i * 188, 48)
    d.text(
        380,
        116,
        "beside each access: the sanitizer (who wrote, which barrier since) and the profile (bytes, sectors, banks)",
        size=12,
    )
    return d
