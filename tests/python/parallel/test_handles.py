"""Work under way: handles that are waited for, asked, dropped, and shared by threads."""

import pytest
from support import LINKS


@pytest.mark.parametrize("env", LINKS.values(), ids=LINKS)
def test_every_collective_as_a_handle(ranks, env):
    def script():
        import gc
        import time

        import torch
        from support import fails

        import offbeat
        from offbeat.errors import Timeout

        offbeat.init(timeout=30.0)
        me, world = offbeat.rank(), offbeat.world_size()
        everyone = range(world)

        # many at once; results come in any order of asking
        tensors = [torch.full((size,), float(me)) for size in (1, 1000, 0, 100_000, 7)]
        handles = [offbeat.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert all(isinstance(handle, offbeat.Handle) for handle in handles)
        for handle in reversed(handles):
            assert handle.wait() is None
            assert handle.done()
            assert handle.wait(timeout=0.0) is None  # twice is fine
        assert all(bool((tensor == sum(everyone)).all()) for tensor in tensors)

        gathered = offbeat.all_gather(torch.full((me + 1,), me), async_op=True)
        reduced = torch.full((3,), float(me))
        to_last = offbeat.reduce(reduced, world - 1, async_op=True)
        sent = torch.full((3,), float(me))
        broadcast = offbeat.broadcast(sent, 1, async_op=True)
        to_zero = offbeat.gather(torch.tensor([me]), 0, async_op=True)
        out = torch.zeros(2)
        tensors = [torch.full((2,), 5.0 + rank) for rank in everyone] if me == 0 else None
        scattered = offbeat.scatter(tensors, 0, out, async_op=True)
        mine = offbeat.reduce_scatter([torch.full((2,), float(rank)) for rank in everyone], async_op=True)
        swapped = offbeat.all_to_all([torch.tensor([10 * me + rank]) for rank in everyone], async_op=True)
        barrier = offbeat.barrier(async_op=True)
        del tensors
        gc.collect()
        assert barrier.wait() is None
        first = gathered.wait()
        assert [part.tolist() for part in first] == [[rank] * (rank + 1) for rank in everyone]
        assert gathered.wait() is first
        assert to_last.wait() is None
        assert reduced.tolist() == [float(sum(everyone) if me == world - 1 else me)] * 3
        assert broadcast.wait() is None
        assert sent.tolist() == [1.0] * 3
        assert to_zero.wait() is None if me else [part.item() for part in to_zero.wait()] == list(everyone)
        assert scattered.wait() is None
        assert out.tolist() == [5.0 + me] * 2
        assert mine.wait().tolist() == [float(world * me)] * 2
        assert [part.item() for part in swapped.wait()] == [10 * rank + me for rank in everyone]

        # wait(timeout) gives up waiting, not the work; a blocking call queues behind
        tensor = torch.ones(10)
        if me == 0:
            handle = offbeat.all_reduce(tensor, async_op=True)
            assert not handle.done()
            fails(Timeout, "0.2 s|wait", handle.wait, timeout=0.2)
            fails(Timeout, "wait", handle.wait, timeout=0.0)
            offbeat.send(torch.ones(1), 1)
        else:
            if me == 1:
                offbeat.recv(torch.ones(1), 0)
            handle = offbeat.all_reduce(tensor, async_op=True)
        other = torch.ones(1)
        offbeat.all_reduce(other)
        assert handle.done()
        assert other.item() == world
        assert tensor.tolist() == [float(world)] * 10

        # done() puts a strided result in place
        whole = torch.ones(4, 6)
        handle = offbeat.all_reduce(whole.t(), async_op=True)
        deadline = time.monotonic() + 20
        while not handle.done():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert torch.equal(whole, torch.full((4, 6), float(world)))

        # a dropped handle is still carried out, on memory that stays valid
        for _ in range(50):
            offbeat.all_reduce(torch.ones(10_000), async_op=True)
            offbeat.all_reduce(torch.ones(50, 60).t(), async_op=True)
        gc.collect()
        kept = torch.ones(5)
        offbeat.all_reduce(kept, async_op=True)  # contiguous: in place even if nobody waits
        offbeat.barrier()
        assert kept.tolist() == [float(world)] * 5

        # handles that nobody waits for do not keep the interpreter
        offbeat.all_reduce(torch.ones(10), async_op=True)
        offbeat.shutdown()

    ranks(script, 3, env=env)


def test_a_failed_handle_raises_each_time_it_is_asked(ranks):
    def script():
        import torch
        from support import fails

        import offbeat
        from offbeat.errors import Mismatch

        offbeat.init(timeout=30.0)
        handle = offbeat.all_reduce(torch.ones(2 + offbeat.rank()), async_op=True)
        first = fails(Mismatch, "rank 0|rank 1", handle.wait)
        assert handle.done()
        assert fails(Mismatch, "rank 0|rank 1", handle.wait) is first
        fails(Mismatch, "rank 0|rank 1", offbeat.all_reduce, torch.ones(2))
        offbeat.shutdown()

    ranks(script, 2)


@pytest.mark.parametrize("env", LINKS.values(), ids=LINKS)
def test_threads_with_groups_of_their_own(ranks, env):
    def script():
        import threading

        import torch

        import offbeat

        offbeat.init(timeout=30.0)
        me, world = offbeat.rank(), offbeat.world_size()
        groups = [offbeat.Group(members) for members in ([0, 1, 2], [0, 1], [1, 2], [0, 2], [0, 1, 2])]
        errors = []

        def work(group, number):
            try:
                for i in range(60):
                    size = (1, 17, 5000, 70_000)[i % 4]
                    tensor = torch.full((size,), float(me + i + number))
                    if i % 3 == 0:
                        offbeat.all_reduce(tensor, group=group, async_op=True).wait()
                    else:
                        offbeat.all_reduce(tensor, group=group)
                    want = float(sum(rank + i + number for rank in group.ranks))
                    assert bool((tensor == want).all()), (group, i, tensor, want)
                    assert [part.item() for part in offbeat.all_gather(torch.tensor([me]), group=group)] == group.ranks
            except BaseException as error:
                errors.append(error)
                raise

        threads = [
            threading.Thread(target=work, args=(group, number))
            for number, group in enumerate(groups)
            if group.rank is not None
        ]
        for thread in threads:
            thread.start()
        # the world's own group goes on meanwhile
        for _ in range(60):
            tensor = torch.ones(1000)
            offbeat.all_reduce(tensor)
            assert bool((tensor == world).all())
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not errors, errors

        # one group in several threads: calls come one after the other, and all see the same value in the same call
        results = []
        threads = [threading.Thread(target=lambda: results.append(bump())) for _ in range(4)]

        def bump():
            tensor = torch.ones(3)
            offbeat.all_reduce(tensor)
            return tensor.tolist()

        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == [[float(world)] * 3] * 4

        # messages between threads, told apart by their tags
        if me < 2:
            received = {}

            def talk(tag):
                for i in range(20):
                    out = torch.empty(100)
                    if me == 0:
                        offbeat.send(torch.full((100,), float(tag + i)), 1, tag=tag)
                        offbeat.recv(out, 1, tag=tag)
                    else:
                        offbeat.recv(out, 0, tag=tag)
                        offbeat.send(out, 0, tag=tag)
                    assert bool((out == tag + i).all())
                received[tag] = True

            threads = [threading.Thread(target=talk, args=(100 * tag,)) for tag in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len(received) == 4
        offbeat.shutdown()

    ranks(script, 3, env=env)


def test_a_dropped_handle_still_gives_a_strided_tensor_its_result(ranks):
    """A copy stands for it in the call; a barrier, or another asynchronous call, puts the result into place."""

    def script():
        import torch
        from support import fails

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init(timeout=30.0)
        total = sum(range(offbeat.world_size()))
        strided = torch.full((4, 6), float(offbeat.rank())).t()[::2]
        offbeat.all_reduce(strided, async_op=True)
        offbeat.barrier()
        assert strided.tolist() == [[total] * 4] * 3
        for op in (torch.distributed.ReduceOp.SUM, None, 3):
            fails(InvalidArgument, "op must be the name|'sum'", offbeat.all_reduce, torch.ones(2), op)
            fails(InvalidArgument, "op must be the name|'sum'", offbeat.reduce, torch.ones(2), 0, op)
        offbeat.shutdown()

    ranks(script, 2)
