"""What algorithms are equal to where they lose nothing, and that training around them goes on as with plain torch."""

from pathlib import Path

import pytest
from support import told


def apart(rank):
    """Every rank is a host of its own."""
    return {"OFFBEAT_HOST": f"host{rank}"}


@pytest.mark.parametrize("layout", ["ab", "abc", "aabb"])
def test_what_loses_nothing_is_the_mean(ranks, layout):
    """Selecting everything, full rank, and momentum without a codec: to rounding what allreduce gives."""

    def script():
        from support import differences, make_model, make_optimizer, same_everywhere, tell, train

        import offbeat
        from offbeat.algorithms import PowerSGD, QAdam, TopK

        offbeat.init()

        def run(algorithm, choice):
            model = make_model("cnn")
            optimizer = offbeat.DistributedOptimizer(make_optimizer(choice, model), model, algorithm)
            train(model, optimizer, "cnn", range(6))
            optimizer.remove()
            return model

        # AdamW divides by the root of the second moment, which is never frozen here
        endless = QAdam(warmup_steps=10**9, codec="int4")
        for algorithm, choice in [(TopK(1.0), "sgd"), (PowerSGD(128, least=0), "sgd"), (endless, "adamw")]:
            exact, other = run("allreduce", choice), run(algorithm, choice)
            tell(
                name=algorithm.name,
                away=max(differences(other, exact).values()),
                equal=same_everywhere(*other.parameters()),
            )
        offbeat.shutdown()

    job = ranks(script, len(layout), per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})
    for rank in job.ranks:
        facts = {fact["name"]: fact for fact in told(rank)}
        assert all(fact["equal"] for fact in facts.values()), facts
        assert facts["qadam"]["away"] == 0
        assert facts["topk"]["away"] < 1e-5, facts
        assert facts["powersgd"]["away"] < 2e-5, facts


ALL = ["bytegrad", "qsgd", "qadam", "onebit_adam", "powersgd", "topk"]


@pytest.mark.parametrize("algorithm", ALL)
def test_training_around_an_algorithm(ranks, algorithm):
    """A scheduler made before wrapping, a scaler with an overflow on one rank, clipping, accumulation, unused parts."""

    def script():
        import sys
        import warnings

        import torch
        from support import fails, loss_of, make_batch, make_model, same_everywhere

        import offbeat

        warnings.simplefilter("ignore")
        offbeat.init()
        kinds = {"qadam": {"warmup_steps": 2}, "onebit_adam": {"warmup_steps": 2}}
        others = {"powersgd": {"rank": 1, "least": 0}}
        algorithm = offbeat.algorithms.KNOWN[sys.argv[1]](**(kinds | others).get(sys.argv[1], {}))
        model = make_model("mlp")
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        adam = sys.argv[1] in kinds
        optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        ours = offbeat.DistributedOptimizer(optimizer, model, algorithm)
        assert ours is optimizer
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # one made after it must not matter either
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
        steps = 0
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.*")
            for step in range(12):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    scaler.scale(loss_of(model, make_batch("mlp", offbeat.rank(), 100 + step)) / 2).backward()
                loss = loss_of(model, make_batch("mlp", offbeat.rank(), step)) / 2
                if step == 7 and offbeat.rank() == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if step == 7:
                    assert not torch.isfinite(norm)
                    before = [p.detach().clone() for p in model.parameters()]
                scaler.step(optimizer)
                if step == 7:
                    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                    assert scaler.get_scale() > (scaler.update() or scaler.get_scale())
                else:
                    scaler.update()
                    steps += 1
                    assert all(torch.isfinite(p).all() for p in model.parameters()), step
                scheduler.step()
                assert same_everywhere(*model.parameters()), step
        assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5**4
        assert torch.equal(model.unused, torch.ones(3))
        if adam:
            assert float(optimizer.state[model[0].weight]["step"]) == steps == 11
            assert optimizer.state_dict()["offbeat"]["frozen"], "the second moment is frozen"
        stats = offbeat.stats()["models"][0]["coding"]
        assert stats["coded"] > 0, stats
        assert stats["non_finite"] >= (1 if offbeat.rank() else 0), stats
        # no scaler: what is not finite is not swallowed
        optimizer.zero_grad()
        loss = loss_of(model, make_batch("mlp", offbeat.rank(), 0))
        (loss * float("nan") if offbeat.rank() == 0 else loss).backward()
        fails(offbeat.errors.NonFinite, "NaN|try:", optimizer.step)
        optimizer.remove()
        optimizer.zero_grad()
        loss_of(model, make_batch("mlp", 0, 0)).backward()
        optimizer.step()
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart, args=[algorithm])


