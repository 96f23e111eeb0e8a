"""Gradients live in buckets; whatever users do to `.grad`, every rank finds the exact mean in it after backward."""

import pytest


@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_users_may_do_what_they_like_with_grad(ranks, layout):
    """Clearing in every way, replacing, scaling in place, keeping a reference to an old one."""

    def script():
        import torch
        from support import check_gradients, loss_of, make_batch, make_model, mean_gradients

        import offbeat

        offbeat.init()
        me = offbeat.rank()
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=500)
        number = iter(range(1000))

        def backward(what, before=lambda: None, carried=False):
            """One backward on other data each time; `carried` keeps what was there."""
            step = next(number)
            kept = {name: p.grad.clone() for name, p in model.named_parameters()} if carried else {}
            before()
            batches = [make_batch("mlp", rank, step) for rank in range(2)]
            want = mean_gradients(model, [lambda m, b=batch: loss_of(m, b) for batch in batches])
            loss_of(model, batches[me]).backward()
            if carried:  # the sum of the old and the new, exchanged anew: the mean of equal parts changes little
                for name, parameter in model.named_parameters():
                    torch.testing.assert_close(parameter.grad, kept[name] + want[name], rtol=1e-5, atol=1e-7)
            else:
                check_gradients(model, want, what)
            optimizer.step()

        backward("first")
        for _ in range(2):
            backward("to none", lambda: optimizer.zero_grad(set_to_none=True))
            backward("to zero", lambda: optimizer.zero_grad(set_to_none=False))
            backward("by model", lambda: model.zero_grad(set_to_none=True))
            backward("by model, to zero", lambda: model.zero_grad(set_to_none=False))

        def replace():
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)

        def delete():
            for parameter in model.parameters():
                del parameter.grad

        # they stay where they are: in their bucket, which is not copied to and fro
        places = [parameter.grad.data_ptr() for parameter in model.parameters()]
        backward("in place", lambda: optimizer.zero_grad(set_to_none=False))
        backward("in place", optimizer.zero_grad)
        assert [parameter.grad.data_ptr() for parameter in model.parameters()] == places
        backward("replaced", replace)
        backward("deleted", delete)

        def point_elsewhere():
            for parameter in model.parameters():
                parameter.grad.data = torch.zeros_like(parameter)

        # the object is the same, the memory is not: what model.to(...) does to gradients
        for _ in range(2):
            backward("pointed elsewhere", point_elsewhere)
        assert [parameter.grad.data_ptr() for parameter in model.parameters()] == places
        backward("accumulated", carried=True)
        optimizer.zero_grad(set_to_none=False)
        backward("after it")

        # what a user keeps is his own after the gradient was cleared, or a view that follows: never a crash
        kept = [parameter.grad for parameter in model.parameters()]
        backward("kept", optimizer.zero_grad)
        assert all(bool(torch.isfinite(each).all()) for each in kept)

        # scaled in place, replaced by half of it: the step takes what the user left there
        for change in ("scaled", "replaced"):
            optimizer.zero_grad()
            backward(change)
            optimizer.zero_grad()
            loss_of(model, make_batch("mlp", me, next(number))).backward()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            wanted = [parameter.grad.clone() * 0.5 for parameter in model.parameters()]
            for parameter in model.parameters():
                if change == "scaled":
                    parameter.grad.mul_(0.5)
                else:
                    parameter.grad = parameter.grad * 0.5
            optimizer.step()
            for parameter, old, half in zip(model.parameters(), before, wanted, strict=True):
                assert torch.equal(parameter, old.add(half, alpha=-0.1)), change
        # only a part of it cleared
        optimizer.zero_grad()
        backward("half way")
        optimizer.zero_grad(set_to_none=False)
        model[0].weight.grad = None
        model[4].bias.grad = torch.zeros(4)
        backward("mixed")
        # a hook of the user's own sees this rank's gradient, and what it gives is what counts
        handle = model[0].weight.register_hook(lambda gradient: gradient * (me + 1))
        optimizer.zero_grad()
        step = next(number)
        batches = [make_batch("mlp", rank, step) for rank in range(2)]
        want = mean_gradients(model, [lambda m: loss_of(m, batches[0]), lambda m: loss_of(m, batches[1])])
        twice = mean_gradients(model, [lambda m: loss_of(m, batches[0]), lambda m: 2 * loss_of(m, batches[1])])
        loss_of(model, batches[me]).backward()
        check_gradients(model, want | {"0.weight": twice["0.weight"]}, "hook")
        handle.remove()
        offbeat.shutdown()

    ranks(script, 2, per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})


