"""Children that a rank forks are no ranks; they are told so, end as usual, and do not disturb their parent."""

import pytest


@pytest.mark.parametrize("links", ["shared memory", "tcp"])
def test_fork_after_init(ranks, links):
    def script():
        import multiprocessing
        import os
        import sys
        import warnings
        from pathlib import Path

        import torch
        from support import descriptors, fails

        import offbeat
        from offbeat.errors import NotInitialized

        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of fork with threads, and are right
        offbeat.init(timeout=20.0)
        world = offbeat.world_size()
        shared = offbeat.shared_empty(1000).fill_(1.0)
        group = offbeat.Group(range(world))
        offbeat.all_reduce(shared, async_op=True).wait()
        sockets = len(descriptors("socket:"))

        def child():
            assert not offbeat.is_initialized()
            tensor = torch.ones(2)
            words = f"pid {os.getpid()}|forked|parent"
            for call, *args in (
                (offbeat.init,),
                (offbeat.rank,),
                (offbeat.barrier,),
                (offbeat.all_reduce, tensor),
                (offbeat.all_reduce, shared),
                (offbeat.shared_empty, 3),
                (offbeat.send, tensor, 0),
                (offbeat.shutdown,),
            ):
                fails(NotInitialized, words, call, *args)
            fails(NotInitialized, words, offbeat.all_reduce, tensor, group=group)
            assert len(descriptors("socket:")) < sockets, "the child keeps its parent's sockets"
            assert shared.sum() > 0  # memory that it inherited can be read

        context = multiprocessing.get_context("fork")
        for end in ("return", "exit", "raise"):
            pid = os.fork()
            if pid == 0:
                # ends as an interpreter ends: with atexit, destructors and excepthook
                child()
                if end == "exit":
                    sys.exit(0)
                if end == "raise":
                    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
                    raise ValueError("only the child's")
                return
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == (1 if end == "raise" else 0), (end, status)
            tensor = torch.ones(10)
            offbeat.all_reduce(tensor)
            assert tensor.tolist() == [float(world)] * 10
        process = context.Process(target=child)
        process.start()
        process.join(30)
        assert process.exitcode == 0
        # a spawned one is a process of its own
        process = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        offbeat.all_reduce(shared.fill_(1.0), group=group)
        assert bool((shared == world).all())
        offbeat.shutdown()

    ranks(script, 2, env={"OFFBEAT_SHM": "0"} if links == "tcp" else {})


def test_data_loaders_between_collectives(ranks):
    def script():
        import torch

        import offbeat

        offbeat.init(timeout=20.0)
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        for epoch in range(2):
            loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)
            for (batch,) in loader:
                total = batch.sum()
                offbeat.all_reduce(total)
                assert total.item() == 2 * batch.sum().item(), epoch
        offbeat.shutdown()

    ranks(script, 2)


def test_a_rank_may_be_forked_before_init(ranks):
    """multiprocessing's fork method, as notebooks use it: the children are the ranks."""

    def script():
        import multiprocessing
        import os

        import torch

        import offbeat

        def rank(number):
            os.environ.update(RANK=str(number), WORLD_SIZE="2")
            offbeat.init()
            tensor = torch.ones(3)
            offbeat.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * 3

        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=rank, args=(number,)) for number in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]

    ranks(script, 1)
