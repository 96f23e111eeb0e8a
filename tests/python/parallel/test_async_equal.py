"""Exchanges in the background where all ranks must end with the same: at the end of training, when replicas are made
equal, and when parameters are added; and weights that nobody shall get."""

import pytest
from support import told


def apart(rank):
    """Every rank is a host of its own."""
    return {"OFFBEAT_HOST": f"host{rank}"}


def test_who_leaves_after_a_step_takes_nothing_from_the_others(ranks):
    """Forced to sync in every step it is LocalSGD(1) on every rank, though each is removed as soon as it can be."""

    def script():
        import torch
        from support import differences, make_model, tell, train

        import offbeat
        from offbeat.algorithms import AsyncModelAverage, LocalSGD

        offbeat.init(timeout=20.0)

        def run(algorithm):
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            if algorithm.when == "background":
                optimizer._offbeat.replica.staleness = 0
            train(model, optimizer, "mlp", range(4))
            optimizer.remove()
            return model

        exact = run(LocalSGD(1))
        tell(away=[max(differences(run(AsyncModelAverage(period=0)), exact).values()) for _ in range(30)])
        offbeat.shutdown()

    for rank in ranks(script, 4, per_rank=apart).ranks:
        (facts,) = told(rank)
        assert max(facts["away"]) < 1e-6, facts


@pytest.mark.parametrize("name", ["AsyncModelAverage", "AsyncGossip", "AsyncServer"])
def test_what_is_under_way_parts_no_replicas_that_were_made_equal(ranks, name):
    """Paused or not: all of it is in the mean. Parameters that are added find the mean too."""

    def script():
        import sys
        import time

        import torch
        from support import make_model, tell, train

        import offbeat

        offbeat.init(timeout=20.0)
        rank = offbeat.rank()
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = getattr(offbeat.algorithms, sys.argv[1])(period=0)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)

        def rows():
            flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            return torch.stack(offbeat.all_gather(flat))

        def spread():
            return float((rows() - rows().mean(0)).norm())

        seen = []
        for turn in range(8):
            optimizer.param_groups[0]["lr"] = 0.1
            for step in range(5):
                train(model, optimizer, "mlp", [10 * turn + step])
                time.sleep(0.001 * (rank + 1))
            paused = bool(turn % 2)
            if paused:
                # some pause later, so that the others are in a round
                time.sleep(0.02 * (rank % 2))
                optimizer.pause()
                time.sleep(0.02)
            before = spread()
            offbeat.consolidate(model)
            equal = spread()
            optimizer.param_groups[0]["lr"] = 0.0
            if paused:
                optimizer.resume()
            train(model, optimizer, "mlp", [10 * turn + 9])
            seen.append((before, equal, spread()))
        tell(seen=seen)

        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, "mlp", range(100, 103))
        optimizer.pause()
        time.sleep(0.1)
        with torch.no_grad():
            # far enough apart that what is still on its way is little beside it
            for parameter in model.parameters():
                parameter.add_(rank)
        before = rows()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        after = rows()
        mean, first = (float((after[0] - row).norm()) for row in (before.mean(0), before[0]))
        tell(apart=float((after - after[0]).abs().max()), mean=mean, first=first)
        optimizer.resume()
        train(model, optimizer, "mlp", range(103, 106))
        optimizer.remove()
        offbeat.shutdown()

    for rank in ranks(script, 3, args=[name], per_rank=apart).ranks:
        seen, added = told(rank)
        assert max(before for before, _, _ in seen["seen"]) > 1e-3, seen
        assert max(equal for _, equal, _ in seen["seen"]) < 1e-6, seen
        assert max(after for _, _, after in seen["seen"]) < 1e-6, seen
        assert added["apart"] == 0, added
        # of a round that some were still in when they paused, the others had added what came of it
        assert added["mean"] < 0.5 * added["first"], added


