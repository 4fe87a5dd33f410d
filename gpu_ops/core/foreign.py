"""Keywords of other libraries' functions, and the equivalent arguments of gpu_ops."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["meant_by"]

_VARLEN = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_k")
_MASKS = ("bias", "block_mask", "mask")  # an op has some of these
_EQUIVALENTS: dict[str, tuple[str, ...]] = {
    "mask": _MASKS,
    "attn_mask": _MASKS,
    "attention_mask": _MASKS,
    "key_padding_mask": ("seqused_k", *_MASKS),
    "attn_bias": ("bias",),
    "alibi": ("alibi_slopes",),
    "s_aux": ("sinks",),
    "temp": ("temperature",),
    "is_causal": ("causal",),
    "scale": ("softmax_scale",),
    "sm_scale": ("softmax_scale",),
    "scaling": ("softmax_scale", "scale"),
    "dropout": ("dropout_p", "p"),
    "dropout_rate": ("dropout_p", "p"),
    "sliding_window": ("window_size",),
    "local_window_size": ("window_size",),
    "logits_soft_cap": ("softcap",),
    "soft_cap": ("softcap",),
    "return_softmax_lse": ("return_lse",),
    "return_attn_probs": ("return_lse",),
    "need_weights": ("return_lse",),
    "query": ("q",),
    "key": ("k", "k_cache"),
    "value": ("v", "v_cache"),
    "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k"),
    "cu_seqlens_kv": ("cu_seqlens_k",),
    "max_seqlen_kv": ("max_seqlen_k",),
    "cache_seqlens": ("seqused_k",),
    "block_tables": ("block_table",),
    "page_table": ("block_table",),
    "generator": ("seed",),
    "input": ("x", "logits", "ids", "q", "gate"),
    "hidden_states": ("x",),
    "gamma": ("weight",),
    "beta": ("bias",),
    "epsilon": ("eps",),
    "variance_epsilon": ("eps",),
    "base": ("theta",),
    "rope_theta": ("theta",),
    "position_ids": ("positions",),
    "labels": ("targets",),
    "lse_square_scale": ("z_loss",),
    "learning_rate": ("lr",),
    "beta1": ("betas",),
    "beta2": ("betas",),
    "exp_avg": ("m",),
    "exp_avg_sq": ("v",),
    "inplace": ("out",),
    "dtype": ("out_dtype",),
}
_ADVICE = {
    "amsgrad": "omit it: no op keeps the largest v",
    "enable_gqa": "omit it: heads share keys wherever nheads is a multiple of nheads_kv",
    "dim": "omit it: the op works along the last axis",
    "axis": "omit it: the op works along the last axis",
}


def meant_by(keyword: str, arguments: Iterable[str]) -> str:
    """Text that names the equivalent of another library's keyword in an op with these arguments; "" if there is none.

    >>> meant_by("attn_mask", ("q", "k", "v", "bias", "block_mask"))
    "here it is 'bias' or 'block_mask'"
    """
    arguments = tuple(arguments)
    if keyword in _VARLEN and "causal" in arguments and "cu_seqlens_q" not in arguments:
        return "attention_varlen takes sequences of several lengths"
    ours = [repr(name) for name in _EQUIVALENTS.get(keyword, ()) if name in arguments]
    return f"here it is {' or '.join(ours)}" if ours else _ADVICE.get(keyword, "")
