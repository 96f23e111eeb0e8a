"""Unusual graphs: activation checkpointing, compiled models, double backward, partial backward."""

import pytest
from support import told


@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_activation_checkpointing(ranks, layout):
    """Both kinds, also with layers that several blocks share: those get several gradients in one backward."""

    def script():
        import torch
        from support import bits, mean_in_order, tell
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        import offbeat

        offbeat.init()
        me, world = offbeat.rank(), offbeat.world_size()

        class Blocks(nn.Module):
            def __init__(self, reentrant, shared):
                super().__init__()
                torch.manual_seed(0)
                self.reentrant = reentrant
                self.first = nn.Linear(6, 6)
                self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
                if shared:
                    self.blocks[2] = self.blocks[0]
                self.last = nn.Linear(6, 2)

            def forward(self, inputs):
                hidden = self.first(inputs)
                for block in self.blocks:
                    if self.reentrant is None:
                        hidden = block(hidden)
                    else:
                        hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
                return self.last(hidden).pow(2).mean()

        def inputs(rank, step):
            return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))

        for shared in (False, True):
            for reentrant in (None, False, True):
                model = Blocks(reentrant, shared)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=64)
                for step in range(5):
                    parts = []
                    for rank in range(world):
                        alone = Blocks(reentrant, shared)
                        alone.load_state_dict(model.state_dict())
                        alone(inputs(rank, step)).backward()
                        parts.append([parameter.grad for parameter in alone.parameters()])
                    optimizer.zero_grad(set_to_none=step != 3)
                    model(inputs(me, step)).backward()
                    for (name, parameter), *gradients in zip(model.named_parameters(), *parts, strict=True):
                        want = mean_in_order(gradients)
                        assert bits(parameter.grad) == bits(want), (shared, reentrant, step, name)
                    optimizer.step()
                tell(shared=shared, reentrant=reentrant)
        offbeat.shutdown()

    job = ranks(script, 2, per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})
    assert len(told(job.ranks[0])) == 6


def test_compiled_models(ranks):
    """Wrapped before and after compiling, by both wrappers; one rank may compile and the other not."""

    def script():
        import torch
        from support import (
            check_gradients,
            digest,
            loss_of,
            make_batch,
            make_model,
            make_optimizer,
            mean_gradients,
            same_everywhere,
            tell,
        )

        import offbeat

        offbeat.init(timeout=60.0)
        me = offbeat.rank()

        def compiled(model, **options):
            return torch.compile(model, backend="aot_eager", **options)

        def optimize(model, of=None):
            optimizer = make_optimizer("sgd", model)
            return offbeat.DistributedOptimizer(optimizer, of or model, bucket_bytes=500)

        def compile_then_wrap(model):
            graph = compiled(model, fullgraph=True)
            return graph, optimize(model, graph)

        def wrap_then_compile(model):
            optimizer = optimize(model)
            return compiled(model), optimizer

        def in_place(model):
            optimizer = optimize(model)
            model.compile(backend="aot_eager")
            return model, optimizer

        def parallel_then_compile(model):
            return compiled(offbeat.DataParallel(model), fullgraph=True), make_optimizer("sgd", model)

        def compile_then_parallel(model):
            return offbeat.DataParallel(compiled(model)), make_optimizer("sgd", model)

        def on_one_rank(model):
            return compile_then_wrap(model) if me else (model, optimize(model))

        found = {}
        ways = compile_then_wrap, wrap_then_compile, in_place, parallel_then_compile, compile_then_parallel, on_one_rank
        for way in ways:
            torch.compiler.reset()
            model = make_model("cnn", seed=me)
            wrapped, optimizer = way(model)
            reference = make_model("cnn")
            for step in range(5):
                # one forward of the plain model for each rank, from rank 0's buffers
                reference.load_state_dict(model.state_dict())
                losses = [lambda m, r=rank, s=step: loss_of(m, make_batch("cnn", r, s)) for rank in range(2)]
                want = mean_gradients(reference, losses)
                optimizer.zero_grad()
                losses[me](wrapped).backward()
                for name, parameter in model.named_parameters():
                    assert same_everywhere(parameter.grad), (way.__name__, step, name)
                    torch.testing.assert_close(parameter.grad, want[name], rtol=1e-4, atol=1e-6)
                optimizer.step()
            found[way.__name__] = digest(model, buffers=False)
        check_gradients(make_model("cnn"), {})
        tell(**found)
        offbeat.shutdown()

    job = ranks(script, 2, timeout=110)
    one, other = (told(rank)[0] for rank in job.ranks)
    assert one == other
    assert len(one) == 6


