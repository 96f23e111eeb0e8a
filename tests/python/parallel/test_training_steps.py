"""Between backward and step: scaling, clipping, autocast and all kinds of optimizers see the averaged gradient."""

import pytest
from support import told


@pytest.mark.parametrize("clips", [False, True])
def test_a_gradient_scaler_skips_on_every_rank(ranks, clips):
    """An infinite loss on one rank only: all skip that step and lower the scale; the bits are DDP's with its scaler."""

    def script():
        import math
        import sys

        import torch
        import torch.distributed as dist
        from support import digest, loss_of, make_batch, make_model, make_optimizer, tell
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()
        me, clips = offbeat.rank(), sys.argv[1] == "True"
        for kind in ("cnn", "transformer"):
            found = {}
            for way in ("ddp", "ours", "DataParallel"):
                model = make_model(kind)
                optimizer = make_optimizer("adamw", model)
                wrapped = model
                if way == "ddp":
                    wrapped = DistributedDataParallel(model)
                elif way == "ours":
                    offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=1000)
                else:
                    wrapped = offbeat.DataParallel(model, optimizer)
                scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
                history = []
                for step in range(9):
                    optimizer.zero_grad()
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step % 2 == 0):
                        loss = loss_of(wrapped, make_batch(kind, me, step))
                    if (step, me) in ((3, 1), (6, 0)):
                        loss = loss * math.inf
                    scaler.scale(loss).backward()
                    norm = 0.0
                    if clips:
                        scaler.unscale_(optimizer)
                        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                    before = digest(model, buffers=False)
                    scaler.step(optimizer)
                    scaler.update()
                    history.append([scaler.get_scale(), digest(model, buffers=False) == before, repr(norm)])
                steps = {int(state["step"]) for state in optimizer.state.values()}
                found[way] = [history, digest(model, buffers=False), sorted(steps)]
            tell(found=found)
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2, args=[clips])
    one, other = (told(rank) for rank in job.ranks)
    assert one == other
    for case in one:
        ddp = case["found"].pop("ddp")
        assert [skipped for _, skipped, _ in ddp[0]] == [step in (3, 6) for step in range(9)]
        assert ddp[2] == [7]
        assert [scale / 1024 for scale, _, _ in ddp[0]] == [1, 2, 2, 1, 1, 2, 1, 1, 2]
        for way, result in case["found"].items():
            assert result == ddp, way


def test_clipping_sees_the_mean(ranks):
    """The norm is that of the averaged gradient, and the bits are DDP's, clipped by norm and by value."""

    def script():
        import torch
        import torch.distributed as dist
        from support import digest, loss_of, make_batch, make_model, make_optimizer, mean_gradients, tell
        from torch.nn.parallel import DistributedDataParallel
        from torch.nn.utils import clip_grad_norm_, clip_grad_value_

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()
        me = offbeat.rank()
        for by in ("norm", "value"):
            found = {}
            for way in ("ddp", "ours"):
                model = make_model("transformer")
                optimizer = make_optimizer("sgd", model)
                wrapped = DistributedDataParallel(model) if way == "ddp" else model
                if way == "ours":
                    offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=2000)
                norms = []
                for step in range(6):
                    losses = [lambda m, r=r, s=step: loss_of(m, make_batch("transformer", r, s)) for r in range(2)]
                    means = mean_gradients(make_model("transformer"), losses) if step == 0 else {}
                    optimizer.zero_grad()
                    losses[me](wrapped).backward()
                    if by == "norm":
                        norms.append(float(clip_grad_norm_(model.parameters(), 0.3)))
                        if means:
                            want = torch.stack([mean.norm() for mean in means.values()]).norm()
                            torch.testing.assert_close(torch.tensor(norms[0]), want)
                    else:
                        clip_grad_value_(model.parameters(), 0.01)
                        norms.append(max(float(parameter.grad.abs().max()) for parameter in model.parameters()))
                    optimizer.step()
                found[way] = [norms, digest(model)]
            tell(by=by, found=found)
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2)
    one, other = (told(rank) for rank in job.ranks)
    assert one == other
    for case in one:
        assert case["found"]["ours"] == case["found"]["ddp"], case["by"]
    assert max(one[0]["found"]["ours"][0]) > 0.3, "nothing was clipped"
    assert max(one[1]["found"]["ours"][0]) == pytest.approx(0.01)


