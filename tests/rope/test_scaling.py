"""RopeScaling against formulas written out one frequency at a time, and configs of real models."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest

from gpu_ops import RopeScaling
from gpu_ops.errors import OptionError
from gpu_ops.reference.rope import rope_scaling as maths

R, THETA = 128, 500000.0


def plain(i: int, rotary_dim: int = R, theta: float = THETA) -> float:
    return 1.0 / theta ** (2 * i / rotary_dim)


def close(scaling: RopeScaling, formula, *, rotary_dim=R, theta=THETA, seqlen=0):
    expected = [formula(i) for i in range(rotary_dim // 2)]
    actual = scaling.inv_freq(rotary_dim, theta, seqlen)
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_default_is_plain():
    close(RopeScaling("default"), plain)


def test_linear():
    close(RopeScaling.linear(4.0), lambda i: plain(i) / 4.0)


def test_ntk():
    close(RopeScaling.ntk(4.0), lambda i: plain(i, theta=THETA * 4.0 ** (R / (R - 2))))


def test_ntk_with_two_rotary_dims_has_the_one_frequency_1():
    for scaling in (RopeScaling.ntk(4.0), RopeScaling.dynamic(4.0, 16)):
        np.testing.assert_array_equal(scaling.inv_freq(2, 10000.0, 64), [1.0])


@pytest.mark.parametrize("seqlen", [0, 2047, 2048, 2049, 8192])
def test_dynamic(seqlen):
    longest = max(seqlen, 2048)
    base = THETA * (2.0 * longest / 2048 - 1.0) ** (R / (R - 2))
    close(RopeScaling.dynamic(2.0, 2048), lambda i: plain(i, theta=base), seqlen=seqlen)


def test_dynamic_up_to_the_original_length_is_plain():
    close(RopeScaling.dynamic(8.0, 2048), plain, seqlen=2048)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("rotary_dim", "theta", "factor", "original"), [(128, 1e4, 16.0, 4096), (64, 1e6, 40.0, 4096)]
)
def test_yarn_by_parts(rotary_dim, theta, factor, original, truncate):
    """Each frequency is scaled by the number of turns that it makes over the original context."""

    def index_with(turns):  # the i where original * theta**(-2i/R) / (2 pi) == turns
        return rotary_dim / 2 * math.log(original / (2 * math.pi * turns), theta)

    low, high = index_with(32.0), index_with(1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    assert 0 < low < high < rotary_dim / 2

    def formula(i):
        f = plain(i, rotary_dim, theta)
        if i <= low:
            return f
        if i >= high:
            return f / factor
        share = (i - low) / (high - low)
        return (1 - share) * f + share * f / factor

    scaling = RopeScaling.yarn(factor, original, truncate=truncate)
    close(scaling, formula, rotary_dim=rotary_dim, theta=theta)


def test_yarn_with_a_context_of_few_turns_steps_instead_of_dividing_by_zero():
    """Both ends of the ramp fall on index 0: everything but that index is interpolated."""
    scaling = RopeScaling.yarn(4.0, 6)  # 6 < 2 pi: not one full turn
    close(scaling, lambda i: plain(i) / (4.0 if i else 1.0))


def test_yarn_attention_factor():
    assert RopeScaling.yarn(4.0, 64).attention_factor_at(10) == pytest.approx(0.1 * math.log(4) + 1)
    assert RopeScaling.yarn(1.0, 64).attention_factor_at(10) == 1.0
    assert RopeScaling.yarn(4.0, 64, attention_factor=1.25).attention_factor_at(10) == 1.25
    both = RopeScaling.yarn(40.0, 64, mscale=0.707, mscale_all_dim=1.0)
    expected = (0.1 * 0.707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert both.attention_factor_at(10) == pytest.approx(expected)
    single = RopeScaling.yarn(40.0, 64, mscale=0.707)  # alone it does not count
    assert single.attention_factor_at(10) == pytest.approx(0.1 * math.log(40) + 1)


@pytest.mark.parametrize(("seqlen", "which"), [(4096, 0), (4097, 1)])
def test_longrope_switches_beyond_the_original_length(seqlen, which):
    factors = [[1.0 + 0.01 * i for i in range(64)], [2.0 + 0.5 * i for i in range(64)]]
    scaling = RopeScaling.longrope(*factors, 4096, factor=32.0)
    close(scaling, lambda i: 1.0 / (factors[which][i] * THETA ** (2 * i / R)), seqlen=seqlen)
    expected = math.sqrt(1 + math.log(32) / math.log(4096))
    assert scaling.attention_factor_at(seqlen) == pytest.approx(expected)


def test_longrope_by_the_definition_switches_at_the_same_length():
    options = {"short_factor": [1.0], "long_factor": [2.0], "original_max_position": 64}
    assert [maths.longrope_inv_freq(2, THETA, seqlen=n, **options)[0] for n in (64, 65)] == [1.0, 0.5]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_by_wavelength(factor):
    low, high, original = 1.0, 4.0, 8192

    def formula(i):
        f = plain(i)
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            return f
        if wavelength > original / low:
            return f / factor
        smooth = (original / wavelength - low) / (high - low)
        return (1 - smooth) * f / factor + smooth * f

    wavelengths = [2 * math.pi / plain(i) for i in range(R // 2)]
    assert any(original / high < w < original / low for w in wavelengths)  # the blend is exercised
    close(RopeScaling.llama3(factor, original), formula)


# ---- from_hf -----------------------------------------------------------------------------------------------

LLAMA31 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
DEEPSEEK_V3 = {
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
GPT_OSS = {
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
     "rope_type": "yarn", "truncate": False},
}  # fmt: skip
PHI3 = {
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.1] * 48, "type": "su"},
}
GEMMA3 = {
    "text_config": {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
}


def test_from_hf_llama31():
    expected = dataclasses.replace(RopeScaling.llama3(8.0, 8192), theta=500000.0)
    assert RopeScaling.from_hf(LLAMA31) == expected
    # the rope part alone has everything but theta
    assert RopeScaling.from_hf(LLAMA31["rope_scaling"]) == RopeScaling.llama3(8.0, 8192)
    # transformers 5 spells it rope_parameters and keeps theta in it
    new = {
        "max_position_embeddings": 131072,
        "rope_parameters": {**LLAMA31["rope_scaling"], "rope_theta": 500000.0},
    }
    assert RopeScaling.from_hf(new) == expected


def test_from_hf_yarn_of_deepseek():
    scaling = RopeScaling.from_hf(DEEPSEEK_V3)
    assert scaling == dataclasses.replace(RopeScaling.yarn(40.0, 4096, attention_factor=1.0), theta=10000.0)
    # the original length counts, not max_position_embeddings
    assert scaling.original_max_position == 4096


def test_from_hf_yarn_without_truncation():
    scaling = RopeScaling.from_hf(GPT_OSS)
    assert scaling.truncate is False
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(32) + 1)


def test_from_hf_yarn_falls_back_to_max_position_embeddings_and_to_their_ratio():
    part = {"rope_type": "yarn", "factor": 2.0}
    assert (
        RopeScaling.from_hf({"max_position_embeddings": 2048, "rope_scaling": part}).original_max_position
        == 2048
    )
    part = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    assert RopeScaling.from_hf({"max_position_embeddings": 4096, "rope_scaling": part}).factor == 4.0


def test_from_hf_longrope_takes_the_ratio_of_lengths():
    scaling = RopeScaling.from_hf(PHI3)
    assert scaling.kind == "longrope"
    assert scaling.original_max_position == 4096
    assert scaling.attention_factor_at(1) == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert scaling.short_factor == (1.1,) * 48


def test_from_hf_longrope_with_given_factors_for_short_and_long():
    part = {**PHI3["rope_scaling"], "short_mscale": 1.2, "long_mscale": 1.3}
    scaling = RopeScaling.from_hf({**PHI3, "rope_scaling": part})
    assert [scaling.attention_factor_at(n) for n in (4096, 4097)] == [1.2, 1.3]


def test_from_hf_dynamic_stretches_from_max_position_embeddings():
    config = {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert RopeScaling.from_hf(config) == RopeScaling.dynamic(2.0, 2048)
    part = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}
    assert RopeScaling.from_hf(part) == RopeScaling.dynamic(2.0, 512)


def test_from_hf_without_scaling():
    config = {"rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.5}
    scaling = RopeScaling.from_hf(config)
    assert (scaling.kind, scaling.theta, scaling.partial_rotary_factor) == ("default", 1e6, 0.5)
    neox = RopeScaling.from_hf({"rotary_emb_base": 10000, "rotary_pct": 0.25})
    assert (neox.theta, neox.partial_rotary_factor) == (10000.0, 0.25)


def test_from_hf_takes_rope_scaling_before_rope_parameters():
    part = {"rope_type": "linear", "factor": 4.0}
    for theta in ({"rope_theta": 1e6}, {}):
        config = theta | {
            "rope_scaling": part,
            "rope_parameters": {"rope_theta": theta.get("rope_theta", 1e4)},
        }
        assert RopeScaling.from_hf(config) == RopeScaling.from_hf(theta | {"rope_scaling": part})
    text = GEMMA3["text_config"] | {"rope_scaling": {"factor": 2.0}}
    full = RopeScaling.from_hf(text, layer_type="full_attention")
    assert full == dataclasses.replace(RopeScaling.linear(2.0), theta=1e6)
    assert RopeScaling.from_hf(text, layer_type="sliding_attention").kind == "default"


def test_from_hf_per_layer_type():
    full = RopeScaling.from_hf(GEMMA3, layer_type="full_attention")
    assert full == dataclasses.replace(RopeScaling.linear(8.0), theta=1e6)
    assert RopeScaling.from_hf(GEMMA3, layer_type="sliding_attention").kind == "default"
    with pytest.raises(
        OptionError, match=r"layer_type=, one of 'full_attention', 'sliding_attention'; got None"
    ):
        RopeScaling.from_hf(GEMMA3)
    part = GEMMA3["text_config"]["rope_parameters"]
    assert RopeScaling.from_hf(part, layer_type="full_attention") == full


# ---- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RopeScaling("cubic"), r"kind='cubic' is unknown; allowed: 'default', 'linear', 'ntk', 'dynamic'"),
        (lambda: RopeScaling.linear(0.0), r"RopeScaling\.linear: factor must be finite and > 0, got 0\.0"),
        (lambda: RopeScaling.linear("4"), r"factor must be a number, got str '4'"),
        (lambda: RopeScaling.ntk(0.5), r"RopeScaling\.ntk: factor must be >= 1"),
        (lambda: RopeScaling.ntk(float("nan")), r"factor must be finite"),
        (lambda: RopeScaling.dynamic(2.0, 2048.5), r"original_max_position must be an integer"),
        (lambda: RopeScaling("yarn", 2.0), r"RopeScaling\.yarn: original_max_position is missing"),
        (lambda: RopeScaling.yarn(2.0, 64, beta_fast=1, beta_slow=32), r"beta_slow must be smaller than beta_fast"),
        (lambda: RopeScaling.yarn(2.0, 64, truncate="no"), r"truncate must be True or False"),
        (lambda: RopeScaling.yarn(2.0, 64).inv_freq(8, 1.0), r"theta must be > 1"),
        (lambda: RopeScaling.llama3(8.0, 64, low_freq_factor=4.0),
         r"low_freq_factor must be smaller than high_freq"),
        (lambda: RopeScaling.longrope([1.0], [1.0, 2.0], 64), r"short_factor has 1 entries, long_factor 2"),
        (lambda: RopeScaling.longrope([], [], 64), r"short_factor is empty"),
        (lambda: RopeScaling.longrope([1.0, 0.0], [1.0, 1.0], 64), r"short_factor\[1\] must be finite and > 0"),
        (lambda: RopeScaling.longrope([1.0], [1.0], 64).inv_freq(8), r"rotary_dim=8 needs 4; .* pass rotary_dim=2"),
        (lambda: RopeScaling.linear(2.0).inv_freq(7), r"rotary_dim must be even, got 7"),
        (lambda: RopeScaling("default", partial_rotary_factor=1.5), r"must lie in \(0, 1\], got 1\.5"),
        (lambda: RopeScaling.from_hf({"rope_type": "mystery"}), r"'mystery' is unknown; there are .*'llama3'"),
        (lambda: RopeScaling.from_hf({"rope_type": ["yarn"]}), r"\['yarn'\] is unknown"),
        (lambda: RopeScaling.from_hf([1]), r"expected a dict, got list; pass config\.to_dict"),
        (lambda: RopeScaling.from_hf({"rope_scaling": "yarn"}), r"rope_scaling must be a dict, got str"),
        (lambda: RopeScaling.from_hf({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}}),
         r"with it rope_theta=1000000\.0: the model would run with 10000\.0"),
        (lambda: RopeScaling.from_hf({"hidden_size": 8}), r"found no rope entry; .* got the keys \['hidden_size'\]"),
        (lambda: RopeScaling.from_hf({"type": "linear"}), r"rope type 'linear' needs 'factor'"),
        (lambda: RopeScaling.from_hf({"type": "dynamic", "factor": 2.0}), r"pass the whole config"),
        (lambda: RopeScaling.from_hf({"type": "mrope", "mrope_section": [2, 2]}), r"mrope_section .* not supported"),
        (lambda: RopeScaling.from_hf(LLAMA31, layer_type="full_attention"), r"one set for all"),
    ],
)  # fmt: skip
def test_mistakes_are_answered(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_it_is_frozen_hashable_and_picklable():
    scaling = RopeScaling.longrope([1.0, 2.0], [3.0, 4.0], 64, factor=2.0)
    assert hash(scaling) == hash(RopeScaling.longrope((1, 2), (3, 4), 64, factor=2))
    assert pickle.loads(pickle.dumps(scaling)) == scaling
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaling.factor = 3.0
    with pytest.raises(ValueError, match="read-only"):
        scaling.inv_freq(4)[0] = 1.0


@pytest.mark.parametrize(
    ("scaling", "seqlen"),
    [
        (RopeScaling.ntk(1e300), 0),
        (RopeScaling.dynamic(1e300, 64), 100),
        (RopeScaling.dynamic(2.0, 1), 10**300),
        (RopeScaling.yarn(8.0, 2**62, beta_fast=1.7e308), 0),
    ],
    ids=["ntk", "dynamic", "seqlen", "yarn"],
)
def test_frequencies_beyond_float64_are_refused(scaling, seqlen):
    with pytest.raises(OptionError, match=r"frequencies of .* overflow"):
        scaling.inv_freq(8, seqlen=seqlen)
