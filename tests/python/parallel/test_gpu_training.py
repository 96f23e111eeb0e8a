"""The path of the GPU from Python to NCCL, on doubles of libcuda and libnccl with the real kernels in it, and CPU
tensors as device memory: the bits of the CPU's path, on all schedules of streams, with few launches and nothing left
behind. Steps that keep something: `test_gpu_steps.py`; waits: `test_gpu_waits.py`."""

import pytest
from gpu import building
from gpu_training import IN_ORDER, LAYOUTS, both, forgetful
from support import told

pytestmark = [
    pytest.mark.skipif(building.missing() is not None, reason=str(building.missing())),
    # the doubles are built when they are first asked for
    pytest.mark.timeout(300),
]

PLAIN = ["allreduce", "LocalSGD(every=2)", "Decentralized(peers='ring')", "Decentralized()"]
CODED = [
    "bytegrad",
    "qsgd",
    "ByteGrad(feedback=True)",
    "ByteGrad(average=False, hierarchical=False)",
    "Coded('onebit')",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_coded_training_has_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", *(CODED if len(LAYOUTS[layout]) > 2 else [*CODED, "Coded('int4')"]))


def test_short_floats_too(train):
    train(both, "ab", "float16,bfloat16", "bytegrad", "Coded('onebit')")


@pytest.mark.parametrize("layout", IN_ORDER)
def test_plain_training_has_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", *PLAIN)


def test_four_hosts(train):
    train(both, "abcd", "float32", "allreduce", "bytegrad", "Decentralized()")


# the first stream is torch's, the second is of gradients, the third of weights
def test_every_schedule_of_streams_gives_the_same_bits(train):
    train(both, "ab", "float32", "bytegrad", "allreduce", "TopK(ratio=0.1)", "powersgd", "Vote()", *range(4))
    train(both, "ab", "float32", "LocalSGD(every=2, warmup_steps=2)", *range(8))


# the first stream is torch's, the second the idle one, the third ours: where both are lazy nobody makes ours run
@pytest.mark.parametrize(("where", "lazy"), [("before", 0b001), ("after", 0b110)])
def test_a_wait_for_another_stream_is_found_by_a_schedule(train, where, lazy):
    said = train(forgetful, "ab", "allreduce", where, "", check=False, FAKECUDA_SCHED=lazy)
    # what was not waited for may also run when its memory is long gone
    found = [rank.out.startswith("other bits") or (rank.code or 0) < 0 for rank in said.ranks]
    assert any(found), said.report()


def counted():
    import sys

    from gpu_training import leave, make_small
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)
    algorithm, kernels, groups = sys.argv[1], *map(int, sys.argv[2:])
    double = Double()
    with in_place_of_a_gpu(double):
        optimizer, step = make_small(algorithm)
        for _ in range(3):
            step()
        assert len(optimizer._offbeat.replica.gradients.plan()) == 1, "ten tensors in one bucket"
        before = double.counts()
        for _ in range(10):
            step()
        spent = {name: count - before[name] for name, count in double.counts().items()}
        assert [spent.pop("kernels"), spent.pop("groups")] == [10 * kernels, 10 * groups], spent
        # of P and of Q
        assert spent.pop("ncclAllReduce") == (20 if algorithm == "powersgd" else 0), spent
        # a mark before and one after
        assert spent.pop("cuEventCreate") == 20, spent
        assert not any(spent.values()), spent
        optimizer.remove()
    leave(double)


# kernels and exchanges of a step
COUNTS = {
    # encode, decode-add-encode, decode; to who sums and back
    "bytegrad": (3, 2),
    # the same between momentum and gradient, and between difference and outer step
    "QAdam(warmup_steps=1)": (5, 2),
    "DiLoCo(every=1, codec='minmax8')": (5, 2),
    # selecting takes ten, then the lists of two hosts and the division; lists to each other
    "topk": (13, 1),
    # tell and hear; to the peers
    "low_precision_decentralized": (2, 1),
    # where Q begins, P, what is whole; P orthonormal, Q; whether that is finite, the product, what is whole
    "powersgd": (8, 2),
}


@pytest.mark.parametrize("algorithm", COUNTS)
def test_a_step_is_few_launches_and_the_host_waits_for_nothing(train, algorithm):
    train(counted, "ab", algorithm, *COUNTS[algorithm])


def failing():
    """Trains until something is raised; tells what, and how long after the step before that took."""
    import os
    import sys
    import time

    from gpu_training import make, step
    from standin import Double, in_place_of_a_gpu
    from support import tell

    import offbeat

    algorithm, dies = sys.argv[1], sys.argv[2:] == [str(os.environ["RANK"])]
    offbeat.init(timeout=10.0)
    double, since, number = Double(), time.monotonic(), 0
    with in_place_of_a_gpu(double):
        try:
            model, optimizer = make(algorithm)
            for number in range(20):
                since = time.monotonic()
                if dies and number == 4:
                    os._exit(0)
                step(model, optimizer, number)
        except offbeat.errors.OffbeatError as error:
            seconds = time.monotonic() - since
            tell(kind=type(error).__name__, message=str(error), step=number, seconds=seconds)


def stories(job):
    return [told(rank)[-1] for rank in job.ranks if told(rank)]


