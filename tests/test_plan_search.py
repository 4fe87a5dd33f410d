"""``python -m perf --plan``: the search for layouts, and the command."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_ops.models import PRESETS, LlamaConfig
from perf import cli, plan_anchors, plan_search, plan_step
from perf.plan_cluster import Cluster, Link
from perf.plan_search import layouts, least_memory, room, search
from perf.plan_step import Job, Plan

LLAMA8, LLAMA70, LLAMA405 = (PRESETS[f"llama-3-{size}b"] for size in (8, 70, 405))
H100 = Cluster.parse("h100x64")
JOB = Job(LLAMA70, H100, 8192, 128)
SMALL = LlamaConfig(vocab=32000, hidden=1024, ffn=2816, nlayers=6, nheads=16, nheads_kv=4)
JOBS = {
    "70B on 64": JOB,
    "8B on 8": Job(LLAMA8, Cluster.parse("h100x8"), 8192, 128),
    "8B on 12 A100": Job(LLAMA8, Cluster.parse("a100x12"), 4096, 96),
    "8B on 8 RTX 4090": Job(LLAMA8, Cluster.parse("rtx4090x8"), 4096, 64),
    "70B on NVL72, fp8": Job(LLAMA70, Cluster.parse("gb200x72"), 8192, 144, "fp8"),
    "8B, 128k": Job(LLAMA8, Cluster.parse("h100x32"), 131072, 32),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_plans_are_legal_and_in_order(job):
    found = search(job)
    assert found.plans
    assert len({plan_search._sizes(plan.layout) for plan in found.plans}) == len(found.plans)
    steps = [plan.step for plan in found.plans]
    assert steps == sorted(steps)
    for plan in found.plans:
        lo = plan.layout
        assert lo.tp * lo.cp * lo.pp * lo.dp == job.cluster.count
        assert job.cluster.node % lo.tp == job.config.nheads_kv % lo.tp == 0
        assert lo.dp * lo.micro * lo.microbatches(job) == job.sequences
        assert lo.cp == 1 or job.seqlen % (2 * lo.cp) == 0
        assert lo.vp == 1 or lo.microbatches(job) % lo.pp == 0
        assert lo.zero < 3 or lo.pp == 1
        assert plan.nbytes <= room(job) == pytest.approx(0.9e9 * job.cluster.card.memory_gb)
        assert min(plan.seconds.values()) >= 0
        assert found.limit(plan) in {"memory", *plan.seconds}
        assert 0 < plan.mfu < plan_step.EFFICIENCY


@pytest.mark.parametrize("name", ["8B on 8", "8B on 8 RTX 4090", "8B on 12 A100"])
def test_no_layout_is_faster(name):
    """Every ZeRO stage and policy of every layout."""
    job = JOBS[name]
    every = [
        Plan.of(job, replace(layout, zero=zero, policy=policy))
        for layout, zero, policy in itertools.product(layouts(job), (1, 2, 3), job.kept)
        if zero < 3 or layout.pp == 1
    ]
    found = search(job)
    assert found.plans[0].step == min(plan.step for plan in every if plan.nbytes <= room(job))
    assert least_memory(job).nbytes == min(plan.nbytes for plan in every)


scales = st.floats(1.0, 1.6)


@settings(max_examples=8, deadline=None)
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
    """Some 0.2 ms each: it ends in two seconds."""
    found = search(Job(config, Cluster.parse(cluster), 8192, sequences))
    assert found.plans
    assert found.compared < 5000


def test_what_limits():
    assert search(JOBS["8B on 8 RTX 4090"]).limit(search(JOBS["8B on 8 RTX 4090"]).plans[0]) == "memory"
    alone = search(Job(SMALL, replace(H100, count=1, node=1), 2048, 512))
    assert alone.limit(alone.plans[0]) == "compute"
    slow = replace(H100, count=8, node=8, link=replace(H100.link, gbps=1.0))
    wide = search(Job(LLAMA8, slow, 8192, 8))
    limits = {plan_search._sizes(plan.layout): wide.limit(plan) for plan in wide.plans}
    assert limits[8, 1, 1, 1] == "TP"


# --- the command ---


def test_the_command(capsys):
    assert (
        cli.main(argv=["--plan", "Llama3-70B", "--cluster", "h100x64", "--seqlen", "8k", "--batch", "1M"])
        == 0
    )
    text = capsys.readouterr().out
    assert "batch 128 x 8,192 = 1,048,576 tokens" in text
    assert "64 x H100 SXM, 8 to a node: NVLink4 315 GB/s, between nodes NDR 400G 45 GB/s" in text
    assert "50% of what CP, PP and DP could hide is hidden" in text
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    times, sizes = ([row for row in rows if (len(row) > 12) == wide] for wide in (True, False))
    best = search(JOB).plans[:5]
    assert [[int(cell) for cell in row[2:9]] for row in times] == [
        [lo.tp, lo.cp, lo.pp, lo.vp, lo.dp, lo.zero, lo.micro] for lo in (plan.layout for plan in best)
    ]
    assert [row[11].strip() for row in times] == [f"{plan.tokens_per_second:,.0f}" for plan in best]
    assert [row[-2].strip() for row in sizes] == [f"{plan.nbytes / 1e9:.1f}" for plan in best]


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
    assert all(f"{anchor.plan().tflops / anchor.tflops - 1:+.1%}" in text for anchor in plan_anchors.ANCHORS)
    assert plan_anchors.OTHER_CARD in text


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