def test_all_kinds_of_parameters(ranks):
    """Types, strides and shapes in one model: each gets the mean in its own type, with its own strides."""

    def script():
        import torch
        from support import check_gradients, mean_gradients, same_everywhere
        from torch import nn

        import offbeat

        offbeat.init()
        me, world = offbeat.rank(), offbeat.world_size()

        class Zoo(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(me)
                self.channels = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
                self.turned = nn.Parameter(torch.randn(7, 3).t())
                self.complex = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64))
                self.complex128 = nn.Parameter(torch.randn(3, dtype=torch.complex128))
                self.doubles = nn.Parameter(torch.randn(33, dtype=torch.float64))
                self.brains = nn.Parameter(torch.randn(65).bfloat16())
                self.halves = nn.Parameter(torch.randn(9).half())
                self.scalar = nn.Parameter(torch.tensor(0.5))
                self.empty = nn.Parameter(torch.empty(0, 3))
                self.one = nn.Parameter(torch.randn(1, 1, 1))
                self.gaps = nn.Parameter(torch.randn(6, 4)[:, :2])
                self.register_buffer("count", torch.tensor(7 + me))

            def forward(self, factor):
                total = sum((p.abs() ** 2 * factor).double().sum() for n, p in self.named_parameters() if n != "empty")
                return total + self.empty.sum().double() + self.complex.real.sum().double() * factor

        model = Zoo()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=300)
        for parameter in model.parameters():
            assert same_everywhere(parameter), parameter
        assert int(model.count) == 7
        for step in range(4):
            factors = [float(torch.tensor(1.0 + 0.37 * rank + 0.11 * step)) for rank in range(world)]
            want = mean_gradients(model, [lambda m, f=factor: m(f) for factor in factors])
            # rounded once, at the end: halves are summed in f32
            alone = Zoo()
            alone.load_state_dict(model.state_dict())
            for name in ("brains", "halves"):
                parts = [torch.autograd.grad(alone(factor), getattr(alone, name))[0].float() for factor in factors]
                want[name] = ((parts[0] + parts[1]) / 2).to(getattr(alone, name).dtype)
            optimizer.zero_grad(set_to_none=step != 2)
            model(factors[me]).backward()
            check_gradients(model, want, f"step {step}")
            for name in ("channels", "turned"):
                parameter = getattr(model, name)
                assert parameter.grad.stride() == parameter.stride(), name
            optimizer.step()
            for name, parameter in model.named_parameters():
                assert same_everywhere(parameter), name
        offbeat.shutdown()

    ranks(script, 2)


def test_tied_and_shared_parameters(ranks):
    """A parameter with two names counts once; one with several uses is sent when its gradient is complete."""

    def script():
        import torch
        from support import check_gradients, mean_gradients, tell
        from torch import nn

        import offbeat

        offbeat.init()
        me, world = offbeat.rank(), offbeat.world_size()

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.words = nn.Embedding(11, 8)
                self.middle = nn.Linear(8, 8)
                self.head = nn.Linear(8, 11, bias=False)
                self.head.weight = self.words.weight

            def forward(self, words):
                hidden = self.words(words)
                for _ in range(3):  # the same layer three times
                    hidden = torch.tanh(self.middle(hidden))
                return self.head(hidden).pow(2).mean()

        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=64)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            words = [torch.randint(0, 11, (3, 4), generator=generator) for _ in range(world)]
            want = mean_gradients(model, [lambda m, w=w: m(w) for w in words])
            optimizer.zero_grad()
            model(words[me]).backward()
            assert sorted(want) == ["middle.bias", "middle.weight", "words.weight"]
            check_gradients(model, want, f"step {step}")
            optimizer.step()
        assert model.head.weight is model.words.weight
        tell(names=[name for name, _ in model.named_parameters()])
        offbeat.shutdown()

    ranks(script, 3)


