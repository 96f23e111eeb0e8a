"""What algorithms are equal to where they lose nothing, and that training around them goes on as with plain torch."""

import pytest
from support import told


def apart(rank):
    """Every rank is a host of its own."""
    return {"OFFBEAT_HOST": f"host{rank}"}


@pytest.mark.parametrize("layout", ["ab", "abc", "aabb"])
def test_what_loses_nothing_is_the_mean(ranks, layout):
    """Selecting everything, full rank, and momentum without a codec: to rounding what allreduce gives."""

    def script():
        from support import differences, make_model, make_optimizer, same_everywhere, tell, train

        import offbeat
        from offbeat.algorithms import PowerSGD, QAdam, TopK

        offbeat.init()

        def run(algorithm, choice):
            model = make_model("cnn")
            optimizer = offbeat.DistributedOptimizer(make_optimizer(choice, model), model, algorithm)
            train(model, optimizer, "cnn", range(6))
            optimizer.remove()
            return model

        # AdamW divides by the root of the second moment, which is never frozen here
        endless = QAdam(warmup_steps=10**9, codec="int4")
        for algorithm, choice in [(TopK(1.0), "sgd"), (PowerSGD(128, least=0), "sgd"), (endless, "adamw")]:
            exact, other = run("allreduce", choice), run(algorithm, choice)
            tell(
                name=algorithm.name,
                away=max(differences(other, exact).values()),
                equal=same_everywhere(*other.parameters()),
            )
        offbeat.shutdown()

    job = ranks(script, len(layout), per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})
    for rank in job.ranks:
        facts = {fact["name"]: fact for fact in told(rank)}
        assert all(fact["equal"] for fact in facts.values()), facts
        assert facts["qadam"]["away"] == 0
        assert facts["topk"]["away"] < 1e-5, facts
        assert facts["powersgd"]["away"] < 2e-5, facts


def test_endless_warm_up_is_torchs_adam(ranks):
    """Two ranks divide by two, as plain torch does on both their batches: the same bits."""

    def script():
        import torch
        from support import bits, make_model, simulate, train

        import offbeat
        from offbeat.algorithms import OneBitAdam

        offbeat.init()
        for kind in (torch.optim.Adam, torch.optim.AdamW):
            model, alone = make_model("mlp"), make_model("mlp")
            optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, OneBitAdam(warmup_steps=10**6))
            train(model, optimizer, "mlp", range(20))
            simulate(alone, kind(alone.parameters(), lr=0.01, weight_decay=0.1), "mlp", range(20), [[0], [1]])
            assert all(bits(a) == bits(b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
            optimizer.remove()
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart)


@pytest.mark.parametrize("world", [1, 2])
def test_adam_with_a_frozen_second_moment(ranks, world):
    """Without a codec the step after the warm-up is the formula: v̂ stays, m goes on, decay is decoupled."""

    def script():
        import torch
        from support import loss_of, make_batch, make_model, train

        import offbeat
        from offbeat.algorithms import QAdam

        offbeat.init()
        warmup, lr, decay, eps, betas = 3, 0.01, 0.1, 1e-6, ((0.9, 0.99), (0.8, 0.95))
        model, other = make_model("mlp"), make_model("mlp")

        def groups(model):
            parameters = list(model.parameters())
            halves = (parameters[:3], parameters[3:])
            return [{"params": half, "betas": betas[at]} for at, half in enumerate(halves)]

        optimizer = torch.optim.AdamW(groups(model), lr=lr, weight_decay=decay, eps=eps)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, QAdam(warmup_steps=warmup, codec=None))
        train(model, optimizer, "mlp", range(10))

        twin = torch.optim.AdamW(groups(other), lr=lr, weight_decay=decay, eps=eps)
        frozen = {}
        for step in range(10):
            parts = [
                torch.autograd.grad(loss_of(other, make_batch("mlp", rank, step)), list(other.parameters()))
                for rank in range(offbeat.world_size())
            ]
            means = [sum(part) / len(parts) for part in zip(*parts, strict=True)]
            if step < warmup:
                for parameter, mean in zip(other.parameters(), means, strict=True):
                    parameter.grad = mean
                twin.step()
                continue
            with torch.no_grad():
                for at, (parameter, mean) in enumerate(zip(other.parameters(), means, strict=True)):
                    beta1, beta2 = betas[0 if at < 3 else 1]
                    state = twin.state[parameter]
                    v = frozen.setdefault(at, state["exp_avg_sq"] / (1 - beta2**warmup))
                    state["exp_avg"].lerp_(mean, 1 - beta1)
                    parameter.mul_(1 - lr * decay)
                    parameter -= lr * state["exp_avg"] / (1 - beta1 ** (step + 1)) / (v.sqrt() + eps)
        for name, parameter in model.named_parameters():
            want = dict(other.named_parameters())[name]
            assert torch.allclose(parameter, want, rtol=1e-4, atol=1e-6), (name, (parameter - want).abs().max())
            state = optimizer.state[parameter]
            assert float(state["step"]) == 10
        offbeat.shutdown()

    ranks(script, world, per_rank=apart)


