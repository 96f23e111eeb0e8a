"""Steps that keep something, on the path of the GPU as in `test_gpu_training.py`: momentum, anchors, copies of peers,
what selection leaves, and functions of the user's. The bits of the CPU's path, also after a checkpoint and after values
that are not finite."""

import pytest
from gpu import building
from gpu_training import IN_ORDER, LAYOUTS, both, stopped

pytestmark = [
    pytest.mark.skipif(building.missing() is not None, reason=str(building.missing())),
    # the doubles are built when they are first asked for
    pytest.mark.timeout(300),
]

SHORT = "float16,bfloat16"
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


def test_short_floats_too(train):
    train(both, "ab", SHORT, *PLAIN_AT_FIRST, *PLAIN_WEIGHTS[:1], CODED_WEIGHTS[1])
    train(both, "abc", SHORT, *OF_COPIES[:1], *OF_COPIES[2:4])


@pytest.mark.parametrize("layout", ["alone on a host", "two each"])
def test_selected_short_floats_too(train, layout):
    train(both, LAYOUTS[layout], SHORT, "TopK(ratio=0.1)")


@pytest.mark.parametrize("layout", IN_ORDER)
def test_factored_training_has_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", *FACTORED)


def test_factored_short_floats_too(train):
    train(both, "ab", SHORT, "PowerSGD(rank=2)")


@pytest.mark.parametrize("layout", ["alone on a host", "three hosts", "three and one"])
def test_functions_of_the_users_have_the_bits_of_the_cpu(train, layout):
    train(both, LAYOUTS[layout], "float32", "Vote()")


def test_functions_take_what_the_steps_beside_them_take(train):
    train(both, "ab", "float64,bfloat16", "Vote(codec=None)")


# the first stream is torch's, the second is of gradients, the third of weights
def test_steps_that_keep_something_on_every_schedule(train):
    weights = [*PLAIN_WEIGHTS, *CODED_WEIGHTS[1:], OF_COPIES[0]]
    train(both, "ab", "float32", OF_MOMENTUM[1], *weights, *range(8), timeout=200)


def test_a_run_that_was_stopped_goes_on_to_the_bit(train):
    train(stopped, "ab", "gpu:6 gpu:3,gpu:6", *PLAIN_AT_FIRST, *PLAIN_WEIGHTS, *CODED_WEIGHTS)
    train(stopped, "abc", "gpu:6 gpu:3,gpu:6", *OF_COPIES)


@pytest.mark.parametrize("layout", ["alone on a host", "two each"])
def test_a_run_goes_on_with_what_was_left_of_gradients(train, layout):
    selected = ["TopK(ratio=0.1)", "TopK(ratio=0.1, warmup_steps=2)"]
    others = ["ByteGrad(feedback=True)", "qsgd", "PowerSGD(rank=2)", "Vote()"]
    train(stopped, LAYOUTS[layout], "gpu:6 gpu:3,gpu:6", *others, *selected)


def test_checkpoints_move_between_cpu_and_gpu(train):
    # without residuals of codecs, which lie with other ranks there
    ways = "cpu:7 cpu:4,gpu:7 gpu:4,cpu:7"
    some = ["QAdam(warmup_steps=2)", *PLAIN_WEIGHTS, CODED_WEIGHTS[2], "TopK(ratio=0.1)", "Vote(codec=None)"]
    # the second of them begins to factor after that
    train(stopped, "ab", ways, *some, "PowerSGD(rank=2)", "PowerSGD(rank=1, warmup_steps=5)")
    train(stopped, "abc", ways, *OF_COPIES)


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
