"""Synchronous gossip when ranks die, fail or leave: the others train on, and agree on a model."""

import json
import random

import pytest
from support import told

ALGORITHMS = [
    "Decentralized('all')",
    "Decentralized('ring')",
    "Decentralized('shift_one')",
    "Decentralized('exponential')",
    "Decentralized('random', seed=4)",
    "LowPrecisionDecentralized()",
    "LowPrecisionDecentralized('all', gamma=0.5)",
    "LowPrecisionDecentralized('exponential', every=2)",
]
# 20 pairs of an algorithm and a seed.
PLANS = [(algorithm, seed) for seed in range(3) for algorithm in ALGORITHMS][:20]


def script():
    """Trains for some steps, in which some ranks go, and then agrees on a model."""
    import json
    import os
    import signal
    import sys
    import time

    import torch
    from support import digest, tell
    from torch import nn

    import offbeat

    plan = json.loads(sys.argv[1])
    offbeat.init(timeout=20.0)
    rank = offbeat.rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(60, 40), nn.BatchNorm1d(40), nn.Linear(40, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    algorithm = eval(plan["algorithm"], vars(offbeat.algorithms))
    optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
    target = torch.randn(60, 10, generator=torch.Generator().manual_seed(5)) / 8
    generator = torch.Generator().manual_seed(rank)
    step, where = plan["goes"].get(str(rank), (None, None))

    def go(here, now):
        if now != step or here != where:
            return
        if plan["how"] == "raise":
            raise ValueError("out of luck")
        if plan["how"] == "leave":
            offbeat.shutdown()
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    times, losses = [], []
    for now in range(plan["steps"]):
        began = time.monotonic()
        go("begin", now)
        x = torch.randn(8, 60, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x @ target)
        go("forward", now)
        loss.backward()
        go("backward", now)
        optimizer.step()
        time.sleep(0.002)
        times.append(time.monotonic() - began)
        losses.append(loss.item())
    stats = offbeat.stats()["models"][0]
    go("end", plan["steps"])
    spread = offbeat.consolidate(model)
    agreed = digest(model)
    again = offbeat.consolidate(model)
    state = optimizer.state_dict()["offbeat"]["weights"]
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    # the first step has to find the others
    tell(steps=len(times), slowest=max(times[1:]), first=sum(losses[:10]), last=sum(losses[-10:]), finite=finite)
    tell(stats=stats, spread=spread, agreed=agreed, again=again, state={"step": state["step"], "syncs": state["syncs"]})
    optimizer.remove()
    offbeat.shutdown()


def start(ranks, plan, world=4, hosts="aabb"):
    return ranks.start(script, world, args=[json.dumps(plan)], per_rank=lambda rank: {"OFFBEAT_HOST": hosts[rank]})


def check(job, plan, *, reported=True, slowest=1.0):
    """The others have trained on, and have agreed on one model."""
    job.wait(90, check=False)
    survivors = [rank for rank in job.ranks if str(rank.rank) not in plan["goes"]]
    facts = {}
    for rank in survivors:
        assert rank.code == 0, f"{plan}\n{job.report()}"
        first, second = told(rank)
        facts[rank.rank] = fact = first | second
        assert fact["finite"], f"{plan} {fact}"
        assert fact["steps"] == plan["steps"] == fact["state"]["step"], f"{plan} {fact}"
        assert fact["slowest"] < slowest, f"{plan} {fact}"
        assert fact["last"] < fact["first"], f"{plan} {fact}"
        before = [int(gone) for gone, (_, where) in plan["goes"].items() if where != "end"]
        assert fact["stats"]["living"] == job.world - len(before), f"{plan} {fact}"
        assert fact["again"] == 0, f"{plan} {fact}"
        assert fact["spread"] < 0.5, f"{plan} {fact}"
        for gone in plan["goes"] if reported else ():
            lines = [line for line in rank.err.splitlines() if "Training goes on" in line and f"rank {gone} " in line]
            assert len(lines) == 1, f"{plan}\n{rank.err}"
            assert "host " in lines[0], f"{plan}\n{rank.err}"
    assert len({fact["agreed"] for fact in facts.values()}) == 1, f"{plan} {facts}"
    return facts


@pytest.mark.parametrize("part", range(5))
def test_a_killed_rank_is_reported_once_and_the_others_train_on(ranks, part):
    jobs = []
    for algorithm, seed in PLANS[part::5]:
        chance = random.Random(f"{algorithm}{seed}")
        moment = (chance.randrange(1, 60), chance.choice(["begin", "forward", "backward"]))
        how = chance.choice(["kill", "kill", "raise"])
        plan = {"algorithm": algorithm, "steps": 80, "goes": {str(chance.randrange(4)): moment}, "how": how}
        jobs.append((start(ranks, plan, hosts=chance.choice(["aabb", "abcd"])), plan))
    for job, plan in jobs:
        facts = check(job, plan)
        for fact in facts.values():
            # an exchange that was under way is dropped, and with an odd number of ranks one is left out in turn
            assert fact["stats"]["syncs"] > 20, f"{plan} {fact}"


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_two_go(ranks, how):
    together = {"1": (20, "forward"), "2": (20, "forward")}
    apart = {"0": (15, "backward"), "3": (30, "begin")}
    plans = [
        {"algorithm": algorithm, "steps": 60, "goes": goes, "how": how}
        for algorithm, goes in [(ALGORITHMS[3], together), (ALGORITHMS[5], apart), (ALGORITHMS[0], apart)]
    ]
    for job, plan in [(start(ranks, plan), plan) for plan in plans]:
        check(job, plan)


def test_only_one_is_left(ranks):
    plan = {"algorithm": ALGORITHMS[1], "steps": 60, "goes": {"0": (20, "forward")}, "how": "kill"}
    job = start(ranks, plan, world=2, hosts="ab")
    (fact,) = check(job, plan).values()
    assert fact["spread"] == 0


def test_a_rank_that_leaves_in_good_order_holds_nobody_up(ranks):
    goes = {"2": (25, "begin")}
    plans = [{"algorithm": ALGORITHMS[at], "steps": 60, "goes": goes, "how": "leave"} for at in (1, 3, 5)]
    for job, plan in [(start(ranks, plan), plan) for plan in plans]:
        check(job, plan, reported=False)
        assert "Training goes on" not in job.ranks[0].err


def test_a_rank_that_dies_instead_of_agreeing_is_left_out(ranks):
    """The others wait in consolidate already."""
    plans = [
        {"algorithm": algorithm, "steps": 20, "goes": {gone: (20, "end")}, "how": how}
        for algorithm, gone, how in [(ALGORITHMS[3], "0", "kill"), (ALGORITHMS[5], "2", "raise")]
    ]
    for job, plan in [(start(ranks, plan), plan) for plan in plans]:
        check(job, plan)


def test_all_that_are_left_agree_whenever_ranks_die_while_agreeing(ranks):
    """Again and again, with parameters and buffers of all kinds; ranks are killed at moments of their own."""

    def script():
        import os
        import random
        import signal
        import sys
        import threading

        import torch
        from support import digest, tell
        from torch import nn

        import offbeat

        offbeat.init(timeout=20.0)
        rank, seed = offbeat.rank(), int(sys.argv[2])
        model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 500))
        model.register_buffer("wide", torch.ones(7, dtype=torch.float64))
        model.register_buffer("short", torch.ones(5, dtype=torch.bfloat16))
        model.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, sys.argv[1])
        chance = random.Random(f"{seed}{rank}")
        if rank in (1, 4):
            later = 0.05 + 0.4 * chance.random()
            threading.Timer(later, os.kill, (os.getpid(), signal.SIGKILL)).start()
        kept, steady = [], 0
        # until the two are gone: ranks 0, 2 and 3 add 1, 3 and 4
        while steady < 5:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.add_(rank + 1)
                expected = model.wide.clone()
            offbeat.consolidate(model)
            # the mean of ranks with 1 … 5 more, over all or some of them
            moved = float((model.wide - expected).mean()) + rank + 1
            assert torch.allclose(model.wide, model.wide[0].expand(7)), model.wide
            assert 1 <= moved <= 5, moved
            steady = steady + 1 if abs(moved - 8 / 3) < 1e-9 else 0
            kept.append(digest(model))
        tell(kept=kept)
        offbeat.shutdown()

    jobs = [
        ranks.start(script, 5, args=[algorithm, seed], per_rank=lambda rank: {"OFFBEAT_HOST": "aabbc"[rank]})
        for seed, algorithm in enumerate(["allreduce", "decentralized", "decentralized", "async_gossip"])
    ]
    for job in jobs:
        job.wait(90, check=False)
        facts = []
        for rank in (0, 2, 3):
            assert job.ranks[rank].code == 0, job.report()
            facts += told(job.ranks[rank])
        assert all(fact["kept"] == facts[0]["kept"] for fact in facts), facts
        assert len(facts[0]["kept"]) > 5, facts


