"""The path of the GPU from Python to NCCL, on doubles of libcuda and libnccl with the real kernels in it, and CPU
tensors as device memory: the bits of the CPU's path, on all schedules of streams, with few launches and nothing left
behind."""

import pytest
from gpu import building
from support import told

pytestmark = [
    pytest.mark.skipif(building.missing() is not None, reason=str(building.missing())),
    # the doubles are built when they are first asked for
    pytest.mark.timeout(300),
]

# ranks by host
LAYOUTS = {"alone on a host": "ab", "three hosts": "abc", "two each": "aabb", "three and one": "aaab", "one host": "aa"}
# where both hosts and their ranks are several, NCCL adds up in an order of its own
IN_ORDER = ["alone on a host", "three hosts", "one host"]
PLAIN = ["allreduce", "LocalSGD(every=2)", "Decentralized(peers='ring')", "Decentralized()"]
CODED = [
    "bytegrad",
    "qsgd",
    "ByteGrad(feedback=True)",
    "ByteGrad(average=False, hierarchical=False)",
    "Coded('onebit')",
]


SELECTED = [
    "topk",
    "TopK(ratio=0.2)",
    "TopK(ratio=0.1, hierarchical=False)",
    "TopK(ratio=1.0)",
]


@pytest.fixture(scope="session")
def doubles():
    return building.build()


@pytest.fixture
def train(ranks, doubles):
    """Runs a script of ranks on the doubles."""

    def run(script, hosts, *args, **env):
        env = {"DOUBLES": str(doubles), **{name: str(value) for name, value in env.items()}}
        options = {key: env.pop(key) for key in ("check", "timeout") if key in env}
        return ranks(
            script,
            len(hosts),
            env=env,
            args=args,
            per_rank=lambda rank: {"OFFBEAT_HOST": hosts[rank]},
            timeout=float(options.get("timeout", 100)),
            check=options.get("check") != "False",
        )

    return run


def both():
    import sys

    import torch
    from gpu_training import compare, leave

    import offbeat

    offbeat.init(timeout=20.0)
    dtype = getattr(torch, sys.argv[1])
    leave(compare([(algorithm, dtype) for algorithm in sys.argv[2:]]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_coded_training_has_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", *(CODED if len(LAYOUTS[layout]) > 2 else [*CODED, "Coded('int4')"]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_too(train, dtype):
    train(both, "ab", dtype, "bytegrad", "Coded('onebit')")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selected_training_has_the_bits_of_the_cpu(train, layout):
    # a warm-up is plain training
    warm = ["TopK(ratio=0.05, warmup_steps=2)"] if layout in IN_ORDER else []
    train(both, LAYOUTS[layout], "float32", *SELECTED, *warm)


@pytest.mark.parametrize("layout", ["alone on a host", "two each"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_selected_short_floats_too(train, layout, dtype):
    train(both, LAYOUTS[layout], dtype, "TopK(ratio=0.1)")


@pytest.mark.parametrize("layout", ["alone on a host", "three hosts", "three and one"])
def test_functions_of_the_users_have_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", "Vote()")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_functions_take_what_the_steps_beside_them_take(train, dtype):
    train(both, "ab", dtype, "Vote(codec=None)")


def test_a_function_that_fails_ends_the_training_on_all_ranks(train):
    job = train(failing, "ab", "Vote(fails=3)")
    assert [(story["kind"], story["step"]) for story in stories(job)] == [("PeerFailed", 3)] * 2, job.report()
    words = ("the function Vote.vote of rank 1 failed", "not in this step", "bucket")
    assert all(word in story["message"] for story in stories(job) for word in words), job.report()


@pytest.mark.parametrize("layout", IN_ORDER)
def test_plain_training_has_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", *PLAIN)


def test_four_hosts(train):
    train(both, "abcd", "float32", "allreduce", "bytegrad", "Decentralized()")


# the first stream is torch's, the others are ours
@pytest.mark.parametrize("lazy", [0b00000000, 0b00000001, 0b11111110, 0b11111111])
def test_every_schedule_of_streams_gives_the_same_bits(train, lazy):
    train(both, "ab", "float32", "bytegrad", "allreduce", "TopK(ratio=0.1)", "Vote()", FAKECUDA_SCHED=lazy)


# torch's, that of gradients and that of weights
@pytest.mark.parametrize("lazy", range(8))
def test_exchanges_of_weights_on_every_schedule(train, lazy):
    train(both, "ab", "float32", "LocalSGD(every=2, warmup_steps=2)", FAKECUDA_SCHED=lazy)


def forgetful():
    import sys

    from gpu_training import differences, elsewhere, train
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)
    usual, double = train("allreduce"), Double()
    with in_place_of_a_gpu(double), elsewhere(double, sys.argv[1]):
        print("other bits" if differences(usual, train("allreduce")) else "the same bits", flush=True)


# the first stream is torch's, the second the idle one, the third ours: where both are lazy nobody makes ours run
@pytest.mark.parametrize(("where", "lazy"), [("before", 0b001), ("after", 0b110)])
def test_a_wait_for_another_stream_is_found_by_a_schedule(train, where, lazy):
    said = train(forgetful, "ab", where, check=False, FAKECUDA_SCHED=lazy)
    # what was not waited for may also run when its memory is long gone
    found = [rank.out.startswith("other bits") or (rank.code or 0) < 0 for rank in said.ranks]
    assert any(found), said.report()


def counted():
    import sys

    import torch
    from gpu_training import leave
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)
    double = Double()
    with in_place_of_a_gpu(double):
        model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(5)))
        optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, sys.argv[1])

        def step():
            optimizer.zero_grad()
            model(torch.ones(4, 40)).mean().backward()
            optimizer.step()

        for _ in range(3):
            step()
        assert len(optimizer._offbeat.replica.plan()) == 1, "ten tensors in one bucket"
        before = double.counts()
        for _ in range(10):
            step()
        spent = {name: count - before[name] for name, count in double.counts().items()}
        assert [spent.pop("kernels"), spent.pop("groups")] == [10 * int(number) for number in sys.argv[2:]], spent
        # a mark before and one after
        assert spent.pop("cuEventCreate") == 20, spent
        assert not any(spent.values()), spent
        optimizer.remove()
    leave(double)


