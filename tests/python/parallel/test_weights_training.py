"""That training with algorithms that exchange weights is as with plain torch: resuming, scaling, uneven data, hosts."""

import pytest
from support import told


def apart(rank):
    """Every rank is a host of its own."""
    return {"OFFBEAT_HOST": f"host{rank}"}


ALGORITHMS = {
    "local": "LocalSGD(3, warmup_steps=2)",
    "diloco": "DiLoCo(4, warmup_steps=1)",
    "streaming": "DiLoCo(6, codec='int4', fragments=2, overlap=2)",
    "gossip": "Decentralized('random', seed=2)",
    "ring": "LowPrecisionDecentralized(codec='qsgd')",
    "choco": "LowPrecisionDecentralized('all', gamma=0.5)",
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resumed_training_has_the_same_bits(ranks, name):
    """Also where an exchange was under way, and whether weights or the optimizer are saved first."""

    def script():
        import io
        import sys

        import torch
        from support import digest, make_model, make_optimizer, train

        import offbeat

        offbeat.init()
        algorithm = eval(sys.argv[1], vars(offbeat.algorithms))

        def start():
            model = make_model("mlp")
            return model, offbeat.DistributedOptimizer(make_optimizer("adamw", model), model, algorithm)

        model, optimizer = start()
        train(model, optimizer, "mlp", range(14))
        wanted = digest(model)
        optimizer.remove()
        for stop in (5, 7):
            model, optimizer = start()
            train(model, optimizer, "mlp", range(stop))
            file = io.BytesIO()
            saved = {}
            for part in ("model", "optimizer") if stop == 5 else ("optimizer", "model"):
                saved[part] = model.state_dict() if part == "model" else optimizer.state_dict()
            torch.save(saved, file)
            # what saved it goes on as if nothing had been
            train(model, optimizer, "mlp", range(stop, 14))
            assert digest(model) == wanted, f"saving at {stop} changed it"
            optimizer.remove()
            model, optimizer = start()
            file.seek(0)
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            train(model, optimizer, "mlp", range(stop, 14))
            assert digest(model) == wanted, f"resumed at {stop} it is another"
            optimizer.remove()
        offbeat.shutdown()

    ranks(script, 4, per_rank=apart, args=[ALGORITHMS[name]])


def test_one_rank_overflows_and_all_count_the_step(ranks):
    """A GradScaler skips on that rank alone, and exchanges go on with the next; learning rates and clipping too."""

    def script():
        import torch
        from support import loss_of, make_batch, make_model, tell, train_scaled

        import offbeat
        from offbeat.algorithms import Decentralized, LocalSGD, LowPrecisionDecentralized

        offbeat.init()
        for algorithm in (LocalSGD(3), Decentralized("ring"), LowPrecisionDecentralized()):
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            if algorithm.name == "decentralized":
                wrapper = model = offbeat.DataParallel(model, optimizer, algorithm)
            else:
                wrapper = optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            plain = make_model("mlp")
            for step in range(9):
                train_scaled(model, optimizer, scheduler, scaler, step)
                if step == 0 and algorithm.name == "local_sgd":
                    # a step of its own, so far: what plain torch does
                    loss_of(plain, make_batch("mlp", offbeat.rank(), step)).backward()
                    torch.optim.SGD(plain.parameters(), lr=0.1).step()
                    pairs = zip(model.parameters(), plain.parameters(), strict=True)
                    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
            stats = offbeat.stats()["models"][0]
            finite = all(bool(p.isfinite().all()) for p in model.parameters())
            tell(name=algorithm.name, step=stats["step"], syncs=stats["syncs"], finite=finite, scale=scaler.get_scale())
            wrapper.remove()
            assert type(optimizer) is torch.optim.SGD
            assert not getattr(optimizer, "_step_supports_amp_scaling", False)
        offbeat.shutdown()

    for rank in ranks(script, 3, per_rank=apart).ranks:
        facts = told(rank)
        assert [fact["step"] for fact in facts] == [9, 9, 9], facts
        assert [fact["syncs"] for fact in facts] == [3, 9, 9], facts
        assert all(fact["finite"] for fact in facts), facts
        assert facts[0]["scale"] == (512 if rank.rank == 1 else 1024), facts


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_with_fewer_batches(ranks, name):
    """Who is done early takes part with the weights it has; at the end all have one model."""

    def script():
        import sys

        from support import make_model, make_optimizer, same_everywhere, tell, train

        import offbeat

        offbeat.init()
        model = make_model("cnn")
        optimizer = offbeat.DistributedOptimizer(
            make_optimizer("sgd", model), model, eval(sys.argv[1], vars(offbeat.algorithms))
        )
        for epoch in range(2):
            with optimizer.join():
                train(model, optimizer, "cnn", range(7 * epoch, 7 * epoch + 3 + 2 * offbeat.rank()))
            tell(
                equal=same_everywhere(*model.parameters(), *model.buffers()), step=offbeat.stats()["models"][0]["step"]
            )
        offbeat.shutdown()

    for rank in ranks(script, 3, per_rank=apart, args=[ALGORITHMS[name]]).ranks:
        facts = told(rank)
        assert [fact["equal"] for fact in facts] == [True, True], facts
        assert [fact["step"] for fact in facts] == [7, 14], facts


def test_only_steps_count(ranks):
    """Evaluation, accumulation and no_sync() exchange nothing; hosts of several ranks act as one."""

    def script():
        import torch
        from support import loss_of, make_batch, make_model, tell

        import offbeat
        from offbeat.algorithms import Decentralized, DiLoCo, LocalSGD, LowPrecisionDecentralized

        offbeat.init()
        for algorithm in (LocalSGD(2), DiLoCo(4, fragments=2, overlap=1), Decentralized(), LowPrecisionDecentralized()):
            model = make_model("cnn")
            unused = torch.nn.Parameter(torch.ones(3))
            optimizer = torch.optim.SGD([*model.parameters(), unused], lr=0.05)
            names = [("unused", unused)]
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm, named_parameters=names)
            for step in range(4):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    loss_of(model, make_batch("cnn", offbeat.rank(), step)).backward()
                loss_of(model, make_batch("cnn", offbeat.rank(), step + 50)).backward()
                loss_of(model, make_batch("cnn", offbeat.rank(), step + 90)).backward()
                optimizer.step()
                if offbeat.rank() == 0:
                    model.eval()
                    with torch.no_grad():
                        loss_of(model, make_batch("cnn", 0, 1000))
                    model.train()
            stats = offbeat.stats()["models"][0]
            weights = [float(p.detach().double().sum()) for p in model.parameters()]
            tell(name=algorithm.name, step=stats["step"], syncs=stats["syncs"], weights=weights)
            spread = offbeat.consolidate(model)
            assert offbeat.consolidate(model) == 0
            assert spread >= 0
            optimizer.remove()
        offbeat.shutdown()

    layout = "aabb"
    job = ranks(script, 4, per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})
    everyones = [told(rank) for rank in job.ranks]
    for facts in everyones:
        assert [fact["step"] for fact in facts] == [4, 4, 4, 4], facts
        assert [fact["syncs"] for fact in facts] == [2, 2, 4, 4], facts
    for other in (1, 3):
        # gossip is applied before a step, which then makes ranks of a host differ until the next
        for mine, theirs in zip(everyones[other], everyones[other - 1], strict=True):
            assert (mine["weights"] == theirs["weights"]) == (mine["name"] != "decentralized"), mine["name"]


