"""Shared memory: tensors of every type, which outlive the runtime, whatever the size of /dev/shm."""

import os
import shutil
import subprocess
import sys

import pytest
from support import LINKS


@pytest.mark.parametrize("world", [1, 2])
def test_shared_tensors_are_tensors(ranks, world):
    def script():
        import copy
        import pickle

        import torch
        from support import DTYPES

        import offbeat

        offbeat.init()
        for dtype in DTYPES:
            tensor = offbeat.shared_empty(3, 5, dtype=dtype)
            assert tensor.dtype is dtype
            assert tensor.shape == (3, 5)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            tensor.fill_(1)
            assert torch.equal(tensor, torch.ones(3, 5, dtype=dtype))
        assert offbeat.shared_empty((2, 3)).shape == (2, 3)
        assert offbeat.shared_empty(torch.Size([2, 3])).shape == (2, 3)
        assert offbeat.shared_empty([4]).shape == (4,)
        assert offbeat.shared_empty(()).shape == ()
        assert offbeat.shared_empty().shape == ()
        assert offbeat.shared_empty(0, 7).shape == (0, 7)
        assert offbeat.shared_empty(2).dtype is torch.float32
        # complex tensors can be had, though not sent
        assert offbeat.shared_empty(2, dtype=torch.complex64).dtype is torch.complex64

        # tensors of their own: none shares memory with another
        many = [offbeat.shared_empty(1000).fill_(i) for i in range(200)]
        assert all(bool((tensor == i).all()) for i, tensor in enumerate(many))
        del many[::2]
        more = [offbeat.shared_empty(500).fill_(-i) for i in range(200)]
        assert all(bool((tensor == 2 * i + 1).all()) for i, tensor in enumerate(many))
        assert all(bool((tensor == -i).all()) for i, tensor in enumerate(more))

        tensor = offbeat.shared_empty(4).fill_(3.0).requires_grad_()
        (tensor * 2).sum().backward()
        assert tensor.grad.tolist() == [2.0] * 4
        assert torch.equal(pickle.loads(pickle.dumps(tensor.detach())), tensor.detach())
        assert torch.equal(copy.deepcopy(tensor.detach()), tensor.detach())
        # views of a bucket, as gradients are
        bucket = offbeat.shared_empty(10).zero_()
        views = bucket[:4].view(2, 2), bucket[4:]
        views[0].fill_(1.0), views[1].fill_(2.0)
        offbeat.all_reduce(bucket)
        assert bool((views[0] == offbeat.world_size()).all())
        offbeat.shutdown()

    ranks(script, world)


def test_tensors_outlive_the_runtime(ranks):
    def script():
        import gc

        import torch
        from support import fails

        import offbeat

        offbeat.init()
        shared = offbeat.shared_empty(1 << 20).fill_(7.0)
        view = offbeat.shared_empty(1000).fill_(1.0)[10:20]
        gathered = offbeat.all_gather(torch.arange(100_000) + offbeat.rank())
        handle = offbeat.all_gather(torch.full((1000,), offbeat.rank()), async_op=True)
        offbeat.barrier()
        group = offbeat.Group([0, 1])
        offbeat.shutdown()
        gc.collect()
        shared.add_(1.0)
        assert bool((shared == 8.0).all())
        assert view.tolist() == [1.0] * 10
        assert all(torch.equal(part, torch.arange(100_000) + rank) for rank, part in enumerate(gathered))
        assert [int(part[-1]) for part in handle.wait()] == [0, 1]
        fails(offbeat.errors.NotInitialized, "offbeat.init()", offbeat.all_reduce, shared)

        offbeat.init()  # another runtime, another memory: the old tensors are plain to it
        words = "before offbeat.shutdown()"
        fails(offbeat.errors.InvalidArgument, words, offbeat.all_reduce, torch.ones(1), group=group)
        fresh = offbeat.shared_empty(1 << 20).fill_(1.0)
        offbeat.all_reduce(fresh)
        offbeat.all_reduce(shared)
        offbeat.all_reduce(view)
        assert bool((fresh == 2.0).all())
        assert bool((shared == 16.0).all())
        assert view.tolist() == [2.0] * 10
        del fresh, shared, view
        gc.collect()
        # no shutdown: the interpreter's end must cope with tensors that are still there
        globals()["kept"] = offbeat.shared_empty(10).fill_(1.0)

    ranks(script, 2)


def test_freed_memory_goes_back(ranks):
    """A training loop that makes shared tensors again and again does not grow."""

    def script():
        from pathlib import Path

        import torch

        import offbeat

        offbeat.init()

        def resident():
            fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            return int(fields["RssShmem"].split()[0]) / 1024

        peaks = []
        for _ in range(10):
            tensor = offbeat.shared_empty(8 << 20).fill_(1.0)  # 32 MB
            offbeat.all_reduce(tensor)
            peaks.append(resident())
            del tensor
        offbeat.all_reduce(torch.ones(1))
        # ours and what we touched of the neighbour's
        assert max(peaks) < 3 * 32 + 32, peaks
        offbeat.shutdown()

    ranks(script, 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs the command unshare (util-linux)")
def test_a_small_dev_shm_is_enough(tmp_path):
    """Containers have 64 MB there by default; ours has 1 MB, and tensors of 256 MB."""
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("mounting in a namespace of its own is not allowed here")
    script = tmp_path / "script.py"
    script.write_text(
        """
import shutil, torch, offbeat
assert shutil.disk_usage("/dev/shm").total <= 1 << 20
offbeat.init()
(link,) = [link for link in offbeat.runtime.current().links() if link["kind"] != "self"]
assert link["kind"] == "shared memory", link
tensor = offbeat.shared_empty(64 << 20).fill_(1.0)
offbeat.all_reduce(tensor)
assert tensor[0] == tensor[-1] == tensor.mean() == 2.0
plain = torch.ones(1 << 20)
offbeat.all_reduce(plain)
assert plain.sum() == 2 << 20
offbeat.shutdown()
print("right\\n", end="")
"""
    )
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {script}"
    command = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {launch}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("right\n") == 2


@pytest.mark.parametrize("env", LINKS.values(), ids=LINKS)
def test_closed_groups_end(ranks, env):
    """A job that makes groups again and again does not grow."""

    def script():
        import time
        from pathlib import Path

        import torch
        from support import fails

        import offbeat
        from offbeat.errors import InvalidArgument

        def threads():
            names = [entry.read_text() for entry in Path("/proc/self/task").glob("*/comm")]
            return [name for name in names if name.startswith("offbeat-group")]

        offbeat.init(timeout=20.0)
        for number in range(20):
            group = offbeat.Group([0, 2])
            if group.rank is not None:
                tensor = torch.full((1000,), float(number))
                handle = offbeat.all_reduce(tensor, group=group, async_op=True)
                group.close()
                assert handle.done()
                assert bool((tensor == 2.0 * number).all())
                words = "this group was closed|try:"
                fails(InvalidArgument, words, offbeat.all_reduce, tensor, group=group)
                fails(InvalidArgument, words, offbeat.barrier, group=group, async_op=True)
            group.close()
        deadline = time.monotonic() + 10.0
        while threads():
            assert time.monotonic() < deadline, threads()
            time.sleep(0.01)

        offbeat.barrier()  # the world goes on, and so do other groups
        group = offbeat.Group([0, 1, 2])
        offbeat.barrier(group=group)
        offbeat.shutdown()
        group.close()
        offbeat.init()
        group.close()
        offbeat.barrier()

    ranks(script, 3, env=env)