# encode, decode-add-encode, decode; to who sums and back
# selecting takes ten, then the lists of two hosts and the division; lists to each other
@pytest.mark.parametrize(("algorithm", "kernels", "groups"), [("bytegrad", 3, 2), ("topk", 13, 1)])
def test_a_step_is_few_launches_and_the_host_waits_for_nothing(train, algorithm, kernels, groups):
    train(counted, "ab", algorithm, str(kernels), str(groups))


def resumed():
    import torch
    from gpu_training import bits, leave, make, step
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)
    double = Double()
    with in_place_of_a_gpu(double):
        for algorithm in (
            "ByteGrad(feedback=True)",
            "qsgd",
            "TopK(ratio=0.1)",
            "TopK(ratio=0.1, warmup_steps=2)",
            "Vote()",
        ):
            model, optimizer = make(algorithm)
            for number in range(6):
                if number == 3:
                    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(saved, f"saved{offbeat.rank()}.pt")
                step(model, optimizer, number)
            usual = [tensor.clone() for tensor in model.state_dict().values()]
            optimizer.remove()
            model, optimizer = make(algorithm, seed=9)
            loaded = torch.load(f"saved{offbeat.rank()}.pt", weights_only=True)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            for number in range(3, 6):
                step(model, optimizer, number)
            same = [torch.equal(bits(a), bits(b)) for a, b in zip(usual, model.state_dict().values(), strict=True)]
            assert all(same), (algorithm, same)
            optimizer.remove()
    leave(double)


@pytest.mark.parametrize("layout", ["alone on a host", "two each"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(train, layout):
    train(resumed, LAYOUTS[layout])


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
            kinds = {"PowerSGD()": "low_rank", "QAdam(warmup_steps=1)": "momentum"}
            kinds |= {"DiLoCo(every=2)": "difference", "LowPrecisionDecentralized()": "replicas"}
            for algorithm, name in kinds.items():
                fails(offbeat.errors.Unsupported, f"{name} is not carried on a GPU|try: model.cpu()", make, algorithm)
            for algorithm in (
                "AsyncModelAverage()",
                "AsyncModelAverage(warmup_steps=2)",
                "AsyncGossip()",
                "AsyncServer()",
            ):
                fails(offbeat.errors.Unsupported, "on the CPU only|try model.cpu()", make, algorithm)
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
        optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, sys.argv[1])

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


@pytest.mark.parametrize("algorithm", ["bytegrad", "topk"])
def test_values_that_are_not_finite_are_told_later_on_all_ranks_alike(train, algorithm):
    train(non_finite, "ab", algorithm)


def selected_odd():
    """Selects from values of which some are not finite, on both paths. What is left must not be spoiled."""
    import torch
    from gpu_training import bits, leave
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)

    def run():
        torch.manual_seed(3)
        model = torch.nn.Linear(300, 30)
        sgd, topk = torch.optim.SGD(model.parameters(), lr=0.0), offbeat.algorithms.TopK(ratio=0.1)
        optimizer = offbeat.DistributedOptimizer(sgd, model, topk)
        seen = []
        for number in range(4):
            optimizer.zero_grad()
            x = torch.randn(2, 300, generator=torch.Generator().manual_seed(10 * number + offbeat.rank()))
            if number == 1 and offbeat.rank() == 1:
                x[0, 7], x[0, 9], x[1, 11] = float("inf"), float("nan"), float("-inf")
            # a step of the optimizer would complain
            model(x).square().mean().backward()
            kept = optimizer.state_dict()["offbeat"]["kept"]
            seen += [parameter.grad.clone() for parameter in model.parameters()]
            seen += [kept[name][label] for name in sorted(kept) for label in sorted(kept[name])]
        optimizer.remove()
        return seen

    usual, double = run(), Double()
    with in_place_of_a_gpu(double):
        found = run()
    assert any(not tensor.isfinite().all() for tensor in usual)
    assert len(usual) == len(found) == 16
    for number, (a, b) in enumerate(zip(usual, found, strict=True)):
        assert torch.equal(a.isnan(), b.isnan()), number
        assert torch.equal(bits(a.nan_to_num(nan=0.5)), bits(b.nan_to_num(nan=0.5))), number
    leave(double)


@pytest.mark.parametrize("layout", ["alone on a host", "two each"])
def test_what_is_left_is_that_of_the_cpu_after_values_that_are_not_finite(train, layout):
    train(selected_odd, LAYOUTS[layout])