@pytest.mark.parametrize("lazy", [0b00, 0b01, 0b10, 0b11])
def test_a_rank_that_is_gone_is_named_in_seconds(train, lazy):
    job = train(failing, "abc", "bytegrad", "2", FAKECUDA_SCHED=lazy)
    assert [story["kind"] for story in stories(job)] == ["PeerLost"] * 2, job.report()
    assert all("rank 2" in story["message"] and story["seconds"] < 5 for story in stories(job)), job.report()


@pytest.mark.parametrize(
    "trouble",
    [
        {"FAKENCCL_FAIL": "work:30:6", "FAKENCCL_FAIL_RANK": 1},
        {"FAKENCCL_FAIL": "ncclSend:12:1", "FAKENCCL_FAIL_RANK": 1},
        {"FAKENCCL_FAIL": "ncclCommInitRankConfig:1:2", "FAKENCCL_FAIL_RANK": 1},
    ],
    ids=lambda trouble: trouble["FAKENCCL_FAIL"],
)
def test_errors_of_nccl_end_the_training_on_all_ranks(train, trouble):
    job = train(failing, "ab", "bytegrad", **trouble)
    assert len(stories(job)) == 2, job.report()
    assert any("NCCL error" in story["message"] for story in stories(job)), job.report()


def test_a_function_that_fails_ends_the_training_on_all_ranks(train):
    job = train(failing, "ab", "Vote(fails=3)")
    assert [(story["kind"], story["step"]) for story in stories(job)] == [("PeerFailed", 3)] * 2, job.report()
    words = ("the function Vote.vote of rank 1 failed", "not in this step", "bucket")
    assert all(word in story["message"] for story in stories(job) for word in words), job.report()


def test_a_lack_of_memory_says_what_to_try(train):
    # scratch memory of both ranks, at the first exchange
    job = train(failing, "ab", "bytegrad", FAKECUDA_FAIL="cuMemAllocAsync:8:2")
    assert any("out of memory" in s["message"] and "bucket_bytes" in s["message"] for s in stories(job)), job.report()
    assert len(stories(job)) == 2, job.report()


def refused():
    import contextlib
    import os
    import sys

    from gpu_training import make
    from standin import Double, in_place_of_a_gpu
    from support import fails

    import offbeat

    case = sys.argv[1]
    offbeat.init(timeout=10.0)
    if case == "steps":
        with in_place_of_a_gpu(Double()):
            fails(offbeat.errors.Unsupported, "bucket_bytes", make, "allreduce", bucket_bytes="auto")
        # the same ranks train on the CPU afterwards
        make("allreduce")[1].remove()
    elif case == "mixed":
        gpu = in_place_of_a_gpu(Double()) if os.environ["RANK"] == "0" else contextlib.nullcontext()
        with gpu:
            fails(offbeat.errors.Mismatch, "devices|on a GPU|on the CPU", make, "allreduce")
    elif case == "no driver":
        # one rank has a GPU to torch, and no library that we find
        double = Double() if os.environ["RANK"] == "0" else None
        with in_place_of_a_gpu(double):
            words = "no CUDA: libcuda.so.1 is not there" + ("" if double is None else "|rank 1")
            fails(offbeat.errors.Unsupported, words, make, "allreduce")
    elif case == "no nccl":
        double = Double()
        os.environ["OFFBEAT_NCCL"] = "nowhere.so"
        with in_place_of_a_gpu(double):
            fails(offbeat.errors.Unsupported, "no NCCL: OFFBEAT_NCCL=nowhere.so does not load|try:", make, "allreduce")
    print("refused")


@pytest.mark.parametrize("case", ["steps", "mixed", "no driver", "no nccl"])
def test_what_cannot_be_is_refused_on_all_ranks(train, case):
    job = train(refused, "ab", case)
    assert all("refused" in rank.out for rank in job.ranks), job.report()


def non_finite():
    import sys

    import torch
    from gpu_training import leave
    from standin import Double, in_place_of_a_gpu
    from support import fails

    import offbeat

    offbeat.init(timeout=10.0)
    double = Double()
    with in_place_of_a_gpu(double):
        model = torch.nn.Linear(300, 3)
        # of a higher rank so small a matrix travels whole
        algorithm = offbeat.algorithms.PowerSGD(rank=1) if sys.argv[1] == "powersgd" else sys.argv[1]
        optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, algorithm)

        def backward(value=1.0):
            optimizer.zero_grad()
            model(torch.full((2, 300), value if offbeat.rank() == 1 else 1.0)).mean().backward()

        for _ in range(3):
            backward()
            optimizer.step()
        # a step that is left out, as a GradScaler does, is no reason to complain of it later
        backward(float("inf"))
        assert not model.weight.grad.isfinite().all()
        for _ in range(3):
            backward()
            optimizer.step()
        # one that is made is complained of in a later one, on all ranks in the same
        backward(float("inf"))
        optimizer.step()
        backward()
        optimizer.step()
        backward()
        fails(offbeat.errors.NonFinite, "of a step before", optimizer.step)
        backward()
        optimizer.step()
        # who selects counts its own
        assert max(offbeat.all_gather_object(offbeat.stats()["models"][0]["coding"]["non_finite"])) > 0
        optimizer.remove()
    leave(double)
    sys.exit()  # as interpreters end, with all that was loaded in them (nursery.py)


@pytest.mark.parametrize("algorithm", ["bytegrad", "topk", "powersgd"])
def test_values_that_are_not_finite_are_told_later_on_all_ranks_alike(train, algorithm):
    train(non_finite, "ab", algorithm)
