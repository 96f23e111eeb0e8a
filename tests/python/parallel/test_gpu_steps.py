"""Steps that keep something, on the path of the GPU as in `test_gpu_training.py`: momentum, anchors, copies of peers,
what selection leaves, and functions of the user's. The bits of the CPU's path, also after a checkpoint and after values
that are not finite."""

import pytest
from gpu import building
from gpu_training import IN_ORDER, LAYOUTS, both

pytestmark = [
    pytest.mark.skipif(building.missing() is not None, reason=str(building.missing())),
    # the doubles are built when they are first asked for
    pytest.mark.timeout(300),
]

OF_MOMENTUM = [
    "Warm(warmup_steps=2)",
    "Warm(warmup_steps=2, codec='int4')",
    "Warm(warmup_steps=1, codec='onebit')",
]
PLAIN_AT_FIRST = ["QAdam(warmup_steps=2)", "QAdam(warmup_steps=2, codec='int4')", "OneBitAdam(warmup_steps=2)"]
PLAIN_WEIGHTS = [
    "DiLoCo(every=2)",
    "DiLoCo(every=4, fragments=2, overlap=1, outer_momentum=0.0, warmup_steps=1)",
]
CODED_WEIGHTS = [
    "DiLoCo(every=1, codec='minmax8')",
    "DiLoCo(every=2, codec='int4')",
    "DiLoCo(every=4, fragments=2, overlap=1, codec='qsgd')",
]
OF_COPIES = [
    "LowPrecisionDecentralized()",
    "LowPrecisionDecentralized(codec='qsgd', every=2)",
    "LowPrecisionDecentralized(codec=None)",
    "LowPrecisionDecentralized(codec='onebit', gamma=0.2)",
    "LowPrecisionDecentralized(peers='exponential')",
    "LowPrecisionDecentralized(peers='all', codec='int4', gamma=0.3)",
]
SELECTED = [
    "topk",
    "TopK(ratio=0.2)",
    "TopK(ratio=0.1, hierarchical=False)",
    "TopK(ratio=1.0)",
]

# the lower the rank the more matrices; of nine columns of a factor one is left for a second pass
FACTORED = [
    "powersgd",
    "PowerSGD(rank=1, hierarchical=False)",
    "PowerSGD(rank=9, least=0, warmup_steps=1)",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["momentum", "weights", "copies"])
def test_steps_that_keep_something_have_the_bits_of_the_cpu(train, family, layout):
    algorithms = {"momentum": OF_MOMENTUM, "weights": CODED_WEIGHTS, "copies": OF_COPIES}[family]
    train(both, LAYOUTS[layout], "float32", *algorithms)


@pytest.mark.parametrize("layout", IN_ORDER)
def test_steps_beside_plain_ones_have_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", *PLAIN_AT_FIRST, *PLAIN_WEIGHTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selected_training_has_the_bits_of_the_cpu(train, layout):
    # a warm-up is plain training
    warm = ["TopK(ratio=0.05, warmup_steps=2)"] if layout in IN_ORDER else []
    train(both, LAYOUTS[layout], "float32", *SELECTED, *warm)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_too(train, dtype):
    train(both, "ab", dtype, *PLAIN_AT_FIRST, *PLAIN_WEIGHTS[:1], CODED_WEIGHTS[1])
    train(both, "abc", dtype, *OF_COPIES[:1], *OF_COPIES[2:4])


@pytest.mark.parametrize("layout", ["alone on a host", "two each"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_selected_short_floats_too(train, layout, dtype):
    train(both, LAYOUTS[layout], dtype, "TopK(ratio=0.1)")


@pytest.mark.parametrize("layout", IN_ORDER)
def test_factored_training_has_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", *FACTORED)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_factored_short_floats_too(train, dtype):
    train(both, "ab", dtype, "PowerSGD(rank=2)")


@pytest.mark.parametrize("layout", ["alone on a host", "three hosts", "three and one"])
def test_functions_of_the_users_have_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", "Vote()")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_functions_take_what_the_steps_beside_them_take(train, dtype):
    train(both, "ab", dtype, "Vote(codec=None)")


@pytest.mark.parametrize("lazy", [0b000, 0b001, 0b010, 0b100, 0b110, 0b111])
def test_steps_that_keep_something_on_every_schedule(train, lazy):
    train(both, "ab", "float32", OF_MOMENTUM[1], *PLAIN_WEIGHTS, *CODED_WEIGHTS[1:], OF_COPIES[0], FAKECUDA_SCHED=lazy)


def resumed():
    import sys

    import torch
    from gpu_training import bits, leave, make, step
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)
    double = Double()
    with in_place_of_a_gpu(double):
        for algorithm in sys.argv[1:]:
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
    train(resumed, "ab", *PLAIN_AT_FIRST, *PLAIN_WEIGHTS, *CODED_WEIGHTS)
    train(resumed, "abc", *OF_COPIES)


@pytest.mark.parametrize("layout", ["alone on a host", "two each"])
def test_a_run_goes_on_with_what_was_left_of_gradients(train, layout):
    selected = ["TopK(ratio=0.1)", "TopK(ratio=0.1, warmup_steps=2)"]
    train(resumed, LAYOUTS[layout], "ByteGrad(feedback=True)", "qsgd", *selected, "PowerSGD(rank=2)", "Vote()")


def moved():
    """A checkpoint of one path is gone on with on the other: the bits of a run on one of them."""
    import contextlib
    import sys

    import torch
    from gpu_training import bits, leave, make, step
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)
    double = Double()

    def on(place):
        return in_place_of_a_gpu(double) if place == "gpu" else contextlib.nullcontext()

    for algorithm in sys.argv[1:]:
        ends = {}
        for first, second in (("cpu", "cpu"), ("cpu", "gpu"), ("gpu", "cpu")):
            with on(first):
                model, optimizer = make(algorithm)
                for number in range(4):
                    step(model, optimizer, number)
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved, f"moved{offbeat.rank()}.pt")
                optimizer.remove()
            with on(second):
                model, optimizer = make(algorithm, seed=9)
                loaded = torch.load(f"moved{offbeat.rank()}.pt", weights_only=True)
                model.load_state_dict(loaded["model"])
                optimizer.load_state_dict(loaded["optimizer"])
                for number in range(4, 7):
                    step(model, optimizer, number)
                ends[first, second] = [bits(tensor).clone() for tensor in model.state_dict().values()]
                optimizer.remove()
        for path, end in ends.items():
            same = [torch.equal(a, b) for a, b in zip(ends["cpu", "cpu"], end, strict=True)]
            assert all(same), (algorithm, path, same)
    leave(double)