def test_elements_without_a_second_moment_stay(ranks):
    def script():
        import torch
        from support import noted_warnings

        import offbeat

        offbeat.init()
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 2), "late": torch.nn.Linear(4, 2)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        algorithm = offbeat.algorithms.OneBitAdam(warmup_steps=2)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
        x = torch.ones(3, 4)
        x[:, 1] = 0  # no gradient for this column
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for step in range(5):
            optimizer.zero_grad()
            loss = model["used"](x).square().sum() + (model["late"](x).sum() if step > 2 else 0)
            loss.backward()
            if step == 2:
                before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            with noted_warnings() as said:
                optimizer.step()
            assert any("not updated any more" in text for text in said) == (step == 3), said
        after = dict(model.named_parameters())
        assert torch.equal(after["used.weight"][:, 1], before["used.weight"][:, 1])
        assert not torch.equal(after["used.weight"][:, 0], before["used.weight"][:, 0])
        assert torch.equal(after["late.weight"], before["late.weight"])
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart)


ALL = ["bytegrad", "qsgd", "qadam", "onebit_adam", "powersgd", "topk"]


@pytest.mark.parametrize("algorithm", ALL)
def test_training_around_an_algorithm(ranks, algorithm):
    """A scheduler made before wrapping, a scaler with an overflow on one rank, clipping, accumulation, unused parts."""

    def script():
        import sys
        import warnings

        import torch
        from support import fails, loss_of, make_batch, make_model, same_everywhere

        import offbeat

        warnings.simplefilter("ignore")
        offbeat.init()
        kinds = {"qadam": {"warmup_steps": 2}, "onebit_adam": {"warmup_steps": 2}}
        others = {"powersgd": {"rank": 1, "least": 0}}
        algorithm = offbeat.algorithms.KNOWN[sys.argv[1]](**(kinds | others).get(sys.argv[1], {}))
        model = make_model("mlp")
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        adam = sys.argv[1] in kinds
        optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        ours = offbeat.DistributedOptimizer(optimizer, model, algorithm)
        assert ours is optimizer
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # one made after it must not matter either
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
        steps = 0
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.*")
            for step in range(12):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    scaler.scale(loss_of(model, make_batch("mlp", offbeat.rank(), 100 + step)) / 2).backward()
                loss = loss_of(model, make_batch("mlp", offbeat.rank(), step)) / 2
                if step == 7 and offbeat.rank() == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if step == 7:
                    assert not torch.isfinite(norm)
                    before = [p.detach().clone() for p in model.parameters()]
                scaler.step(optimizer)
                if step == 7:
                    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                    assert scaler.get_scale() > (scaler.update() or scaler.get_scale())
                else:
                    scaler.update()
                    steps += 1
                    assert all(torch.isfinite(p).all() for p in model.parameters()), step
                scheduler.step()
                assert same_everywhere(*model.parameters()), step
        assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5**4
        assert torch.equal(model.unused, torch.ones(3))
        if adam:
            assert float(optimizer.state[model[0].weight]["step"]) == steps == 11
            assert optimizer.state_dict()["offbeat"]["frozen"], "the second moment is frozen"
        stats = offbeat.stats()["models"][0]["coding"]
        assert stats["coded"] > 0, stats
        assert stats["non_finite"] >= (1 if offbeat.rank() else 0), stats
        # no scaler: what is not finite is not swallowed
        optimizer.zero_grad()
        loss = loss_of(model, make_batch("mlp", offbeat.rank(), 0))
        (loss * float("nan") if offbeat.rank() == 0 else loss).backward()
        fails(offbeat.errors.NonFinite, "NaN|try:", optimizer.step)
        optimizer.remove()
        optimizer.zero_grad()
        loss_of(model, make_batch("mlp", 0, 0)).backward()
        optimizer.step()
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart, args=[algorithm])


