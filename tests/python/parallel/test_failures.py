"""When a rank dies, fails, leaves, or never comes: who is told what, and how soon."""

import json
import os
import signal
import time

import pytest
from support import told

PLACES = {"one host": {}, "own hosts": lambda rank: {"OFFBEAT_HOST": f"h{rank}"}}
MIXED = PLACES | {"two on one host": lambda rank: {"OFFBEAT_HOST": f"h{rank // 2}"}}


def place(ranks, where, script, world, **options):
    per_rank = MIXED[where]
    if per_rank:
        options["per_rank"] = per_rank
    return ranks(script, world, **options)


def survivors(job, *lost):
    return [rank for rank in job.ranks if rank.rank not in lost]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("children", ["none", "DataLoader workers", "forked and started"])
@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_a_killed_rank_is_named_in_two_seconds(ranks, where, children, call):
    if call == "recv" and children != "none":
        pytest.skip("told the same way")

    def script():
        import os
        import signal
        import subprocess
        import sys
        import time

        import torch
        from support import note_time, report

        import offbeat

        children, call = sys.argv[1:]
        offbeat.init(timeout=60.0)
        offbeat.all_reduce(torch.ones(3))
        if offbeat.rank() == 2:
            if children == "DataLoader workers":
                data = torch.utils.data.TensorDataset(torch.arange(1000))
                batches = iter(torch.utils.data.DataLoader(data, num_workers=2, persistent_workers=True))
                next(batches)
            elif children == "forked and started":
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                subprocess.Popen(["sleep", "60"], close_fds=False)
            offbeat.barrier()
            time.sleep(0.5)  # the others are inside their call by now
            note_time("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        offbeat.barrier()
        if call == "recv":
            report(offbeat.recv, torch.ones(1), 2)
        else:
            report(offbeat.all_reduce, torch.ones(100_000))
        report(offbeat.all_reduce, torch.ones(1))  # and again, at once

    job = place(ranks, where, script, 4, args=[children, call], check=False)
    killed = float((job.directory / "killed").read_text())
    pid = job.processes[2].pid
    assert job.ranks[2].code == -signal.SIGKILL
    for rank in survivors(job, 2):
        assert rank.code == 0, job.report()
        for error in told(rank):
            assert error["kind"] == "PeerLost", error
            assert error["rank"] == 2
            assert f"rank 2 (host {error['host']}, pid {pid}) is gone" in error["message"]
            assert "try:" in error["message"]
            assert error["at"] - killed < 2.0, error
        if where == "own hosts":
            assert error["host"] == "h2"


def test_a_killed_rank_ends_the_job_under_torchrun(torchrun):
    def script():
        import os
        import signal

        import torch

        import offbeat

        offbeat.init()
        offbeat.barrier()
        if offbeat.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        offbeat.all_reduce(torch.ones(10))

    job = torchrun(script, 2, check=False)
    assert job.code == 1
    assert "PeerLost: rank 1" in job.ranks[0].err
    assert not job.alive()


@pytest.mark.parametrize("where", PLACES)
def test_an_uncaught_exception_is_quoted_by_the_others(ranks, where):
    def script():
        import time

        import torch
        from support import report

        import offbeat

        offbeat.init(timeout=60.0)
        offbeat.barrier()
        if offbeat.rank() == 1:
            time.sleep(0.5)  # the others have left the barrier by now
            raise ValueError("no more data in shard 7")
        report(offbeat.all_reduce, torch.ones(10))

    job = place(ranks, where, script, 3, check=False)
    assert [rank.code for rank in job.ranks] == [0, 1, 0]
    assert "ValueError: no more data in shard 7" in job.ranks[1].err
    for rank in survivors(job, 1):
        (error,) = told(rank)
        assert error["kind"] == "PeerFailed", error
        assert error["rank"] == 1
        assert "ValueError: no more data in shard 7" in error["cause"]
        assert "script.py" in error["cause"]
        assert error["cause"] in error["message"]
        assert f"pid {job.processes[1].pid}" in error["message"]


@pytest.mark.parametrize("how", ["sys.exit", "end", "shutdown", "os._exit", "exception in a thread"])
@pytest.mark.parametrize("where", PLACES)
def test_a_rank_that_leaves_early_is_named(ranks, where, how):
    def script():
        import os
        import sys
        import threading
        import time

        import torch
        from support import report

        import offbeat

        offbeat.init(timeout=5.0)
        offbeat.barrier()
        if offbeat.rank() == 0:
            how = sys.argv[1]
            if how == "sys.exit":
                sys.exit(3)
            elif how == "shutdown":
                offbeat.shutdown()
            elif how == "os._exit":
                time.sleep(0.5)  # it flushes nothing: what the others need for the barrier must have left
                os._exit(0)
            elif how == "exception in a thread":
                thread = threading.Thread(target=lambda: 1 / 0)
                thread.start()
                thread.join()
            return
        report(offbeat.all_reduce, torch.ones(10))

    job = place(ranks, where, script, 3, args=[how], check=False)
    assert [rank.code for rank in job.ranks] == [3 if how == "sys.exit" else 0, 0, 0], job.report()
    why = {"shutdown": "it called offbeat.shutdown()", "os._exit": "is gone"}.get(how, "interpreter exited")
    for rank in survivors(job, 0):
        (error,) = told(rank)
        assert error["kind"] == "PeerLost"
        assert error["rank"] == 0
        assert why in error["message"], error


@pytest.mark.parametrize("where", PLACES)
def test_exit_without_shutdown_is_fine_when_nobody_needs_anybody(ranks, where):
    """Ranks end at different times, without a word; also with work whose handle nobody waited for."""

    def script():
        import time

        import torch

        import offbeat

        offbeat.init(timeout=5.0)
        tensor = offbeat.shared_empty(1000).fill_(1.0)
        for _ in range(20):
            offbeat.all_reduce(tensor.fill_(1.0))
            offbeat.reduce_scatter([torch.ones(30_000)] * offbeat.world_size())
            offbeat.all_gather(torch.ones(1000))
        globals()["handle"] = offbeat.all_reduce(torch.ones(10), async_op=True)
        globals()["handle"].wait()
        time.sleep(0.3 * offbeat.rank())

    began = time.monotonic()
    job = place(ranks, where, script, 3)
    assert time.monotonic() - began < 15
    assert [rank.err for rank in job.ranks] == [""] * 3


def test_ranks_may_leave_as_soon_as_they_have_their_result(ranks):
    """The fastest rank is gone while the others are still inside the same call."""

    def script():
        import sys

        import torch

        import offbeat

        offbeat.init(timeout=30.0)
        world = offbeat.world_size()
        call = {
            "all_reduce": lambda: offbeat.all_reduce(torch.ones(100_003)),
            "reduce_scatter": lambda: offbeat.reduce_scatter([torch.ones(100_003)] * world),
            "all_gather": lambda: offbeat.all_gather(torch.ones(100_003)),
            "all_to_all": lambda: offbeat.all_to_all([torch.ones(100_003)] * world),
            "broadcast": lambda: offbeat.broadcast(torch.ones(1_000_003)),
            "gather": lambda: offbeat.gather(torch.ones(300_003), 1),
            "barrier": offbeat.barrier,
        }[sys.argv[1]]
        call()
        call()
        offbeat.shutdown()

    for call in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather", "barrier"):
        job = ranks(script, 4, args=[call], per_rank=lambda rank: {"OFFBEAT_HOST": f"h{rank // 2}"})
        assert [rank.err for rank in job.ranks] == [""] * 4, call


# What ranks 0 and 2 call, what rank 1 calls, and what the diff must show of both.
MISMATCHES = {
    "shapes": ("all_reduce(ones(2))", "all_reduce(ones(3))", "float32[2]|float32[3]"),
    "large shapes": ("all_reduce(ones(100_000))", "all_reduce(ones(100_001))", "float32[100000]|float32[100001]"),
    "dimensions": ("all_reduce(ones(6))", "all_reduce(ones(2, 3))", "float32[6]|float32[2, 3]"),
    "nine dimensions": ("all_reduce(ones(*[1] * 8, 2))", "all_reduce(ones(*[1] * 8, 3))", "2]|3]"),
    "empty": ("all_reduce(ones(0))", "all_reduce(ones(1))", "float32[0]|float32[1]"),
    "memory": ("all_reduce(ones(2))", "all_reduce(shared_empty(3))", "float32[2]|float32[3]"),
    "types": ("all_reduce(ones(2))", "all_reduce(ones(2).int())", "float32[2]|int32[2]"),
    "ops": ("all_reduce(ones(2), 'sum')", "all_reduce(ones(2), 'max')", "sum|max"),
    "codecs": ("all_reduce(ones(2), codec='float16')", "all_reduce(ones(2))", "codec"),
    "order": ("all_reduce(ones(2))", "barrier()", "all_reduce(float32[2], sum)|barrier()"),
    "kinds": ("all_gather(ones(2))", "all_to_all([ones(2)] * 3)", "all_gather|all_to_all"),
    "sources": ("broadcast(ones(2), 0)", "broadcast(ones(2), 1)", "rank 0)|rank 1)"),
    "destinations": ("reduce(ones(2), 0)", "reduce(ones(2), 1)", "rank 0)|rank 1)"),
    "gatherers": ("gather(ones(2), 2)", "gather(ones(2), 1)", "rank 2)|rank 1)"),
    "gathered columns": ("all_gather(ones(2, 1))", "all_gather(ones(5, 2))", "float32[*, 1]|float32[*, 2]"),
    "gathered types": ("all_gather(ones(2))", "all_gather(ones(2).double())", "float32[*]|float64[*]"),
    "lists": ("reduce_scatter([ones(1)] * 3)", "reduce_scatter([ones(2)] * 3)", "float32[1]|float32[2]"),
    "later in a list": (
        "reduce_scatter([ones(1), ones(1), ones(1)])",
        "reduce_scatter([ones(1), ones(1), ones(2)])",
        "reduce_scatter(float32[1]",
    ),
    "swapped types": ("all_to_all([ones(1)] * 3)", "all_to_all([ones(1).int()] * 3)", "float32|int32"),
}


@pytest.mark.parametrize("where", PLACES)
def test_different_calls_give_a_diff_on_every_rank(ranks, where):
    """Each pair of calls has a group of its own, which it poisons; the world stays usable."""

    def script():
        import functools
        import json
        import sys

        import torch
        from support import report, tell

        import offbeat

        collectives = [
            "all_reduce",
            "reduce",
            "broadcast",
            "all_gather",
            "gather",
            "scatter",
            "reduce_scatter",
            "all_to_all",
            "barrier",
        ]
        offbeat.init(timeout=20.0)
        for name, calls in json.loads(sys.argv[1]).items():
            group = offbeat.Group([0, 1, 2])
            names = {name: functools.partial(getattr(offbeat, name), group=group) for name in collectives}
            names |= {"ones": torch.ones, "shared_empty": offbeat.shared_empty}
            tell(name=name)
            report(eval, calls[offbeat.rank() == 1], names)
            report(offbeat.barrier, group=group)
        tensor = torch.ones(2)
        offbeat.all_reduce(tensor)
        assert tensor.tolist() == [3.0, 3.0]
        offbeat.shutdown()

    calls = {name: (usual, other) for name, (usual, other, _) in MISMATCHES.items()}
    job = place(ranks, where, script, 3, args=[json.dumps(calls)])
    for rank in job.ranks:
        lines = told(rank)
        assert [line["name"] for line in lines[::3]] == list(MISMATCHES)
        for name, first, second in zip(MISMATCHES, lines[1::3], lines[2::3], strict=True):
            words = ["rank 1 (host", *MISMATCHES[name][2].split("|"), "try:"]
            assert second["kind"] == "Mismatch", (name, second)
            assert all(word in second["message"] for word in words), (name, words, second["message"])
            assert first["kind"] == "Mismatch", (name, first)
            assert first["message"] == second["message"], name


@pytest.mark.parametrize("where", PLACES)
def test_a_scattered_tensor_that_does_not_fit_is_a_mismatch(ranks, where):
    def script():
        import torch
        from support import report

        import offbeat

        offbeat.init(timeout=20.0)
        me = offbeat.rank()
        report(offbeat.scatter, [torch.ones(2)] * 3 if me == 0 else None, 0, torch.ones(3 if me == 1 else 2))
        report(offbeat.barrier)

    job = place(ranks, where, script, 3)
    for rank in job.ranks:
        first, second = told(rank)
        # only the receiver sees it at once
        assert rank.rank != 1 or first["kind"] == "Mismatch", first
        assert second["kind"] == "Mismatch", second
        assert "float32[2] to rank 1, whose out is float32[3]" in second["message"]


@pytest.mark.parametrize("where", PLACES)
def test_different_groups_are_a_mismatch(ranks, where):
    def script():
        from support import report

        import offbeat

        offbeat.init(timeout=20.0)
        report(offbeat.Group, [0, 1] if offbeat.rank() == 0 else [1, 2])

    job = place(ranks, where, script, 3)
    for rank in job.ranks:
        (error,) = told(rank)
        assert error["kind"] == "Mismatch", error
        assert "[0, 1]" in error["message"]
        assert "[1, 2]" in error["message"]


@pytest.mark.parametrize("where", PLACES)
def test_messages_that_do_not_fit_are_a_mismatch(ranks, where):
    def script():
        import torch
        from support import report

        import offbeat

        offbeat.init(timeout=20.0)
        for theirs, mine in (((3,), (4,)), ((100_000,), (100_001,)), ((3,), (3, 1))):
            if offbeat.rank() == 0:
                report(offbeat.send, torch.ones(theirs), 1)
            else:
                report(offbeat.recv, torch.ones(mine), 0)
        offbeat.barrier()  # the collectives are not touched by it

    job = place(ranks, where, script, 2)
    for error in told(job.ranks[1]):
        assert error["kind"] == "Mismatch", error
        assert "try:" in error["message"]


@pytest.mark.parametrize("where", MIXED)
@pytest.mark.parametrize("call", ["all_reduce", "recv", "handle"])
def test_a_rank_that_never_calls_is_named_at_the_timeout(ranks, where, call):
    def script():
        import sys
        import time

        import torch
        from support import blocks, report, tell

        import offbeat

        offbeat.init(timeout=1.5)
        offbeat.barrier()
        if offbeat.rank() == 1:
            time.sleep(4)
            report(offbeat.all_reduce, torch.ones(3))
        else:
            began = time.monotonic()
            report(blocks, sys.argv[1], 1)
            tell(took=time.monotonic() - began)
            if sys.argv[1] == "recv":
                report(offbeat.all_reduce, torch.ones(3))

    job = place(ranks, where, script, 3, args=[call])
    for rank in survivors(job, 1):
        error, took, *_ = told(rank)
        assert error["kind"] == "Timeout", error
        host = {"one host": "", "own hosts": "h1", "two on one host": "h0"}[where]
        assert f"rank 1 (host {host}" in error["message"]
        assert f"pid {job.processes[1].pid}" in error["message"]
        assert ("all_reduce" if call != "recv" else "recv") in error["message"]
        assert 1.0 < took["took"] < 3.5
    if call != "recv":
        (late,) = told(job.ranks[1])  # it is told the same story when it comes
        assert late["kind"] == "Timeout", late


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("call", ["all_reduce", "recv", "handle"])
def test_ctrl_c_ends_a_blocked_call(ranks, where, call):
    def script():
        import sys
        import time

        import torch
        from support import blocks, note_time, report

        import offbeat

        offbeat.init(timeout=60.0)
        offbeat.barrier()
        me = offbeat.rank()
        if me == 2:  # never comes
            report(offbeat.recv, torch.ones(1), 0)
            return
        note_time(f"ready{me}")
        if me == 1:
            report(offbeat.all_reduce, torch.ones(3))
            return
        try:
            blocks(sys.argv[1], 2)
        except KeyboardInterrupt:
            note_time("interrupted")
            raise
        finally:
            time.sleep(0.01)

    options = {"per_rank": PLACES[where]} if PLACES[where] else {}
    job = ranks.start(script, 3, args=[call], **options)
    wait_for(job, "ready0", "ready1")
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(job.processes[0].pid, signal.SIGINT)
    job.wait(30, check=False)
    interrupted = float((job.directory / "interrupted").read_text())
    assert interrupted - began < 2.0
    assert job.ranks[0].code == -signal.SIGINT
    assert "KeyboardInterrupt" in job.ranks[0].err
    for rank in survivors(job, 0):
        (error,) = told(rank)
        assert error["kind"] == "PeerFailed", error
        assert error["rank"] == 0
        assert "KeyboardInterrupt" in error["cause"]
        assert error["at"] - began < 3.0


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("handler", ["default", "raises SystemExit"])
def test_sigterm(ranks, where, handler):
    def script():
        import signal
        import sys

        import torch
        from support import note_time, report

        import offbeat

        if sys.argv[1] != "default":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        offbeat.init(timeout=60.0)
        offbeat.barrier()
        if offbeat.rank() == 1:
            note_time("ready")
            offbeat.recv(torch.ones(1), 0, tag=5)
        report(offbeat.all_reduce, torch.ones(3))

    options = {"per_rank": PLACES[where]} if PLACES[where] else {}
    job = ranks.start(script, 2, args=[handler], **options)
    wait_for(job, "ready")
    time.sleep(0.3)
    began = time.monotonic()
    os.kill(job.processes[1].pid, signal.SIGTERM)
    job.wait(30, check=False)
    assert job.ranks[1].code == (-signal.SIGTERM if handler == "default" else 143)
    (error,) = told(job.ranks[0])
    assert error["at"] - began < 2.0
    assert error["kind"] in ("PeerLost", "PeerFailed"), error
    assert error["rank"] == 1
    assert not job.alive()


def test_ctrl_c_while_waiting_for_the_others_in_init(ranks):
    def script():
        import torch  # noqa: F401
        from support import note_time

        import offbeat

        note_time("ready")
        offbeat.init(connect_timeout=60.0)

    job = ranks.start(script, 1, per_rank=lambda rank: {"WORLD_SIZE": "2"})
    wait_for(job, "ready")
    time.sleep(0.7)
    began = time.monotonic()
    os.kill(job.processes[0].pid, signal.SIGINT)
    job.wait(30, check=False)
    assert time.monotonic() - began < 5
    assert "KeyboardInterrupt" in job.ranks[0].err
    assert job.ranks[0].code == -signal.SIGINT


def wait_for(job, *names, timeout=30.0):
    deadline = time.monotonic() + timeout
    while not all((job.directory / name).exists() for name in names):
        assert time.monotonic() < deadline, job.report()
        assert any(process.poll() is None for process in job.processes), job.report()
        time.sleep(0.01)
