"""Every collective, on every type and operation, in worlds of one to four, with either kind of store."""

import pytest


def every_collective():
    """The signatures, on plain and shared tensors; ends with the subgroup of all but the first rank."""
    import torch
    from support import fails

    import offbeat

    offbeat.init(timeout=30.0)
    me, world = offbeat.rank(), offbeat.world_size()
    last, everyone = world - 1, list(range(world))
    assert (offbeat.local_rank(), offbeat.local_size()) == (me, world)

    def full(value, shape=(2, 3)):
        return torch.full(shape, float(value))

    for make in full, lambda value, shape=(2, 3): offbeat.shared_empty(shape).fill_(value):
        tensor = make(me + 1)
        assert offbeat.all_reduce(tensor) is None
        assert torch.equal(tensor, full(sum(range(world + 1))))

        tensor = make(me + 1)
        assert offbeat.all_reduce(tensor, op="mean", group=None) is None
        assert torch.equal(tensor, full((world + 1) / 2))

        tensor = make(me + 1)
        assert offbeat.reduce(tensor, last, "max") is None
        assert torch.equal(tensor, full(world if me == last else me + 1))

        tensor = make(me)
        assert offbeat.broadcast(tensor, src=last) is None
        assert torch.equal(tensor, full(last))
        tensor = make(me)
        offbeat.broadcast(tensor)
        assert torch.equal(tensor, full(0))

        parts = offbeat.all_gather(make(me))
        assert len(parts) == world
        assert all(torch.equal(part, full(rank)) for rank, part in enumerate(parts))
        parts = offbeat.all_gather(make(me, (me, 2)))
        assert [tuple(part.shape) for part in parts] == [(rank, 2) for rank in everyone]
        assert all(torch.equal(part, full(rank, (rank, 2))) for rank, part in enumerate(parts))

        parts = offbeat.gather(make(me, (me + 1,)), last)
        if me == last:
            assert all(torch.equal(part, full(rank, (rank + 1,))) for rank, part in enumerate(parts))
        else:
            assert parts is None

        out = make(-1)
        tensors = [make(10 * me + rank) for rank in everyone] if me == last else None
        assert offbeat.scatter(tensors, last, out) is None
        assert torch.equal(out, full(10 * last + me))

        mine = offbeat.reduce_scatter([make(me + 10 * rank) for rank in everyone], "sum")
        assert torch.equal(mine, full(sum(everyone) + 10 * me * world))
        # of different sizes, which all ranks see alike
        mine = offbeat.reduce_scatter([make(1, (rank, 2)) for rank in everyone])
        assert torch.equal(mine, full(world, (me, 2)))

        parts = offbeat.all_to_all([make(10 * me + rank, (me + rank,)) for rank in everyone])
        assert all(torch.equal(part, full(10 * rank + me, (me + rank,))) for rank, part in enumerate(parts))

        if world > 1:
            peer, source = (me + 1) % world, (me - 1) % world
            out = make(-1)
            for tag in (7, 0):
                if me % 2 == 0:
                    offbeat.send(make(me + tag), peer, tag=tag)
                    offbeat.recv(out, source, tag=tag)
                else:
                    offbeat.recv(out, source, tag=tag)
                    offbeat.send(make(me + tag), peer, tag=tag)
                assert torch.equal(out, full(source + tag))

    assert offbeat.barrier() is None
    assert offbeat.broadcast_object({"from": me, "list": [1, None]}, src=last) == {"from": last, "list": [1, None]}
    assert offbeat.all_gather_object("x" * me) == ["x" * rank for rank in everyone]
    if world > 1:
        others = offbeat.Group(reversed(everyone[1:]))
        assert others.ranks == everyone[1:]
        assert others.size == world - 1
        assert others.rank == (None if me == 0 else me - 1)
        if me > 0:
            tensor = full(me)
            offbeat.all_reduce(tensor, group=others)
            assert torch.equal(tensor, full(sum(everyone)))
            assert offbeat.all_gather_object(me, group=others) == everyone[1:]
            assert offbeat.broadcast_object(me, src=last, group=others) == last
            offbeat.barrier(group=others)
        else:
            fails(offbeat.errors.InvalidArgument, "rank 0 is no member", offbeat.barrier, group=others)
    offbeat.shutdown()
    assert not offbeat.is_initialized()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_collective_when_rank_0_hosts_the_store(ranks, world):
    ranks(every_collective, world)