def counting():
    """Every step adds 1 to all weights of its rank, so the server's are those of the mean of all ranks' steps."""
    import os
    import signal
    import sys
    import time

    import torch
    from gpu_training import leave
    from standin import where_it_is_asked_for
    from support import same_everywhere, tell

    import offbeat

    offbeat.init(timeout=20.0)
    me, world = offbeat.rank(), offbeat.world_size()
    algorithm, how = eval(sys.argv[1], vars(offbeat.algorithms)), sys.argv[2]
    with where_it_is_asked_for() as double:
        model = torch.nn.Linear(50, 30)
        with torch.no_grad():
            [p.zero_() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if how == "parallel":
            wrapper = trained = offbeat.DataParallel(model, optimizer, algorithm)
        else:
            wrapper, trained = offbeat.DistributedOptimizer(optimizer, model, algorithm), model
            optimizer = wrapper

        def step():
            optimizer.zero_grad()
            (trained(torch.zeros(1, 50)) * 0 - sum(p.sum() for p in model.parameters())).sum().div(30).backward()
            optimizer.step()
            time.sleep(0.002)

        def weights():
            return torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()])

        made = 0
        bounded = algorithm.bound is not None
        for turn in range(3):
            # all but rank 0 go on while it waits for them; as far as a bound lets them
            more = 10 + (0 if bounded and turn else me if bounded else 40 * me)
            for _ in range(more):
                step()
                made += 1
            if how == "lost" and turn == 2 and me == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "paused" and turn != me:
                optimizer.pause()
            offbeat.consolidate(model)
            optimizer.resume() if how == "paused" else None
            seen = weights()
            if how == "lost" and turn == 2:
                break
            want = sum(offbeat.all_gather_object(made)) / world
            tell(want=want, away=float((seen - want).abs().max()), same=same_everywhere(*model.parameters()))
        # nothing is left that could move them, though rounds go on
        optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(30):
            step()
        tell(moved=float((weights() - seen).abs().max()), least=float(seen.min()), made=made)
        if how != "lost":
            offbeat.barrier()
        wrapper.remove()
    offbeat.shutdown() if double is None else leave(double)


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.timeout(300))])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("AsyncServer(period=0.001)", "plain"),
        ("AsyncServer(period=0.001)", "paused"),
        ("AsyncServer(period=0.001)", "lost"),
        ("AsyncServer()", "parallel"),
        ("AsyncServer(period=0.001, codec='minmax8')", "plain"),
        ("AsyncServer(period=0.001, codec='int4')", "lost"),
        ("AsyncServer(staleness=8, period=0.001)", "plain"),
        ("AsyncServer(staleness=8, period=0.001, codec='minmax8')", "paused"),
    ],
)
def test_consolidating_gives_all_that_the_server_has(ranks, request, name, how, place):
    """Whoever comes first and waits for the others has old values of the server. On the CPU, and on a GPU."""
    env = {} if place == "cpu" else {"DOUBLES": str(request.getfixturevalue("doubles"))}
    for rank in ranks(counting, 3, args=[name, how], env=env, per_rank=apart, check=how != "lost").ranks:
        if how == "lost" and rank.rank == 2:
            continue
        assert rank.code == 0, rank.err
        *turns, last = told(rank)
        assert len(turns) == (2 if how == "lost" else 3), turns
        assert all(turn["same"] and turn["away"] < 1e-3 for turn in turns), turns
        assert last["moved"] < 1e-3, last
        # what is left of this rank's steps in any case, and a bit of the lost one's
        assert last["least"] > last["made"] / 3, last


@pytest.mark.parametrize(
    "name",
    [
        "AsyncModelAverage(period=0, codec='minmax8')",
        "AsyncServer(period=0, codec='minmax8')",
        "AsyncGossip(period=0, codec='modular')",
    ],
)
def test_weights_that_cannot_be_encoded_reach_nobody(ranks, name):
    """The rank that has them raises, at a safe point, and counts them; with good weights again training goes on."""

    def script():
        import sys
        import time

        import torch
        from support import make_model, tell, train

        import offbeat
        from offbeat.errors import NonFinite

        offbeat.init(timeout=20.0)
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        algorithm = eval(sys.argv[1], vars(offbeat.algorithms))
        optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
        story, weight = "", next(model.parameters())
        for step in range(40):
            good = weight.detach().clone()
            if step == 20 and offbeat.rank() == 1:
                weight.data.view(-1)[0] = float("nan")
            try:
                train(model, optimizer, "mlp", [step])
                while step == 20 and offbeat.rank() == 1:
                    train(model, optimizer, "mlp", [step])
            except NonFinite as error:
                story = str(error)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.nan_to_num_(0.0)
                    weight.copy_(good)
            time.sleep(0.002)
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        model_stats = offbeat.stats()["models"][0]
        tell(story=story, finite=finite, counted=model_stats["coding"]["non_finite"], syncs=model_stats["syncs"])
        offbeat.barrier()
        offbeat.shutdown()

    for number, rank in enumerate(ranks(script, 2, args=[name], per_rank=apart).ranks):
        (facts,) = told(rank)
        assert facts["finite"], facts
        assert facts["syncs"] > 0, facts
        assert (facts["counted"] > 0) == (number == 1), facts
        assert ("try:" in facts["story"] and "NaN" in facts["story"]) == (number == 1), facts
