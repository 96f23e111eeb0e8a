"""What algorithms that exchange weights are equal to, and what they preserve."""

import pytest
from support import told


def apart(rank):
    """Every rank is a host of its own."""
    return {"OFFBEAT_HOST": f"host{rank}"}


def on(layout):
    """Rank n is on host layout[n]."""
    return lambda rank: {"OFFBEAT_HOST": layout[rank]}


@pytest.mark.parametrize("layout", ["ab", "abc", "aabb"])
def test_averaging_weights_in_every_step_is_averaging_gradients(ranks, layout):
    """LocalSGD(1) with plain SGD is allreduce; so is one that never leaves its warm-up, to the last bit."""

    def script():
        import torch
        from support import differences, make_model, same_everywhere, tell, train

        import offbeat
        from offbeat.algorithms import DiLoCo, LocalSGD

        offbeat.init()

        def run(algorithm, momentum=0.0):
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            train(model, optimizer, "mlp", range(8))
            optimizer.remove()
            return model

        exact = run("allreduce")
        for name, algorithm in {
            "local": LocalSGD(1),
            "diloco": DiLoCo(1, outer_lr=1.0, outer_momentum=0.0),
            "late": LocalSGD(1, warmup_steps=3),
            "warm": LocalSGD(4, warmup_steps=100),
        }.items():
            other = run(algorithm)
            away = max(differences(other, exact).values())
            tell(name=name, away=away, equal=same_everywhere(*other.parameters()))
        offbeat.shutdown()

    for rank in ranks(script, len(layout), per_rank=on(layout)).ranks:
        facts = {fact["name"]: fact for fact in told(rank)}
        assert all(fact["equal"] for fact in facts.values()), facts
        assert all(fact["away"] < 1e-6 for fact in facts.values()), facts
        assert facts["warm"]["away"] == 0


