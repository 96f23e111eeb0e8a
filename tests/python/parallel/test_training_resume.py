"""A checkpoint holds everything: training goes on as if it had never stopped, also in plain torch."""

import pytest
from support import told


@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_resuming_changes_no_bit(ranks, tmp_path, layout):
    """New processes load after wrapping, and go on with other bucket sizes; `weights_only` is enough to load."""

    def script():
        import sys
        from pathlib import Path

        import torch
        from support import digest, make_model, make_optimizer, tell, train

        import offbeat

        offbeat.init()
        part, directory = sys.argv[1], Path(sys.argv[2])
        size = 700 if part == "second" else None
        for kind in ("cnn", "transformer"):
            for choice in ("sgd", "adamw"):
                path = directory / f"{kind}-{choice}.pt"
                # nothing but the checkpoint is the same when training goes on
                model = make_model(kind, seed=0 if part != "second" else 99)
                optimizer = make_optimizer(choice, model)
                scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
                offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=size)
                if part == "second":
                    state = torch.load(path, weights_only=True)
                    model.load_state_dict(state["model"])
                    optimizer.load_state_dict(state["optimizer"])
                    scheduler.load_state_dict(state["scheduler"])
                steps = {"whole": range(12), "first": range(5), "second": range(5, 12)}[part]
                losses = []
                for step in steps:
                    losses += train(model, optimizer, kind, [step])
                    scheduler.step()
                own = optimizer.state_dict()["offbeat"]
                if part == "first" and offbeat.rank() == 0:
                    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                    torch.save({name: each.state_dict() for name, each in objects.items()}, path)
                tell(
                    digest=digest(model, buffers=offbeat.rank() == 0),
                    rate=optimizer.param_groups[0]["lr"],
                    losses=losses[-7:],
                    step=own["step"],
                    names=sorted(own["order"]) == sorted(name for name, _ in model.named_parameters()),
                )
        offbeat.shutdown()

    done = {}
    for part in ("whole", "first", "second"):
        job = ranks(script, 2, args=[part, tmp_path], per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})
        done[part] = [told(rank) for rank in job.ranks]
        assert all(len(cases) == 4 for cases in done[part])
    assert done["first"] != done["whole"]
    assert done["second"] == done["whole"]
    for cases in done["whole"]:
        assert [case["step"] for case in cases] == [12] * 4
        assert all(case["names"] for case in cases)


def test_a_checkpoint_loads_into_plain_torch_and_back(ranks):
    """The state of a wrapped optimizer serves a plain one, and a plain one's serves a wrapped one."""

    def script():
        import copy
        import io

        import torch
        from support import digest, fails, make_model, make_optimizer, simulate, train

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init()
        for choice in ("sgd", "adamw"):
            model = make_model("cnn")
            optimizer = offbeat.DistributedOptimizer(make_optimizer(choice, model), model)
            train(model, optimizer, "cnn", range(4))
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            assert set(state["optimizer"]) == {"state", "param_groups", "offbeat"}

            alone = make_model("cnn", seed=5)
            plain = make_optimizer(choice, alone)
            alone.load_state_dict(state["model"])
            plain.load_state_dict(state["optimizer"])
            simulate(alone, plain, "cnn", range(4, 8), [[0, 1]])
            saved = copy.deepcopy(plain.state_dict())
            train(model, optimizer, "cnn", range(4, 8))
            assert digest(alone, buffers=offbeat.rank() == 0) == digest(model, buffers=offbeat.rank() == 0)

            # and on from what plain torch has saved
            train(model, optimizer, "cnn", range(8, 11))
            other = make_model("cnn", seed=6)
            resumed = offbeat.DistributedOptimizer(make_optimizer(choice, other), other)
            other.load_state_dict(alone.state_dict())
            assert "offbeat" not in saved
            resumed.load_state_dict(saved)
            train(other, resumed, "cnn", range(8, 11))
            assert digest(other, buffers=False) == digest(model, buffers=False)

            # what cannot be read is refused whole
            saved["param_groups"][0]["lr"] = 5.0
            for ours, words in (
                (3, "must be a dict, not int"),
                ({"version": 99, "step": 70}, "has version 99|reads 1"),
            ):
                fails(InvalidArgument, f'try:|"offbeat"|{words}', resumed.load_state_dict, saved | {"offbeat": ours})
                assert resumed.state_dict()["offbeat"]["step"] == 11 - 8
                assert resumed.param_groups[0]["lr"] < 5.0
        offbeat.shutdown()

    ranks(script, 2)


