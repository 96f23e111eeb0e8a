"""When a rank gets a signal in a call: it ends, and the others are told."""

import os
import signal
import time

import pytest
from support import PLACES, survivors, told


def wait_for(job, *names, timeout=30.0):
    deadline = time.monotonic() + timeout
    while not all((job.directory / name).exists() for name in names):
        assert time.monotonic() < deadline, job.report()
        assert any(process.poll() is None for process in job.processes), job.report()
        time.sleep(0.01)


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