@pytest.mark.parametrize("choice", ["sgd", "lbfgs"])
def test_what_is_not_finite_in_a_closure_is_told_before_the_step(ranks, choice):
    """The weights stay as they are, and training goes on with the next batch."""

    def script():
        import sys

        import torch
        from support import digest, fails, loss_of, make_batch, make_model, same_everywhere

        import offbeat

        offbeat.init()
        model = make_model("mlp")
        kind = torch.optim.SGD if sys.argv[1] == "sgd" else torch.optim.LBFGS
        optimizer = offbeat.DistributedOptimizer(kind(model.parameters(), lr=0.1), model, "bytegrad")

        def closure(step, bad=False):
            optimizer.zero_grad()
            loss = loss_of(model, make_batch("mlp", offbeat.rank(), step))
            (loss * float("nan") if bad and offbeat.rank() == 1 else loss).backward()
            return loss

        for step in range(4):
            before = digest(model)
            if step == 2:
                fails(offbeat.errors.NonFinite, "NaN|try:", optimizer.step, lambda: closure(2, bad=True))
                assert digest(model) == before
            elif step == 3:
                assert torch.isfinite(optimizer.step(closure=lambda: closure(3)))
            else:
                assert torch.isfinite(optimizer.step(lambda step=step: closure(step)))
            assert (digest(model) == before) == (step == 2)
            assert same_everywhere(*model.parameters())
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart, args=[choice])


def test_what_is_not_finite_is_told_without_an_optimizer(ranks):
    """Nobody can look before the step then, so the next forward does; a step that a scaler leaves out does no harm."""

    def script():
        import torch
        from support import fails, loss_of, make_batch, make_model

        import offbeat

        offbeat.init()
        model = make_model("mlp")
        wrapped = offbeat.DataParallel(model, algorithm="bytegrad")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def backward(step):
            optimizer.zero_grad()
            loss = loss_of(wrapped, make_batch("mlp", offbeat.rank(), step))
            scaler.scale(loss * float("inf") if step in (1, 4) and offbeat.rank() == 1 else loss).backward()

        for step in range(4):
            backward(step)
            scaler.step(optimizer)
            scaler.update()
        backward(4)
        optimizer.step()
        fails(offbeat.errors.NonFinite, "step 4|spoiled 0.weight|try:", backward, 5)
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart)


def test_bad_input_is_told_when_it_is_made(ranks):
    def script():
        from typing import ClassVar

        import torch
        from support import fails

        import offbeat
        from offbeat import algorithms, steps

        wrong = offbeat.errors.InvalidArgument
        for ratio in (0, 2, -1, True, "a"):
            fails(wrong, "ratio|try", algorithms.TopK, ratio)
        for rank in (0, -1, 5000, 1.5):
            fails(wrong, "rank|try", algorithms.PowerSGD, rank)
        for kind in (algorithms.QAdam, algorithms.OneBitAdam, algorithms.PowerSGD, algorithms.TopK):
            fails(wrong, "warmup_steps|try", kind, warmup_steps=-1)
        fails(wrong, "no codec 'int5'|try", algorithms.QAdam, codec="int5")
        fails(wrong, "feedback without a codec", algorithms.QAdam, codec=None, feedback=True)
        fails(wrong, "op='max'", steps.AllReduce, "max")
        fails(wrong, "beta=1", steps.Momentum, 1)
        fails(wrong, "state=", steps.Apply, print, "momentum")
        fails(wrong, "function", steps.Apply, 3)
        fails(wrong, "state=|try", steps.Apply, print, None)
        fails(wrong, "state=|different names", steps.Apply, print, ["a", "a"])
        nan = float("nan")
        for least in ("a", None, True, nan):
            fails(wrong, "least=|try", algorithms.PowerSGD, least=least)
        for beta in ("a", True, nan):
            fails(wrong, "beta=|try", steps.Momentum, beta)
        for seed in (-1, "a", None, 1.5, True):
            for kind in (algorithms.QSGD, algorithms.PowerSGD, algorithms.AsyncGossip):
                fails(wrong, "seed=|try", kind, seed=seed)
        averaging = (algorithms.GradientAllReduce, algorithms.ByteGrad, algorithms.QSGD)
        for kind in averaging:
            for hierarchical in ("x", nan, 2, None):
                fails(wrong, "hierarchical=|try", kind, hierarchical=hierarchical)
            fails(wrong, "average='no'|try", kind, average="no")
        for feedback in ("no", nan):
            for kind in (algorithms.ByteGrad, algorithms.QAdam, algorithms.AsyncServer):
                fails(wrong, "feedback=|try", kind, feedback=feedback)
        offbeat.init()
        model = torch.nn.Linear(3, 3)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for name in ("qadam", "onebit_adam"):
            fails(wrong, "Adam|got SGD|try", offbeat.DistributedOptimizer, sgd, model, name)
            fails(wrong, "Adam|no optimizer|try", offbeat.DataParallel, model, algorithm=name)
        fails(wrong, "no algorithm 'bytegrat'|'bytegrad'|'topk'", offbeat.DistributedOptimizer, sgd, model, "bytegrat")
        fails(wrong, "try: TopK()", offbeat.DistributedOptimizer, sgd, model, algorithms.TopK)
        ours = [steps.AllReduce()]

        class Own(algorithms.Algorithm):
            given: ClassVar = ours
            first: ClassVar = (0, ())

            def steps(self):
                return self.given

            def warmup(self):
                return self.first

        def own(words, **members):
            fails(wrong, words, offbeat.DistributedOptimizer, sgd, model, type("Own", (Own,), members)())

        own("without steps|try", given=None)
        own("'allreduce', which is no step|try: [AllReduce", given=["allreduce"])
        own("the class AllReduce|try: [AllReduce()]", given=[steps.AllReduce])
        own("no list|try: [AllReduce", given=steps.AllReduce())
        for first in (-1, "3", None, True):
            own("warmup()[0]=|try", first=(first, ours))
        own("warmup()|try: a pair", first=3)
        own("warmup()|'allreduce', which is no step", first=(3, ["allreduce"]))
        for every in ("a", 0, 1.5, None):
            own(f"every={every!r}|try", every=every)
        own("what=3|try", what=3)
        own("when=None|try", when=None)
        fails(wrong, "what its steps are|try", offbeat.DistributedOptimizer, sgd, model, algorithms.Algorithm())
        double = torch.nn.Linear(3, 3).double()
        optimizer = torch.optim.SGD(double.parameters(), lr=0.1)
        if offbeat.world_size() > 1:
            for name in ("topk", "powersgd", "bytegrad"):
                fails(wrong, "float64|try", offbeat.DistributedOptimizer, optimizer, double, name)
            momentum, gradient = steps.Momentum(), steps.Gradient()
            for given in ([momentum, *ours], [momentum, momentum, *ours, gradient]):
                own("Momentum without Gradient|try: [Momentum(), AllReduce(), Gradient()]", given=given)
        # nothing of it is left
        offbeat.DistributedOptimizer(sgd, model)
        model(torch.ones(1, 3)).sum().backward()
        sgd.step()
        offbeat.shutdown()

    ranks(script, 1)
    ranks(script, 2, per_rank=apart)