def test_a_loss_while_ranks_have_different_numbers_of_batches(ranks):
    def script():
        import os
        import signal
        import sys

        import torch
        from support import digest, loss_of, make_batch, make_model, tell

        import offbeat

        offbeat.init(timeout=20.0)
        rank = offbeat.rank()
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, eval(sys.argv[1], vars(offbeat.algorithms)))
        moment = int(sys.argv[2])
        for epoch in range(2):
            with optimizer.join():
                # rank 0 is done first; rank 3 dies in the first epoch
                for step in range(10 + 6 * rank):
                    if rank == 3 and step == moment:
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.zero_grad()
                    loss_of(model, make_batch("mlp", rank, 100 * epoch + step)).backward()
                    optimizer.step()
            tell(agreed=digest(model), step=offbeat.stats()["models"][0]["step"])
        offbeat.shutdown()

    jobs = []
    for algorithm, moment in [(ALGORITHMS[1], 5), (ALGORITHMS[3], 12), (ALGORITHMS[5], 27)]:
        layout = {"per_rank": lambda rank: {"OFFBEAT_HOST": "aabb"[rank]}}
        jobs.append(ranks.start(script, 4, args=[algorithm, moment], **layout))
    for job in jobs:
        job.wait(90, check=False)
        facts = []
        for rank in job.ranks[:3]:
            assert rank.code == 0, job.report()
            facts.append(told(rank))
        assert facts[0] == facts[1] == facts[2], facts
        # rank 2 has the most batches of those that are left; more steps are made where the lost one had data left
        assert facts[0][1]["step"] - facts[0][0]["step"] == 22, facts
        assert facts[0][0]["step"] >= 22, facts


