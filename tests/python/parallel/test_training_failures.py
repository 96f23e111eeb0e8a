"""When a rank fails, dies or sleeps in the middle of a training step: who is told what, and how soon."""

import os
import signal
import time

import pytest
from support import told

LAYOUTS = {"one host": "aaa", "own hosts": "abc"}


def hosts(layout):
    return lambda rank: {"OFFBEAT_HOST": LAYOUTS[layout][rank]}


def at_once(ranks, script, world, **options):
    """The jobs of all layouts, which run at the same time: they mostly sleep."""
    jobs = [ranks.start(script, world, per_rank=hosts(layout)) for layout in LAYOUTS]
    return [job.wait(**options) for job in jobs]


def others(job, *without):
    return [rank for rank in job.ranks if rank.rank not in without]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["forward", "backward", "first backward", "join"])
def test_an_exception_in_a_step_is_quoted_by_the_others(ranks, layout, where):
    def script():
        import contextlib
        import os
        import sys
        import time

        from support import make_model, make_optimizer, note_time, report, train

        import offbeat

        where = sys.argv[1]
        offbeat.init(timeout=60.0)
        model = make_model("cnn")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=500)
        fatal = 0 if where == "first backward" else 3
        for step in range(4):
            if step == fatal and offbeat.rank() == 1:

                def fail(*_):
                    note_time("failed")
                    raise ValueError("image 17 is broken")

                if where == "forward":
                    model[4].register_forward_pre_hook(fail)
                else:
                    model[4].weight.register_hook(fail)
            if step == fatal and offbeat.rank() != 1:
                with optimizer.join() if where == "join" else contextlib.nullcontext():
                    report(train, model, optimizer, "cnn", [step])
                    report(train, model, optimizer, "cnn", [step])  # and again
                    time.sleep(1)  # whoever goes without a goodbye must not be what the others hear of first
                    os._exit(0)
            with optimizer.join() if where == "join" else contextlib.nullcontext():
                train(model, optimizer, "cnn", [step])

    job = ranks(script, 3, args=[where], check=False, per_rank=hosts(layout))
    failed = float((job.directory / "failed").read_text())
    assert [rank.code for rank in job.ranks] == [0, 1, 0], job.report()
    assert "ValueError: image 17 is broken" in job.ranks[1].err
    for rank in others(job, 1):
        for error in told(rank):
            assert error["kind"] == "PeerFailed", error
            assert error["rank"] == 1
            assert "ValueError: image 17 is broken" in error["cause"]
            assert "script.py" in error["cause"]
        assert told(rank)[0]["at"] - failed < 5.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_killed_in_backward_is_named(ranks, layout):
    def script():
        import os
        import signal

        from support import make_model, make_optimizer, note_time, report, train

        import offbeat

        offbeat.init(timeout=60.0)
        model = make_model("cnn")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=500)
        train(model, optimizer, "cnn", range(3))
        if offbeat.rank() == 2:

            def die(_):
                note_time("killed")
                os.kill(os.getpid(), signal.SIGKILL)

            model[4].weight.register_hook(die)
            train(model, optimizer, "cnn", [3])
        report(train, model, optimizer, "cnn", [3])

    job = ranks(script, 3, check=False, per_rank=hosts(layout))
    killed = float((job.directory / "killed").read_text())
    assert [rank.code for rank in job.ranks] == [0, 0, -signal.SIGKILL], job.report()
    for rank in others(job, 2):
        (error,) = told(rank)
        assert error["kind"] == "PeerLost", error
        assert error["rank"] == 2
        assert f"pid {job.processes[2].pid}" in error["message"]
        assert error["at"] - killed < 3.0