@pytest.mark.parametrize("world", [1, 3])
def test_every_collective_under_torchrun(torchrun, world):
    torchrun(every_collective, world)


@pytest.mark.parametrize("hosts", ["one each", "two and one"])
def test_every_collective_between_hosts(ranks, hosts):
    def local(rank):
        return {"OFFBEAT_HOST": f"h{rank if hosts == 'one each' else rank // 2}"}

    ranks(between_hosts, 3, per_rank=local)


def between_hosts():
    import torch
    from support import same_everywhere

    import offbeat

    offbeat.init(timeout=30.0)
    me, world = offbeat.rank(), offbeat.world_size()
    everyone = list(range(world))
    assert offbeat.local_size() < world
    for count in (0, 1, 7, 1000, 300_000):
        tensor = torch.arange(count) + me
        offbeat.all_reduce(tensor)
        assert torch.equal(tensor, world * torch.arange(count) + sum(everyone))
        tensor = torch.arange(count) + me
        offbeat.reduce(tensor, 1)
        assert torch.equal(tensor, world * torch.arange(count) + sum(everyone) if me == 1 else torch.arange(count) + me)
        tensor = torch.arange(count) + me
        offbeat.broadcast(tensor, 2)
        assert torch.equal(tensor, torch.arange(count) + 2)
        parts = offbeat.all_gather(torch.arange(count + me) + me)
        assert all(torch.equal(part, torch.arange(count + rank) + rank) for rank, part in enumerate(parts))
        parts = offbeat.gather(torch.arange(count + me), 2)
        assert (parts is None) == (me != 2)
        assert all(torch.equal(part, torch.arange(count + rank)) for rank, part in enumerate(parts or ()))
        out = torch.empty(count + me, dtype=torch.int64)
        offbeat.scatter([torch.arange(count + rank) + 1 for rank in everyone] if me == 1 else None, 1, out)
        assert torch.equal(out, torch.arange(count + me) + 1)
        mine = offbeat.reduce_scatter([torch.arange(count + rank) + me for rank in everyone])
        assert torch.equal(mine, world * torch.arange(count + me) + sum(everyone))
        parts = offbeat.all_to_all([torch.arange(count + rank) + 10 * me for rank in everyone])
        assert all(torch.equal(part, torch.arange(count + me) + 10 * rank) for rank, part in enumerate(parts))
        if me == 0:
            offbeat.send(torch.arange(count), 2, tag=9)
        if me == 2:
            out = torch.empty(count, dtype=torch.int64)
            offbeat.recv(out, 0, tag=9)
            assert torch.equal(out, torch.arange(count))
        noise = torch.randn(count, generator=torch.Generator().manual_seed(me))
        offbeat.all_reduce(noise)
        assert same_everywhere(noise)
    offbeat.barrier()
    offbeat.shutdown()


