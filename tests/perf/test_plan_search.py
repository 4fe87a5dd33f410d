"""``python -m perf --plan``: the search for layouts, and the command."""

from __future__ import annotations

import doctest
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_ops.models import PRESETS, LlamaConfig
from perf import cli, plan_step
from perf import plan as plan_command
from perf.plan import layouts, least_memory, room, search
from perf.plan_step import Cluster, ClusterPlan, Job, Link

LLAMA8, LLAMA70, LLAMA405 = (PRESETS[f"llama-3-{size}b"] for size in (8, 70, 405))
H100 = Cluster.parse("h100x64")
JOB = Job(LLAMA70, H100, 8192, 128)
SMALL = LlamaConfig(vocab=32000, hidden=1024, ffn=2816, nlayers=6, nheads=16, nheads_kv=4)
JOBS = {
    "70B on 64": JOB,
    "8B on 8": Job(LLAMA8, Cluster.parse("h100x8"), 8192, 128),
    "8B on 12 A100": Job(LLAMA8, Cluster.parse("a100x12"), 4096, 96),
    "8B on 8 RTX 4090": Job(LLAMA8, Cluster.parse("rtx4090x8"), 8192, 128),
    "70B on NVL72, fp8": Job(LLAMA70, Cluster.parse("gb200x72"), 8192, 144, "fp8"),
    "8B, 128k": Job(LLAMA8, Cluster.parse("h100x32"), 131072, 32),
    "32 key heads": Job(PRESETS["llama-2-7b"], Cluster.parse("a100x32"), 4096, 64),
    "4 key heads": Job(SMALL, Cluster.parse("l40sx32"), 2048, 48),
    "1 key head": Job(replace(SMALL, vocab=1000, nheads_kv=1, nlayers=13), Cluster.parse("l40sx8"), 512, 8),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_layouts_divide_evenly(job):
    config, cluster = job.config, job.cluster
    every = list(layouts(job))
    assert len(set(every)) == len(every)
    for lo in every:
        assert lo.tp * lo.cp * lo.pp * lo.dp == cluster.count
        assert cluster.node % lo.tp == config.nheads_kv % lo.tp == config.ffn % lo.tp == 0
        assert lo.dp * lo.micro * lo.microbatches(job) == job.sequences
        assert lo.cp == 1 or job.seqlen % (2 * lo.cp) == 0
        assert lo.vp == 1 or lo.microbatches(job) % lo.pp == 0
        assert lo.pp > 1 or lo.vp == 1
        assert min(lo.stages(job)) >= lo.vp - 1
        assert -config.nlayers % (lo.pp * lo.vp) <= 2


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_plans_fit_and_are_in_order(job):
    result = search(job)
    assert result.plans
    assert len({plan_command._sizes(plan.layout) for plan in result.plans}) == len(result.plans)
    steps = [plan.step for plan in result.plans]
    assert steps == sorted(steps)
    for plan in result.plans:
        assert plan.layout.zero < 3 or plan.layout.pp == 1
        assert plan.nbytes <= room(job) == pytest.approx(0.9e9 * job.cluster.card.memory_gb)
        assert min(plan.seconds.values()) >= 0
        assert result.limit(plan) in {"memory", *plan.seconds}
        assert 0 < plan.mfu < plan_step.EFFICIENCY


@pytest.mark.parametrize(
    "name", ["8B on 8", "8B on 8 RTX 4090", "8B on 12 A100", "4 key heads", "1 key head"]
)
def test_no_layout_is_faster_or_smaller(name):
    """No layout beats the one found for its sizes: every ZeRO stage and policy is tried here."""
    job = JOBS[name]
    every = [
        ClusterPlan.of(job, replace(layout, zero=zero, policy=policy))
        for layout, zero, policy in itertools.product(layouts(job), (1, 2, 3), job.kept)
        if zero < 3 or layout.pp == 1
    ]
    fastest: dict[plan_command.Sizes, float] = {}
    for plan in every:
        key = plan_command._sizes(plan.layout)
        if plan.nbytes <= room(job):
            fastest[key] = min(plan.step, fastest.get(key, plan.step))
    assert {plan_command._sizes(plan.layout): plan.step for plan in search(job).plans} == fastest
    assert least_memory(job).nbytes == min(plan.nbytes for plan in every)


scales = st.floats(1.0, 1.6)


@settings(max_examples=8)
@given(scales, scales, scales, scales, st.sampled_from(["8B on 8", "8B on 12 A100", "8B on 8 RTX 4090"]))
def test_better_hardware_is_never_slower(room, link, network, memory_speed, name):
    job = JOBS[name]
    card, old = job.cluster.card, job.cluster
    better = replace(card, memory_gb=card.memory_gb * room, memory_gbps=card.memory_gbps * memory_speed)

    def faster(one: Link, scale: float) -> Link:
        return replace(one, gbps=one.gbps * scale)

    cluster = replace(old, card=better, link=faster(old.link, link), network=faster(old.network, network))
    assert search(replace(job, cluster=cluster)).plans[0].step <= search(job).plans[0].step


@pytest.mark.parametrize(
    ("config", "cluster", "sequences"),
    [
        (LLAMA405, "h100x16384", 2048),
        (LLAMA405, "h100x131072", 16384),
        (LLAMA70, "h100x1024", 1024),
        (LLAMA8, "b200x720", 5040),
    ],
)
def test_a_search_compares_few_layouts(config, cluster, sequences):
    """A layout takes about 0.2 ms, so a search ends in two seconds."""
    result = search(Job(config, Cluster.parse(cluster), 8192, sequences))
    assert result.plans
    assert result.compared < 5000


def test_what_limits():
    assert search(JOBS["8B on 8 RTX 4090"]).limit(search(JOBS["8B on 8 RTX 4090"]).plans[0]) == "memory"
    alone = search(Job(SMALL, replace(H100, count=1, node=1), 2048, 512))
    assert alone.limit(alone.plans[0]) == "compute"
    slow = replace(H100, count=8, node=8, link=replace(H100.link, gbps=1.0))
    result = search(Job(LLAMA8, slow, 8192, 8))
    limits = {plan_command._sizes(plan.layout): result.limit(plan) for plan in result.plans}
    assert limits[8, 1, 1, 1] == "TP"


# ---- the command -------------------------------------------------------------------------------------------


def test_the_command(capsys):
    assert (
        cli.main(argv=["--plan", "Llama3-70B", "--cluster", "h100x64", "--seqlen", "8k", "--batch", "1M"])
        == 0
    )
    text = capsys.readouterr().out
    errors = [anchor.error for anchor in plan_command.ANCHORS]
    assert f"to {max(errors):+.0%} (--plan anchors)" in text
    assert "batch 128 x 8,192 = 1,048,576 tokens" in text
    assert "64 x H100 SXM, 8 to a node: NVLink4 315 GB/s, between nodes NDR 400G 45 GB/s" in text
    assert "50% of what CP, PP and DP could hide is hidden" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line[:1] == "│"]
    best = search(JOB).plans[:5]
    for i, plan in enumerate(best):
        lo = plan.layout
        sizes = (i + 1, lo.tp, lo.cp, lo.pp, lo.vp, lo.dp, lo.zero, lo.micro, lo.policy, f"{plan.step:.3g}")
        assert rows[i][:10] == list(map(str, sizes))
        assert rows[i][10] == f"{plan.tokens_per_second:,.0f}"
        assert sum(float(share.rstrip("%")) for share in rows[i + 5][1:]) == pytest.approx(100, abs=0.5)
        assert rows[i + 10][-1] == f"{plan.nbytes / 1e9:.1f}"


