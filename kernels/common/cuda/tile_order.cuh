// The order in which blocks take the tiles of a matrix product.
#pragma once

// The block's tile of an m x n result: its first row and column. The result is cut into panels of up to kPanel rows of
// tiles. A panel's blocks run down columns, so that blocks in flight share tiles of both operands in L2.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ void block_tile(int m, int n, int& row0, int& col0) {
    constexpr int kPanel = 16;
    const int tiles_m = (m + kBlockM - 1) / kBlockM, tiles_n = (n + kBlockN - 1) / kBlockN;
    const int panels = (tiles_m + kPanel - 1) / kPanel, height = (tiles_m + panels - 1) / panels;
    const int panel = blockIdx.x / (height * tiles_n), i = blockIdx.x % (height * tiles_n);
    const int rows = min(height, tiles_m - panel * height);
    row0 = (panel * height + i % rows) * kBlockM;
    col0 = i / rows * kBlockN;
}
