"""What an optimizer has, and in which groups: parameters that come late, groups that differ, wrappings that fail."""

import pytest


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_that_come_late_are_trained_by_all(ranks, world):
    """Whether a group is added or grows, and also where `DataParallel` has no optimizer, all ranks begin with rank 0's
    values."""

    def script():
        import torch
        from support import make_model, make_optimizer, same_everywhere, train
        from torch import nn

        import offbeat
        from offbeat.algorithms import LocalSGD

        offbeat.init(timeout=20.0)

        class Grown(nn.Module):
            """Has a layer that is nothing at first."""

            def __init__(self, model):
                super().__init__()
                self.model, self.late = model, nn.Identity()

            def forward(self, x):
                return self.late(self.model(x))

        def try_it(wraps, algorithm, way):
            model = Grown(make_model("mlp"))
            optimizer, wrapped = make_optimizer("sgd", model), model
            if wraps == "DistributedOptimizer":
                offbeat.DistributedOptimizer(optimizer, model, algorithm)
            else:
                wrapped = offbeat.DataParallel(model, None if "alone" in wraps else optimizer, algorithm)
            train(wrapped, optimizer, "mlp", range(4))
            torch.manual_seed(offbeat.rank())
            model.late = nn.Linear(4, 4)
            late = list(model.late.parameters())
            if way == "add_param_group":
                optimizer.add_param_group({"params": late})
            else:
                optimizer.param_groups[0]["params"] += late
            before = model.late.weight.detach().clone()
            train(wrapped, optimizer, "mlp", range(4, 8))
            assert not torch.equal(model.late.weight, before)
            assert same_everywhere(*model.parameters()), (wraps, algorithm, way)
            found = offbeat.stats()["models"][-1]
            if offbeat.world_size() > 1:
                assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
            elif "alone" not in wraps:  # nobody else counts there
                assert found["step"] == 8, found
            (optimizer if wraps == "DistributedOptimizer" else wrapped).remove()

        for way in ("add_param_group", "the list"):
            try_it("DataParallel alone", "allreduce", way)
            for wraps in ("DistributedOptimizer", "DataParallel"):
                for algorithm in ("allreduce", "powersgd", LocalSGD(every=2)):
                    try_it(wraps, algorithm, way)
        offbeat.shutdown()

    ranks(script, world)


def test_parameters_that_take_the_place_of_others_are_averaged(ranks):
    """As where layers are thawed by turns: there are as many, but others."""

    def script():
        import itertools

        import torch
        from support import same_everywhere
        from torch import nn

        import offbeat
        from offbeat.algorithms import LocalSGD

        offbeat.init(timeout=20.0)

        def groups(optimizer, parameters):
            optimizer.param_groups.clear()
            optimizer.add_param_group({"params": parameters})

        def assigned(optimizer, parameters):
            optimizer.param_groups[0]["params"] = parameters

        def in_place(optimizer, parameters):
            optimizer.param_groups[0]["params"][:] = parameters

        for way, algorithm in itertools.product((groups, assigned, in_place), ("allreduce", "powersgd", LocalSGD(2))):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
            offbeat.DistributedOptimizer(optimizer, model, algorithm)
            for turn in range(4):
                torch.manual_seed(10 * turn + offbeat.rank())
                before = [parameter.detach().clone() for parameter in model[turn % 3].parameters()]
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.randn(2, 4)).square().mean().backward()
                    if algorithm == "allreduce":
                        assert same_everywhere(*(p.grad for p in model[turn % 3].parameters())), (way, turn)
                    optimizer.step()
                assert same_everywhere(*model.parameters()), (way.__name__, algorithm, turn)
                assert not any(map(torch.equal, before, model[turn % 3].parameters()))
                way(optimizer, list(model[(turn + 1) % 3].parameters()))
            optimizer.remove()
        offbeat.shutdown()

    ranks(script, 2)


def test_groups_that_differ_are_shown(ranks):
    """Settings and state are handed over by groups and places in them, so these must be alike."""

    def script():
        import torch
        from support import fails, make_model

        import offbeat
        from offbeat.errors import Mismatch

        offbeat.init(timeout=20.0)
        model = make_model("mlp")
        first, second, third = (list(layer.parameters()) for layer in (model[0], model[2], model[4]))
        orders = [
            ([first, second, third], [third, second, first]),  # groups in another order
            ([[*first, *second]], [[*second, *first]]),  # parameters in another order
        ]
        for lists in orders:
            optimizer = torch.optim.AdamW([{"params": group} for group in lists[offbeat.rank()]])
            error = fails(Mismatch, "groups of parameters|same order", offbeat.DistributedOptimizer, optimizer, model)
            assert "+group 0: " in str(error), error
            fails(Mismatch, "group 0", offbeat.DataParallel, model, optimizer)
        offbeat.shutdown()

    ranks(script, 2)