def test_double_and_partial_backwards(ranks):
    """A gradient penalty, a backward to a few parameters only, the model used inside another, outputs of all kinds."""

    def script():
        import dataclasses

        import torch
        from support import bits, check_gradients, loss_of, make_batch, make_model, make_optimizer, mean_gradients, wrap
        from torch import nn

        import offbeat

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me = offbeat.rank()

        def penalised(model, rank, step):
            inputs, labels = make_batch("mlp", rank, step)
            inputs.requires_grad_()
            outputs = model(inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            return nn.functional.cross_entropy(outputs, labels) + slope.pow(2).mean()

        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=300)
        for step in range(4):
            want = mean_gradients(model, [lambda m, r=rank, s=step: penalised(m, r, s) for rank in range(2)])
            optimizer.zero_grad()
            penalised(model, me, step).backward(create_graph=step == 3)
            check_gradients(model, want, f"penalty {step}")
            optimizer.step()
        for step in range(3):
            want = mean_gradients(
                model, [lambda m, r=rank, s=step: loss_of(m, make_batch("mlp", r, s)) for rank in range(2)]
            )
            optimizer.zero_grad()
            few = ["2.weight", "4.bias"]
            loss_of(model, make_batch("mlp", me, step)).backward(inputs=[model.get_parameter(name) for name in few])
            check_gradients(model, {name: want[name] for name in few}, f"partial {step}")
            optimizer.step()

        @dataclasses.dataclass
        class Answer:
            scores: torch.Tensor
            notes: list

        class Nested(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.inner = nn.Linear(8, 4)
                self.unrelated = nn.Linear(8, 4)

            def forward(self, inputs, shape):
                scores = self.inner(inputs)
                outputs = {"tuple": (scores, 1), "dict": {"a": {"b": [scores]}}, "dataclass": Answer(scores, ["x"])}
                # what is left aside by the loss must not keep anybody waiting
                return outputs[shape], self.unrelated(inputs)

        def scores_in(output):
            answer, _ = output
            if isinstance(answer, Answer):
                return answer.scores
            return answer[0] if isinstance(answer, tuple) else answer["a"]["b"][0]

        for wraps in ("DistributedOptimizer", "DataParallel"):
            model = Nested()
            optimizer = make_optimizer("sgd", model)
            called = wrap(wraps, model, optimizer, bucket_bytes=64)
            outer = nn.ModuleDict({"model": called, "own": nn.Linear(4, 2)})
            for step, shape in enumerate(("tuple", "dict", "dataclass") * 2):
                inputs = [make_batch("mlp", rank, step)[0] for rank in range(2)]
                optimizer.zero_grad()
                outer.own.zero_grad()
                outer.own(scores_in(called(inputs[me], shape=shape))).pow(2).sum().backward()
                parts, mine = [], None
                for rank in range(2):
                    alone = Nested()
                    alone.load_state_dict(model.state_dict())
                    head = nn.Linear(4, 2)
                    head.load_state_dict(outer.own.state_dict())
                    head(alone.inner(inputs[rank])).pow(2).sum().backward()
                    parts.append(alone.inner.weight.grad)
                    mine = head.weight.grad if rank == me else mine
                assert bits(model.inner.weight.grad) == bits((parts[0] + parts[1]) / 2), (wraps, shape)
                assert bits(outer.own.weight.grad) == bits(mine), "another's parameters are exchanged"
                assert model.unrelated.weight.grad is None
                optimizer.step()
        offbeat.shutdown()

    ranks(script, 2)


@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_a_model_that_is_never_called_itself(ranks, layout):
    """Its methods, its submodules or its bare parameters are used: backward is enough to know."""

    def script():
        import contextlib

        import torch
        from support import check_gradients, make_batch, make_model, mean_gradients, noted_warnings
        from torch import nn

        import offbeat

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me = offbeat.rank()

        class Methods(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = make_model("mlp")
                self.bare = nn.Parameter(torch.ones(4))
                self.norm = nn.BatchNorm1d(4)

            def loss(self, batch):
                return nn.functional.cross_entropy(self.norm(self.body(batch[0])) * self.bare, batch[1])

        for wraps in ("DistributedOptimizer", "DataParallel"):
            for size in (100, 1 << 20):
                model = Methods()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                if wraps == "DataParallel":
                    holder = offbeat.DataParallel(model, bucket_bytes=size)
                else:
                    holder = offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=size)
                with noted_warnings() as texts:
                    for step in range(6):
                        losses = [lambda m, r=rank, s=step: m.loss(make_batch("mlp", r, s)) for rank in range(2)]
                        want = mean_gradients(model, losses if step != 4 else losses[me : me + 1])
                        optimizer.zero_grad(set_to_none=step % 2 == 0)
                        with holder.no_sync() if step == 4 else contextlib.nullcontext():
                            losses[me](model).backward()
                        check_gradients(model, want, f"{wraps}, step {step}, buckets of {size}")
                        if step != 4:
                            optimizer.step()
                assert texts == []
        offbeat.shutdown()

    ranks(script, 2, per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})


def test_scripted_models(ranks):
    """Scripted before `DataParallel`: trained as the plain model is; every other order says what to do instead."""

    def script():
        import copy

        import torch
        from support import differences, fails, make_model, make_optimizer, same_everywhere, train

        import offbeat
        from offbeat.errors import Unsupported

        offbeat.init(timeout=20.0)
        plain, scripted = make_model("mlp"), torch.jit.script(make_model("mlp"))
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", plain), plain)
        train(plain, optimizer, "mlp", range(3))
        for model in (plain, copy.deepcopy(plain)):
            fails(AttributeError, "torch.jit.script|try: script it first", torch.jit.script, model)
        torch.jit.trace(plain, torch.ones(2, 8))

        other = make_optimizer("sgd", scripted)
        words = "torch.jit.script|try: offbeat.DataParallel"
        fails(Unsupported, words, offbeat.DistributedOptimizer, other, scripted)
        wrapped = offbeat.DataParallel(scripted, other)
        train(wrapped, other, "mlp", range(3))
        # rounded in other places
        assert max(differences(scripted, plain).values()) < 1e-5
        assert same_everywhere(*scripted.parameters())
        optimizer.remove()
        assert torch.equal(torch.jit.script(plain)(torch.ones(2, 8)), plain(torch.ones(2, 8)))
        offbeat.shutdown()

    ranks(script, 2)