def test_what_only_one_rank_loaded_before_wrapping_is_replaced(ranks):
    """Parameters, buffers, optimizer state and settings come from rank 0, with its types and shapes."""

    def script():
        import torch
        from support import bits, digest, loss_of, make_batch, make_model, make_optimizer, tell, train

        import offbeat

        offbeat.init()
        me = offbeat.rank()
        for choice in ("sgd", "adamw"):
            for loads in (0, 1):
                # two ranks with different pasts, one of which has none
                model = make_model("cnn", seed=me)
                optimizer = make_optimizer(choice, model)
                if me == loads:
                    for step in range(3):
                        loss_of(model, make_batch("cnn", 7, step)).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    optimizer.param_groups[0]["lr"] = 0.0123
                before = digest(model)
                offbeat.DistributedOptimizer(optimizer, model)
                assert (digest(model) == before) == (me == 0)
                state = {
                    name: {
                        key: [str(value.dtype), list(value.shape), bits(value).hex()] for key, value in entries.items()
                    }
                    for (name, parameter) in model.named_parameters()
                    if (entries := optimizer.state.get(parameter, {}))
                }
                after = digest(model)
                train(model, optimizer, "cnn", range(3))
                tell(
                    loads=loads,
                    start=after,
                    rate=optimizer.param_groups[0]["lr"],
                    state=state,
                    end=digest(model, buffers=False),
                )
        # settings of all kinds
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + me, momentum=0.5 * me, nesterov=bool(me))
        offbeat.DistributedOptimizer(optimizer, model)
        group = optimizer.param_groups[0]
        tell(lr=group["lr"], momentum=group["momentum"], nesterov=group["nesterov"])
        offbeat.shutdown()

    job = ranks(script, 2)
    zero, one = (told(rank) for rank in job.ranks)
    assert zero == one
    for case in zero[:-1]:
        assert bool(case["state"]) == (case["loads"] == 0)
        assert case["rate"] == (0.0123 if case["loads"] == 0 else pytest.approx(case["rate"]))
    assert {case["rate"] for case in zero[:-1] if case["loads"] == 1} == {0.05, 1e-3}
    assert zero[2]["state"]["8.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert zero[-1] == {"lr": 1.0, "momentum": 0.0, "nesterov": False}


def test_resuming_with_another_number_of_ranks(ranks, tmp_path):
    """What two ranks have saved goes on with three, and with one."""

    def script():
        import sys

        import torch
        from support import digest, make_model, make_optimizer, simulate, tell, train

        import offbeat

        offbeat.init()
        world = offbeat.world_size()
        model = make_model("cnn", seed=world)
        optimizer = offbeat.DistributedOptimizer(make_optimizer("adamw", model), model)
        if world == 2:
            train(model, optimizer, "cnn", range(4))
            if offbeat.rank() == 0:
                torch.save([model.state_dict(), optimizer.state_dict()], sys.argv[1])
        else:
            of_model, of_optimizer = torch.load(sys.argv[1], weights_only=True)
            model.load_state_dict(of_model)
            optimizer.load_state_dict(of_optimizer)
            train(model, optimizer, "cnn", range(4, 8))
            of_model, of_optimizer = torch.load(sys.argv[1], weights_only=True)
            alone = make_model("cnn", seed=7)
            plain = make_optimizer("adamw", alone)
            alone.load_state_dict(of_model)
            plain.load_state_dict(of_optimizer)
            simulate(alone, plain, "cnn", range(4, 8), [list(range(world))])
            own = optimizer.state_dict()["offbeat"]
            tell(found=digest(model, buffers=False), want=digest(alone, buffers=False), own=own)
        offbeat.shutdown()

    path = tmp_path / "checkpoint.pt"
    ranks(script, 2, args=[path])
    for world in (3, 1):
        job = ranks(script, world, args=[path])
        for rank in job.ranks:
            (case,) = told(rank)
            assert case["found"] == case["want"]
            assert case["own"]["world_size"] == world


@pytest.mark.slow
def test_a_restarted_job_goes_on_from_its_checkpoint(torchrun, tmp_path):
    """A rank dies in a step, torchrun starts all of them again, and they end where an undisturbed job ends."""

    def script():
        import os
        import signal
        import sys
        from pathlib import Path

        import torch
        from support import digest, make_model, make_optimizer, simulate, tell, train

        import offbeat

        offbeat.init()
        path = Path(sys.argv[1])
        model = make_model("cnn", seed=offbeat.rank())
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        start = 0
        if path.exists():
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            start = state["step"]
        for step in range(start, 8):
            if step == 5 and start == 0 and offbeat.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, "cnn", [step])
            if offbeat.rank() == 0 and step % 2:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)
        alone = make_model("cnn")
        simulate(alone, make_optimizer("sgd", alone), "cnn", range(8), [[0, 1]])
        tell(start=start, right=digest(model, buffers=False) == digest(alone, buffers=False))
        offbeat.shutdown()

    job = torchrun(script, 2, args=[tmp_path / "checkpoint.pt"], max_restarts=1)
    for rank in job.ranks:
        assert told(rank) == [{"start": 4, "right": True}], job.report()