def test_a_wrapping_that_fails_leaves_all_as_it_was(ranks):
    """What was wrapped before stays so, and what was not can be wrapped after."""

    def script():
        import torch
        from support import fails, make_model, make_optimizer, same_everywhere, train

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init(timeout=20.0)

        class Lookahead(torch.optim.Optimizer):
            """As it is often written: its base class is not asked."""

            def __init__(self, inner):
                self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

        model = make_model("mlp", seed=offbeat.rank())
        optimizer = make_optimizer("sgd", model)
        wrong = Lookahead(optimizer)
        for wraps in (offbeat.DistributedOptimizer, lambda optimizer, model: offbeat.DataParallel(model, optimizer)):
            fails(InvalidArgument, "Lookahead|super().__init__", wraps, wrong, model)
        optimizer.param_groups[0]["schedule"] = lambda step: step
        fails(InvalidArgument, "optimizer|lambda", offbeat.DistributedOptimizer, optimizer, model)
        del optimizer.param_groups[0]["schedule"]

        offbeat.DistributedOptimizer(optimizer, model)
        fails(InvalidArgument, "none of the model's", offbeat.DistributedOptimizer, optimizer, make_model("mlp"))
        train(model, optimizer, "mlp", range(3))
        assert same_everywhere(*model.parameters())
        offbeat.shutdown()

    ranks(script, 2)


def test_torchs_default_device_changes_nothing(ranks):
    """What ranks tell each other is in the host's memory, wherever new tensors go."""

    def script():
        import torch
        from support import make_model, make_optimizer, same_everywhere, train

        import offbeat

        offbeat.init(timeout=20.0)
        model = make_model("mlp", seed=offbeat.rank())
        optimizer = make_optimizer("adamw", model)
        with torch.device("meta"):
            offbeat.DistributedOptimizer(optimizer, model, "local_sgd", bucket_bytes=1000)
            assert offbeat.all_gather_object(offbeat.rank()) == [0, 1]
            assert offbeat.broadcast_object(offbeat.rank()) == 0
            assert offbeat.shared_empty(0).device.type == "cpu"
        train(model, optimizer, "mlp", range(3))
        with torch.device("meta"), optimizer.join():
            pass
        with torch.device("meta"):
            offbeat.consolidate(model)
        assert same_everywhere(*model.parameters())
        offbeat.shutdown()

    ranks(script, 2)


def test_gradients_that_somebody_holds_stay_what_they_were(ranks):
    """A gradient that is kept from one step to the next keeps its values, as with DDP."""

    def script():
        import torch
        from torch import nn

        import offbeat

        offbeat.init(timeout=20.0)
        for wraps in ("DistributedOptimizer", "DataParallel"):
            model = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "other": nn.Linear(1, 1, bias=False)})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            wrapper = optimizer
            if wraps == "DataParallel":
                wrapper = offbeat.DataParallel(model, optimizer)
            else:
                offbeat.DistributedOptimizer(optimizer, model)
            held = []
            for step in range(5):
                optimizer.zero_grad()
                layers = ["used"] if step == 3 else ["used", "other"]
                sum(model[name](torch.full((1, 1), float(step + 1))).sum() for name in layers).backward()
                held.append([parameter.grad for parameter in model.parameters()])
            assert [used.item() for used, _ in held] == [1, 2, 3, 4, 5]
            assert [None if other is None else other.item() for _, other in held] == [1, 2, 3, None, 5]
            wrapper.remove()
        offbeat.shutdown()

    ranks(script, 2)


def test_what_users_of_ddp_set_and_leave_out(ranks):
    """`require_backward_grad_sync`, and parameters that are each rank's own, which `consolidate` leaves alone."""

    def script():
        import torch
        from support import loss_of, make_batch, make_model, make_optimizer, same_everywhere

        import offbeat

        offbeat.init(timeout=20.0)
        me = offbeat.rank()
        wrapped = offbeat.DataParallel(make_model("mlp"))
        for step in range(3):
            wrapped.zero_grad()
            for micro in range(3):
                wrapped.require_backward_grad_sync = micro == 2
                loss_of(wrapped, make_batch("mlp", me, 3 * step + micro)).backward()
                assert same_everywhere(*(p.grad for p in wrapped.parameters())) == (micro == 2), (step, micro)
        assert wrapped.require_backward_grad_sync
        assert offbeat.stats()["models"][-1]["step"] == 3

        model = make_model("cnn")
        model.own = torch.nn.Parameter(torch.full((2,), float(me)))
        model.register_buffer("mine", torch.full((2,), float(me)))
        model._ddp_params_and_buffers_to_ignore = ["own", "mine"]
        wrapped = offbeat.DataParallel(model, make_optimizer("sgd", model), "local_sgd")
        with torch.no_grad():
            model[0].weight.fill_(float(me))
        assert offbeat.consolidate(model) > 0
        assert torch.equal(model[0].weight, torch.full_like(model[0].weight, 0.5))
        assert model.own.tolist() == model.mine.tolist() == [me, me]
        offbeat.shutdown()

    ranks(script, 2)