def test_diloco_is_what_it_says(ranks):
    """The outer step by the formula; one with outer_lr=1 and no momentum is LocalSGD; streaming by hand."""

    def script():
        import torch
        from support import differences, loss_of, make_batch, make_model, same_everywhere, tell, train

        import offbeat
        from offbeat import syncs
        from offbeat.algorithms import DiLoCo, LocalSGD

        offbeat.init()
        world, steps, rate = offbeat.world_size(), 12, 0.1

        def run(algorithm):
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            train(model, optimizer, "mlp", range(steps))
            optimizer.remove()
            return model

        def by_hand(every, lr, momentum, fragments=1, overlap=0):
            """All ranks in one process."""
            models = [make_model("mlp") for _ in range(world)]
            inner = [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9) for model in models]
            anchor = [p.detach().clone() for p in models[0].parameters()]
            speed = [torch.zeros_like(p) for p in anchor]
            parts = syncs.divide([p.numel() for p in anchor], fragments, cut=[True] * len(anchor))
            interval, begun = every // fragments, None
            for step in range(1, steps + 1):
                for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
                    optimizer.zero_grad()
                    loss_of(model, make_batch("mlp", rank, step - 1)).backward()
                    optimizer.step()
                with torch.no_grad():
                    if (step + overlap) % interval == 0:
                        begun = [[p.clone() for p in model.parameters()] for model in models]
                    if step % interval == 0:
                        for piece in parts[(step // interval - 1) % fragments]:

                            def of(tensors, piece=piece):
                                return list(tensors)[piece.tensor].view(-1)[piece.first : piece.last]

                            d = sum(of(anchor) - of(weights) for weights in begun) / world
                            of(speed).mul_(momentum).add_(d)
                            of(anchor).sub_(lr * (d + momentum * of(speed)))
                            for model, weights in zip(models, begun, strict=True):
                                x = of(model.parameters())
                                x.copy_(of(anchor) + (x - of(weights)))
            return models[offbeat.rank()]

        for name, algorithm, other in [
            ("plain", DiLoCo(4, outer_lr=1.0, outer_momentum=0.0), run(LocalSGD(4))),
            ("outer", DiLoCo(4), by_hand(4, 0.7, 0.9)),
            ("codec", DiLoCo(4, codec="minmax8"), by_hand(4, 0.7, 0.9)),
            ("fragments", DiLoCo(6, fragments=3), by_hand(6, 0.7, 0.9, 3)),
            ("overlap", DiLoCo(6, fragments=2, overlap=2), by_hand(6, 0.7, 0.9, 2, 2)),
            ("one", DiLoCo(4, fragments=1, overlap=0), run(DiLoCo(4))),
        ]:
            model = run(algorithm)
            tell(name=name, away=max(differences(model, other).values()), equal=same_everywhere(*model.parameters()))
        # so that these small ones are cut
        syncs.GRAIN = 16
        model, other = run(DiLoCo(12, fragments=6, overlap=1)), by_hand(12, 0.7, 0.9, 6, 1)
        tell(name="cut", away=max(differences(model, other).values()), equal=same_everywhere(*model.parameters()))
        offbeat.shutdown()

    for rank in ranks(script, 3, per_rank=apart).ranks:
        facts = {fact["name"]: fact for fact in told(rank)}
        assert facts["one"]["away"] == 0
        assert facts["plain"]["away"] < 1e-6, facts
        assert all(facts[name]["away"] < 2e-6 for name in ("outer", "fragments", "overlap", "cut")), facts
        assert 1e-6 < facts["codec"]["away"] < 0.01, facts
        assert [name for name in facts if facts[name]["equal"]] == ["plain", "outer", "codec", "one"], facts


@pytest.mark.parametrize("layout", ["abc", "aabb"])
def test_outer_steps_begin_where_the_warmup_ends(ranks, layout):
    """What the warm-up did is in the anchors, and is not done again; also where it was saved in the middle of that, and
    where a rank has no more data when it ends."""

    def script():
        import sys

        import torch
        from support import differences, loss_of, make_batch, make_model, tell, train

        import offbeat
        from offbeat import syncs
        from offbeat.algorithms import DiLoCo

        offbeat.init()
        # so that these small ones are cut
        syncs.GRAIN = 16
        hosts, steps, outer = sys.argv[1], 16, {"outer_lr": 0.6, "outer_momentum": 0.7}
        ranks = range(len(hosts))

        def make():
            model = make_model("mlp")
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def average(models):
            for tensors in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(p.grad for p in tensors) / len(models)
                for p in tensors:
                    p.grad = mean.clone()

        def by_hand(a, data=steps):
            """All ranks in one process; rank 0 has data for so many steps."""
            models, inner = zip(*(make() for _ in ranks), strict=True)
            anchor = [p.detach().clone() for p in models[0].parameters()]
            speed = [torch.zeros_like(p) for p in anchor]
            parts = syncs.divide([p.numel() for p in anchor], a.fragments, cut=[True] * len(anchor))
            interval = a.every // a.fragments
            for at in range(steps):
                for rank, model in enumerate(models):
                    model.zero_grad()
                    works = rank > 0 or at < data
                    (loss_of(model, make_batch("mlp", rank, at)) * works).backward()
                for host in set(hosts):
                    average([models[rank] for rank in ranks if at < a.warmup_steps or hosts[rank] == host])
                for rank, optimizer in enumerate(inner):
                    if rank > 0 or at < data:
                        optimizer.step()
                step = at + 1 - a.warmup_steps
                with torch.no_grad():
                    if step == 0:
                        for model in models:
                            for p, q in zip(model.parameters(), models[1].parameters(), strict=True):
                                p.copy_(q)
                        anchor = [p.clone() for p in models[0].parameters()]
                    if step > 0 and (step + a.overlap) % interval == 0:
                        begun = [[p.clone() for p in model.parameters()] for model in models]
                    if step > 0 and step % interval == 0:
                        for tensor, first, last in parts[(step // interval - 1) % a.fragments]:
                            cut = slice(first, last)
                            theta, v = anchor[tensor].view(-1)[cut], speed[tensor].view(-1)[cut]
                            d = sum(theta - weights[tensor].view(-1)[cut] for weights in begun) / len(models)
                            v.mul_(a.outer_momentum).add_(d)
                            theta.sub_(a.outer_lr * (d + a.outer_momentum * v))
                            for model, weights in zip(models, begun, strict=True):
                                x = list(model.parameters())[tensor].view(-1)[cut]
                                x.copy_(theta + (x - weights[tensor].view(-1)[cut]))
            return models[offbeat.rank()]

        for a in (
            DiLoCo(3, warmup_steps=4, **outer),
            DiLoCo(6, warmup_steps=4, fragments=3, **outer),
            DiLoCo(6, warmup_steps=1, fragments=2, overlap=2, **outer),
        ):
            model, optimizer = make()
            optimizer = offbeat.DistributedOptimizer(optimizer, model, a)
            train(model, optimizer, "mlp", range(steps))
            tell(name=str(a), away=max(differences(model, by_hand(a)).values()))
            optimizer.remove()

        a = DiLoCo(3, warmup_steps=4, **outer)
        model, optimizer = make()
        optimizer = offbeat.DistributedOptimizer(optimizer, model, a)
        train(model, optimizer, "mlp", range(2))
        saved = model.state_dict(), optimizer.state_dict()
        optimizer.remove()
        other, optimizer = make()
        optimizer = offbeat.DistributedOptimizer(optimizer, other, a)
        other.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(other, optimizer, "mlp", range(2, steps))
        tell(name="resumed", away=max(differences(other, by_hand(a)).values()))
        optimizer.remove()

        if hosts == "abc":
            a, data = DiLoCo(3, warmup_steps=4, **outer), 2
            model, optimizer = make()
            optimizer = offbeat.DistributedOptimizer(optimizer, model, a)
            with optimizer.join():
                train(model, optimizer, "mlp", range(data if offbeat.rank() == 0 else steps))
            # the last exchange was in the last step
            tell(name="uneven", away=max(differences(model, by_hand(a, data)).values()))
        offbeat.shutdown()

    for rank in ranks(script, len(layout), per_rank=on(layout), args=[layout]).ranks:
        facts = told(rank)
        assert len(facts) == (5 if layout == "abc" else 4)
        assert all(fact["away"] < 2e-6 for fact in facts), facts


@pytest.mark.parametrize("peers", ["all", "ring", "shift_one", "exponential", "random"])
def test_decentralized_is_its_formula(ranks, peers):
    """x = Σ W x - lr · g, with g from before the average; the sum over ranks goes on as if there were none."""

    def script():
        import sys

        import torch
        from support import differences, loss_of, make_batch, make_model, tell, train

        import offbeat
        from offbeat.algorithms import Decentralized, LowPrecisionDecentralized

        offbeat.init()
        peers = sys.argv[1]
        world, steps, rate = offbeat.world_size(), 7, 0.1

        def peers_of(rank, step):
            if peers == "all":
                return range(world)
            if peers == "ring":
                return {(rank - 1) % world, rank, (rank + 1) % world}
            if peers == "exponential":
                return {rank, rank ^ (1 << step % 2)}
            half = world // 2
            return {rank, (step + rank) % half + half if rank < half else (rank - half - step) % half}

        def run(algorithm):
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            train(model, optimizer, "mlp", range(steps))
            optimizer.remove()
            return model

        model = run(Decentralized(peers, seed=3))
        models = [make_model("mlp") for _ in range(world)]
        if peers != "random":
            for step in range(steps):
                before = [[p.detach().clone() for p in each.parameters()] for each in models]
                for rank, each in enumerate(models):
                    loss = loss_of(each, make_batch("mlp", rank, step))
                    gradients = torch.autograd.grad(loss, list(each.parameters()))
                    around = sorted(peers_of(rank, step))
                    for at, (p, g) in enumerate(zip(each.parameters(), gradients, strict=True)):
                        with torch.no_grad():
                            p.copy_(sum(before[peer][at] for peer in around) / len(around) - rate * g)
            tell(away=max(differences(model, models[offbeat.rank()]).values()))
        if peers == "ring":
            # differences without a codec are the same gossip
            other = run(LowPrecisionDecentralized(codec=None))
            tell(away=max(differences(other, models[offbeat.rank()]).values()))
        # without a learning rate only the average is left, which preserves the sum and draws all together
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, Decentralized(peers, seed=3))
        first = next(model.parameters())
        with torch.no_grad():
            first.mul_(1 + offbeat.rank())
        sums = []
        for step in range(6):
            value = first.detach().double().clone()
            offbeat.all_reduce(value)
            sums.append(value)
            train(model, optimizer, "mlp", [step])
        tell(lost=max(float((value - sums[0]).abs().max() / sums[0].abs().max()) for value in sums))
        apart = offbeat.consolidate(model)
        again = offbeat.consolidate(model)
        tell(spread=apart, again=again, told=offbeat.stats()["models"][0]["spread"])
        offbeat.shutdown()

    job = ranks(script, 4, per_rank=apart, args=[peers])
    for rank in job.ranks:
        facts = told(rank)
        assert all(fact["away"] < 1e-6 for fact in facts if "away" in fact), facts
        assert next(fact["lost"] for fact in facts if "lost" in fact) < 1e-6, facts
        spread = next(fact for fact in facts if "spread" in fact)
        assert spread["again"] == spread["told"] == 0, facts
        assert spread["spread"] < (1e-6 if peers in ("all", "exponential", "shift_one") else 0.5), facts


def test_one_model_is_agreed_on_whatever_it_holds(ranks):
    """Floating-point numbers of any kind become their mean, all else rank 0's, and what is equal keeps its bits."""

    def script():
        import torch
        from torch import nn

        import offbeat

        offbeat.init()
        rank, world = offbeat.rank(), offbeat.world_size()

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                kinds = torch.float64, torch.bfloat16, torch.complex64
                self.kinds = nn.ParameterList([torch.full((3, 2), 1 + rank, dtype=kind) for kind in kinds])
                self.small = nn.ParameterList([torch.full((2,), float(at + rank)) for at in range(300)])
                self.turned = nn.Parameter((torch.arange(6.0).view(2, 3) * (1 + rank)).t())
                self.same = nn.Parameter(torch.tensor([0.1, -0.0]))
                self.empty = nn.Parameter(torch.empty(0, 4))
                self.register_buffer("steps", torch.tensor(7 + rank))
                self.register_buffer("mask", torch.tensor([rank == 0, rank > 0]))
                self.register_buffer("wide", torch.tensor([[1 + rank]]).expand(5, 4))

        model = Model()
        assert offbeat.consolidate(model) > 0
        middle = (world - 1) / 2
        for parameter in model.kinds:
            assert (parameter == 1 + middle).all(), parameter
        for at, parameter in enumerate(model.small):
            assert (parameter == at + middle).all(), (at, parameter)
        assert torch.equal(model.turned, (torch.arange(6.0).view(2, 3) * (1 + middle)).t()), model.turned
        assert torch.equal(model.same.view(torch.int32), torch.tensor([0.1, -0.0]).view(torch.int32))
        assert (int(model.steps), model.mask.tolist()) == (7, [True, False])
        assert (model.wide == 1).all()
        offbeat.shutdown()

    ranks(script, 3, per_rank=apart)
