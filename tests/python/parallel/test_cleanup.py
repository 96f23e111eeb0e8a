"""Nothing is left behind: no file, no process, no memory, however a job ends; and an idle rank does nothing."""

from pathlib import Path

import pytest
from support import told

ENDS = ["shutdown", "exit", "exception", "kill all", "kill one"]


def files_of_ours():
    """What the runtime could have left where such things are usually left."""
    places = (Path("/dev/shm"), Path("/tmp"), Path("/run/user/0"), Path.home())
    return {path for place in places if place.is_dir() for path in place.glob("*offbeat*")}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_behind(ranks, end, tmp_path):
    def script():
        import os
        import signal
        import sys
        from pathlib import Path

        import torch
        from support import tell

        import offbeat

        end = sys.argv[1]
        offbeat.init(timeout=5.0)
        tensor = offbeat.shared_empty(1 << 20).fill_(1.0)
        offbeat.all_reduce(tensor)
        offbeat.all_reduce(torch.ones(1 << 18), async_op=True).wait()
        tell(socket=[line for line in Path("/proc/net/unix").read_text().splitlines() if "@offbeat" in line] != [])
        offbeat.barrier()
        if end == "shutdown":
            offbeat.shutdown()
        elif end == "exit":
            sys.exit(0)
        elif end == "exception":
            raise RuntimeError("all of us")
        elif end == "kill all" or (end == "kill one" and offbeat.rank() == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            offbeat.barrier()

    before = files_of_ours()
    job = ranks(script, 3, args=[end], check=False, env={"TMPDIR": str(tmp_path)})
    assert all('"socket": true' in rank.out for rank in job.ranks), job.report()
    assert not job.alive()
    assert files_of_ours() <= before
    assert {path.suffix for path in job.directory.iterdir()} <= {".py", ".out", ".err"}
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("job")] == []


def test_memory_is_anonymous_and_an_idle_rank_sleeps(ranks):
    def script():
        import os
        import time
        from pathlib import Path

        import torch
        from support import descriptors, tell

        import offbeat

        offbeat.init()
        shared = offbeat.shared_empty(1000)
        offbeat.all_reduce(shared)
        offbeat.all_reduce(torch.ones(10), async_op=True).wait()
        mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        ours = {path for path in mapped if "offbeat" in path and ".so" not in path}
        assert ours, mapped
        assert all(path.startswith("/memfd:") for path in ours), ours
        assert not descriptors("/dev/shm")
        offbeat.barrier()
        before = os.times()
        time.sleep(1.5)
        after = os.times()
        tell(busy=after.user + after.system - before.user - before.system)
        offbeat.barrier()
        offbeat.shutdown()
        time.sleep(0.3)
        del shared

    for rank in ranks(script, 2).ranks:
        assert told(rank)[0]["busy"] <= 0.1
