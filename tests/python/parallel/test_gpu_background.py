"""Exchanges in the background of models on a GPU, on doubles of libcuda and libnccl with CPU tensors as device memory:
the bits of the CPU's path where every step waits for its exchange, on all schedules of streams; no waits of the host
where none does; nothing left behind. Ranks that are lost: `test_async_failures.py`; pauses:
`test_async_steps.py`."""

import pytest
from gpu import building
from gpu_training import both, forgetful, stopped
from support import told

pytestmark = [
    pytest.mark.skipif(building.missing() is not None, reason=str(building.missing())),
    # the doubles are built when they are first asked for
    pytest.mark.timeout(300),
]

PLAIN = ["AsyncModelAverage()", "AsyncGossip()", "AsyncServer(staleness=0)", "AsyncGossip(peers='exponential')"]
CODED = [
    "AsyncModelAverage(codec='minmax8')",
    "AsyncGossip(codec='modular')",
    "AsyncServer(staleness=0, codec='minmax8')",
    "AsyncServer(staleness=0, codec='qsgd', feedback=False)",
]
PATHS = [("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")]
WARM = ["AsyncModelAverage(warmup_steps=2)", "AsyncModelAverage(codec='onebit', warmup_steps=3)"]


@pytest.mark.parametrize("hosts", ["ab", "aa", "abc", "aabb"])
def test_forced_exchanges_have_the_bits_of_the_cpu(train, hosts):
    train(both, hosts, "float32", *PLAIN, *CODED)


def test_after_a_warmup_too(train):
    train(both, "ab", "float32", *WARM)


def test_other_floats_too(train):
    train(both, "ab", "float16,bfloat16,float64", PLAIN[0], CODED[1], CODED[2])


# the first stream is torch's, the second ours
def test_every_schedule_of_streams_gives_the_same_bits(train):
    train(both, "ab", "float32", PLAIN[0], CODED[1], CODED[2], WARM[0], *range(8))


# the first stream is torch's, the second the idle one if there is one, the next ours
@pytest.mark.parametrize("algorithm", [PLAIN[0], PLAIN[2], CODED[1]])
@pytest.mark.parametrize(
    ("where", "lazy", "forgotten"),
    [
        ("fetch", 0b001, ""),  # weights leave before they are copied
        ("land", 0b110, ""),  # a delta is added before it has come
        ("", 0b10, "cuEventQuery"),  # a snapshot is read before it has come
    ],
)
def test_a_wait_that_is_forgotten_is_found_by_a_schedule(train, algorithm, where, lazy, forgotten):
    said = train(forgetful, "ab", algorithm, where, forgotten, check=False, FAKECUDA_SCHED=lazy)
    # memory that is not there yet may hold anything, also what is no number
    signs = [(rank.out.startswith("other bits"), (rank.code or 0) < 0, "NonFinite" in rank.err) for rank in said.ranks]
    found = [any(each) for each in signs]
    assert any(found), said.report()


def counted():
    import sys
    import time

    from gpu_training import end, leave, make_small
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)
    double = Double()
    with in_place_of_a_gpu(double):
        optimizer, step = make_small(sys.argv[1])
        before = double.counts()

        def spent():
            return {name: count - before[name] for name, count in double.counts().items() if count > before[name]}

        until = time.monotonic() + 30
        while offbeat.stats()["models"][0]["syncs"] < 20 and time.monotonic() < until:
            step()
            # from the first step on: nothing but copies, with a mark before and one after each
            assert set(spent()) <= {"cuEventCreate", "cuMemcpyHtoDAsync_v2"}, spent()
            time.sleep(0.001)
        rounds = offbeat.stats()["models"][0]["syncs"]
        assert rounds >= 20
        assert spent()["cuEventCreate"] <= 4 * (rounds + 2), (spent(), rounds)
        end(optimizer)
    leave(double)


@pytest.mark.parametrize("algorithm", ["AsyncModelAverage(period=0.002)", "AsyncServer(period=0.002, codec='minmax8')"])
@pytest.mark.parametrize("lazy", [0b00, 0b11])
def test_no_step_waits_for_the_device(train, algorithm, lazy):
    train(counted, "ab", algorithm, FAKECUDA_SCHED=lazy)