def test_a_rank_that_comes_back_late_and_far_away_is_not_kept_waiting(ranks):
    """A round ends without it, and it cannot read the codes of that: what all do next still works."""

    def script():
        import os
        import signal
        import time

        import torch
        from support import digest, loss_of, make_batch, make_model, tell

        import offbeat
        from offbeat.survivors import Survivors

        offbeat.init(timeout=10.0)
        rank = offbeat.rank()
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, "low_precision_decentralized")
        resume = Survivors.resume

        def resume_late(survivors):
            if survivors._resting:
                time.sleep(0.3)
            resume(survivors)

        if rank == 2:
            Survivors.resume = resume_late
        for epoch in range(2):
            with optimizer.join():
                for step in range(6 + 2 * rank):
                    if rank == 1 and step == 4:
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.zero_grad()
                    loss_of(model, make_batch("mlp", rank, 100 * epoch + step)).backward()
                    optimizer.step()
            if rank == 2 and epoch == 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter))
        tell(agreed=digest(model))
        offbeat.shutdown()

    job = ranks.start(script, 3, per_rank=lambda rank: {"OFFBEAT_HOST": "abc"[rank]})
    job.wait(60, check=False)
    assert job.ranks[0].code == job.ranks[2].code == 0, job.report()
    assert told(job.ranks[0]) == told(job.ranks[2]), job.report()
