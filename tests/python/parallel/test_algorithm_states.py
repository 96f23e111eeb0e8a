"""What algorithms keep between steps: through changes of the model, and where a checkpoint is of others."""

import pytest
from support import told

ALONE = "0123"


def on(layout):
    """Each rank on the host that the layout says."""
    return lambda rank: {"OFFBEAT_HOST": f"host{layout[rank]}"}


@pytest.mark.parametrize("how", ["thawed", "added"])
def test_other_parameters_leave_what_was_kept(ranks, how):
    """Residuals, factors, momentum and states of your own go on; what codecs have lost begins at zero, with a word."""

    def script():
        import sys

        import torch
        from support import make_model, noted_warnings, same_everywhere, tell, train

        import offbeat
        from offbeat import algorithms
        from offbeat.steps import AllReduce, Apply

        class Slow(offbeat.Algorithm):
            name = "slow"

            def steps(self):
                return [Apply(self.keep, ["sum"]), AllReduce()]

            def keep(self, bucket):
                bucket.state["sum"].add_(bucket.values)

        offbeat.init()
        for algorithm in (algorithms.TopK(0.1), algorithms.PowerSGD(2), algorithms.OneBitAdam(1), Slow()):
            model = make_model("mlp")
            last = [model[4].weight, model[4].bias]
            for parameter in last:
                parameter.requires_grad_(sys.argv[1] == "added")
            parameters = [p for p in model.parameters() if sys.argv[1] == "thawed" or all(p is not q for q in last)]
            optimizer = torch.optim.AdamW(parameters, lr=0.01)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            train(model, optimizer, "mlp", range(4))
            before = optimizer.state_dict()["offbeat"]["kept"]
            with noted_warnings() as said:
                if sys.argv[1] == "added":
                    optimizer.add_param_group({"params": last})
                for parameter in last:
                    parameter.requires_grad_(True)
                model(torch.zeros(1, 8))
            after = optimizer.state_dict()["offbeat"]["kept"]
            lost = {
                label
                for name, entries in before.items()
                for label, values in entries.items()
                if values.any() and not torch.equal(after[name].get(label, torch.zeros(0)), values)
            }
            train(model, optimizer, "mlp", range(4, 7))
            tell(name=algorithm.name, lost=sorted(lost), said=said, equal=same_everywhere(*model.parameters()))
            optimizer.remove()
        offbeat.shutdown()

    job = ranks(script, 2, per_rank=on(ALONE), args=[how])
    for rank in job.ranks:
        facts = {fact["name"]: fact for fact in told(rank)}
        assert len(facts) == 4
        assert all(fact["equal"] for fact in facts.values())
        assert facts["onebit_adam"]["lost"] == ["2.results", "2.shares"]
        (said,) = [text for text in facts["onebit_adam"]["said"] if "other parameters" in text]
        assert "under 2.results, 2.shares begins at zero again" in said
        for name in ("topk", "powersgd", "slow"):
            assert facts[name]["lost"] == []
            assert not any("other parameters" in text for text in facts[name]["said"])


