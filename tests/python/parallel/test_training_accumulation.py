"""`no_sync()` and several backwards in a step: DDP's meaning, and the gradient of the big batch."""

import pytest


def test_no_sync_is_read_at_forward_as_in_ddp(ranks):
    """All combinations of forward and backward inside and outside; then an exchange of what has accumulated.

    Also in evaluation mode, in which models with frozen statistics are trained.
    """

    def script():
        import contextlib
        import itertools

        import torch.distributed as dist
        from support import bits, loss_of, make_batch, make_model, make_optimizer, same_everywhere, tell
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()
        me = offbeat.rank()

        def gradients(wrapped, contexts, forward_inside, backward_inside):
            """Of a step before, then of one with the combination, then of one more that exchanges everything."""
            found = []
            for step, inside in enumerate([(False, False), (forward_inside, backward_inside), (False, False)]):
                with contexts() if inside[0] else contextlib.nullcontext():
                    loss = loss_of(wrapped, make_batch("mlp", me, step))
                with contexts() if inside[1] else contextlib.nullcontext():
                    loss.backward()
                found.append([bits(p.grad) for p in wrapped.parameters()])
                equal = same_everywhere(*(p.grad for p in wrapped.parameters()))
                assert equal == (not inside[0]), (step, inside, equal)
            return found

        for forward_inside, backward_inside, training in itertools.product((False, True), repeat=3):
            results = []
            ddp = DistributedDataParallel(make_model("mlp")).train(training)
            results.append(gradients(ddp, ddp.no_sync, forward_inside, backward_inside))
            model = make_model("mlp").train(training)
            optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=300)
            results.append(gradients(model, optimizer.no_sync, forward_inside, backward_inside))
            wrapper = offbeat.DataParallel(make_model("mlp")).train(training)
            results.append(gradients(wrapper, wrapper.no_sync, forward_inside, backward_inside))
            assert results[1] == results[0], ("DistributedOptimizer", forward_inside, backward_inside, training)
            assert results[2] == results[0], ("DataParallel", forward_inside, backward_inside, training)
            tell(forward=forward_inside, backward=backward_inside)
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2)
    assert job.ranks[0].out.count("\n") == 8


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_accumulation_holds_the_bits_of_ddp(ranks, kind):
    """With no_sync(), and with an exchange in each backward; also BatchNorm's buffers, which travel once a step."""

    def script():
        import contextlib
        import sys

        import torch.distributed as dist
        from support import digest, loss_of, make_batch, make_model, make_optimizer, tell
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        kind = sys.argv[1]
        dist.init_process_group("gloo")
        offbeat.init()

        def accumulate(wrapped, optimizer, held):
            for step in range(6):
                optimizer.zero_grad(set_to_none=bool(step % 2))
                for part in range(4):
                    with held() if part < 3 else contextlib.nullcontext():
                        (loss_of(wrapped, make_batch(kind, offbeat.rank(), 10 * step + part)) / 4).backward()
                optimizer.step()

        for syncs in ("no_sync", "each"):
            for choice in ("sgd", "adamw"):
                found = {}
                for way in ("ddp", 600, 1 << 20, "DataParallel"):
                    model = make_model(kind)
                    optimizer = make_optimizer(choice, model)
                    if way == "ddp":
                        wrapped = holder = DistributedDataParallel(model)
                    elif way == "DataParallel":
                        wrapped = holder = offbeat.DataParallel(model)
                    else:
                        wrapped, holder = model, offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=way)
                    accumulate(wrapped, optimizer, holder.no_sync if syncs == "no_sync" else contextlib.nullcontext)
                    found[way] = digest(model)
                    assert found[way] == found["ddp"], (syncs, choice, way)
                tell(found=found)
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2, args=[kind])
    assert job.ranks[0].out.count("\n") == 4


