"""Dropout of a row as LLVM IR: (y,) = x * kept * factor, where ``kept`` is 1 or 0 in the dtype of the row.

In this order: x * factor may overflow where x is dropped.
"""

from __future__ import annotations

from gpu_ops.kernels.common.cpu.codegen.rows import map_rows

drop = map_rows(lambda operands, scalars: (operands[0] * operands[1] * scalars[0],))
