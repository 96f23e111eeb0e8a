"""What scripts written for DDP do with a model: each must end with the mean of what plain copies compute."""

import pytest


def habits():
    """Each habit is a model and a way to use it; a plain copy on the same rank does the same."""
    import collections
    import contextlib
    import copy
    import dataclasses
    import threading

    import torch
    from support import same_everywhere
    from torch import nn

    import offbeat

    offbeat.init(timeout=20.0)
    me, world = offbeat.rank(), offbeat.world_size()

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    class Keywords(Plain):
        def forward(self, *, inputs, scale=1.0, extra=None):
            return super().forward(inputs["x"][0]) * scale + (extra["y"] if extra else 0)

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        others: dict

    class Nested(Plain):
        def forward(self, x):
            y = super().forward(x)
            return Output(y, {"list": [y * 2, None, "word"]})

    @dataclasses.dataclass(slots=True)
    class Compact:
        logits: torch.Tensor
        others: list
        missing: object = dataclasses.field(init=False)

    class Looped(Plain):
        """Its outputs hold themselves, and what is no output at all."""

        def forward(self, x):
            y = super().forward(x)
            output = Compact(y, [Compact, {"twice": [y, y]}])
            output.others.append(output)
            return output

    Pair = collections.namedtuple("Pair", "first second")  # noqa: PYI024

    class Opaque:
        """No container that anybody looks into."""

        def __init__(self, y):
            self.y = y

    class Hidden(Plain):
        def forward(self, x):
            y = super().forward(x)
            return Pair(y.detach(), Opaque(y))

    class Silent(Plain):
        def forward(self, x):
            self.loss = super().forward(x).square().sum()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.relu(self.layer(x)))

    class Detached(Plain):
        def forward(self, x):
            return self.two(self.one(x).detach())

    class Sizes(Plain):
        def __init__(self):
            super().__init__()
            self.nothing, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return super().forward(x) * self.scalar + self.nothing.sum()

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(world + 1))

        def forward(self, x, number):
            return self.experts[number](x)

    class Buffers(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("nothing", torch.zeros(0))
            self.register_buffer("none", None)
            self.register_buffer("count", torch.arange(3) + 10 * me)
            self.register_buffer("flag", torch.tensor(bool(me)))
            self.register_buffer("small", torch.full((2,), float(me), dtype=torch.float16), persistent=False)

        def forward(self, x):
            self.count += 1
            return super().forward(x)

    class Scaled(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            return super().forward(x) * self.scale

    def data(size=5):
        return torch.randn(size, 4)

    def simple(model, _):
        model(data()).square().sum().backward()

    def keywords(model, _):
        model(inputs={"x": [data()]}, scale=2.0, extra={"y": torch.ones(3)}).square().sum().backward()

    def nested(model, _):
        output = model(data())
        (output.logits.sum() + output.others["list"][0].square().sum()).backward()

    def looped(model, _):
        output = model(data())
        (output.logits.sum() + output.others[2].others[1]["twice"][0].square().sum()).backward()

    def hidden(model, _):
        model(data()).second.y.square().sum().backward()

    def silent(model, _):
        assert model(data()) is None
        (model.module if isinstance(model, offbeat.DataParallel) else model).loss.backward()

    def one_backward(model, _):
        (model(data()).sum() * model(data()).square().sum()).backward()

    def crossed(model, _):
        first, second = model(data()).sum(), model(data()).square().sum()
        second.backward()
        first.backward()

    def retained(model, _):
        loss = model(data()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def ignored(model, _):
        for _ in range(3):
            model(data())
        simple(model, 0)

    def penalty(model, _):
        x = data().requires_grad_()
        loss = model(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()

    def uneven(model, _):
        model(data(0 if me == 1 else 5)).sum().backward()

    def expert(model, step):
        model(data(), (me + step) % world).square().sum().backward()

    def evaluating(model, _):
        model.eval()
        simple(model, 0)
        model.train()

    def held(model, _):
        with model.no_sync() if isinstance(model, offbeat.DataParallel) else contextlib.nullcontext():
            simple(model, 0)
            simple(model, 0)
        simple(model, 0)

    def hooked(model, _):
        handles = [
            model.register_forward_hook(lambda module, inputs, output: output * 2),
            model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)),
            next(model.parameters()).register_hook(lambda gradient: gradient * 3),
        ]
        simple(model, 0)
        for handle in handles:
            handle.remove()

    def functional(model, _):
        others = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.named_parameters()}
        torch.func.functional_call(model, others, (data(),)).sum().backward()
        assert all(tensor.grad is None for tensor in model.parameters())
        simple(model, 0)

    def transformed(model, _):
        values = {name: tensor.detach() for name, tensor in model.named_parameters()}

        def loss(values, x):
            return torch.func.functional_call(model, values, (x[None],)).square().sum()

        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, data())
        assert {name: slopes.shape[0] for name, slopes in each.items()} == dict.fromkeys(values, 5)
        if me == 0:  # buffers are not asked for, so one rank may look alone
            torch.func.jacrev(model)(data())
        torch.func.vmap(model)(data()).square().sum().backward()

    def threaded(model, _):
        thread = threading.Thread(target=simple, args=(model, 0))
        thread.start()
        thread.join()

    def failing(model, _):
        with contextlib.suppress(RuntimeError):
            model(torch.ones(2, 9))
        simple(model, 0)

    habits = [
        (Plain, simple),
        (Plain, one_backward),
        (Plain, crossed),
        (Plain, retained),
        (Plain, ignored),
        (Plain, penalty),
        (Plain, uneven),
        (Plain, evaluating),
        (Plain, held),
        (Plain, hooked),
        (Plain, functional),
        (Scaled, transformed),
        (Plain, threaded),
        (Plain, failing),
        (Keywords, keywords),
        (Nested, nested),
        (Looped, looped),
        (Hidden, hidden),
        (Silent, silent),
        (Twice, simple),
        (Detached, simple),
        (Sizes, simple),
        (Buffers, simple),
        (Experts, expert),
    ]
    for kind, use in habits:
        torch.manual_seed(0)
        model = kind()
        plain = copy.deepcopy(model)
        wrapped = offbeat.DataParallel(model)
        for step in range(3):
            for each in (wrapped, plain):
                torch.manual_seed(100 * step + me)
                each.zero_grad()
                use(each, step)
            for (name, tensor), alone in zip(model.named_parameters(), plain.parameters(), strict=True):
                what = kind.__name__, use.__name__, step, name
                theirs = offbeat.all_gather_object(alone.grad)
                if all(gradient is None for gradient in theirs):
                    assert tensor.grad is None, what
                    continue
                want = sum(torch.zeros_like(alone) if each is None else each for each in theirs) / world
                assert tensor.grad is not None, what
                torch.testing.assert_close(tensor.grad, want, rtol=1e-5, atol=1e-6, msg=str(what))
                assert same_everywhere(tensor.grad), what
            with torch.no_grad():
                for tensor, alone in zip(model.parameters(), plain.parameters(), strict=True):
                    alone.copy_(tensor.sub_(0.01 if tensor.grad is None else 0.01 * tensor.grad))
        if kind is Buffers:
            wrapped(data())
            assert (model.count.tolist(), model.flag.item(), model.small.tolist()) == ([4, 5, 6], False, [0.0, 0.0])
        wrapped.remove()
    offbeat.shutdown()


@pytest.mark.parametrize("layout", ["aaa", "aab"])
def test_habits_of_ddp(ranks, layout):
    ranks(habits, 3, per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})
