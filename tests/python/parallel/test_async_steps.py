"""What counts as a step where exchanges are in the background, and what a pause leaves alone."""

import pytest
from support import told


def test_one_rank_overflows_and_all_count_the_step(ranks):
    """A GradScaler skips on that rank alone: its weights stay, its exchange is made all the same, and clocks agree."""

    def script():
        import torch
        from support import make_model, tell, train_scaled

        import offbeat
        from offbeat.algorithms import AsyncGossip, AsyncModelAverage, AsyncServer

        offbeat.init(timeout=20.0)
        cases = [AsyncServer(staleness=0), AsyncModelAverage(), AsyncGossip(), AsyncModelAverage(warmup_steps=3)]
        for case, algorithm in enumerate(cases):
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            if case == 1:
                wrapper = model = offbeat.DataParallel(model, optimizer, algorithm)
                replica = wrapper._replica
            else:
                wrapper = optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
                replica = optimizer._offbeat.replica
            replica.staleness = 0
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            for step in range(9):
                train_scaled(model, optimizer, scheduler, scaler, step)
            stats = offbeat.stats()["models"][0]
            tell(
                step=stats["step"],
                syncs=stats["syncs"],
                staleness=stats["background"]["staleness"],
                spread=stats["background"]["spread"],
                finite=all(bool(p.isfinite().all()) for p in model.parameters()),
                scale=scaler.get_scale(),
            )
            offbeat.barrier()
            wrapper.remove()
            assert type(optimizer) is torch.optim.SGD
        offbeat.shutdown()

    for rank in ranks(script, 4, per_rank=lambda rank: {"OFFBEAT_HOST": "aabb"[rank]}).ranks:
        facts = told(rank)
        assert [fact["step"] for fact in facts] == [9, 9, 9, 9], facts
        assert [fact["syncs"] for fact in facts] == [9, 9, 9, 6], facts
        assert all(fact["staleness"] == 0 and fact["finite"] and 0 < fact["spread"] < 10 for fact in facts), facts
        assert {fact["scale"] for fact in facts} == {512 if rank.rank == 1 else 1024}, facts


def pausing():
    """Steps change nothing, so weights move by what ranks give each other alone."""
    import sys
    import time

    import torch
    from gpu_training import leave
    from standin import where_it_is_asked_for

    import offbeat

    offbeat.init(timeout=20.0)
    me = offbeat.rank()
    with where_it_is_asked_for() as double:
        model = torch.nn.Linear(40, 30)
        algorithm = eval(sys.argv[1], vars(offbeat.algorithms))
        optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, algorithm)

        def whole():
            rows = offbeat.all_gather(torch.cat([p.detach().reshape(-1).double() for p in model.parameters()]))
            return torch.stack(rows)

        with torch.no_grad():
            model.weight += torch.linspace(-1, 1, 1200).view(30, 40) * (me + 1)
        before = whole()
        steps = 0
        for turn in range(60 + 15 * me):
            for _ in range(turn % 3):
                model(torch.ones(2, 40)).sum().backward()
                optimizer.step()
                steps += 1
                time.sleep(0.001)
            optimizer.pause()
            seen = [p.clone() for p in model.parameters()]
            with torch.no_grad():
                model(torch.ones(2, 40))
            model.eval()
            model(torch.ones(2, 40)).sum().backward()
            model.train()
            time.sleep(0.002 * (turn % 4))
            assert all(torch.equal(a, b) for a, b in zip(seen, model.parameters(), strict=True))
            if turn % 5:
                optimizer.resume()
            # once in a while a rank stays in its pause, and pauses again
        optimizer.pause()
        offbeat.barrier()
        # with everybody paused nobody begins a round; those under way end with the copies
        rounds = -1
        while rounds != (rounds := sum(offbeat.all_gather_object(offbeat.stats()["models"][0]["syncs"]))):
            time.sleep(0.2)
        optimizer.resume()
        optimizer._offbeat.replica.drain()
        after = whole()
        stats = offbeat.stats()["models"][0]
        assert stats["step"] == steps
        assert stats["background"]["syncs"] > 0
        assert float((after - before).abs().max()) > 0.1, "ranks have met"
        assert float((after.sum(0) - before.sum(0)).abs().max()) < 1e-4
        offbeat.consolidate(model)
        rows = whole()
        assert bool((rows == rows[0]).all())
        offbeat.barrier()
        optimizer.remove()
    offbeat.shutdown() if double is None else leave(double)


@pytest.mark.parametrize("place", ["cpu", *(pytest.param(lazy, marks=pytest.mark.timeout(300)) for lazy in range(4))])
@pytest.mark.parametrize("name", ["AsyncGossip(period=0.003)", "AsyncGossip(period=0.003, codec='modular')"])
def test_pausing_again_and_again_loses_nothing(ranks, request, name, place):
    """Weights stay as they are in a pause, evaluation is no step, and what others had of this rank meanwhile is made
    good after it: pairs keep their sum. On the CPU, and on a GPU on every schedule of torch's stream and ours."""
    env = {}
    if place != "cpu":
        env = {"DOUBLES": str(request.getfixturevalue("doubles")), "FAKECUDA_SCHED": str(place)}
    ranks(pausing, 4, args=[name], env=env, per_rank=lambda rank: {"OFFBEAT_HOST": "aabb"[rank]})