def test_checkpoints_move_between_cpu_and_gpu(train):
    # without residuals of codecs, which lie with other ranks there
    train(moved, "ab", "QAdam(warmup_steps=2)", *PLAIN_WEIGHTS, CODED_WEIGHTS[2], "TopK(ratio=0.1)", "Vote(codec=None)")
    # the second of them begins to factor after that
    train(moved, "ab", "PowerSGD(rank=2)", "PowerSGD(rank=1, warmup_steps=5)")
    train(moved, "abc", *OF_COPIES)


def non_finite_weights():
    """Weights that are not finite on a rank: told at a later exchange, and anchors and copies stay as they were."""
    import sys

    import torch
    from gpu_training import kept_by, leave, make, step
    from standin import Double, in_place_of_a_gpu
    from support import fails

    import offbeat

    offbeat.init(timeout=10.0)
    double = Double()
    with in_place_of_a_gpu(double):
        for algorithm in sys.argv[1:]:
            model, optimizer = make(algorithm)
            step(model, optimizer, 0)
            with torch.no_grad():
                model.last.bias[3] = float("nan")
            step(model, optimizer, 1)
            assert not model.last.bias.isfinite().all()
            kept = kept_by(optimizer)
            assert all(values.isfinite().all() for entries in kept.values() for values in entries.values()), algorithm
            fails(offbeat.errors.NonFinite, "weights of step", step, model, optimizer, 2)
            coding = offbeat.stats()["models"][0]["coding"]
            assert coding["non_finite"] > 0 if "codec" in algorithm else True
            optimizer.remove()
    leave(double)


def test_weights_that_are_not_finite_are_told_later_and_spoil_nothing_kept(train):
    codec = "codec='minmax8', every=1"
    train(non_finite_weights, "ab", "DiLoCo(every=1)", f"DiLoCo({codec})", "LowPrecisionDecentralized()")


def scaled():
    """A GradScaler leaves a step out where gradients overflow, on both paths in the same step."""
    import torch
    from gpu_training import bits, leave, make
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=10.0)
    double = Double()

    def run(algorithm):
        model, optimizer = make(algorithm)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(6):
            optimizer.zero_grad()
            x = torch.full((8, 20), 1.0 + number + offbeat.rank())
            x[0, 0] = float("inf") if number == 3 and offbeat.rank() == 1 else 0.5
            scaler.scale(model(x, True).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        # gradients of weights that differ are this rank's own
        assert scaler.get_scale() < 4.0 or offbeat.rank() == 0
        end = [bits(p).clone() for p in model.parameters()]
        optimizer.remove()
        return end

    for algorithm in ("QAdam(warmup_steps=2)", "OneBitAdam(warmup_steps=1)", "DiLoCo(every=2)"):
        usual = run(algorithm)
        with in_place_of_a_gpu(double):
            found = run(algorithm)
        assert all(torch.equal(a, b) for a, b in zip(usual, found, strict=True)), algorithm
    leave(double)


def test_steps_that_a_scaler_leaves_out(train):
    train(scaled, "ab")


def lossy_odd():
    """Selects from or factors values of which some are not finite, on both paths. What is kept must not be spoiled."""
    import sys

    import torch
    from gpu_training import bits, leave
    from standin import Double, in_place_of_a_gpu

    import offbeat

    offbeat.init(timeout=20.0)

    def run():
        torch.manual_seed(3)
        model = torch.nn.Linear(300, 30)
        sgd, lossy = torch.optim.SGD(model.parameters(), lr=0.0), eval(sys.argv[1], vars(offbeat.algorithms))
        optimizer = offbeat.DistributedOptimizer(sgd, model, lossy)
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
    assert len(usual) == len(found) == int(sys.argv[2])
    for number, (a, b) in enumerate(zip(usual, found, strict=True)):
        assert torch.equal(a.isnan(), b.isnan()), number
        assert torch.equal(bits(a.nan_to_num(nan=0.5)), bits(b.nan_to_num(nan=0.5))), number
    leave(double)


@pytest.mark.parametrize("layout", ["alone on a host", "two each"])
def test_what_is_left_is_that_of_the_cpu_after_values_that_are_not_finite(train, layout):
    train(lossy_odd, LAYOUTS[layout], "TopK(ratio=0.1)", 16)


def test_factors_are_those_of_the_cpu_after_values_that_are_not_finite(train):
    train(lossy_odd, "ab", "PowerSGD(rank=3)", 24)
