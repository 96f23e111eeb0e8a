"""When a rank dies, fails, leaves, or never comes: who is told what, and how soon.

Ranks that make different calls are in test_mismatches.py, those that get a signal in test_signals.py.
"""

import signal
import time

import pytest
from support import MIXED, PLACES, place, survivors, told


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

    # an agent that looks at once may end rank 0 before it has said anything
    job = torchrun(script, 2, check=False, patience=5.0)
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


@pytest.mark.parametrize("how", ["init again", "late hook", "thread", "thread and late hook"])
def test_an_uncaught_exception_is_quoted_whoever_else_has_hooks(ranks, how):
    """Torch's hook between two of ours, one that was set later and passes nothing on, and a thread that trains."""

    def script():
        import sys
        import threading
        import time

        import torch.distributed as dist
        from support import make_model, make_optimizer, report, train

        import offbeat

        how = sys.argv[1]
        offbeat.init(timeout=20.0)
        if how == "init again":
            dist.init_process_group("gloo")
            offbeat.shutdown()
            offbeat.init(timeout=20.0)

        def work():
            model = make_model("mlp")
            optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
            train(model, optimizer, "mlp", range(3))
            if offbeat.rank() == 1:
                raise ValueError("no more data in shard 7")
            report(train, model, optimizer, "mlp", [3])

        if "late hook" in how:
            sys.excepthook = lambda kind, *_: print("it was", kind.__name__)
        if "thread" in how:
            # one that has nothing to do with training may end as it likes
            helper = threading.Thread(target=lambda: 1 / 0)
            helper.start()
            helper.join()
            worker = threading.Thread(target=work)
            worker.start()
            worker.join()
            time.sleep(3.0 * offbeat.rank())
        else:
            work()

    began = time.monotonic()
    job = ranks(script, 2, args=[how], check=False)
    assert [rank.code for rank in job.ranks] == [0, 0 if "thread" in how else 1], job.report()
    (error,) = told(job.ranks[0])
    assert error["kind"] == "PeerFailed", error
    assert "ValueError: no more data in shard 7" in error["cause"]
    assert error["at"] - began < 10.0
    assert "ZeroDivisionError" in job.ranks[0].err or "thread" not in how
    shown = (job.ranks[1].out + job.ranks[1].err).count("ValueError" if how == "late hook" else "ValueError: no more")
    assert shown == 1, job.report()


@pytest.mark.parametrize("how", ["a signal whose handler raises", "half a character"])
def test_an_uncaught_exception_is_quoted_whatever_comes_between(ranks, how):
    """As when torch's DataLoader says that a worker is gone, and when a file's name is no UTF-8."""

    def script():
        import os
        import signal
        import sys

        import torch
        from support import report

        import offbeat

        class Source:
            """Is asked for the line that raised while the exception is quoted."""

            def get_source(self, name):
                os.kill(os.getpid(), signal.SIGALRM)
                return "raise ValueError('no more data')"

        def gone(*_):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            raise RuntimeError("a worker is gone")

        offbeat.init(timeout=20.0)
        if offbeat.rank() == 1:
            if sys.argv[1] == "half a character":
                raise ValueError("no more data in caf\udce9.csv")
            signal.signal(signal.SIGALRM, gone)
            exec(
                compile("raise ValueError('no more data')", "nowhere", "exec"),
                {"__loader__": Source(), "__name__": "nowhere"},
            )
        report(offbeat.all_reduce, torch.ones(1))

    job = ranks(script, 2, args=[how], check=False)
    assert [rank.code for rank in job.ranks] == [0, 1], job.report()
    (error,) = told(job.ranks[0])
    assert error["kind"] == "PeerFailed", error
    assert "ValueError: no more data" in error["cause"]
    assert "caf\\udce9.csv" in error["cause"] or how != "half a character"
    assert "ValueError: no more data" in job.ranks[1].err


def test_an_exception_that_was_looked_at_ends_no_rank(ranks):
    """As test runners and consoles do: it is the last one, and the process ends in good order after it."""

    def script():
        import sys

        import torch
        from support import report

        import offbeat

        offbeat.init(timeout=20.0)
        if offbeat.rank() == 1:

            def look():
                try:
                    raise ValueError("a test that failed")
                except ValueError as error:
                    sys.last_value, sys.last_traceback = error, error.__traceback__

            look()
            return
        report(offbeat.all_reduce, torch.ones(1))

    job = ranks(script, 2)
    (error,) = told(job.ranks[0])
    assert error["kind"] == "PeerLost", error
    assert "its interpreter exited" in error["message"]


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