def test_another_world_takes_over_what_it_can(ranks, tmp_path):
    """Momentum and factors are alike on all ranks and go on; residuals begin at zero, and it is said."""

    def script():
        import sys

        import torch
        from support import make_model, noted_warnings, same_everywhere, tell, train

        import offbeat
        from offbeat.algorithms import OneBitAdam, PowerSGD

        offbeat.init()
        part, directory = sys.argv[1:]
        for algorithm in (OneBitAdam(warmup_steps=2), PowerSGD(2, least=0)):
            model = make_model("mlp")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            path = f"{directory}/{algorithm.name}.pt"
            if part == "second":
                loaded = torch.load(path, weights_only=True)
                model.load_state_dict(loaded["model"])
                with noted_warnings() as said:
                    optimizer.load_state_dict(loaded["optimizer"])
                kept = optimizer.state_dict()["offbeat"]["kept"]["0.weight"]
                old = loaded["optimizer"]["offbeat"]["kept"]["0.weight"]
                same = sorted(label for label in old if torch.equal(kept.get(label, torch.zeros(0)), old[label]))
                tell(said=[text for text in said if "2 ranks" in text], same=same)
            train(model, optimizer, "mlp", range(5))
            if part == "first" and offbeat.rank() == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            assert same_everywhere(*model.parameters())
            optimizer.remove()
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart, args=["first", tmp_path])
    job = ranks(script, 3, per_rank=apart, args=["second", tmp_path])
    for rank in job.ranks:
        one_bit, power = told(rank)
        (said,) = one_bit["said"]
        assert all(words in said for words in ("2.shares", "2.results", "onebit_adam on 3")), said
        assert one_bit["same"] == ["1.momentum"]
        (said,) = power["said"]
        assert "left" in said
        assert [label for label in power["same"] if label.endswith("factor")]