def test_a_rank_that_sleeps_is_warned_about_and_then_given_up(ranks):
    """On standard error, before the deadline: which rank, which bucket, which parameters, which step."""

    def script():
        import time

        from support import make_model, make_optimizer, note_time, report, train

        import offbeat

        offbeat.init(timeout=3.0)
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=500)
        train(model, optimizer, "mlp", range(4))
        if offbeat.rank() == 1:
            model[2].weight.register_hook(lambda _: time.sleep(6))
        else:
            note_time(f"began{offbeat.rank()}")
        report(train, model, optimizer, "mlp", [4])

    for job in at_once(ranks, script, 3, check=False):
        for rank in job.ranks:
            (error,) = told(rank)
            assert error["kind"] == "Timeout", error
            assert "step 4" in error["message"], error
            assert "bucket" in error["message"], error
            assert any(name in error["message"] for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
        for rank in others(job, 1):
            (error,) = told(rank)
            assert "rank 1" in error["message"], error
            waited = error["at"] - float((job.directory / f"began{rank.rank}").read_text())
            assert 2.5 < waited < 8.0
            warnings = [line for line in rank.err.splitlines() if "rank 1" in line and "step 4" in line]
            assert warnings, rank.err
            assert "bucket" in warnings[0]
            assert "2.weight" in warnings[0] or "2.bias" in warnings[0] or "0.weight" in warnings[0]
            assert len(warnings) <= 3, "one would do"


def test_after_a_checkpoint_only_the_first_step_may_take_longer(ranks):
    """Steps go on counting where the checkpoint stopped, and the first of this run still has its own deadline."""

    def script():
        import time

        from support import make_model, make_optimizer, report, train

        import offbeat

        offbeat.init(timeout=2.0, first_step_timeout=60.0)
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        train(model, optimizer, "mlp", range(3))
        state = optimizer.state_dict()
        offbeat.DistributedOptimizer(optimizer, model)
        optimizer.load_state_dict(state)
        if offbeat.rank() == 1:
            time.sleep(3.0)
        train(model, optimizer, "mlp", range(3, 5))
        if offbeat.rank() == 1:
            time.sleep(6.0)
        report(train, model, optimizer, "mlp", [5])

    job = ranks(script, 2, check=False)
    (error,) = told(job.ranks[0])
    assert error["kind"] == "Timeout", error
    assert "step 5" in error["message"], error


@pytest.mark.slow
def test_the_first_step_may_take_longer(ranks):
    """Loading and compiling on one rank: before its first forward, in it, or before its first backward."""

    def script():
        import time

        from support import digest, loss_of, make_batch, make_model, make_optimizer, simulate, tell, train

        import offbeat

        offbeat.init(timeout=3.0, first_step_timeout=30.0)
        me = offbeat.rank()
        layout = [[0, 1]] if offbeat.local_size() == 2 else [[0], [1]]
        alone = make_model("cnn")
        simulate(alone, make_optimizer("sgd", alone), "cnn", range(4), layout)
        offbeat.barrier()
        for where in ("before", "forward", "backward"):
            model = make_model("cnn")
            optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
            if me == 1 and where == "before":
                time.sleep(4.0)
            handle = None
            if me == 1 and where == "forward":
                handle = model[4].register_forward_pre_hook(lambda *_: time.sleep(4.0))
            optimizer.zero_grad()
            loss = loss_of(model, make_batch("cnn", me, 0))
            if me == 1 and where == "backward":
                time.sleep(4.0)
            loss.backward()
            optimizer.step()
            if handle is not None:
                handle.remove()
            train(model, optimizer, "cnn", range(1, 4))
            tell(where=where, right=digest(model, buffers=False) == digest(alone, buffers=False))
            offbeat.barrier()
        offbeat.shutdown()

    for job in at_once(ranks, script, 2):
        for rank in job.ranks:
            assert [case["right"] for case in told(rank)] == [True] * 3


def test_ctrl_c_in_the_wait_for_gradients(ranks):
    def script():
        import time

        from support import make_model, make_optimizer, note_time, report, train

        import offbeat

        offbeat.init(timeout=60.0)
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=500)
        train(model, optimizer, "mlp", range(3))
        if offbeat.rank() == 0:
            note_time("waiting")
            try:
                train(model, optimizer, "mlp", [3])
            except KeyboardInterrupt:
                note_time("interrupted")
                raise
        time.sleep(3)
        report(train, model, optimizer, "mlp", [3])

    job = ranks.start(script, 2)
    deadline = time.monotonic() + 30
    while not (job.directory / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.7)
    began = time.monotonic()
    os.kill(job.processes[0].pid, signal.SIGINT)
    job.wait(30, check=False)
    assert float((job.directory / "interrupted").read_text()) - began < 1.0
    assert job.ranks[0].code == -signal.SIGINT
    (error,) = told(job.ranks[1])
    assert error["kind"] in ("PeerFailed", "PeerLost"), error
    assert error["rank"] == 0


