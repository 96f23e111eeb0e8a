"""The path of the GPU from Python to NCCL, on doubles of libcuda and libnccl with the real kernels in it, and CPU
tensors as device memory: the bits of the CPU's path, on all schedules of streams, with few launches and nothing left
behind."""

import pytest
from gpu import building

pytestmark = [
    pytest.mark.skipif(building.missing() is not None, reason=str(building.missing())),
    # the doubles are built when they are first asked for
    pytest.mark.timeout(300),
]

# ranks by host
LAYOUTS = {"alone on a host": "ab", "three hosts": "abc", "two each": "aabb", "three and one": "aaab", "one host": "aa"}
PLAIN = ["allreduce", "LocalSGD(every=2)", "Decentralized(peers='ring')", "Decentralized()"]
CODED = [
    "bytegrad",
    "qsgd",
    "ByteGrad(feedback=True)",
    "ByteGrad(average=False, hierarchical=False)",
    "Coded('onebit')",
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


# where both hosts and their ranks are several, NCCL adds up in an order of its own
@pytest.mark.parametrize("layout", ["alone on a host", "three hosts", "one host"])
def test_plain_training_has_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", *PLAIN)


def test_four_hosts(train):
    train(both, "abcd", "float32", "allreduce", "bytegrad", "Decentralized()")


# the first stream is torch's, the others are ours
@pytest.mark.parametrize("lazy", [0b00000000, 0b00000001, 0b11111110, 0b11111111])
def test_every_schedule_of_streams_gives_the_same_bits(train, lazy):
    train(both, "ab", "float32", "bytegrad", "allreduce", FAKECUDA_SCHED=lazy)


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
        print("other bits" if differences(usual, train("allreduce")) else "the same bits")


@pytest.mark.parametrize(("where", "lazy"), [("before", 1), ("after", 2)])
def test_a_wait_for_another_stream_is_found_by_a_schedule(train, where, lazy):
    said = train(forgetful, "ab", where, FAKECUDA_SCHED=lazy)
    assert any("other bits" in rank.out for rank in said.ranks), said.report()


def counted():
    import torch
    from gpu_training import leave
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)
    double = Double()
    with in_place_of_a_gpu(double):
        model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(5)))
        optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model, "bytegrad")

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
        # encode, decode-add-encode, decode; to who sums and back; a mark before and one after
        assert spent.pop("kernels") == 30, spent
        assert spent.pop("groups") == 20, spent
        assert spent.pop("cuEventCreate") == 20, spent
        assert not any(spent.values()), spent
        optimizer.remove()
    leave(double)


def test_a_step_is_few_launches_and_the_host_waits_for_nothing(train):
    train(counted, "ab")


def resumed():
    import torch
    from gpu_training import bits, leave, make, step
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)
    double = Double()
    with in_place_of_a_gpu(double):
        for algorithm in ("ByteGrad(feedback=True)", "qsgd"):
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


def test_a_run_that_was_stopped_goes_on_to_the_bit(train):
    train(resumed, "ab")
