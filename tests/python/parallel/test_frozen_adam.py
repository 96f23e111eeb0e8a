"""Adam's step with a frozen second moment: the formula, and that replicas hold the same of it."""

import pytest
from support import told


def apart(rank):
    """Every rank is a host of its own."""
    return {"OFFBEAT_HOST": f"host{rank}"}


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


@pytest.mark.parametrize("amsgrad", [False, True])
def test_elements_without_a_second_moment_stay(ranks, amsgrad):
    def script():
        import sys

        import torch
        from support import noted_warnings

        import offbeat

        offbeat.init()
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 2), "late": torch.nn.Linear(4, 2)})
        amsgrad = sys.argv[1] == "True"
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, amsgrad=amsgrad)
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

    ranks(script, 2, per_rank=apart, args=[amsgrad])


@pytest.mark.parametrize("short", [2, 5])
def test_ranks_with_fewer_batches_freeze_alike(ranks, short):
    """Who ends inside the warm-up, or after it, takes over what was frozen, and what has come of it since."""

    def script():
        import sys

        import torch
        from support import make_model, same_everywhere, tell, train

        import offbeat
        from offbeat.algorithms import QAdam

        offbeat.init()
        model = make_model("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, QAdam(warmup_steps=3))
        batches = int(sys.argv[1]) if offbeat.rank() == 0 else 9
        with optimizer.join():
            train(model, optimizer, "mlp", range(batches))
        assert same_everywhere(*model.parameters())
        tell(frozen=optimizer.state_dict()["offbeat"]["frozen"])
        train(model, optimizer, "mlp", range(9, 12))
        assert same_everywhere(*model.parameters())
        offbeat.shutdown()

    job = ranks(script, 2, per_rank=apart, args=[short])
    (zero,), (one,) = (told(rank) for rank in job.ranks)
    assert zero == one
    assert set(zero["frozen"].values()) == {3}


@pytest.mark.parametrize("world", [1, 2])
def test_closures_freeze_in_the_same_step(ranks, world):
    def script():
        import torch
        from support import digest, loss_of, make_batch, make_model, train

        import offbeat
        from offbeat.algorithms import OneBitAdam

        offbeat.init()
        found = []
        for with_closure in (False, True):
            model = make_model("mlp")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, OneBitAdam(warmup_steps=3))
            losses = [] if with_closure else train(model, optimizer, "mlp", range(8))
            for step in range(8) if with_closure else ():

                def closure(model=model, optimizer=optimizer, step=step):
                    optimizer.zero_grad()
                    loss = loss_of(model, make_batch("mlp", offbeat.rank(), step))
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure).item())
            frozen = set(optimizer.state_dict()["offbeat"]["frozen"].values())
            found.append((digest(model), losses, frozen))
            optimizer.remove()
        assert found[0] == found[1], found
        assert found[0][2] == {3}
        offbeat.shutdown()

    ranks(script, world, per_rank=apart)


def test_a_subclass_with_a_step_of_its_own_is_refused(ranks):
    """Also where a scheduler has put another on the object; a subclass without one is as good as Adam."""

    def script():
        import torch
        from support import fails, make_model

        import offbeat

        class Plain(torch.optim.Adam):
            pass

        class Own(torch.optim.AdamW):
            def step(self, closure=None):
                return super().step(closure)

        offbeat.init()
        model = make_model("mlp")
        for kind in (Plain, Own):
            optimizer = kind(model.parameters())
            torch.optim.lr_scheduler.StepLR(optimizer, 3)
            if kind is Own:
                words = "Own has one of its own|try: torch.optim.AdamW"
                fails(offbeat.errors.InvalidArgument, words, offbeat.DistributedOptimizer, optimizer, model, "qadam")
            else:
                for _ in range(2):
                    offbeat.DistributedOptimizer(optimizer, model, "qadam")
                offbeat.DistributedOptimizer(optimizer, model).remove()
        offbeat.shutdown()

    ranks(script, 1)
