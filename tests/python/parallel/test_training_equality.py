"""Training on several ranks gives what torch's DDP gives, and the same bits however the gradients travel."""

import pytest
from support import told

MODELS = ["cnn", "transformer"]
OPTIMIZERS = ["sgd", "adamw"]
# Adam blows up the rounding noise where the true gradient is 0: biases before BatchNorm, and of keys in attention.
NOISE = ("0.bias", "4.bias", "in_proj_bias")
LAYOUTS = {"one host": "aaaa", "a host each": "abcd", "two hosts": "aabb", "mixed": "abba", "uneven": "abbb"}


def hosts(layout):
    return lambda rank: {"OFFBEAT_HOST": LAYOUTS[layout][rank]}


@pytest.mark.parametrize("layout", ["one host", "a host each"])
def test_two_ranks_hold_the_bits_of_ddp(ranks, layout):
    """Whatever the size of buckets and the wrapper; also BatchNorm's buffers, in which ranks differ after a step."""

    def script():
        import torch.distributed as dist
        from support import digest, make_model, make_optimizer, tell, train
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()
        for kind in ("cnn", "transformer"):
            for choice in ("sgd", "adamw"):
                found = {}
                for way in ("ddp", 1000, 64 << 10, 8 << 20, "again", "DataParallel"):
                    if way in (64 << 10, "again") and offbeat.local_size() == 1:
                        continue
                    # rank 1 starts elsewhere: everything comes from rank 0
                    model = make_model(kind, seed=offbeat.rank())
                    optimizer = make_optimizer(choice, model)
                    wrapped = model
                    if way == "ddp":
                        wrapped = DistributedDataParallel(model)
                    elif way == "DataParallel":
                        wrapped = offbeat.DataParallel(model, optimizer, bucket_bytes=5000)
                    else:
                        size = None if way == "again" else way
                        assert offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=size) is optimizer
                    losses = train(wrapped, optimizer, kind, range(50))
                    found[way] = [digest(model), digest(model, buffers=False), losses[-1]]
                    if way not in ("ddp", "DataParallel"):
                        optimizer.remove()
                tell(kind=kind, choice=choice, found=found)
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2, per_rank=hosts(layout))
    replicas = [told(rank) for rank in job.ranks]
    assert len(replicas[0]) == 4
    for of_rank in replicas:
        for case in of_rank:
            for way, result in case["found"].items():
                assert result == case["found"]["ddp"], (case["kind"], case["choice"], way)
    for one, other in zip(*replicas, strict=True):
        for way, result in one["found"].items():
            assert result[1] == other["found"][way][1], way
            assert result[2] != other["found"][way][2], "ranks have different data"


@pytest.mark.parametrize("layout", ["one host", "two hosts", "mixed", "uneven"])
def test_four_ranks_sum_in_the_documented_order(ranks, layout):
    """The bits of a simulation in one process: hosts first, or all ranks ascending with `hierarchical=False`."""

    def script():
        import os

        from support import digest, make_model, make_optimizer, simulate, tell, train

        import offbeat

        offbeat.init()
        hosts = offbeat.all_gather_object(os.environ["OFFBEAT_HOST"])
        layout = [[rank for rank in range(4) if hosts[rank] == host] for host in dict.fromkeys(hosts)]
        choices = (1000, "auto"), (64 << 10, True), (None, "auto"), (3000, False), (None, False)
        for kind, choice in (("cnn", "adamw"), ("transformer", "sgd")):
            found = {}
            for size, hierarchical in choices:
                model = make_model(kind)
                optimizer = make_optimizer(choice, model)
                algorithm = offbeat.algorithms.GradientAllReduce(hierarchical=hierarchical)
                offbeat.DistributedOptimizer(optimizer, model, algorithm, bucket_bytes=size)
                train(model, optimizer, kind, range(15))
                found[f"{size} {hierarchical}"] = digest(model, buffers=False)
                if offbeat.rank() == 0:
                    found[f"with buffers {size} {hierarchical}"] = digest(model)
                optimizer.remove()
            if offbeat.rank() == 0:
                for name, order in (("by hosts", layout), ("ascending", [[0, 1, 2, 3]])):
                    model = make_model(kind)
                    simulate(model, make_optimizer(choice, model), kind, range(15), order)
                    found[name] = digest(model)
            offbeat.barrier()
            tell(found=found)
        offbeat.shutdown()

    job = ranks(script, 4, per_rank=hosts(layout))
    first, *others = [[case["found"] for case in told(rank)] for rank in job.ranks]
    assert len(first) == 2
    for case, *theirs in zip(first, *others, strict=True):
        by_hosts = [case[f"with buffers {way}"] for way in ("1000 auto", "65536 True", "None auto")]
        flat = [case[f"with buffers {way}"] for way in ("3000 False", "None False")]
        assert by_hosts == [case["by hosts"]] * 3
        assert flat == [case["ascending"]] * 2
        assert (by_hosts[0] == flat[0]) == (layout == "one host"), "the two orders cannot be told apart"
        for their in theirs:
            assert len(their) == 5
            assert their == {way: case[way] for way in their}