def test_a_world_of_one_keeps_nothing_and_says_so(ranks, tmp_path):
    def script():
        import sys

        import torch
        from support import make_model, noted_warnings, tell, train

        import offbeat
        from offbeat.algorithms import DiLoCo, OneBitAdam, TopK

        offbeat.init()
        for algorithm in (TopK(0.1), OneBitAdam(2), DiLoCo(4)):
            model = make_model("mlp")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            path = f"{sys.argv[1]}/{algorithm.name}.pt"
            if offbeat.world_size() == 1:
                saved = torch.load(path, weights_only=True)
                with noted_warnings() as said:
                    optimizer.load_state_dict(saved)
                    # what has kept nothing has nothing to lose
                    optimizer.load_state_dict(optimizer.state_dict())
                tell(said=said)
            else:
                train(model, optimizer, "mlp", range(5))
                if offbeat.rank() == 0:
                    torch.save(optimizer.state_dict(), path)
            optimizer.remove()
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart, args=[tmp_path])
    (rank,) = ranks(script, 1, args=[tmp_path]).ranks
    for fact, labels in zip(told(rank), ("1.left", "1.momentum, 2.results, 2.shares", "anchor"), strict=True):
        (said,) = fact["said"]
        assert "on 2 ranks, this is" in said, said
        assert labels in said, said
        assert "begins at zero again" in said, said


@pytest.mark.parametrize("layout", ["abc", "aab"])
def test_ranks_without_a_gradient_take_no_vote_of_others(ranks, layout):
    """In the example every vote weighs the same, also where the momentum of a rank is zero in most places."""

    def script():
        import importlib.util
        import sys

        import torch

        import offbeat

        spec = importlib.util.spec_from_file_location("example", sys.argv[1])
        example = sys.modules["example"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        offbeat.init()
        gradients = [torch.randn(3000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
        for gradient in gradients[:2]:
            gradient[300:] = 0
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(3000))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offbeat.DistributedOptimizer(optimizer, model, example.MajorityVote())
        (model.weight * gradients[offbeat.rank()]).sum().backward()
        votes = sum(torch.where(gradient < 0, -1.0, 1.0) for gradient in gradients)
        assert torch.equal(model.weight.grad, votes.sign())
        offbeat.shutdown()

    path = Path(__file__).resolve().parents[3] / "examples" / "08_your_own_algorithm.py"
    ranks(script, 3, per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]}, args=[path])


def test_algorithms_of_other_packages(ranks, tmp_path):
    """A package registers a name by an entry point; nothing is imported before somebody asks for it."""
    package = tmp_path / "site"
    (package / "relaxed-1.0.dist-info").mkdir(parents=True)
    (package / "relaxed-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: relaxed\nVersion: 1.0\n")
    points = "[offbeat.algorithms]\nrelaxed = relaxed:Relaxed\nbroken = relaxed:Missing\nodd = relaxed:odd\n"
    (package / "relaxed-1.0.dist-info" / "entry_points.txt").write_text(points)
    (package / "relaxed.py").write_text(
        "import offbeat\n"
        "class Relaxed(offbeat.Algorithm):\n"
        "    name = 'relaxed'\n"
        "    def steps(self):\n"
        "        return [offbeat.steps.AllReduce('mean', 'bfloat16')]\n"
        "def odd():\n"
        "    return 3\n"
    )

    def script():
        import sys

        sys.path.insert(0, sys.argv[1])
        from support import fails, make_model, make_optimizer, train

        import offbeat

        offbeat.init()
        model = make_model("mlp")
        optimizer = make_optimizer("sgd", model)
        wrong = offbeat.errors.InvalidArgument
        fails(wrong, "no algorithm 'relaxes'|'relaxed'", offbeat.DistributedOptimizer, optimizer, model, "relaxes")
        assert "relaxed" not in sys.modules
        fails(wrong, "cannot be made|Missing", offbeat.DistributedOptimizer, optimizer, model, "broken")
        fails(wrong, "no offbeat.Algorithm", offbeat.DistributedOptimizer, optimizer, model, "odd")
        offbeat.DistributedOptimizer(optimizer, model, "relaxed")
        train(model, optimizer, "mlp", range(3))
        assert offbeat.stats()["models"][0]["algorithm"] == "relaxed"
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart, args=[package])


def test_a_step_of_your_own_that_fails_is_told_everywhere(ranks):
    def script():
        from support import fails, make_model, make_optimizer, train

        import offbeat

        def grumble(bucket):
            if bucket.step == 2 and offbeat.rank() == 1:
                raise ValueError("not in the mood")

        class Moody(offbeat.Algorithm):
            name = "moody"

            def steps(self):
                return [offbeat.steps.Apply(grumble), offbeat.steps.AllReduce()]

        offbeat.init()
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, Moody())
        error = fails(
            offbeat.errors.PeerFailed, "not in the mood|rank 1|grumble", train, model, optimizer, "mlp", range(5)
        )
        assert (error.rank, "not in the mood" in error.cause) == (1, True)
        spans = [span[0] for span in offbeat.runtime.current().trace()]
        assert "python" in spans
        offbeat.shutdown()

    ranks(script, 2, per_rank=apart)