def test_bad_input_is_told_when_it_is_made(ranks):
    def script():
        import torch
        from support import fails

        import offbeat
        from offbeat import algorithms, steps

        wrong = offbeat.errors.InvalidArgument
        for ratio in (0, 2, -1, True, "a"):
            fails(wrong, "ratio|try", algorithms.TopK, ratio)
        for rank in (0, -1, 5000, 1.5):
            fails(wrong, "rank|try", algorithms.PowerSGD, rank)
        for kind in (algorithms.QAdam, algorithms.OneBitAdam, algorithms.PowerSGD, algorithms.TopK):
            fails(wrong, "warmup_steps|try", kind, warmup_steps=-1)
        fails(wrong, "no codec 'int5'|try", algorithms.QAdam, codec="int5")
        fails(wrong, "feedback without a codec", algorithms.QAdam, codec=None, feedback=True)
        fails(wrong, "op='max'", steps.AllReduce, "max")
        fails(wrong, "beta=1", steps.Momentum, 1)
        fails(wrong, "state=", steps.Apply, print, "momentum")
        fails(wrong, "function", steps.Apply, 3)
        offbeat.init()
        model = torch.nn.Linear(3, 3)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for name in ("qadam", "onebit_adam"):
            fails(wrong, "Adam|got SGD|try", offbeat.DistributedOptimizer, sgd, model, name)
            fails(wrong, "Adam|no optimizer|try", offbeat.DataParallel, model, algorithm=name)
        fails(wrong, "no algorithm 'bytegrat'|'bytegrad'|'topk'", offbeat.DistributedOptimizer, sgd, model, "bytegrat")
        fails(wrong, "try: TopK()", offbeat.DistributedOptimizer, sgd, model, algorithms.TopK)
        double = torch.nn.Linear(3, 3).double()
        optimizer = torch.optim.SGD(double.parameters(), lr=0.1)
        if offbeat.world_size() > 1:
            for name in ("topk", "powersgd", "bytegrad"):
                fails(wrong, "float64|try", offbeat.DistributedOptimizer, optimizer, double, name)
        # nothing of it is left
        offbeat.DistributedOptimizer(sgd, model)
        model(torch.ones(1, 3)).sum().backward()
        sgd.step()
        offbeat.shutdown()

    ranks(script, 1)
    ranks(script, 2, per_rank=apart)