def test_accumulation_is_the_big_batch(ranks):
    """Micro-batches of all ranks together give the gradient of one process that has them all."""

    def script():
        import contextlib

        import torch
        from support import loss_of, make_batch, make_model, make_optimizer, same_everywhere

        import offbeat

        offbeat.init()
        me, world = offbeat.rank(), offbeat.world_size()
        model, alone = make_model("mlp"), make_model("mlp")
        optimizer, plain = make_optimizer("sgd", model), make_optimizer("sgd", alone)
        offbeat.DistributedOptimizer(optimizer, model)
        for step in range(8):
            parts = 1 + step % 4
            optimizer.zero_grad()
            for part in range(parts):
                with optimizer.no_sync() if part < parts - 1 else contextlib.nullcontext():
                    (loss_of(model, make_batch("mlp", me, 10 * step + part)) / parts).backward()
            optimizer.step()
            everything = [make_batch("mlp", rank, 10 * step + part) for rank in range(world) for part in range(parts)]
            plain.zero_grad()
            loss_of(alone, [torch.cat(each) for each in zip(*everything, strict=True)]).backward()
            for mine, big in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, big.grad, rtol=1e-5, atol=1e-7)
                assert same_everywhere(mine.grad)
            plain.step()
        for mine, big in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, big, rtol=1e-5, atol=1e-6)
        # the last part of the last batch is shorter on one rank: each rank's mean counts the same, as in DDP
        optimizer.zero_grad()
        loss_of(model, make_batch("mlp", me, 99, size=2 + 3 * me)).backward()
        losses = [loss_of(alone, make_batch("mlp", rank, 99, size=2 + 3 * rank)) for rank in range(world)]
        plain.zero_grad()
        alone.load_state_dict(model.state_dict())
        losses = [loss_of(alone, make_batch("mlp", rank, 99, size=2 + 3 * rank)) for rank in range(world)]
        (sum(losses) / world).backward()
        for mine, big in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, big.grad, rtol=1e-5, atol=1e-7)
        offbeat.shutdown()

    ranks(script, 3)


def test_unusual_orders_of_forward_and_backward(ranks):
    """Two forwards for one backward, two backwards for one forward, an exception in no_sync(), nesting."""

    def script():
        import contextlib

        import torch
        from support import (
            check_gradients,
            loss_of,
            make_batch,
            make_model,
            make_optimizer,
            mean_gradients,
            mean_in_order,
            same_everywhere,
        )

        import offbeat

        offbeat.init()
        me = offbeat.rank()
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=300)

        def loss(step, of=None, rank=me):
            return loss_of(of or model, make_batch("mlp", rank, step))

        def want(*functions):
            return mean_gradients(model, functions)

        for _ in range(2):  # in the first round and in a later one
            # one of two forwards is inside: the backward of both exchanges
            optimizer.zero_grad()
            with optimizer.no_sync():
                first = loss(1)
            (first + loss(2)).backward()
            check_gradients(model, want(*(lambda m, r=rank: loss(1, m, r) + loss(2, m, r) for rank in range(2))))

            # the same graph twice: the sum of both, the same on all ranks
            optimizer.zero_grad()
            once = loss(3)
            once.backward(retain_graph=True)
            single = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            check_gradients(model, want(*(lambda m, r=rank: loss(3, m, r) for rank in range(2))), "first of two")
            once.backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, 2 * single[name], rtol=1e-5, atol=1e-7)
                assert same_everywhere(parameter.grad), name

            # a forward that raised has not asked for an exchange, on whichever rank
            optimizer.zero_grad()
            if me:
                with contextlib.suppress(RuntimeError):
                    model(torch.ones(2, 99))
            with optimizer.no_sync():
                loss(3).backward()
            check_gradients(model, want(lambda m: loss(3, m)), "after a forward that raised")

            # two forwards, then two backwards
            optimizer.zero_grad()
            one, two = loss(4), loss(5)
            one.backward()
            two.backward()
            parts = [want(*(lambda m, r=rank, s=step: loss(s, m, r) for rank in range(2))) for step in (4, 5)]
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, parts[0][name] + parts[1][name], rtol=1e-5, atol=1e-7)
                assert same_everywhere(parameter.grad), name

            # an exception ends no_sync(), and the outer of two holds after the inner one
            optimizer.zero_grad()
            with contextlib.suppress(ValueError), optimizer.no_sync():
                raise ValueError
            loss(6).backward()
            check_gradients(model, want(*(lambda m, r=rank: loss(6, m, r) for rank in range(2))), "after an exception")
            optimizer.zero_grad()
            with optimizer.no_sync():
                with optimizer.no_sync():
                    pass
                loss(7).backward()
            check_gradients(model, want(lambda m: loss(7, m)), "nested")
            # only what a forward without no_sync() touches goes out with what has accumulated
            (model[4](torch.ones(1, 12)).sum() * (me + 1) + loss(8)).backward()
            locals_ = [mean_gradients(model, [lambda m, r=rank: loss(7, m, r)]) for rank in range(2)]
            news = [
                mean_gradients(model, [lambda m, r=rank: m[4](torch.ones(1, 12)).sum() * (r + 1) + loss(8, m, r)])
                for rank in range(2)
            ]
            for name, parameter in model.named_parameters():
                mean = mean_in_order([locals_[rank][name] + news[rank][name] for rank in range(2)])
                torch.testing.assert_close(parameter.grad, mean, rtol=1e-5, atol=1e-7)
                assert same_everywhere(parameter.grad), name
            optimizer.zero_grad()
        offbeat.shutdown()

    ranks(script, 2)


