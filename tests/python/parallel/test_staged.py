"""Collectives of tensors that go through memory of the host, as those of a GPU do; here those of the CPU do so too."""

import pytest


def staged():
    import torch

    import offbeat
    from offbeat import handle

    seen = []
    readable = handle.readable

    def watched(tensor, name="tensor"):
        flat = readable(tensor, name)
        seen.append(flat.data_ptr() != tensor.data_ptr() and flat.is_contiguous() and not flat.requires_grad)
        return flat

    handle.is_staged = lambda tensor: True
    # those that were imported by name go on to this one
    handle.readable = offbeat.collectives.readable = watched
    offbeat.init(timeout=20.0)
    rank, world = offbeat.rank(), offbeat.world_size()
    everyone = offbeat.Group(range(world))
    total = world * (world + 1) / 2

    def mine(dtype=torch.float32):
        # neither contiguous nor without a graph
        return (torch.ones(4, 6, dtype=dtype) * (rank + 1)).t()

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = mine(dtype)
        offbeat.all_reduce(tensor, group=everyone)
        assert tensor.eq(total).all()
        assert tensor.stride() == (1, 6)
    tensor = mine()
    offbeat.all_reduce(tensor, codec="bfloat16")
    assert tensor.eq(total).all()
    parameter = torch.nn.Parameter(mine())
    version = parameter._version
    offbeat.all_reduce(parameter, "mean", group=everyone)
    assert parameter.eq(total / world).all()
    assert parameter._version > version
    tensor = mine()
    work = offbeat.all_reduce(tensor, async_op=True)
    # what is under way is a copy
    tensor.add_(5)
    work.wait()
    assert tensor.eq(total).all()
    tensor = mine()
    offbeat.broadcast(tensor, 1)
    assert tensor.eq(2).all()
    tensor = mine()
    offbeat.reduce(tensor, 1)
    assert tensor.eq(total if rank == 1 else rank + 1).all()
    assert [float(each.mean()) for each in offbeat.all_gather(mine())] == [i + 1 for i in range(world)]
    assert [float(each.mean()) for each in offbeat.all_gather(mine(), async_op=True).wait()][-1] == world
    gathered = offbeat.gather(mine(), 0)
    assert (gathered is None) == (rank != 0)
    out = torch.empty(6, 4)
    offbeat.scatter([mine() * i for i in range(world)] if rank == 1 else None, 1, out)
    assert out.eq(2 * rank).all()
    assert offbeat.reduce_scatter([mine()] * world).eq(total).all()
    assert [float(each.mean()) for each in offbeat.all_to_all([mine()] * world)] == [i + 1 for i in range(world)]
    if rank == 0:
        offbeat.send(mine(), 1)
    elif rank == 1:
        offbeat.recv(tensor, 0)
        assert tensor.eq(1).all()
    assert set(seen) == {True}, seen
    offbeat.shutdown()


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_tensors_that_go_through_the_host_come_back(ranks, hosts):
    ranks(staged, len(hosts), per_rank=lambda rank: {"OFFBEAT_HOST": hosts[rank]}, timeout=60)


def elsewhere():
    import torch
    from support import fails

    import offbeat

    offbeat.init(timeout=20.0)
    words = "on meta|from the CPU and from CUDA devices|try: tensor.cpu"
    fails(offbeat.errors.Unsupported, words, offbeat.all_reduce, torch.empty(3, device="meta"))
    offbeat.shutdown()


def test_devices_that_nobody_reads_are_refused(ranks):
    ranks(elsewhere, 2, timeout=60)
