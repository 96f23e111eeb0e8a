"""Exchanges in the background when ranks die, are slow, fail or are interrupted: the others train on."""

import json
import os
import random
import signal
import time

import pytest

ALGORITHMS = [
    ("AsyncModelAverage", {"period": 0.01}),
    ("AsyncModelAverage", {"period": 0.01, "codec": "minmax8"}),
    ("AsyncGossip", {"period": 0.005}),
    ("AsyncGossip", {"period": 0.005, "codec": "modular"}),
    ("AsyncServer", {"period": 0.005}),
    ("AsyncServer", {"period": 0.005, "codec": "minmax8"}),
    ("AsyncServer", {"staleness": 2}),
]


def script():
    """Trains for a while; the plan says who goes, and who is slow. On doubles of a GPU, if there are any."""
    import contextlib
    import json
    import os
    import signal
    import sys
    import time

    import torch
    from standin import where_it_is_asked_for
    from torch import nn

    import offbeat

    name, options, plan = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    offbeat.init(timeout=20.0)
    contextlib.ExitStack().enter_context(where_it_is_asked_for())
    rank = offbeat.rank()
    torch.manual_seed(1)
    model = nn.Linear(200, 50)
    algorithm = getattr(offbeat.algorithms, name)(**options)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model, algorithm)
    target = torch.randn(200, 50, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(rank)
    pause = plan.get("pause", 0.002)
    nap = pause * plan.get("slowed", 1) if rank == plan.get("slow") else pause
    times = []
    end = time.monotonic() + plan["seconds"]
    while time.monotonic() < end:
        began = time.monotonic()
        x = torch.randn(8, 200, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x @ target).backward()
        optimizer.step()
        time.sleep(nap)
        times.append(time.monotonic() - began)
        if len(times) == plan.get("goes", {}).get(str(rank)):
            if plan["how"] == "raise":
                raise ValueError("out of luck")
            os.kill(os.getpid(), getattr(signal, plan["how"]))
    stats = offbeat.stats()["models"][0]["background"]
    syncs = stats["syncs"]
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    row = {"steps": len(times), "slowest": max(times), "mean": sum(times) / len(times), "stats": stats}
    print(json.dumps(row | {"finite": finite, "syncs": syncs}))
    offbeat.shutdown()


def start(ranks, name, options, plan, world=4, hosts="aabb", env=None):
    arguments = [name, json.dumps(options), json.dumps(plan)]
    return ranks.start(script, world, args=arguments, env=env, per_rank=lambda rank: {"OFFBEAT_HOST": hosts[rank]})


def run(ranks, name, options, plan, world=4, hosts="aabb"):
    return start(ranks, name, options, plan, world, hosts).wait(60, check=False)


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.timeout(300))])
@pytest.mark.parametrize(("name", "options"), ALGORITHMS)
def test_a_killed_rank_is_reported_once_and_the_others_train_on(ranks, request, name, options, place):
    jobs = []
    for seed in range(3):
        chance = random.Random(f"{name}{options}{seed}")
        victim, how = chance.randrange(4), chance.choice(["SIGKILL", "SIGKILL", "raise"])
        plan = {"seconds": 2.0, "goes": {str(victim): chance.randrange(1, 60)}, "how": how}
        env = {} if place == "cpu" else {"DOUBLES": str(request.getfixturevalue("doubles"))}
        if place == "gpu" and seed:
            # torch's stream, or ours
            env["FAKECUDA_SCHED"] = str(seed)
        jobs.append((start(ranks, name, options, plan, env=env), plan, victim))
    for job, plan, victim in jobs:
        for rank in job.wait(60, check=False).ranks:
            if rank.rank == victim:
                assert rank.code != 0
                continue
            assert rank.code == 0, f"{plan}\n{rank.err}"
            told = json.loads(rank.out)
            assert told["finite"]
            assert told["slowest"] < 1.0, f"{plan} {told}"
            # others may have ended before
            assert told["stats"]["living"] <= 3, f"{plan} {told}"
            assert told["stats"]["syncs"] > 10, f"{plan} {told}"
            assert rank.err.count("Training goes on") == 1, rank.err
            assert all(word in rank.err for word in (f"rank {victim} ", "host ")), rank.err


def test_two_die(ranks):
    plan = {"seconds": 2.0, "goes": {"1": 20, "2": 20}, "how": "SIGKILL"}
    for job in [start(ranks, name, options, plan) for name, options in ALGORITHMS[::2]]:
        job.wait(60, check=False)
        for rank in (job.ranks[0], job.ranks[3]):
            assert rank.code == 0, rank.err
            told = json.loads(rank.out)
            assert told["stats"]["living"] <= 2, told
            assert told["slowest"] < 1.0, told


@pytest.mark.parametrize("slowed", [5, 50])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AsyncModelAverage", {"period": 0.05}),
        ("AsyncGossip", {"period": 0.05, "codec": "modular"}),
        ("AsyncServer", {"period": 0.05}),
    ],
)
def test_a_slow_rank_slows_nobody(ranks, name, options, slowed):
    plan = {"seconds": 3.0, "slow": 1, "slowed": slowed, "pause": 0.01}
    told = [json.loads(rank.out) for rank in run(ranks, name, options, plan, world=3, hosts="aab").ranks]
    assert told[1]["steps"] * slowed / 3 < max(told[0]["steps"], told[2]["steps"])
    # naps are most of a step: a rank that waited for the slow one would have a step of its length
    assert all(told[rank]["mean"] < 0.01 * min(slowed, 5) / 1.5 for rank in (0, 2)), told
    assert all(row["syncs"] > 1 for row in told), told


def test_a_bound_holds_the_fast_ones_back(ranks):
    plan = {"seconds": 2.0, "slow": 1, "slowed": 5, "pause": 0.01}
    told = [json.loads(rank.out) for rank in run(ranks, "AsyncServer", {"staleness": 3}, plan, 3, "abc").ranks]
    steps = [row["steps"] for row in told]
    # after the slow one has left, the others may run for a moment
    assert max(steps) - steps[1] <= 30, steps


def test_an_interrupt_ends_a_rank_that_waits(ranks):
    plan = {"seconds": 30.0, "slow": 1, "slowed": 2000, "pause": 0.01}
    arguments = ["AsyncServer", json.dumps({"staleness": 0}), json.dumps(plan)]
    job = ranks.start(script, 2, args=arguments, per_rank=lambda rank: {"OFFBEAT_HOST": "ab"[rank]})
    time.sleep(4)
    began = time.monotonic()
    os.kill(job.processes[0].pid, signal.SIGINT)
    os.kill(job.processes[1].pid, signal.SIGKILL)
    job.wait(30, check=False)
    assert time.monotonic() - began < 10
    assert "KeyboardInterrupt" in job.ranks[0].err


def test_who_leaves_when_all_have_met_is_not_said_to_be_left_out(ranks):
    """Its values are used, though those that are slower see it leave before they know that."""

    def script():
        import signal
        import time

        import offbeat
        from offbeat import consolidation

        offbeat.init(timeout=20.0)
        offbeat.barrier()

        def sleep(*_):
            time.sleep(0.2)
            signal.setitimer(signal.ITIMER_REAL, 0.001)

        if offbeat.rank() == 1:
            # between two letters
            signal.signal(signal.SIGALRM, sleep)
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        assert consolidation.meet(says=offbeat.rank() == 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        offbeat.shutdown()

    for rank in ranks(script, 2, per_rank=lambda rank: {"OFFBEAT_HOST": "ab"[rank]}).ranks:
        assert "has left" not in rank.err, rank.err