def test_optimizers_of_all_kinds(ranks):
    """Fused and foreach variants, many classes, several groups, a class of the user's own: the bits of DDP."""

    def script():
        import torch
        import torch.distributed as dist
        from support import digest, make_model, tell, train
        from torch import optim
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()

        class Signs(optim.Optimizer):
            def __init__(self, parameters, lr):
                super().__init__(parameters, {"lr": lr})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.sub_(parameter.grad.sign(), alpha=group["lr"])

        def groups(model, **options):
            few = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2:].parameters()}]
            return optim.SGD(few, lr=0.1, momentum=0.9, **options)

        makers = {
            "foreach": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
            "fused sgd": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
            "fused adam": lambda m: optim.Adam(m.parameters(), lr=1e-2, fused=True),
            "amsgrad": lambda m: optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, foreach=True),
            "rmsprop": lambda m: optim.RMSprop(m.parameters(), lr=1e-2, momentum=0.5, centered=True),
            "adagrad": lambda m: optim.Adagrad(m.parameters(), lr=1e-2),
            "asgd": lambda m: optim.ASGD(m.parameters(), lr=1e-2),
            "groups": groups,
            "own": lambda m: Signs(m.parameters(), 1e-3),
            "tensor rate": lambda m: optim.Adam(m.parameters(), lr=torch.tensor(1e-2)),
        }
        for name, maker in makers.items():
            found = []
            for way in ("ddp", "ours"):
                model = make_model("mlp", seed=offbeat.rank())
                optimizer = maker(model)
                if way == "ours":
                    offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=400)
                train(DistributedDataParallel(model) if way == "ddp" else model, optimizer, "mlp", range(6))
                found.append(digest(model))
            tell(name=name, found=found, start=digest(make_model("mlp")))
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2)
    one, other = (told(rank) for rank in job.ranks)
    assert one == other
    assert len(one) == 10
    for case in one:
        assert case["found"][0] == case["found"][1], case["name"]
        assert case["found"][0] != case["start"]


def test_a_line_search_needs_the_mean_loss(ranks):
    """As a warning at wrapping says; then ranks search alike, and as one process does with gradients of all."""

    def script():
        import torch
        from support import digest, loss_of, make_batch, make_model, mean_gradients, noted_warnings, tell

        import offbeat

        offbeat.init(timeout=20.0)
        me, calls = offbeat.rank(), []
        model, alone = make_model("mlp"), make_model("mlp")
        optimizer, plain = (
            torch.optim.LBFGS(each.parameters(), max_iter=8, line_search_fn="strong_wolfe") for each in (model, alone)
        )
        with noted_warnings() as texts:
            offbeat.DistributedOptimizer(optimizer, model)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, make_batch("mlp", me, 0, size=6 + 20 * me))
            loss.backward()
            calls.append("ours")
            loss = loss.detach()
            offbeat.all_reduce(loss, "mean")
            return loss

        def of_all():
            losses = [lambda m, r=rank: loss_of(m, make_batch("mlp", r, 0, size=6 + 20 * r)) for rank in range(2)]
            for name, gradient in mean_gradients(alone, losses).items():
                alone.get_parameter(name).grad = gradient
            calls.append("alone")
            return sum(loss(alone).detach() for loss in losses) / 2

        same = []
        for _ in range(3):
            same.append(float(optimizer.step(closure)) == float(plain.step(of_all)) and digest(model) == digest(alone))
        tell(same=same, ours=calls.count("ours"), alone=calls.count("alone"), texts=texts)
        offbeat.shutdown()

    job = ranks(script, 2)
    for rank in job.ranks:
        (found,) = told(rank)
        assert found["same"] == [True] * 3, found
        assert found["ours"] == found["alone"] > 12
        assert len(found["texts"]) == int(rank.rank == 0)
    assert "offbeat.all_reduce(loss, 'mean')" in told(job.ranks[0])[0]["texts"][0]