def test_parameters_that_are_thawed_or_added(ranks):
    """Buckets of weights are made anew; what ranks have learned meanwhile is averaged, not lost."""

    def script():
        import torch
        from support import make_model, tell, train

        import offbeat
        from offbeat.algorithms import DiLoCo

        offbeat.init()
        model = make_model("mlp")
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, DiLoCo(2))
        train(model, optimizer, "mlp", range(3))
        model[0].weight.requires_grad_(True)
        train(model, optimizer, "mlp", range(3, 6))
        more = torch.nn.Parameter(torch.zeros(2))
        optimizer.add_param_group({"params": [more]})
        train(model, optimizer, "mlp", range(6, 8))
        stats = offbeat.stats()["models"][0]
        tell(step=stats["step"], syncs=stats["syncs"], spread=offbeat.consolidate(model))
        offbeat.shutdown()

    for rank in ranks(script, 2, per_rank=apart).ranks:
        assert told(rank) == [{"step": 8, "syncs": 4, "spread": 0.0}]


def test_wrong_input_is_named(ranks):
    def script():
        import torch
        from support import fails, make_model

        import offbeat
        from offbeat.algorithms import Decentralized, DiLoCo, LocalSGD, LowPrecisionDecentralized
        from offbeat.errors import InvalidArgument

        offbeat.init()
        model = make_model("mlp")

        def wrap(algorithm, **options):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            offbeat.DistributedOptimizer(optimizer, model, algorithm, **options)

        fails(InvalidArgument, "shift_one|3 hosts|even|exponential", wrap, Decentralized("shift_one"))
        fails(InvalidArgument, "fragments=8|6 parameters", wrap, DiLoCo(16, fragments=8))
        fails(InvalidArgument, "check_every|local_sgd|consolidate", wrap, LocalSGD(2), check_every=1)
        fails(InvalidArgument, "optimizer|local_sgd", offbeat.DataParallel, model, algorithm=LocalSGD(2))
        fails(InvalidArgument, "no algorithm|low_precision_decentralized", wrap, "locally")
        double = make_model("mlp").double()
        optimizer = torch.optim.SGD(double.parameters(), lr=0.1)
        fails(
            InvalidArgument,
            "float64|float32",
            offbeat.DistributedOptimizer,
            optimizer,
            double,
            LowPrecisionDecentralized(),
        )
        # and after all that it works
        wrap("local_sgd")
        offbeat.shutdown()

    ranks(script, 3, per_rank=apart)


@pytest.mark.parametrize("end", ["remove", "shutdown"])
def test_training_may_end_while_an_exchange_is_under_way(ranks, end):
    def script():
        import sys

        import torch
        from support import make_batch, make_model, make_optimizer, train

        import offbeat
        from offbeat.algorithms import Decentralized, DiLoCo

        offbeat.init()
        model, other = make_model("mlp"), make_model("mlp")
        streaming = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, DiLoCo(6, overlap=3))
        gossip = offbeat.DistributedOptimizer(make_optimizer("sgd", other), other, Decentralized())
        # weights may be given other memory at any time
        model[0].weight.data = model[0].weight.data.clone()
        train(model, streaming, "mlp", range(10))
        train(other, gossip, "mlp", range(3))
        other(make_batch("mlp", 0, 0)[0])
        if sys.argv[1] == "remove":
            streaming.remove()
            gossip.remove()
            train(model, streaming, "mlp", range(2))
            assert type(streaming) is type(gossip) is torch.optim.SGD
        offbeat.shutdown()

    for rank in ranks(script, 3, per_rank=apart, args=[end]).ranks:
        assert "rror" not in rank.err, rank.err