@pytest.mark.parametrize("lazy", [0b00000000, 0b11111111])
def test_checkpoints_go_from_one_path_to_the_other(train, lazy):
    ways = [f"{first}:{stop},{then}:8" for stop in (0, 1, 5) for first, then in PATHS]
    job = train(stopped, "aab", " ".join(["cpu:8", *ways]), CODED[0], CODED[1], CODED[2], WARM[0], FAKECUDA_SCHED=lazy)
    assert all("begin anew" not in rank.err for rank in job.ranks), job.report()


def failing():
    """Trains until something is raised, and tells what."""
    import sys
    import time

    from gpu_background import begin
    from gpu_training import step
    from standin import Double, in_place_of_a_gpu
    from support import tell

    import offbeat

    offbeat.init(timeout=10.0)
    double, number = Double(), 0
    with in_place_of_a_gpu(double):
        try:
            model, optimizer = begin(sys.argv[1], staleness=None)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                step(model, optimizer, number)
                number += 1
                time.sleep(0.002)
        except offbeat.errors.OffbeatError as error:
            tell(kind=type(error).__name__, message=str(error), steps=number)
        else:
            tell(kind=None, message="", steps=number)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync_v2:4:700", "cuMemcpyHtoDAsync_v2:3:700", "cuEventQuery:20:700"])
def test_a_device_that_fails_ends_the_training_of_its_rank(train, call):
    job = train(failing, "ab", "AsyncModelAverage(period=0.002)", FAKECUDA_FAIL=call)
    failed = [rank for rank in job.ranks if told(rank)[0]["kind"] is not None]
    # who is left alone makes no rounds, in which it could fail
    assert failed, job.report()
    for rank in failed:
        (facts,) = told(rank)
        assert facts["kind"] == "Unsupported", job.report()
        assert f"rank {rank.rank} (" in facts["message"], job.report()
        assert "cuda:0" in facts["message"], job.report()
        assert "illegal memory access" in facts["message"], job.report()


def test_without_room_for_snapshots_all_ranks_are_told(train):
    def script():
        import os

        if os.environ["RANK"] == "1":
            os.environ["FAKECUDA_FAIL"] = "cuMemHostAlloc:2:2"
        from gpu_background import begin
        from gpu_training import leave
        from standin import Double, in_place_of_a_gpu
        from support import fails

        import offbeat

        offbeat.init(timeout=10.0)
        double = Double()
        with in_place_of_a_gpu(double):
            words = "pinned memory of the host|out of memory|rank 1"
            fails(offbeat.errors.Unsupported, words, begin, "AsyncGossip()")
            # the next one finds room
            begin("AsyncGossip()")[1].remove()
        leave(double)

    train(script, "ab")


def test_no_nccl_is_needed(train):
    def script():
        import os

        from gpu_background import begin
        from gpu_training import end, make, step
        from standin import Double, in_place_of_a_gpu
        from support import fails

        import offbeat

        offbeat.init(timeout=10.0)
        double = Double()
        os.environ["OFFBEAT_NCCL"] = "nowhere.so"
        with in_place_of_a_gpu(double):
            fails(offbeat.errors.Unsupported, "no NCCL", make, "allreduce")
            model, optimizer = begin("AsyncModelAverage()")
            for number in range(3):
                step(model, optimizer, number)
            assert offbeat.stats()["models"][0]["syncs"] == 3
            end(optimizer)

    train(script, "ab")


def test_all_ranks_are_on_gpus_or_none(train):
    def script():
        import contextlib
        import os

        from gpu_background import begin
        from standin import Double, in_place_of_a_gpu
        from support import fails

        import offbeat

        offbeat.init(timeout=10.0)
        with in_place_of_a_gpu(Double()) if os.environ["RANK"] == "0" else contextlib.nullcontext():
            fails(offbeat.errors.Mismatch, "devices|on a GPU|on the CPU", begin, "AsyncGossip()")

    train(script, "ab")
