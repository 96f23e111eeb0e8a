"""Training in a world of one: the same script without torchrun, and what needs no second rank."""

import pytest
import torch
from support import fails, make_model, make_optimizer
from torch import nn

import offbeat
from offbeat import settings
from offbeat.errors import InvalidArgument, NotInitialized
from offbeat.optimizer import name_parameters


def alone(rank):
    """The environment of a script that nobody launched."""
    return dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")


def test_a_world_of_one_trains_like_plain_torch(ranks):
    """The same bits, with everything that a wrapper has; and nothing is left of it after remove()."""

    def script():
        import contextlib
        import io

        import torch
        from support import digest, fails, loss_of, make_batch, make_model, make_optimizer, noted_warnings

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init()
        assert offbeat.world_size() == 1

        def loop(wrapped, optimizer, holder, kind):
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            with holder.join() if holder else contextlib.nullcontext():
                for step in range(8):
                    optimizer.zero_grad()
                    with holder.no_sync() if holder else contextlib.nullcontext():
                        loss_of(wrapped, make_batch(kind, 0, 100 + step)).backward()
                    loss_of(wrapped, make_batch(kind, 0, step)).backward()
                    torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()

        with noted_warnings() as texts:
            for kind in ("cnn", "transformer"):
                for choice in ("sgd", "adamw"):
                    results = []
                    for way in ("plain", "DistributedOptimizer", "DataParallel"):
                        model = make_model(kind)
                        model.unused = torch.nn.Linear(2, 2)
                        optimizer = make_optimizer(choice, model)
                        wrapped, holder = model, None
                        if way == "DistributedOptimizer":
                            holder = offbeat.DistributedOptimizer(optimizer, model, check_every=2, bucket_bytes=100)
                            assert holder is optimizer
                        elif way == "DataParallel":
                            wrapped = holder = offbeat.DataParallel(model, optimizer, check_every=2)
                        if isinstance(model, torch.nn.Sequential):
                            model.forward = lambda inputs, model=model: model[:9](inputs)
                        loop(wrapped, optimizer, holder, kind)
                        results.append(digest(model))
                        assert model.unused.weight.grad is None
                        if way == "DistributedOptimizer":
                            file = io.BytesIO()
                            torch.save(optimizer.state_dict(), file)
                            file.seek(0)
                            optimizer.load_state_dict(torch.load(file, weights_only=True))
                            optimizer.remove()
                            assert "offbeat" not in optimizer.state_dict()
                    assert results[0] == results[1] == results[2], (kind, choice, results)
        assert not [text for text in texts if "no gradient" in text], texts
        # what is wrong is wrong in a world of one, too
        frozen = make_model("mlp").requires_grad_(False)
        words = "no parameters that require"
        fails(InvalidArgument, words, offbeat.DistributedOptimizer, make_optimizer("sgd", frozen), frozen)
        fails(InvalidArgument, words, offbeat.DataParallel, frozen)
        other = make_optimizer("sgd", make_model("mlp"))
        fails(InvalidArgument, "model.parameters()", offbeat.DistributedOptimizer, other, make_model("mlp"))
        offbeat.shutdown()

    ranks(script, 1, per_rank=alone)


def test_before_init():
    model = make_model("mlp")
    optimizer = make_optimizer("sgd", model)
    words = "not initialised|offbeat.init()"
    fails(NotInitialized, words, offbeat.DistributedOptimizer, optimizer, model)
    fails(NotInitialized, words, offbeat.DataParallel, model)
    assert type(optimizer) is torch.optim.SGD
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_arguments_are_checked_first():
    """Also before init: whoever reads the error mends the call once, not twice."""
    model = make_model("mlp")
    optimizer = make_optimizer("sgd", model)
    fails(InvalidArgument, "'nonsense'|'allreduce'", offbeat.DistributedOptimizer, optimizer, model, "nonsense")
    fails(InvalidArgument, "bucket_bytes=0", offbeat.DistributedOptimizer, optimizer, model, bucket_bytes=0)
    fails(InvalidArgument, "check_every=0", offbeat.DistributedOptimizer, optimizer, model, check_every=0)
    fails(InvalidArgument, "torch.nn.Module", offbeat.DataParallel, optimizer)


@pytest.mark.parametrize(("text", "argument", "size"), [("", None, 8 << 20), ("4096", None, 4096), ("4096", 77, 77)])
def test_the_size_of_buckets_comes_from_the_call_then_the_environment(monkeypatch, text, argument, size):
    monkeypatch.setenv("OFFBEAT_BUCKET_BYTES", text)
    assert settings.bucket_bytes(argument) == size


@pytest.mark.parametrize("text", ["0", "-1", "large"])
def test_wrong_sizes_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("OFFBEAT_BUCKET_BYTES", text)
    with pytest.raises(InvalidArgument, match=r"OFFBEAT_BUCKET_BYTES.*; try: .*unset it"):
        settings.bucket_bytes(None)


def test_algorithms_are_descriptions():
    """Frozen, comparable, made by name or by hand; an algorithm of the user's own needs only its steps."""
    from offbeat.algorithms import Algorithm, GradientAllReduce, resolve
    from offbeat.steps import AllReduce

    assert resolve("allreduce") == GradientAllReduce() == GradientAllReduce(average=True, hierarchical="auto")
    assert GradientAllReduce(average=False) != GradientAllReduce()
    assert GradientAllReduce().steps() == [AllReduce("mean", hierarchical="auto")]
    assert GradientAllReduce(average=False, hierarchical=False).steps() == [AllReduce("sum", hierarchical=False)]
    with pytest.raises(AttributeError):
        GradientAllReduce().average = False

    class Mine(Algorithm):
        def steps(self):
            return [AllReduce("sum")]

    mine = Mine()
    assert resolve(mine) is mine
    with pytest.raises(InvalidArgument, match="Algorithm"):
        Algorithm().steps()


def test_names_are_without_wrappers_and_never_twice():
    """A model's own part may be called as wrappers call theirs."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.ones(2))

    def names(model):
        return [name for name, _ in name_parameters(make_optimizer("sgd", model), model, None)]

    assert names(Own()) == ["weight", "module.weight", "module.bias"]
    assert names(nn.DataParallel(nn.Linear(2, 2))) == ["weight", "bias"]