def test_sequences_or_tokens(capsys):
    for batch in ("128", "1M", "1024k"):
        assert cli.main(argv=["--plan=llama3-8b", "--cluster", "h100x8", "--batch", batch]) == 0
        assert "batch 128 x 8,192" in capsys.readouterr().out


def test_nothing_fits(capsys):
    assert cli.main(argv=["--cluster", "h100x8", "--plan", "llama3-70b"]) == 1
    least = least_memory(Job(LLAMA70, Cluster.parse("h100x8"), 8192, 128))
    text = capsys.readouterr().out
    assert (
        f"nothing fits: least memory {least.nbytes / 1e9:.0f} GB (state {18 * 70.55 / 8:.0f}, activations"
        in text
    )
    assert "usable 72 of 80 GB" in text


def test_published_runs_are_printed(capsys):
    assert cli.main(argv=["--plan", "anchors"]) == 0
    text = capsys.readouterr().out
    assert all(f"{anchor.plan().tflops / anchor.tflops - 1:+.1%}" in text for anchor in plan_command.ANCHORS)
    assert plan_command.OTHER_CARD in text


def test_a_folder_is_a_model_too(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL.to_hf()))
    assert cli.main(argv=["--plan", str(tmp_path), "--cluster", "h100x8", "--seqlen", "2k"]) == 0
    assert f"{SMALL.parameters / 1e9:.3g}e9 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--plan takes a model"),
        (["llama3-70b"], "pass --cluster"),
        (["lama3-70b", "--cluster", "h100x8"], "did you mean llama-3-70b?"),
        (["llama3-8b", "--cluster", "h1000x8"], "did you mean 'h100'?"),
        (["llama3-8b", "--cluster", "nvl72x8"], "did you mean 'gb200'?"),
        *(
            (["llama3-8b", "--cluster", name], "must be NAMExCOUNT")
            for name in ("h100", "h100x0", "rtx4090", "h100x2000000", "x", "", "h100x" + "9" * 5000)
        ),
        (["llama3-8b", "--cluster", "h100x13", "--batch", "128"], "no layout divides 13 GPUs"),
        (["llama3-8b", "--cluster", "t4x8"], "T4 has no bf16"),
        (["llama3-8b", "--cluster", "h100x8", "--dtype", "fp9"], "did you mean 'fp8'?"),
        *(
            (["llama3-8b", "--cluster", "h100x8", "--seqlen", n], "--seqlen")
            for n in ("0", "-1", "1" + "0" * 30, "8.5k", "k", "")
        ),
        (["llama3-8b", "--cluster", "h100x8", "--seqlen", "3000"], "--batch 349"),
        (["llama3-8b", "--cluster", "h100x8", "--batch", "999999999999"], "more than 1,099,511,627,776"),
        (["llama3-8b", "--cluster", "h100x8", "--batch", "4k"], "--batch 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_line_on_stderr(arguments, words, capsys):
    assert cli.main(argv=["--plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("module", [plan_command, plan_step], ids=lambda m: m.__name__)
def test_examples_run(module):
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)
