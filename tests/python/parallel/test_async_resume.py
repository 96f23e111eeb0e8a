"""Checkpoints of exchanges in the background: training goes on as if it had never stopped, whenever each rank saved."""

import json

import pytest
from support import told

FORCED = [
    ("AsyncServer", {"staleness": 0}),
    ("AsyncServer", {"staleness": 0, "codec": "minmax8"}),
    ("AsyncServer", {"staleness": 0, "codec": "qsgd", "feedback": False}),
    ("AsyncModelAverage", {}),
    ("AsyncModelAverage", {"codec": "minmax8", "warmup_steps": 2}),
    ("AsyncGossip", {"seed": 3}),
    ("AsyncGossip", {"codec": "modular"}),
]


@pytest.mark.parametrize(("name", "options"), FORCED)
def test_resuming_changes_no_bit(ranks, name, options):
    """Every step waits for its exchange. Ranks save and train on; others begin anew from what was saved."""

    def script():
        import io
        import json
        import sys

        import torch
        from support import digest, make_model, tell, train

        import offbeat

        offbeat.init(timeout=20.0)
        options = json.loads(sys.argv[2])

        def begin(seed):
            model = make_model("mlp", seed)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            algorithm = getattr(offbeat.algorithms, sys.argv[1])(**options)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            optimizer._offbeat.replica.staleness = 0
            return model, optimizer

        def end(optimizer):
            # nobody leaves while others still need it for a step
            offbeat.barrier()
            optimizer.remove()

        model, optimizer = begin(0)
        train(model, optimizer, "mlp", range(12))
        wanted, counted = digest(model), offbeat.stats()["models"][0]["background"]
        end(optimizer)
        for stop in (0, 1, 6):
            model, optimizer = begin(0)
            train(model, optimizer, "mlp", range(stop))
            file = io.BytesIO()
            torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, file)
            file.seek(0)
            # what happens after it was saved is not in it
            train(model, optimizer, "mlp", range(50, 50 + 3))
            end(optimizer)
            model, optimizer = begin(1)
            saved = torch.load(file, weights_only=True)
            # in whatever order
            for each in ("optimizer", "model") if stop == 6 else ("model", "optimizer"):
                {"optimizer": optimizer, "model": model}[each].load_state_dict(saved[each])
            again = optimizer.state_dict()["offbeat"]
            assert all(
                torch.equal(values, again["kept"][name][label])
                for name, entries in saved["optimizer"]["offbeat"].get("kept", {}).items()
                for label, values in entries.items()
                if stop
            ), "what was loaded is what would be saved"
            train(model, optimizer, "mlp", range(stop, 12))
            assert digest(model) == wanted, f"resumed at {stop} it is another"
            stats = offbeat.stats()["models"][0]
            assert stats["step"] == 12
            assert stats["background"]["staleness"] == 0
            assert stats["background"]["syncs"] == counted["syncs"]
            end(optimizer)
        # and back in the middle of training
        model, optimizer = begin(0)
        train(model, optimizer, "mlp", range(40, 43))
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, "mlp", range(6, 12))
        tell(same=digest(model) == wanted, labels=sorted(saved["optimizer"]["offbeat"]["kept"].get("0.weight", {})))
        end(optimizer)
        offbeat.shutdown()

    job = ranks(script, 3, args=[name, json.dumps(options)], per_rank=lambda rank: {"OFFBEAT_HOST": "aab"[rank]})
    labels = {
        "AsyncServer": ["account", "base"] + (["shares"] if options.get("codec") == "minmax8" else []),
        "AsyncModelAverage": ["reference", "results", "shares"] if "codec" in options else [],
        "AsyncGossip": ["differences"] if "codec" in options else [],
    }
    for rank in job.ranks:
        assert told(rank) == [{"same": True, "labels": labels[name]}], rank.err
        assert "begin anew" not in rank.err, rank.err


@pytest.mark.parametrize("options", [{}, {"codec": "minmax8"}, {"staleness": 5}])
def test_no_update_is_lost_and_none_counts_twice(ranks, options):
    """Ranks save at different times, one of them in a pause, and their pushes go on: of all that only what is in their
    own checkpoints counts. Each rank's gradient is constant, so what the server must have in the end is known."""

    def script():
        import copy
        import json
        import sys
        import time

        import torch

        import offbeat

        offbeat.init(timeout=20.0)
        me, options = offbeat.rank(), json.loads(sys.argv[1])
        slope = torch.linspace(-1, 1, 700).roll(100 * me) * (me + 1)

        def begin():
            model = torch.nn.Module()
            model.weight = torch.nn.Parameter(torch.linspace(0, 1, 700))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            algorithm = offbeat.algorithms.AsyncServer(period=0.004, **options)
            return model, offbeat.DistributedOptimizer(optimizer, model, algorithm)

        def train(model, optimizer, steps, slope=slope):
            for _ in range(steps):
                optimizer.zero_grad()
                (model.weight * slope).sum().backward()
                optimizer.step()
                time.sleep(0.001 * (me + 1))

        bounded = "staleness" in options
        before = 20 if bounded else 12 + 9 * me
        model, optimizer = begin()
        train(model, optimizer, before)
        if me == 1:
            optimizer.pause()
            time.sleep(0.05)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if me == 1:
            optimizer.resume()
        train(model, optimizer, 25)
        offbeat.barrier()
        optimizer.remove()

        model, optimizer = begin()
        optimizer.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["model"])
        after = 10 if bounded else 30 - 6 * me
        train(model, optimizer, after)
        # all that is left is pushed, with what codecs have lost, and everyone hears of it
        optimizer._offbeat.replica.staleness = 0
        for _ in range(8):
            train(model, optimizer, 1, slope * 0)
            offbeat.barrier()
        sums = offbeat.all_gather(slope * (before + after))
        wanted = torch.linspace(0, 1, 700) - 0.01 * torch.stack(sums).mean(0)
        worst = float((model.weight.detach() - wanted).abs().max())
        assert float((wanted - torch.linspace(0, 1, 700)).abs().max()) > 0.1
        assert worst < 1e-5, worst
        offbeat.shutdown()

    ranks(script, 3, args=[json.dumps(options)])


