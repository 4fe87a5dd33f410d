"""Drawings of the attention kernels. The first line of a function's docstring is the caption."""

from __future__ import annotations

from scripts.docs.drawing import Drawing


def attention_tiles() -> Drawing:
    """A block keeps its rows of Q and iterates over the keys, a tile at a time. Scores never leave registers."""
    d = Drawing(760, 330)
    d.text(60, 24, "Q", size=14)
    for i in range(4):
        d.box(20, 36 + i * 40, 80, 38, "block_m rows" if i == 1 else "", "a" if i == 1 else "n", 11)
    d.text(370, 24, "K, V: tiles of block_n keys, one after the other", size=13)
    for i in range(6):
        d.box(150 + i * 74, 36, 70, 34, f"K{i}", "b" if i == 3 else "n")
        d.box(150 + i * 74, 74, 70, 34, f"V{i}", "c" if i == 3 else "n")
    d.arrow(600, 132, 180, 132, "from right to left: the masked end comes first")
    d.box(130, 150, 130, 54, "S = Q K^T\nblock_m x block_n", "d", 12)
    d.box(310, 150, 150, 54, "P = exp2(S - m)\nl, O corrected", "d", 12)
    d.box(510, 150, 130, 54, "O = O + P V\nregisters", "c", 12)
    d.arrow(102, 96, 148, 148)
    d.arrow(262, 177, 308, 177)
    d.arrow(462, 177, 508, 177)
    d.box(130, 226, 510, 34, "m, l of each row: the largest score so far, the sum relative to it", "n", 12)
    d.arrow(385, 206, 385, 224)
    d.arrow(575, 262, 575, 288)
    d.text(385, 310, "after the last tile: out = O / l, lse = m + log(l)", size=13)
    d.arrow(642, 177, 700, 177)
    d.text(704, 181, "next tile", "start", 11, True)
    return d


def attention_pipeline() -> Drawing:
    """Loads overlap with the products. Shared memory holds K twice and V once; with Q in registers, odd tiles of K
    reuse the buffer that Q was loaded through."""
    d = Drawing(760, 250)
    rows = ("tensor cores", "exp2, masks", "cp.async")
    for i, name in enumerate(rows):
        d.text(104, 40 + i * 42, name, "end", 12)
    x = 120
    for n in ("n", "n - 1"):
        d.box(x, 20, 90, 32, f"S of {n}", "d", 12)
        d.box(x + 90, 62, 90, 32, f"softmax {n}", "n", 12)
        d.box(x + 180, 20, 110, 32, "O += P V", "c", 12)
        x += 290
    d.box(120, 104, 180, 32, "V of tile n", "c", 12)
    d.box(120, 138, 290, 26, "K of tile n - 1", "b", 12)
    d.box(410, 104, 180, 32, "V of tile n - 1", "c", 12)
    d.box(410, 138, 290, 26, "K of tile n - 2", "b", 12)
    d.text(104, 214, "shared memory", "end", 12)
    d.cells(120, 192, 193, 40, ("K, even tiles", "V", "K, odd tiles; Q at first"), "bcb", 12)
    return d


def mma_fragment() -> Drawing:
    """Lanes that hold a 16 x 8 tile of S. With g = lane / 4 and t = lane % 4, a lane has columns 2t and 2t + 1 of
    rows g and g + 8."""
    d = Drawing(620, 300)
    for row in range(16):
        for pair in range(4):
            lane = row % 8 * 4 + pair
            d.box(110 + pair * 60, 30 + row * 16, 60, 16, f"lane {lane}", "a" if row < 8 else "b", 9)
    d.text(230, 20, "columns 0 .. 7, two for each lane", size=11)
    d.text(100, 98, "rows 0 .. 7\nc0, c1", "end", 11)
    d.text(100, 226, "rows 8 .. 15\nc2, c3", "end", 11)
    d.arrow(360, 40, 410, 40)
    d.text(416, 44, "four lanes share a row:", "start", 12)
    d.text(416, 62, "its maximum takes two shuffles", "start", 12)
    d.text(416, 106, "two tiles side by side are the", "start", 12)
    d.text(416, 124, "left operand of the next mma:", "start", 12)
    d.text(416, 142, "P stays in its registers", "start", 12)
    return d