@pytest.mark.parametrize("name", ["AsyncServer(staleness=1)", "AsyncModelAverage()", "AsyncGossip()"])
def test_ranks_that_end_at_different_times_begin_again_together(ranks, name):
    """Who is done early keeps nobody waiting, can still save, and is there again in the next loop."""

    def script():
        import sys

        from support import make_model, make_optimizer, tell, train

        import offbeat

        offbeat.init(timeout=20.0)
        me, model = offbeat.rank(), make_model("mlp")
        algorithm = eval(sys.argv[1], vars(offbeat.algorithms))
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, algorithm)
        optimizer._offbeat.replica.staleness = 0
        for epoch in range(2):
            with optimizer.join():
                train(model, optimizer, "mlp", range(20 * epoch, 20 * epoch + 4 + 3 * me))
            stats = offbeat.stats()["models"][0]
            state = optimizer.state_dict()["offbeat"]
            tell(step=stats["step"], syncs=stats["syncs"], living=stats["background"]["living"], saved=state["step"])
        offbeat.shutdown()

    for rank in ranks(script, 3, args=[name], per_rank=lambda rank: {"OFFBEAT_HOST": "aab"[rank]}).ranks:
        first, second = told(rank)
        steps = 4 + 3 * rank.rank
        assert (first["step"], second["step"]) == (steps, 2 * steps)
        assert (first["saved"], second["saved"]) == (steps, 2 * steps)
        # in the last steps of the last rank there is nobody left; a gossip of three leaves one of them out
        least = 1 if "Gossip" in name else 4
        assert first["syncs"] >= least, (first, second)
        assert second["syncs"] >= first["syncs"] + least, (first, second)
        assert first["living"] <= 3 - (rank.rank == 2), (first, second)


@pytest.mark.parametrize("name", ["AsyncServer(staleness=1)", "AsyncServer(staleness=3, codec='int4')"])
def test_ranks_with_the_same_steps_end_their_loops_together(ranks, name):
    """Whoever pushed last: who has made all its steps and is in a call already holds nobody up in the last of them."""

    def script():
        import sys
        import time

        from support import make_model, make_optimizer, tell, train

        import offbeat

        offbeat.init(timeout=10.0)
        model = make_model("mlp")
        algorithm = eval(sys.argv[1], vars(offbeat.algorithms))
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, algorithm)
        longest = 0.0
        for epoch in range(20):
            began = time.monotonic()
            train(model, optimizer, "mlp", range(7 * epoch, 7 * epoch + 7))
            offbeat.barrier()
            longest = max(longest, time.monotonic() - began)
        tell(longest=longest)
        offbeat.shutdown()

    for rank in ranks(script, 4, args=[name], per_rank=lambda rank: {"OFFBEAT_HOST": "abaa"[rank]}).ranks:
        (facts,) = told(rank)
        assert facts["longest"] < 5.0, facts


@pytest.mark.parametrize("name", ["AsyncModelAverage(period=0.0)", "AsyncGossip()", "AsyncServer(staleness=2)"])
def test_consolidating_ends_rounds_that_some_ranks_are_in(ranks, name):
    """Ranks that were asked for no snapshot in their last step give one now; nobody waits in vain for it."""

    def script():
        import sys
        import time

        from support import make_model, make_optimizer, same_everywhere, tell, train

        import offbeat

        offbeat.init(timeout=20.0)
        model = make_model("mlp")
        algorithm = eval(sys.argv[1], vars(offbeat.algorithms))
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, algorithm)
        seconds = []
        for epoch in range(6):
            train(model, optimizer, "mlp", range(10 * epoch, 10 * epoch + 10))
            offbeat.barrier()
            began = time.monotonic()
            offbeat.consolidate(model)
            seconds.append(time.monotonic() - began)
            assert same_everywhere(*model.parameters())
        tell(longest=max(seconds), syncs=offbeat.stats()["models"][0]["syncs"])
        offbeat.shutdown()

    for rank in ranks(script, 3, args=[name], per_rank=lambda rank: {"OFFBEAT_HOST": "abc"[rank]}).ranks:
        (facts,) = told(rank)
        # a round that cannot be ended would be waited for for 5 s
        assert facts["longest"] < 4.0, facts
        assert facts["syncs"] > 0, facts


@pytest.mark.parametrize("name", ["AsyncModelAverage(period=0)", "AsyncGossip(period=0)"])
def test_who_has_saved_keeps_nobody_waiting(ranks, name):
    """A rank that has saved makes no step until all have; rounds of the others need it. Its weights stay as they were
    saved until its next step, and what came meanwhile is added then: the sum of all ranks' weights stays."""

    def script():
        import sys
        import time

        import torch

        import offbeat

        offbeat.init(timeout=20.0)
        model = torch.nn.Linear(40, 30)
        algorithm = eval(sys.argv[1], vars(offbeat.algorithms))
        optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, algorithm)

        def step():
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()

        def total():
            weight = model.weight.detach().double()
            offbeat.all_reduce(weight)
            return weight

        def syncs():
            return offbeat.stats()["models"][0]["syncs"]

        step()
        with torch.no_grad():
            model.weight += torch.linspace(-1, 1, 1200).view(30, 40) * (offbeat.rank() + 1)
        before = total()
        for _ in range(5):
            if offbeat.rank() == 1:
                optimizer.state_dict()
                saved = model.weight.clone()
                offbeat.barrier()
                offbeat.barrier()
                assert torch.equal(model.weight, saved)
            else:
                offbeat.barrier()
                first = syncs()
                # more than the round that may have been under way
                while syncs() < first + 3:
                    step()
                offbeat.barrier()
                optimizer.state_dict()
            step()
        # all that is under way ends, and is added
        optimizer.pause()
        offbeat.barrier()
        rounds = -1
        while rounds != (rounds := sum(offbeat.all_gather_object(syncs()))):
            time.sleep(0.2)
        optimizer.resume()
        optimizer._offbeat.replica.drain()
        assert float((total() - before).abs().max()) < 1e-4
        offbeat.shutdown()

    ranks(script, 2, args=[name], per_rank=lambda rank: {"OFFBEAT_HOST": "ab"[rank]})
