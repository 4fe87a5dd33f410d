"""perf's cases of attention's options: the peers that ours is timed against compute the same."""

import numpy as np
import pytest

from perf import attention_options as options
from perf import bench_attention
from perf.attention_grids import Shape
from perf.case import RunOptions, results

CASES = bench_attention.cases(RunOptions(grid="options", dtypes=("float32",)))
BY_NAME = {case.name: case for case in CASES}
TORCH = "the torch peers need torch: pip install torch"


def test_every_option_runs_both_ways():
    assert list(BY_NAME) == [f"{way} {o.name}" for o in options.OPTIONS for way in ("forward", "backward")]
    on_gpu = bench_attention.cases(RunOptions(grid="options", device="cuda", seqlens=(640,)))
    assert len(on_gpu) == 2 * 2 * len(options.OPTIONS)
    assert all("S640" in c.shape and c.naive is None for c in on_gpu)


def test_what_is_hidden_is_no_work():
    shape = Shape(1, 256, 256, 8, 8, 64)
    share = {o.name: options.share_seen(o, shape) for o in options.OPTIONS}
    window, document = 256 // options.WINDOWS, 256 // options.DOCUMENTS
    assert share["bias"] == share["alibi"] == share["softcap"] == 1
    assert share["window"] == (256 * window - window * (window - 1) / 2) / 256**2
    assert share["documents"] == options.DOCUMENTS * document * (document + 1) / 2 / 256**2


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("contender", ["ours", "naive", "torch"])
def test_contenders_agree_with_the_reference(name, contender):
    case = BY_NAME[name]
    if contender == "torch":
        pytest.importorskip("torch", reason=TORCH)
    if case.contender(contender) is None:
        assert (contender, name) == ("naive", "backward softcap") or "dropout" in name
        return
    x = case.make_small(np.random.default_rng(0))
    got = results(case.contender(contender)(x)())
    if contender == "torch":
        got = tuple(y.detach().numpy().swapaxes(1, 2) for y in got)
    for actual, exact in zip(got, results(case.reference(x, "float64")), strict=True):
        np.testing.assert_allclose(actual, exact, rtol=0, atol=2e-5)