@pytest.mark.parametrize(
    ("name", "options", "labels"),
    [
        ("AsyncServer", {"period": 0.01, "codec": "minmax8"}, ["account", "base", "shares"]),
        ("AsyncModelAverage", {"period": 0.01, "codec": "minmax8"}, ["reference", "results", "shares"]),
        ("AsyncGossip", {"period": 0.01, "codec": "modular"}, ["differences", "rounds"]),
    ],
)
def test_another_world_or_algorithm_says_what_begins_anew(ranks, tmp_path, name, options, labels):
    """Once, by name; the step is taken over and training goes on."""

    def script():
        import json
        import sys
        import warnings
        from pathlib import Path

        import torch
        from support import make_model, tell, train

        import offbeat

        offbeat.init(timeout=20.0)
        options, path = json.loads(sys.argv[2]), Path(sys.argv[3]) / f"{offbeat.rank()}.pt"

        def begin(algorithm):
            model = make_model("mlp")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = offbeat.DistributedOptimizer(optimizer, model, algorithm)
            # where exchanges are in the background every step waits for one
            optimizer._offbeat.replica.staleness = 0
            return model, optimizer

        algorithm = getattr(offbeat.algorithms, sys.argv[1])(**options)
        if offbeat.world_size() == 3:
            model, optimizer = begin(algorithm)
            train(model, optimizer, "mlp", range(9))
            torch.save([model.state_dict(), optimizer.state_dict()], path)
            offbeat.barrier()
        else:
            for chosen in (algorithm, offbeat.algorithms.LocalSGD(4), offbeat.algorithms.AsyncServer(staleness=1)):
                model, optimizer = begin(chosen)
                of_model, of_optimizer = torch.load(path, weights_only=True)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    model.load_state_dict(of_model)
                    optimizer.load_state_dict(of_optimizer)
                before = offbeat.stats()["models"][0]["syncs"]
                train(model, optimizer, "mlp", range(8))
                stats = offbeat.stats()["models"][0]
                finite = all(bool(p.isfinite().all()) for p in model.parameters())
                told = [str(each.message) for each in caught]
                tell(warnings=told, finite=finite, step=stats["step"], syncs=stats["syncs"] - before)
                offbeat.barrier()
                optimizer.remove()
        offbeat.shutdown()

    arguments = [name, json.dumps(options), tmp_path]
    ranks(script, 3, args=arguments)
    for rank in ranks(script, 2, args=arguments).ranks:
        facts = told(rank)
        assert len(facts) == 3
        for fact, here in zip(facts, (name, "local_sgd", "async_server"), strict=True):
            (warning,) = fact["warnings"]
            wanted = [label for label in labels if here != "local_sgd" or label != "rounds"]
            assert all(label in warning for label in wanted), warning
            assert "on 3 ranks" in warning, warning
            assert here == name or here in warning, warning
            assert fact["finite"]
            assert (fact["step"], fact["syncs"]) == ((8, 2) if here == "local_sgd" else (17, 8)), fact


def test_parameters_find_what_was_kept_by_their_names(ranks):
    """A model that has its parameters in another order goes on as the one that was saved."""

    def script():
        import torch

        import offbeat
        from offbeat.algorithms import AsyncGossip, AsyncServer

        offbeat.init(timeout=20.0)
        me = offbeat.rank()

        def begin(algorithm, names):
            model = torch.nn.Module()
            for name, count in names:
                values = torch.linspace(-1, 1, count).roll(len(name))
                model.register_parameter(name, torch.nn.Parameter(values))
            optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, algorithm)
            optimizer._offbeat.replica.staleness = 0
            return model, optimizer

        def train(model, optimizer, steps):
            for step in steps:
                optimizer.zero_grad()
                for name, parameter in model.named_parameters():
                    parameter.grad = (parameter.detach() * 3 + len(name) + me + step).sin()
                optimizer.step()

        def values(model):
            return torch.cat([parameter.detach().clone() for _, parameter in sorted(model.named_parameters())])

        names = [("a", 700), ("bb", 5), ("ccc", 1300)]
        for algorithm in (AsyncServer(staleness=0), AsyncServer(staleness=0, codec="minmax8"), AsyncGossip()):
            model, optimizer = begin(algorithm, names)
            train(model, optimizer, range(3))
            saved = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
            saved["model"] = {name: tensor.clone() for name, tensor in saved["model"].items()}
            train(model, optimizer, range(3, 7))
            wanted = values(model)
            offbeat.barrier()
            optimizer.remove()
            model, optimizer = begin(algorithm, names[::-1])
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            train(model, optimizer, range(3, 7))
            # who owns an element in another order may be somebody else, and an owner's own updates are not encoded
            bound = 0 if getattr(algorithm, "codec", None) is None else 5e-3
            assert float((values(model) - wanted).abs().max()) <= bound, algorithm
            offbeat.barrier()
            optimizer.remove()
        offbeat.shutdown()

    ranks(script, 2)