def test_backwards_through_several_forwards_as_in_ddp(ranks):
    """One backward goes through a forward inside of no_sync() and one outside, in either order, also in evaluation."""

    def script():
        import contextlib
        import itertools

        import torch.distributed as dist
        from support import bits, loss_of, make_batch, make_model, make_optimizer, same_everywhere, tell
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init(timeout=20.0)
        me = offbeat.rank()

        def gradients(wrapped, contexts, held_first):
            found = []
            for step in range(3):
                losses = []
                for inside in (held_first, not held_first):
                    with contexts() if inside else contextlib.nullcontext():
                        losses.append(loss_of(wrapped, make_batch("mlp", me, 10 * step + inside)))
                wrapped.zero_grad()
                # a kept graph has had its exchange when it is gone through again
                sum(losses).backward(retain_graph=True)
                assert same_everywhere(*(p.grad for p in wrapped.parameters())), step
                found.append([bits(p.grad) for p in wrapped.parameters()])
                with contexts():
                    last = loss_of(wrapped, make_batch("mlp", me, 10 * step + 2))
                wrapped.zero_grad()
                (last + sum(losses)).backward()
                found.append([bits(p.grad) for p in wrapped.parameters()])
                assert not same_everywhere(*(p.grad for p in wrapped.parameters())), step
            return found

        for training, held_first in itertools.product((True, False), repeat=2):
            ddp = DistributedDataParallel(make_model("mlp")).train(training)
            model = make_model("mlp").train(training)
            optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=300)
            want = gradients(ddp, ddp.no_sync, held_first)
            assert gradients(model, optimizer.no_sync, held_first) == want, (training, held_first)
            tell(training=training, held_first=held_first)

            # a forward in evaluation that no backward follows says nothing, also where only one rank makes it
            model.train()
            kept = None
            for _ in range(2):
                if me == 0:
                    kept = loss_of(model.eval(), make_batch("mlp", me, 50))
                    model.train()
                optimizer.zero_grad()
                with optimizer.no_sync():
                    loss_of(model, make_batch("mlp", me, 51)).backward()
                assert not same_everywhere(*(p.grad for p in model.parameters()))
                loss_of(model, make_batch("mlp", me, 52)).backward()
                assert same_everywhere(*(p.grad for p in model.parameters()))
            del kept
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2)
    assert job.ranks[0].out.count("\n") == 4


def test_outputs_that_are_parameters_or_inputs(ranks):
    """What a forward passes on outlives its graph: it holds back and exchanges as DDP does, and keeps no hooks."""

    def script():
        import copy
        import gc
        import weakref

        import torch
        import torch.distributed as dist
        from support import bits, tell
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init(timeout=20.0)

        class Passes(nn.Module):
            def __init__(self, what):
                super().__init__()
                torch.manual_seed(0)
                self.what, self.layer, self.scale = what, nn.Linear(8, 1), nn.Parameter(torch.ones(1))

            def forward(self, x):
                outputs = {
                    "parameter": lambda: (self.layer(x), self.scale),
                    "input": lambda: (self.layer(x) * self.scale, x),
                    "parameters only": lambda: (self.layer.weight, self.layer.bias, self.scale),
                }
                return outputs[self.what]()

        def gradients(wrapped, contexts, inputs):
            found = []
            for step, held in enumerate((False, False, True, False, True, True, False)):
                wrapped.zero_grad()
                x = inputs[step % 2]
                with contexts() if held else torch.enable_grad():
                    loss = sum(output.square().sum() * (1 + offbeat.rank()) for output in wrapped(x))
                    loss.backward()
                found.append([bits(p.grad) for p in wrapped.parameters()])
            return found

        for what in ("parameter", "input", "parameters only"):
            for training in (True, False):
                plain = Passes(what).train(training)
                inputs = [torch.full((2, 8), 1.0 + offbeat.rank() + step, requires_grad=True) for step in range(2)]
                ddp = DistributedDataParallel(copy.deepcopy(plain))
                want = gradients(ddp, ddp.no_sync, inputs)
                model = copy.deepcopy(plain)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=16)
                assert gradients(model, optimizer.no_sync, inputs) == want, (what, training)
                replica = weakref.ref(optimizer._offbeat.replica)
                optimizer.remove()
                assert not any(tensor._backward_hooks for tensor in (*model.parameters(), *inputs))
                gc.collect()
                assert replica() is None
                tell(what=what)
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2)
    assert job.ranks[0].out.count("\n") == 6