def test_another_world_takes_over_what_it_can(ranks, tmp_path):
    """Momentum and factors are alike on all ranks and go on; residuals begin at zero, and it is said."""

    def script():
        import sys

        import torch
        from support import make_model, noted_warnings, same_everywhere, tell, train

        import offbeat
        from offbeat.algorithms import OneBitAdam, PowerSGD

        offbeat.init()
        part, directory = sys.argv[1:]
        for algorithm in (OneBitAdam(warmup_steps=2), PowerSGD(2, least=0)):
            model = make_model("mlp")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            path = f"{directory}/{algorithm.name}.pt"
            if part == "second":
                loaded = torch.load(path, weights_only=True)
                model.load_state_dict(loaded["model"])
                with noted_warnings() as said:
                    optimizer.load_state_dict(loaded["optimizer"])
                kept = optimizer.state_dict()["offbeat"]["kept"]["0.weight"]
                old = loaded["optimizer"]["offbeat"]["kept"]["0.weight"]
                same = sorted(label for label in old if torch.equal(kept.get(label, torch.zeros(0)), old[label]))
                tell(said=[text for text in said if "2 ranks" in text], same=same)
            train(model, optimizer, "mlp", range(5))
            if part == "first" and offbeat.rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            assert same_everywhere(*model.parameters())
            optimizer.remove()
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart, args=["first", tmp_path])
    job = ranks(script, 3, per_rank=apart, args=["second", tmp_path])
    for rank in job.ranks:
        one_bit, power = told(rank)
        (said,) = one_bit["said"]
        assert all(words in said for words in ("2.shares", "2.results", "onebit_adam on 3")), said
        assert one_bit["same"] == ["1.momentum"]
        (said,) = power["said"]
        assert "left" in said
        assert [label for label in power["same"] if label.endswith("factor")]


def test_algorithms_of_other_packages(ranks, tmp_path):
    """A package registers a name by an entry point; nothing is imported before somebody asks for it."""
    package = tmp_path / "site"
    (package / "relaxed-1.0.dist-info").mkdir(parents=True)
    (package / "relaxed-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: relaxed\nVersion: 1.0\n")
    points = "[offbeat.algorithms]\nrelaxed = relaxed:Relaxed\nbroken = relaxed:Missing\nodd = relaxed:odd\n"
    (package / "relaxed-1.0.dist-info" / "entry_points.txt").write_text(points)
    (package / "relaxed.py").write_text(
        "import offbeat\n"
        "class Relaxed(offbeat.Algorithm):\n"
        "    name = 'relaxed'\n"
        "    def steps(self):\n"
        "        return [offbeat.steps.AllReduce('mean', 'bfloat16')]\n"
        "def odd():\n"
        "    return 3\n"
    )

    def script():
        import sys

        sys.path.insert(0, sys.argv[1])
        from support import fails, make_model, make_optimizer, train

        import offbeat

        offbeat.init()
        model = make_model("mlp")
        optimizer = make_optimizer("sgd", model)
        wrong = offbeat.errors.InvalidArgument
        fails(wrong, "no algorithm 'relaxes'|'relaxed'", offbeat.DistributedOptimizer, optimizer, model, "relaxes")
        assert "relaxed" not in sys.modules
        fails(wrong, "cannot be made|Missing", offbeat.DistributedOptimizer, optimizer, model, "broken")
        fails(wrong, "no offbeat.Algorithm", offbeat.DistributedOptimizer, optimizer, model, "odd")
        offbeat.DistributedOptimizer(optimizer, model, "relaxed")
        train(model, optimizer, "mlp", range(3))
        assert offbeat.stats()["models"][0]["algorithm"] == "relaxed"
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart, args=[package])


def test_a_step_of_your_own_that_fails_is_told_everywhere(ranks):
    def script():
        from support import fails, make_model, make_optimizer, train

        import offbeat

        def grumble(bucket):
            if bucket.step == 2 and offbeat.rank() == 1:
                raise ValueError("not in the mood")

        class Moody(offbeat.Algorithm):
            name = "moody"

            def steps(self):
                return [offbeat.steps.Apply(grumble), offbeat.steps.AllReduce()]

        offbeat.init()
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, Moody())
        error = fails(
            offbeat.errors.PeerFailed, "not in the mood|rank 1|grumble", train, model, optimizer, "mlp", range(5)
        )
        assert (error.rank, "not in the mood" in error.cause) == (1, True)
        spans = [span[0] for span in offbeat.runtime.current().trace()]
        assert "python" in spans
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart)