def test_an_exception_in_backward_that_is_caught(ranks):
    """Training goes on where nothing has been sent; where a part has, every rank gets a clear error."""

    def script():
        import sys

        from support import digest, loss_of, make_batch, make_model, make_optimizer, simulate, tell

        import offbeat

        case, world = sys.argv[1], offbeat
        world.init(timeout=20.0)
        me = offbeat.rank()
        # large buckets are complete only at the end; small ones are on their way when the first layer fails
        size = 400 if case == "sent" else 1 << 20
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=size)
        fatal = 0 if case == "first" else 3
        kind = message = None
        for step in range(6):
            optimizer.zero_grad()
            if step == fatal and (me == 1 or case == "all"):

                def fail(_):
                    raise MemoryError("too large a batch")

                handle = model[0].weight.register_hook(fail)
                try:
                    loss_of(model, make_batch("mlp", me, 77)).backward()
                except MemoryError:
                    handle.remove()
                    optimizer.zero_grad()
            try:
                loss_of(model, make_batch("mlp", me, step)).backward()
            except offbeat.errors.OffbeatError as error:
                kind, message = type(error).__name__, str(error)
                break
            optimizer.step()
        alone = make_model("mlp")
        simulate(alone, make_optimizer("sgd", alone), "mlp", range(6), [[0, 1]])
        tell(kind=kind, message=message, right=digest(model) == digest(alone))

    for case in ("first", "later", "all"):
        job = ranks(script, 2, args=[case])
        for rank in job.ranks:
            assert told(rank) == [{"kind": None, "message": None, "right": True}], case
    job = ranks(script, 2, args=["sent"])
    for rank in job.ranks:
        (error,) = told(rank)
        assert error["kind"] == "PeerFailed", error
        assert "rank 1" in error["message"]
        assert "part of its gradients" in error["message"]
        assert "try:" in error["message"]


def test_drift_is_found_and_named(ranks):
    """A parameter that changes on one rank only: at the next check every rank raises the same words."""

    def script():
        import sys

        import torch
        from support import make_model, make_optimizer, tell, train, wrap

        import offbeat

        offbeat.init(timeout=20.0)
        wraps = sys.argv[1]
        model = make_model("cnn")
        optimizer = make_optimizer("sgd", model)
        wrapped = wrap(wraps, model, optimizer, check_every=3)
        for step in range(12):
            try:
                train(wrapped, optimizer, "cnn", [step])
            except offbeat.errors.Mismatch as error:
                tell(step=step, message=str(error))
                break
            if step == 6 and offbeat.rank() == 2:
                with torch.no_grad():
                    model[4].weight[3, 2, 1, 0] += 1e-6
                    model[8].bias[1] += 1.0

    for wraps in ("DistributedOptimizer", "DataParallel"):
        job = ranks(script, 3, args=[wraps])
        (first,) = told(job.ranks[0])
        assert first["step"] == 9
        assert "4.weight" in first["message"]
        assert "8.bias" not in first["message"], "the first one is named"
        assert "rank 2" in first["message"]
        assert "step 9" in first["message"]
        for rank in job.ranks:
            assert told(rank) == [first]
