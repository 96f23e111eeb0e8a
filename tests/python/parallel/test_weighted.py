"""Ranks that see different numbers of samples, where an algorithm counts by them."""

import pytest
from support import MIXED, place, told

OWN_HOSTS = {"per_rank": MIXED["own hosts"]}


@pytest.mark.parametrize("where", MIXED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_all_samples_together(ranks, where, dtype):
    """Also when they are gathered over two backwards, with a parameter that nobody uses, and after a backward that
    raised, whose samples do not count."""

    def script():
        import contextlib
        import sys

        import torch
        from support import make_model, same_everywhere

        import offbeat
        from offbeat.algorithms import GradientAllReduce

        offbeat.init(timeout=20.0)
        rank, dtype = offbeat.rank(), getattr(torch, sys.argv[1])
        model, twin = make_model("mlp").to(dtype), make_model("mlp").double()
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(3, dtype=dtype)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, GradientAllReduce(weighted=True))
        used = [parameter for name, parameter in model.named_parameters() if name != "unused"]
        exact = {"rtol": 5e-2, "atol": 5e-3} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        for step in range(3):
            lot = torch.Generator().manual_seed(step)
            sizes = [2 + (other + step) % 3 * 4 for other in range(4)]
            batches = [torch.randn(size, used[0].shape[1], generator=lot).to(dtype) for size in sizes]
            mine = batches[rank]
            optimizer.saw(1000 * rank)
            breaks = used[0].register_hook(lambda _: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                model(mine).sum().backward()
            breaks.remove()
            optimizer.zero_grad()
            with optimizer.no_sync():
                optimizer.saw(1)
                (model(mine[:1]).square().mean() / len(mine)).backward()
            optimizer.saw(len(mine) - 1)
            (model(mine[1:]).square().mean() * (len(mine) - 1) / len(mine)).backward()
            with torch.no_grad():
                for theirs, ours in zip(twin.parameters(), used, strict=True):
                    theirs.copy_(ours)
            twin.zero_grad()
            twin(torch.cat(batches).double()).square().mean().backward()
            for theirs, ours in zip(twin.parameters(), used, strict=True):
                torch.testing.assert_close(ours.grad.double(), theirs.grad, **exact)
            assert same_everywhere(*(parameter.grad for parameter in used))
            optimizer.step()
        offbeat.shutdown()

    place(ranks, where, script, 4, args=[dtype])


@pytest.mark.parametrize("where", ["own hosts", "two on one host"])
def test_weights_are_those_of_all_samples_together(ranks, where):
    """By the formula, after a warm-up that does not count; a DiLoCo that takes the mean is the same, with a codec
    within what that loses. Where all see as many samples the bits are those without weighing."""

    def script():
        import torch
        from support import same_everywhere

        import offbeat
        from offbeat.algorithms import DiLoCo, LocalSGD

        offbeat.init(timeout=20.0)
        rank, sizes = offbeat.rank(), [3.0, 0.0, 5.5, 1.0]

        def pushes(step):
            """A gradient of each host's own."""
            lot = torch.Generator().manual_seed(100 * step + ord(offbeat.host()[-1]))
            return torch.randn(64, 64, generator=lot)

        def run(algorithm, samples):
            model = torch.nn.Linear(64, 64, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            for step in range(algorithm.warmup_steps + 6):
                optimizer.zero_grad()
                if algorithm.weighted:
                    # a rank tells more in the warm-up, which does not count afterwards
                    optimizer.saw(samples if step >= algorithm.warmup_steps else 1.0)
                model.weight.grad = None
                (model.weight * pushes(step)).sum().backward()
                optimizer.step()
            assert same_everywhere(model.weight) or getattr(algorithm, "overlap", 0) > 0
            optimizer.remove()
            return model.weight.detach()

        def mean(steps, weights):
            moved = torch.stack(offbeat.all_gather(-sum(map(pushes, steps))))
            weights = torch.tensor(weights)
            return (moved * weights[:, None, None]).sum(0) / weights.sum()

        warm = LocalSGD(3, warmup_steps=2, weighted=True)
        want = mean(range(2), [1.0] * 4) + mean(range(2, 8), sizes)
        torch.testing.assert_close(run(warm, sizes[rank]), want, rtol=1e-5, atol=1e-5)
        want = mean(range(6), sizes)
        torch.testing.assert_close(run(LocalSGD(3, weighted=True), sizes[rank]), want, rtol=1e-5, atol=1e-5)
        outer = {"outer_lr": 1.0, "outer_momentum": 0.0, "weighted": True}
        torch.testing.assert_close(run(DiLoCo(3, **outer), sizes[rank]), want, rtol=1e-5, atol=1e-5)
        # two steps of 1/255 of a range of about 20, twice
        torch.testing.assert_close(run(DiLoCo(3, codec="minmax8", **outer), sizes[rank]), want, rtol=0, atol=0.4)
        streaming = DiLoCo(4, fragments=2, overlap=1, **outer)
        plain = DiLoCo(4, fragments=2, overlap=1, outer_lr=1.0, outer_momentum=0.0)
        torch.testing.assert_close(run(streaming, 7.0), run(plain, 7.0), rtol=0, atol=0)
        offbeat.shutdown()

    place(ranks, where, script, 4)


def test_a_rank_without_data_does_not_count(ranks):
    """In join(); and what was told before parameters thawed is not forgotten."""

    def script():
        import torch
        from support import make_model, same_everywhere

        import offbeat
        from offbeat.algorithms import GradientAllReduce

        offbeat.init(timeout=20.0)
        rank = offbeat.rank()
        model = make_model("mlp")
        late = list(model.parameters())[-1].requires_grad_(False)
        wrapped = offbeat.DataParallel(model, algorithm=GradientAllReduce(weighted=True))
        with wrapped.join():
            for step in range(2 + rank):
                lot = torch.Generator().manual_seed(10 * step + rank)
                x = torch.randn(1 + rank, next(model.parameters()).shape[1], generator=lot)
                wrapped.zero_grad()
                wrapped.saw(len(x))
                late.requires_grad_(step > 0)
                wrapped(x).square().mean().backward()
        # the last step was that of the last rank alone
        if rank == 2:
            alone = make_model("mlp")
            alone(x).square().mean().backward()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        wrapped.remove()
        assert same_everywhere(*model.parameters())
        offbeat.shutdown()

    ranks(script, 3, **OWN_HOSTS)


def test_what_is_saved_between_averages_counts_after_loading(ranks):
    def script():
        import copy

        import torch
        from support import bits, make_model, train

        import offbeat
        from offbeat.algorithms import LocalSGD

        offbeat.init(timeout=20.0)

        def start():
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, offbeat.DistributedOptimizer(optimizer, model, LocalSGD(4, weighted=True))

        def go(model, optimizer, steps):
            for step in steps:
                optimizer.saw(1 + offbeat.rank() * step)
                train(model, optimizer, "mlp", [step])

        model, optimizer = start()
        go(model, optimizer, range(6))
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        go(model, optimizer, range(6, 9))
        optimizer.remove()
        again, optimizer = start()
        optimizer.load_state_dict(kept[1])
        again.load_state_dict(kept[0])
        go(again, optimizer, range(6, 9))
        for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert bits(ours) == bits(theirs)
        offbeat.shutdown()

    ranks(script, 2, **OWN_HOSTS)


def test_what_makes_no_sense_is_said(ranks):
    def script():
        import torch
        from support import fails, make_model, report, train

        import offbeat
        from offbeat.algorithms import AsyncServer, DiLoCo, GradientAllReduce, LocalSGD
        from offbeat.errors import InvalidArgument

        offbeat.init(timeout=20.0)
        fails(InvalidArgument, "weighted=True|average=False|try:", GradientAllReduce, average=False, weighted=True)
        for kind in (GradientAllReduce, LocalSGD, DiLoCo):
            fails(InvalidArgument, "weighted='yes'|try:", kind, weighted="yes")

        def wrap(algorithm):
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, offbeat.DistributedOptimizer(optimizer, model, algorithm)

        for algorithm in ("allreduce", "bytegrad", AsyncServer(period=0)):
            model, optimizer = wrap(algorithm)
            fails(InvalidArgument, "counts the same|weighted=True", optimizer.saw, 3)
            optimizer.remove()
        model, optimizer = wrap(GradientAllReduce(weighted=True))
        for samples in (-1, float("nan"), "3", True):
            fails(InvalidArgument, "no number of samples|try:", optimizer.saw, samples)
        # nobody has told: every rank says so
        report(train, model, optimizer, "mlp", [0])
        offbeat.shutdown()

    for rank in ranks(script, 2, **OWN_HOSTS).ranks:
        (story,) = told(rank)
        assert story["kind"] == "InvalidArgument", story
        assert "saw(len(batch))" in story["message"], story