@pytest.mark.slow
def test_four_ranks_are_as_close_to_ddp_as_ddp_is_to_itself(ranks):
    """Within three times what DDP differs from itself when it sums in another order, or 1e-5."""

    def script():
        import torch
        import torch.distributed as dist
        from support import differences, digest, make_model, make_optimizer, tell, train
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()

        def backwards(_, bucket):
            parts = [torch.empty_like(bucket.buffer()) for _ in range(4)]
            dist.all_gather(parts, bucket.buffer())
            future = torch.futures.Future()
            future.set_result((parts[3] + parts[2] + parts[1] + parts[0]) / 4)
            return future

        for kind in ("cnn", "transformer"):
            for choice in ("sgd", "adamw"):
                models = {}
                for way in ("ddp", "backwards", "ours"):
                    model = models[way] = make_model(kind)
                    optimizer = make_optimizer(choice, model)
                    wrapped = model
                    if way == "ours":
                        offbeat.DistributedOptimizer(optimizer, model)
                    else:
                        wrapped = DistributedDataParallel(model)
                        if way == "backwards":
                            wrapped.register_comm_hook(None, backwards)
                    train(wrapped, optimizer, kind, range(50))
                tell(
                    ours=differences(models["ours"], models["ddp"]),
                    theirs=differences(models["backwards"], models["ddp"]),
                    far=max(differences(models["ours"], make_model(kind)).values()),
                    choice=choice,
                    digest=digest(models["ours"], buffers=False),
                )
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 4)
    for cases in zip(*(told(rank) for rank in job.ranks), strict=True):
        assert len({case["digest"] for case in cases}) == 1
        case = cases[0]
        kept = [name for name in case["ours"] if case["choice"] == "sgd" or not name.endswith(NOISE)]
        assert case["far"] > 1e-2, "nothing was learned"
        ours, theirs = (max(case[way][name] for name in kept) for way in ("ours", "theirs"))
        assert 0 < theirs < 1e-3
        assert ours <= max(3 * theirs, 1e-5), case


@pytest.mark.parametrize("layout", ["one host", "a host each"])
def test_many_small_parameters_and_a_large_one(ranks, layout):
    """200 of 1 kB and one of 25 MB, in small and in large buckets: the exact mean of what all ranks have."""

    def script():
        import torch
        from support import digest, make_optimizer, mean_in_order, tell
        from torch import nn

        import offbeat

        offbeat.init()

        class Wide(nn.Module):
            def __init__(self):
                super().__init__()
                self.large = nn.Parameter(torch.zeros(25 << 18))
                self.small = nn.ParameterList(torch.zeros(256) for _ in range(200))

            def forward(self, wanted):
                large = (self.large * wanted[0]).sum()
                return large + sum((one * wish).sum() for one, wish in zip(self.small, wanted[1], strict=True))

        def wishes(rank, step):
            generator = torch.Generator().manual_seed(10 * step + rank)
            return torch.randn(25 << 18, generator=generator), torch.randn(200, 256, generator=generator)

        for size in (4096, 8 << 20):
            model = Wide()
            optimizer = make_optimizer("sgd", model)
            offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=size)
            for step in range(3):
                optimizer.zero_grad()
                everybody = [wishes(rank, step) for rank in range(2)]
                model(everybody[offbeat.rank()]).backward()
                assert torch.equal(model.large.grad, mean_in_order([large for large, _ in everybody]))
                small = mean_in_order([small for _, small in everybody])
                for at, parameter in enumerate(model.small):
                    assert torch.equal(parameter.grad, small[at]), (size, step, at)
                optimizer.step()
            tell(size=size, digest=digest(model))
            optimizer.remove()
        offbeat.shutdown()

    job = ranks(script, 2, per_rank=hosts(layout))
    one, other = (told(rank) for rank in job.ranks)
    assert one == other
    assert len({case["digest"] for case in one}) == 1


@pytest.mark.parametrize("layout", ["one host", "uneven"])
def test_gradients_are_the_users_own_when_backward_returns(ranks, layout):
    """Whatever is written into them at once, also while other ranks are still busy, reaches no other rank."""

    def script():
        import random
        import time

        import torch
        from torch import nn

        import offbeat

        offbeat.init()
        me, world = offbeat.rank(), offbeat.world_size()
        dice = random.Random(me)
        sizes = [200_000, 3, 70_000, 1, 5000]
        ramps = [torch.arange(size).remainder(97).float() for size in sizes]

        class Ramps(nn.Module):
            def __init__(self):
                super().__init__()
                self.values = nn.ParameterList(torch.zeros(size) for size in sizes)

            def forward(self):
                return sum((p * ramp).sum() for p, ramp in zip(self.values, ramps, strict=True))

        model = Ramps()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=300_000)
        for step in range(60):
            if dice.random() < 0.2:
                time.sleep(0.003)
            factors = [float(7 * rank + step) for rank in range(world)]
            loss = model() * factors[me]
            if dice.random() < 0.2:
                loss.register_hook(lambda _: time.sleep(0.003))
            loss.backward()
            for parameter, ramp in zip(model.values, ramps, strict=True):
                want = ramp * (sum(factors) / world)  # whole numbers, and halves of them: exact
                assert torch.equal(parameter.grad, want), (step, parameter.grad, want)
                parameter.grad.fill_(float("nan"))
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step % 2:
                assert not any(bool(parameter.grad.any()) for parameter in model.values)
        offbeat.shutdown()

    ranks(script, 4, per_rank=hosts(layout))
