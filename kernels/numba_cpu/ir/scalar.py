"""Numbers without a function call: Numba's ``min`` and ``max`` are functions, and of all that they are given."""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.core.typing.templates import signature
from numba.extending import intrinsic


def _chosen(sign: str) -> Any:
    @intrinsic
    def choose(typingctx, x, y):
        kind = typingctx.unify_types(types.unliteral(x), types.unliteral(y))

        def codegen(context, builder, sig, args):
            x, y = args
            if isinstance(kind, types.Float):
                second = builder.fcmp_ordered(sign, y, x)
            else:
                second = (builder.icmp_signed if kind.signed else builder.icmp_unsigned)(sign, y, x)
            return builder.select(second, y, x)

        return signature(kind, kind, kind), codegen

    return choose


smaller, larger = _chosen("<"), _chosen(">")
