"""Exchanges of weights, and what happens to these meanwhile: closures, loaded weights, models that are not called, and
consolidating."""

from support import told


def apart(rank):
    """Every rank is a host of its own."""
    return {"OFFBEAT_HOST": f"host{rank}"}


def test_gossip_loses_no_step_and_needs_no_forward(ranks):
    """What weights have moved since an exchange began is kept, whoever moved them; there is one exchange to a step."""

    def script():
        import torch
        from support import make_model, tell
        from torch import nn

        import offbeat
        from offbeat.algorithms import Decentralized

        offbeat.init()

        def wrap(model, lr, every=1):
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            return offbeat.DistributedOptimizer(optimizer, model, Decentralized("all", every=every))

        def syncs():
            return offbeat.stats()["models"][0]["syncs"]

        one = torch.ones(1, 1)
        for every in (1, 3):
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer, seen = wrap(model, 1.0, every), []

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                # ranks go different ways, by one a step on average
                loss = model(one).sum() * (2 * offbeat.rank())
                loss.backward()
                return loss.detach()

            for _ in range(7):
                optimizer.step(closure)
                weights = offbeat.all_gather(model.weight.detach())
                seen.append(float(torch.stack(weights).mean()))
            tell(name="closure", seen=seen, syncs=syncs())
            # from here on forward comes first again, and what is under way is not forgotten
            for _ in range(2):
                closure()
                optimizer.step()
            mean = float(torch.stack(offbeat.all_gather(model.weight.detach())).mean())
            tell(name="then", mean=mean, consolidated=offbeat.consolidate(model) >= 0, weight=float(model.weight))
            optimizer.remove()

        # LBFGS evaluates its closure again and again in one step
        model = make_model("mlp")
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, Decentralized("all"))
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(offbeat.rank()))
        losses = []

        def evaluate():
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            return loss

        for _ in range(6):
            losses.append(float(optimizer.step(evaluate)))
        tell(name="lbfgs", fell=losses[-1] / losses[0], syncs=syncs())
        optimizer.remove()

        # weights that are loaded while an exchange is under way
        model = nn.Linear(3, 2)
        optimizer = wrap(model, 0.0)
        for training in (True, False, True):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            if training:
                optimizer.step()
            else:
                with torch.no_grad():
                    [p.fill_(3.0) for p in model.parameters()]
        tell(name="loaded", weights=[float(p.mean()) for p in model.parameters()])
        # a model that is not called: exchanges begin after the step
        with torch.no_grad():
            model.weight.fill_(offbeat.rank())
        before = syncs()
        for _ in range(3):
            nn.functional.linear(torch.ones(1, 3), model.weight, model.bias).sum().backward()
            optimizer.step()
        tell(name="uncalled", syncs=syncs() - before, weights=float(model.weight.mean()))
        offbeat.shutdown()

    for rank in ranks(script, 2, per_rank=apart).ranks:
        facts = told(rank)
        closures, thens = ([fact for fact in facts if fact["name"] == name] for name in ("closure", "then"))
        assert [fact["seen"] for fact in closures] == [[-1, -2, -3, -4, -5, -6, -7]] * 2, facts
        # that of the last step is under way
        assert [fact["syncs"] for fact in closures] == [6, 2], facts
        assert [fact["mean"] for fact in thens] == [-9, -9], facts
        assert [fact["weight"] for fact in thens] == [-9, -9], facts
        rest = {fact["name"]: fact for fact in facts}
        assert rest["lbfgs"]["fell"] < 0.8, facts
        assert rest["lbfgs"]["syncs"] == 5, facts
        assert rest["loaded"]["weights"] == [3, 3], facts
        assert rest["uncalled"] == {"name": "uncalled", "syncs": 2, "weights": 0.5}, facts


def test_who_ends_first_ends_nothing_of_the_others(ranks):
    """An exchange that has begun is made to its end by all, though nobody uses what comes of it any more."""

    def script():
        import time

        import torch
        from torch import nn

        import offbeat
        from offbeat.algorithms import Decentralized

        offbeat.init(timeout=20.0)
        rank = offbeat.rank()
        for turn in range(12):
            model = nn.Linear(500, 100)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, Decentralized())

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(torch.ones(1, 500)).square().mean()
                loss.backward()
                return loss

            for step in range(3):
                if step == 2:
                    time.sleep(0.01 * (rank == turn % 3))
                optimizer.step(closure)
            optimizer.remove()
        offbeat.shutdown()

    for rank in ranks(script, 3, per_rank=apart).ranks:
        assert "rror" not in rank.err, rank.err


def test_consolidating_is_not_undone_by_what_is_under_way(ranks):
    """Replicas that were made equal stay so without further steps, and their mean is what it would have been."""

    def script():
        import torch
        from support import loss_of, make_batch, make_model, tell, train

        import offbeat
        from offbeat.algorithms import Decentralized, DiLoCo

        offbeat.init()
        rank = offbeat.rank()

        def spread(model):
            flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            rows = torch.stack(offbeat.all_gather(flat)).double()
            return float((rows - rows.mean(0)).norm()), rows.mean(0)

        for name, algorithm in {
            "diloco": DiLoCo(10, outer_lr=1.0, outer_momentum=0.0, overlap=4),
            "streaming": DiLoCo(12, fragments=2, overlap=3, codec="minmax8"),
            "gossip": Decentralized("ring"),
        }.items():
            means = []
            for consolidates in (False, True):
                model = make_model("mlp")
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
                train(model, optimizer, "mlp", range(8 if "diloco" in name else 5))
                if name == "gossip":
                    # an exchange has begun that no step follows
                    loss_of(model, make_batch("mlp", rank, 90)).backward()
                before, _ = spread(model)
                if consolidates:
                    offbeat.consolidate(model)
                optimizer.param_groups[0]["lr"] = 0.0
                train(model, optimizer, "mlp", range(8, 10))
                after, mean = spread(model)
                means.append(mean)
                optimizer.remove()
            tell(name=name, before=before, after=after, moved=float((means[1] - means[0]).abs().max()))
        offbeat.shutdown()

    for rank in ranks(script, 3, per_rank=apart).ranks:
        for fact in told(rank):
            assert fact["before"] > 1e-2, fact
            assert fact["after"] < 1e-6, fact
            assert fact["moved"] < 1e-6, fact