def test_frozen_thawed_and_added_parameters(ranks):
    """What requires no gradient gets none; what is thawed or added later takes part from then on."""

    def script():
        import torch
        from support import check_gradients, loss_of, make_batch, make_model, mean_gradients, same_everywhere

        import offbeat

        offbeat.init()
        me = offbeat.rank()
        model = make_model("mlp", seed=me)
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[:3].parameters(), lr=0.1, momentum=0.9)
        offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=300)
        for name, tensor in model.named_parameters():  # frozen ones and those of no optimizer too
            assert same_everywhere(tensor), name
        number = iter(range(100))

        def step(what, absent, local=()):
            at = next(number)
            batches = [make_batch("mlp", rank, at) for rank in range(2)]
            want = mean_gradients(model, [lambda m, b=batch: loss_of(m, b) for batch in batches])
            mine = mean_gradients(model, [lambda m: loss_of(m, batches[me])])
            model.zero_grad()
            loss_of(model, batches[me]).backward()
            want |= {name: mine[name] for name in local}
            assert sorted(set(dict(model.named_parameters())) - set(want)) == sorted(absent), what
            check_gradients(model, want, what)
            optimizer.step()

        first, last = ["0.bias", "0.weight"], ["4.bias", "4.weight"]
        for _ in range(3):
            step("frozen, and not the optimizer's", first, last)
        before = model[0].weight.detach().clone()
        model[0].requires_grad_(True)
        for _ in range(3):
            step("thawed", [], last)
        assert not torch.equal(before, model[0].weight)
        optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.2})
        for _ in range(3):
            step("added", [])
        model[2].requires_grad_(False)
        for _ in range(3):
            step("frozen", ["2.bias", "2.weight"])
        # one is frozen and another thawed in the same moment: as many as before, and not the same
        model[2].requires_grad_(True)
        model[0].requires_grad_(False)
        for _ in range(3):
            step("swapped", first)
        model[0].requires_grad_(True)
        extra = torch.nn.Parameter(torch.full((5,), float(me)))
        optimizer.add_param_group({"params": [extra]})
        assert extra.tolist() == [0.0] * 5, "what is added comes from rank 0 too"
        optimizer.zero_grad()
        at = next(number)
        (loss_of(model, make_batch("mlp", me, at)) + (extra * (me + 1.0)).sum()).backward()
        assert extra.grad.tolist() == [1.5] * 5
        optimizer.step()
        for name, tensor in [*model.named_parameters(), ("extra", extra)]:
            assert same_everywhere(tensor), name
        offbeat.shutdown()

    ranks(script, 2)


def test_thawed_where_nobody_looks(ranks):
    """Without a forward in training mode buckets are not made anew: an error, not a gradient that stays on its rank."""

    def script():
        import torch
        from support import fails, loss_of, make_batch, make_model, same_everywhere

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init()
        me = offbeat.rank()

        def backward(model, step):
            model.zero_grad()
            loss_of(model, make_batch("mlp", me, step)).backward()

        model = make_model("mlp").eval()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=300)
        for step in range(3):
            backward(model, step)
        model[0].requires_grad_(True)
        fails(InvalidArgument, "0.weight was frozen|model.train()|wrap it again", backward, model, 3)
        offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=300)
        for step in range(4, 7):
            backward(model, step)
            assert same_everywhere(*(parameter.grad for parameter in model.parameters()))
        # a forward in training mode takes it in
        model[2].requires_grad_(False)
        offbeat.DistributedOptimizer(optimizer, model.train(), bucket_bytes=300)
        backward(model, 7)
        model[2].requires_grad_(True)
        backward(model, 8)
        assert same_everywhere(*(parameter.grad for parameter in model.parameters()))
        offbeat.shutdown()

    ranks(script, 2)


def test_what_ddp_is_told_to_ignore_is_every_ranks_own(ranks):
    """Parameters and buffers of `_ddp_params_and_buffers_to_ignore`; all else holds the bits of DDP."""

    def script():
        import torch
        import torch.distributed as dist
        from support import bits, same_everywhere
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()
        me = offbeat.rank()

        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(me)
                # of another shape on each rank: it cannot be exchanged
                self.table = nn.Embedding(5 + me, 4, sparse=True)
                self.norm = nn.BatchNorm1d(4)
                self.head = nn.Linear(4, 2)
                self.register_buffer("seen", torch.full((2 + me,), float(me)))

            def forward(self, words):
                return self.head(self.norm(self.table(words)))

        words = torch.tensor([me, 3, 4, 1])
        found = {}
        for way in ("ddp", "ours", "DataParallel"):
            model = Own()
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["table.weight", "seen"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            wrapped = model
            if way == "ddp":
                wrapped = DistributedDataParallel(model)
            elif way == "ours":
                offbeat.DistributedOptimizer(optimizer, model, check_every=1)
            else:
                wrapped = offbeat.DataParallel(model, optimizer)
            for _ in range(4):
                optimizer.zero_grad()
                wrapped(words).square().sum().backward()
                optimizer.step()
            assert same_everywhere(*model.head.parameters(), *model.norm.parameters())
            assert model.seen.tolist() == [float(me)] * (2 + me)
            assert model.table.weight.grad.is_sparse
            found[way] = [bits(tensor) for tensor in model.state_dict().values()]
        assert found["ours"] == found["ddp"]
        assert found["DataParallel"] == found["ddp"]
        offbeat.shutdown()
        dist.destroy_process_group()

    ranks(script, 2)