def test_both_wrappers_train_and_save_alike(ranks):
    """`DataParallel` with an optimizer makes the same steps as `DistributedOptimizer`, and its optimizer has the
    algorithm's state, also where the algorithm takes the optimizer's step over or exchanges weights."""

    def script():
        import copy

        import torch
        from support import digest, make_model, make_optimizer, train

        import offbeat
        from offbeat import algorithms

        offbeat.init()
        for choice, algorithm in (
            ("sgd", "allreduce"),
            ("sgd", algorithms.PowerSGD(rank=2, warmup_steps=1)),
            ("adamw", algorithms.QAdam(warmup_steps=2)),
            ("adamw", algorithms.OneBitAdam(warmup_steps=2)),
            ("sgd", algorithms.DiLoCo(every=4, fragments=2, overlap=1)),
        ):
            model = make_model("cnn")
            train(model, offbeat.DistributedOptimizer(make_optimizer(choice, model), model, algorithm), "cnn", range(8))
            expected = digest(model)

            model = make_model("cnn")
            optimizer = make_optimizer(choice, model)
            wrapped = offbeat.DataParallel(model, optimizer, algorithm)
            train(wrapped, optimizer, "cnn", range(5))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            train(wrapped, optimizer, "cnn", range(5, 8))
            assert digest(model) == expected, algorithm

            model = make_model("cnn", seed=1)
            optimizer = make_optimizer(choice, model)
            wrapped = offbeat.DataParallel(model, optimizer, algorithm)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            train(wrapped, optimizer, "cnn", range(5, 8))
            assert digest(model) == expected, algorithm

            # what is added late is exchanged too, and nothing else is forgotten
            model.register_parameter("late", torch.nn.Parameter(torch.full((3,), float(offbeat.rank()))))
            optimizer.add_param_group({"params": [model.late]})
            assert torch.equal(model.late.detach(), torch.zeros(3))
            assert offbeat.stats()["models"][-1]["parameters"] == sum(p.numel() for p in model.parameters())
            wrapped.remove()
            assert type(optimizer) in (torch.optim.SGD, torch.optim.AdamW)
        offbeat.shutdown()

    ranks(script, 2, per_rank=lambda rank: {"OFFBEAT_HOST": "ab"[rank]})