def every_type_and_operation():
    """Against the same operation in torch, element by element."""
    import functools

    import torch
    from support import DTYPES, fails, same_everywhere, values

    import offbeat
    from offbeat.errors import InvalidArgument

    offbeat.init(timeout=30.0)
    me, world = offbeat.rank(), offbeat.world_size()
    exact = {"min": torch.minimum, "max": torch.maximum}
    bitwise = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
    unsigned = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}

    def expected(op, dtype, inputs):
        wide = torch.float64 if dtype.is_floating_point else unsigned.get(dtype, dtype)
        inputs = [part.to(wide) for part in inputs]
        if op in ("sum", "mean"):
            total = functools.reduce(torch.add, inputs)
            return total / world if op == "mean" else total
        if op == "product":
            return functools.reduce(torch.mul, inputs)
        return functools.reduce((exact | bitwise)[op], inputs)

    def check(op, dtype, make, count):
        inputs = [values(dtype, count, rank, small=op == "product") for rank in range(world)]
        want = expected(op, dtype, inputs)
        for collective in ("all_reduce", "reduce", "reduce_scatter"):
            tensor = make(count, dtype).copy_(inputs[me])
            if collective == "all_reduce":
                offbeat.all_reduce(tensor, op)
                assert same_everywhere(tensor), (op, dtype, count)
            elif collective == "reduce":
                offbeat.reduce(tensor, 0, op)
                if me != 0:
                    assert torch.equal(tensor, inputs[me]), (op, dtype, count)
                    continue
            else:
                tensor = offbeat.reduce_scatter([tensor] * world, op)
            assert tensor.dtype is dtype
            if dtype.is_floating_point:
                # sums of half types accumulate in float32 and round once
                bound = 2 * torch.finfo(dtype).eps * world
                assert torch.allclose(tensor.double(), want, rtol=bound, atol=bound), (collective, op, dtype, count)
            else:
                assert torch.equal(tensor.to(want.dtype), want), (collective, op, dtype, count)

    def plain(count, dtype):
        return torch.empty(count, dtype=dtype)

    def shared(count, dtype):
        return offbeat.shared_empty(count, dtype=dtype)

    for dtype in DTYPES:
        numbers = {"sum", "min", "max", "product"} if dtype is not torch.bool else set()
        allowed = numbers | ({"mean"} if dtype.is_floating_point else set(bitwise))
        for op in sorted(allowed):
            check(op, dtype, plain, 5)
            check(op, dtype, shared, 1031)
        for op in {"sum", "mean", "min", "max", "product", *bitwise} - allowed:
            words = f"{str(dtype).removeprefix('torch.')}|{op}|try"
            fails(InvalidArgument, words, offbeat.all_reduce, plain(3, dtype), op)
            fails(InvalidArgument, words, offbeat.reduce, plain(3, dtype), 0, op)
            fails(InvalidArgument, words, offbeat.reduce_scatter, [plain(3, dtype)] * world, op)
    fails(InvalidArgument, "average|sum|mean|try", offbeat.all_reduce, torch.ones(3), "average")
    # the refused calls were never made: what follows still matches
    tensor = torch.ones(3)
    offbeat.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3,), float(world)))
    offbeat.shutdown()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("links", ["shared memory", "tcp"])
def test_every_type_and_operation(ranks, world, links):
    if links == "tcp" and world == 1:
        pytest.skip("a world of one has no links")
    ranks(every_type_and_operation, world, env={"OFFBEAT_SHM": "0"} if links == "tcp" else {})


def test_integers_wrap_and_special_values_pass(ranks):
    def script():
        import torch
        from support import same_everywhere

        import offbeat

        offbeat.init()
        me = offbeat.rank()
        for make in torch.empty, offbeat.shared_empty:
            tensor = make(2, dtype=torch.uint8).fill_(200)
            offbeat.all_reduce(tensor)
            assert tensor.tolist() == [144, 144]
            tensor = make(1, dtype=torch.int64).fill_(2**62)
            offbeat.all_reduce(tensor)
            assert tensor.tolist() == [-(2**63)]
            inf, nan = float("inf"), float("nan")
            tensor = make(4).copy_(torch.tensor([[inf, nan, -0.0, inf], [1.0, 1.0, -0.0, -inf]][me]))
            offbeat.all_reduce(tensor)
            assert tensor[0] == inf
            assert tensor[1].isnan()
            assert tensor[3].isnan()
            assert tensor[2].signbit()
            assert same_everywhere(tensor)
            for op in ("min", "max"):
                tensor = make(2).copy_(torch.tensor([[nan, 1.0], [2.0, nan]][me]))
                offbeat.all_reduce(tensor, op)
                assert tensor.isnan().all(), (op, tensor)  # as in torch: a NaN is not lost
            half = make(1, dtype=torch.float16).fill_(60000)
            offbeat.all_reduce(half)
            assert half.isinf().all()
            half = make(1, dtype=torch.float16).fill_(60000)
            offbeat.all_reduce(half, "mean")
            assert half.tolist() == [60000 // 32 * 32]
        offbeat.shutdown()

    ranks(script, 2)