def swizzle() -> Drawing:
    """Swizzled rows in shared memory: chunk c of row r is stored at c XOR r. A column of eight rows falls into eight
    different groups of banks."""
    d = Drawing(680, 290)
    for title, x, moved in (("as in global memory", 60, False), ("in shared memory", 380, True)):
        d.text(x + 128, 22, title, size=12)
        for row in range(8):
            d.text(x - 8, 50 + row * 28, str(row), "end", 11, True)
            for place in range(8):
                chunk = place ^ row if moved else place
                d.box(x + place * 32, 32 + row * 28, 32, 26, str(chunk), "b" if chunk == 2 else "n", 11)
    d.arrow(326, 144, 352, 144)
    d.text(188, 278, "column 2: one group of banks, 8 waves", size=12)
    d.text(508, 278, "column 2: eight groups, 1 wave", size=12)
    return d


def split_kv() -> Drawing:
    """Decoding: the keys of a sequence are split among blocks; a second kernel merges their results."""
    d = Drawing(760, 270)
    d.box(20, 96, 90, 50, "q\n4 heads share k", "a", 11)
    for i in range(4):
        d.box(170, 20 + i * 54, 150, 42, f"keys of part {i}", "b", 12)
        d.arrow(112, 121, 168, 41 + i * 54)
        d.arrow(322, 41 + i * 54, 388, 41 + i * 54)
        d.box(390, 20 + i * 54, 140, 42, "O, max, sum", "d", 12)
        d.arrow(532, 41 + i * 54, 598, 121)
    d.box(600, 92, 140, 58, "attention_combine\nout, lse", "c", 12)
    d.text(245, 254, "one block each, several SMs", size=12)
    d.text(460, 254, "float32, mostly in L2", size=12)
    return d


def paged_cache() -> Drawing:
    """A paged cache: the block table lists the pages of each sequence. Pages of a common prefix are shared."""
    d = Drawing(760, 220)
    for row, (name, pages) in enumerate((("sequence 0", "023"), ("sequence 1", "021"), ("sequence 2", "4"))):
        d.text(104, 50 + row * 44, name, "end", 12)
        d.cells(116, 30 + row * 44, 40, 30, tuple(pages), "a" if row == 0 else "d" if row == 1 else "c", 12)
    d.text(176, 186, "block_table", size=12)
    for page in range(6):
        d.box(330 + page * 68, 80, 62, 60, f"page {page}", "bdbacn"[page], 12)
    d.arrow(260, 92, 326, 104)
    d.text(530, 62, "k_cache: (num_pages, page_size, nheads_kv, head_dim)", size=12)
    d.text(530, 164, "pages 0 and 2 are in two tables; page 5 is free", size=12)
    return d


def attention_backward() -> Drawing:
    """A block keeps its keys and iterates over the queries. dK and dV are summed in its registers; dQ is added to
    global sums by atomics."""
    d = Drawing(760, 330)
    d.box(20, 110, 120, 90, "K, V\nof a block\nshared memory", "b", 12)
    for i in range(5):
        d.box(180 + i * 84, 20, 78, 34, f"Q{i}, dO{i}", "a" if i == 2 else "n", 12)
    d.arrow(180, 80, 590, 80, "tiles of queries, of all heads that share the keys")
    d.box(200, 100, 150, 46, "S^T = K Q^T\nP = exp2(S - lse)", "d", 12)
    d.box(200, 164, 150, 46, "dP^T = V dO^T\ndS = P (dP - delta)", "d", 12)
    d.arrow(142, 130, 198, 124)
    d.arrow(142, 170, 198, 186)
    d.box(420, 100, 150, 46, "dV += P^T dO\nregisters", "c", 12)
    d.box(420, 164, 150, 46, "dK += dS^T Q\nregisters", "c", 12)
    d.arrow(352, 123, 418, 123)
    d.arrow(352, 187, 418, 187)
    d.box(420, 228, 150, 46, "dQ += dS K\natomics, float32", "c", 12)
    d.arrow(300, 212, 418, 250)
    d.text(585, 255, "dS^T by shared memory", "start", 11, True)
    d.text(
        380, 312, "deterministic: a second pass owns queries, and K and V pass by; two products more", size=12
    )
    return d