def saves_and_loads():
    """Saves, or loads what another job has saved, by every rank its own file or all that of rank 0."""
    import sys

    import torch
    from support import make_model, noted_warnings, same_everywhere, tell, train

    import offbeat
    from offbeat.algorithms import PowerSGD, QAdam, TopK

    offbeat.init()
    part, directory = sys.argv[1:]
    for algorithm in (TopK(0.1), PowerSGD(2, least=0), QAdam(warmup_steps=2, codec="int4")):
        model = make_model("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
        path = f"{directory}/{algorithm.name}-{0 if part == 'zero' else offbeat.rank()}.pt"
        if part != "save":
            loaded = torch.load(path, weights_only=True)
            if part == "old":
                for key in ("rank", "hosts", "codecs", "observed"):
                    del loaded["optimizer"]["offbeat"][key]
            model.load_state_dict(loaded["model"])
            with noted_warnings() as said:
                optimizer.load_state_dict(loaded["optimizer"])
            old, kept = (of["offbeat"]["kept"] for of in (loaded["optimizer"], optimizer.state_dict()))
            lost = set()
            for name, label in ((name, label) for name, entries in old.items() for label in entries):
                before, values = old[name][label], kept[name].get(label, torch.zeros_like(old[name][label]))
                if not torch.equal(before, values):
                    assert not values.any(), (name, label)
                    lost.add(label)
            tell(lost=sorted(lost), said=said)
        train(model, optimizer, "mlp", range(4))
        assert same_everywhere(*model.parameters())
        if part == "save":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        optimizer.remove()
    offbeat.shutdown()


def test_other_hosts_and_files_of_other_ranks(ranks, tmp_path):
    """Everybody takes what all have alike; its own where each has loaded its own; and what belongs to hosts, or lies
    with carriers, only where all is as it was."""

    def load(part, layout):
        job = ranks(saves_and_loads, 4, per_rank=on(layout), args=[part, tmp_path])
        facts = [told(rank) for rank in job.ranks]
        # who carries nothing has nothing to lose
        lost = [sorted({label for fact in of for label in fact["lost"]}) for of in zip(*facts, strict=True)]
        return lost, [fact["said"] for fact in facts[1]], facts[0][0]["said"]

    ranks(saves_and_loads, 4, per_rank=on("0011"), args=["save", tmp_path])
    for part in ("own", "old"):
        assert load(part, "0011") == ([[], [], []], [[], [], []], [])
    for layout in ("0101", "0123"):
        lost, said, _ = load("own", layout)
        assert lost == [["1.left"], [], ["2.results", "2.shares"]]
        assert "topk on 4 ranks (hosts [0, 0, 2, 2]), this is topk on 4 ranks (hosts [0, 1, " in said[0][0]
        assert said[1] == []
    lost, said, of_zero = load("zero", "0011")
    assert lost == [["1.left"], ["1.left"], ["2.results", "2.shares"]]
    assert all("(rank 0)" in text and "(rank 1)" in text for (text,) in said)
    assert "another rank has loaded a file that is not its own" in of_zero[0]


def test_other_arguments_take_what_fits(ranks):
    def script():
        import copy

        import torch
        from support import make_model, noted_warnings, same_everywhere, tell, train

        import offbeat
        from offbeat.algorithms import ByteGrad, PowerSGD, QAdam, TopK

        offbeat.init()
        for before, after in (
            (QAdam(2, "int4"), QAdam(2, "minmax8")),
            (QAdam(2, "int4"), QAdam(2, "onebit")),
            (ByteGrad(feedback=True), ByteGrad()),
            (PowerSGD(4, least=0), PowerSGD(2, least=0)),
            (TopK(0.1), TopK(0.2)),
        ):
            for algorithm in (before, after):
                model = make_model("mlp")
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
                if algorithm is before:
                    train(model, optimizer, "mlp", range(4))
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                    optimizer.remove()
            model.load_state_dict(saved[0])
            with noted_warnings() as said:
                optimizer.load_state_dict(saved[1])
            train(model, optimizer, "mlp", range(4, 7))
            assert same_everywhere(*model.parameters())
            tell(said=said)
            optimizer.remove()
        offbeat.shutdown()

    job = ranks(script, 2, per_rank=on(ALONE))
    for rank in job.ranks:
        eight, one, without, thinner, more = (fact["said"] for fact in told(rank))
        assert "codecs ['int4']" in eight[0]
        assert "codecs ['minmax8']" in eight[0]
        for (text,) in (eight, one, without):
            assert "results" in text
            assert "shares" in text
        assert "powersgd on 2 ranks with other arguments" in thinner[0]
        assert "under 1.factor" in thinner[0]
        assert more == []


@pytest.mark.parametrize("stop", range(4))
def test_stopping_after_any_exchange_changes_no_bit(ranks, stop):
    """Also after the first one, where buckets are not made yet; and going back in a run that has gone on."""

    def script():
        import copy
        import sys

        import torch
        from support import digest, make_model, train

        import offbeat
        from offbeat.algorithms import ByteGrad, TopK

        offbeat.init()
        stop = int(sys.argv[1])
        for algorithm in (ByteGrad(feedback=True), TopK(0.1)):

            def start(algorithm=algorithm):
                model = make_model("cnn")
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                return model, offbeat.DistributedOptimizer(optimizer, model, algorithm, bucket_bytes=1000)

            model, optimizer = start()
            train(model, optimizer, "cnn", range(stop))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            train(model, optimizer, "cnn", range(stop, 6))
            expected = digest(model)
            if stop > 0:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                train(model, optimizer, "cnn", range(stop, 6))
                assert digest(model) == expected, "going back"
            optimizer.remove()
            model, optimizer = start()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            train(model, optimizer, "cnn", range(stop, 6))
            assert digest(model) == expected, "resumed"
            optimizer.remove()
        offbeat.shutdown()

    ranks(script, 3, per_rank=on(ALONE), args=[stop])


@pytest.mark.parametrize("how", ["parts", "eval"])
def test_resuming_without_a_forward_in_training_changes_no_bit(ranks, how):
    """Where the script calls parts of the model, or trains it in evaluation mode, no hook runs before the backward."""

    def script():
        import copy
        import sys

        import torch
        from support import digest, same_everywhere

        import offbeat
        from offbeat.algorithms import ByteGrad, OneBitAdam, PowerSGD, QAdam, TopK

        offbeat.init()
        in_parts = sys.argv[1] == "parts"

        def start(algorithm):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 6))
            model.train(in_parts)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            return model, offbeat.DistributedOptimizer(optimizer, model, algorithm, bucket_bytes=400)

        def train(model, optimizer, steps):
            for step in steps:
                optimizer.zero_grad()
                x = torch.randn(5, 12, generator=torch.Generator().manual_seed(9 * step + offbeat.rank()))
                out = model[2](model[1](model[0](x))) if in_parts else model(x)
                out.pow(2).mean().backward()
                optimizer.step()

        for algorithm in (
            ByteGrad(feedback=True),
            QAdam(2, "int4"),
            OneBitAdam(2),
            PowerSGD(2, least=0),
            TopK(0.2),
        ):
            for stop in (1, 4):
                model, optimizer = start(algorithm)
                train(model, optimizer, range(stop))
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                train(model, optimizer, range(stop, 7))
                expected = digest(model)
                optimizer.remove()
                model, optimizer = start(algorithm)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                train(model, optimizer, range(stop, 7))
                assert digest(model) == expected, (algorithm, stop)
                assert same_everywhere(*model.parameters())
                optimizer.remove()
        offbeat.shutdown()

    ranks(script, 2, per_rank=on(ALONE), args=[how])


def test_a_backward_that_raised_may_be_followed_by_loading(ranks):
    """What it had begun is forgotten before buckets are made anew."""

    def script():
        import copy

        import torch
        from support import digest, make_model, train

        import offbeat
        from offbeat.algorithms import ByteGrad

        class Raises(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise ValueError("on purpose")

        offbeat.init()

        def start():
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            # a bucket for each parameter, so that the last layer's are complete before it raises
            return model, offbeat.DistributedOptimizer(optimizer, model, ByteGrad(feedback=True), bucket_bytes=4)

        model, optimizer = start()
        train(model, optimizer, "mlp", range(2))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, "mlp", range(2, 5))
        expected = digest(model)
        optimizer.remove()
        model, optimizer = start()
        layers = list(model)
        hidden = torch.nn.Sequential(*layers[:-1])(torch.ones(2, layers[0].in_features))
        raised = False
        try:
            layers[-1](Raises.apply(hidden)).sum().backward()
        except ValueError:
            raised = True
        assert raised
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, "mlp", range(2, 5))
        assert digest(model) == expected
        offbeat.shutdown()

    ranks(script, 2, per_rank=on(ALONE))
