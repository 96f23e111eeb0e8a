"""A wrapped optimizer is the user's own: schedulers, closures and classes keep working, `remove()` undoes it all."""

from support import told


def test_remove_undoes_everything(ranks):
    """Class, hooks, methods and behaviour; then wrapping anew, with another algorithm, and twice."""

    def script():
        import copy
        import pickle

        import torch
        from support import check_gradients, fails, loss_of, make_batch, make_model, mean_gradients

        import offbeat
        from offbeat.algorithms import GradientAllReduce
        from offbeat.errors import InvalidArgument

        offbeat.init()
        me = offbeat.rank()
        model = make_model("cnn")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        number = iter(range(100))

        def hooks():
            per_parameter = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
            per_module = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
            return sum(per_parameter) + sum(per_module)

        def backward(what, scale=1.0, ranks=(0, 1)):
            step = next(number)
            optimizer.zero_grad()
            alone = copy.deepcopy(model)
            losses = [lambda m, r=rank: loss_of(m, make_batch("cnn", r, step)) for rank in ranks]
            want = {name: mean * scale for name, mean in mean_gradients(alone, losses).items()}
            loss_of(model, make_batch("cnn", me, step)).backward()
            check_gradients(model, want, what)
            optimizer.step()

        names = set(dir(optimizer))
        for _ in range(2):
            assert offbeat.DistributedOptimizer(optimizer, model) is optimizer
            assert isinstance(optimizer, torch.optim.SGD)
            assert type(optimizer).__name__ == "SGD"
            assert repr(optimizer).startswith("SGD (")
            assert {"no_sync", "join", "remove"} <= set(dir(optimizer)) - names
            assert hooks() > 0
            assert "offbeat" in optimizer.state_dict()
            fails(InvalidArgument, "state_dict()|remove()", pickle.dumps, optimizer)
            fails(InvalidArgument, "state_dict()|remove()", copy.deepcopy, optimizer)
            for _ in range(3):
                backward("wrapped")
            optimizer.remove()
            assert type(optimizer) is torch.optim.SGD
            assert set(dir(optimizer)) == names
            assert hooks() == 0
            assert set(optimizer.state_dict()) == {"state", "param_groups"}
            pickle.loads(pickle.dumps(optimizer))
            for _ in range(2):
                backward("alone", ranks=[me])
        # the ranks are apart now; wrapping brings them together
        offbeat.DistributedOptimizer(optimizer, model, GradientAllReduce(average=False), bucket_bytes=2000)
        for _ in range(3):
            backward("sum", scale=2.0)

        class Total(offbeat.algorithms.Algorithm):
            def steps(self):
                return [offbeat.steps.AllReduce("sum")]

        offbeat.DistributedOptimizer(optimizer, model, Total())
        for _ in range(3):
            backward("the user's own", scale=2.0)
        offbeat.DistributedOptimizer(optimizer, model, GradientAllReduce(hierarchical=False))
        offbeat.DistributedOptimizer(optimizer, model, "allreduce")
        for _ in range(3):
            backward("twice")
        assert type(optimizer).__mro__.count(torch.optim.SGD) == 1
        optimizer.remove()
        assert type(optimizer) is torch.optim.SGD
        assert hooks() == 0

        # in the middle of an accumulation, too: gradients stay where they are
        offbeat.DistributedOptimizer(optimizer, model)
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, make_batch("cnn", me, 50)).backward()
        mine = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.remove()
        assert all(torch.equal(p.grad, each) for p, each in zip(model.parameters(), mine, strict=True))

        wrapped = offbeat.DataParallel(model, optimizer)
        assert wrapped.module is model
        assert list(wrapped.state_dict()) == [f"module.{name}" for name in model.state_dict()]
        assert not wrapped.eval().module.training
        wrapped.train()
        fails(InvalidArgument, "0.weight|already|remove()", offbeat.DataParallel, wrapped)
        fails(InvalidArgument, "0.weight|already|remove()", offbeat.DistributedOptimizer, optimizer, model)
        assert wrapped.remove() is model
        assert hooks() == 0
        backward("alone again", ranks=[me])
        offbeat.shutdown()

    ranks(script, 2)


def test_schedulers_made_before_and_after(ranks):
    """The rates and bits of DDP with the same schedulers, and no warning about the order of step() calls."""

    def script():
        import torch
        import torch.distributed as dist
        from support import digest, make_model, noted_warnings, tell, train
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim import lr_scheduler

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()
        found = {}
        with noted_warnings() as texts:
            for way in ("ddp", "before", "after", "removed"):
                model = make_model("mlp")
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                wrapped = DistributedDataParallel(model) if way == "ddp" else model
                if way == "after":
                    offbeat.DistributedOptimizer(optimizer, model)
                cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=30)
                decay = lr_scheduler.StepLR(optimizer, 4, 0.5)
                if way in ("before", "removed"):
                    offbeat.DistributedOptimizer(optimizer, model)
                if way == "removed":
                    optimizer.remove()
                    offbeat.DistributedOptimizer(optimizer, model)
                rates = []
                for step in range(12):
                    train(wrapped, optimizer, "mlp", [step])
                    cycle.step()
                    decay.step()
                    rates.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]])
                found[way] = [rates, digest(model)]
        tell(found=found, texts=[text for text in texts if "lr_scheduler" in text or "offbeat" in text])
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2)
    for rank in job.ranks:
        (case,) = told(rank)
        assert case["texts"] == []
        for way, result in case["found"].items():
            assert result == case["found"]["ddp"], way
        rates = case["found"]["ddp"][0]
        assert len({tuple(rate) for rate in rates}) > 6


def test_closures(ranks):
    """`step(closure)` evaluates as in plain torch, also several times for LBFGS, and gives the loss back."""

    def script():
        import torch
        from support import digest, loss_of, make_batch, make_model, mean_gradients, same_everywhere

        import offbeat

        offbeat.init()
        me = offbeat.rank()
        options = {"lr": 0.5, "max_iter": 4, "tolerance_change": 0.0, "tolerance_grad": 0.0}
        for kind, keywords in ((torch.optim.LBFGS, options), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})):
            model, alone = make_model("mlp", seed=me), make_model("mlp")
            optimizer, plain = kind(model.parameters(), **keywords), kind(alone.parameters(), **keywords)
            offbeat.DistributedOptimizer(optimizer, model)
            for step in range(4):
                losses = []

                def closure(step=step, losses=losses, model=model, optimizer=optimizer):
                    optimizer.zero_grad()
                    losses.append(loss_of(model, make_batch("mlp", me, step)))
                    losses[-1].backward()
                    return losses[-1]

                def of_all(step=step, alone=alone):
                    every = [lambda m, r=rank: loss_of(m, make_batch("mlp", r, step)) for rank in range(2)]
                    for name, gradient in mean_gradients(alone, every).items():
                        alone.get_parameter(name).grad = gradient
                    return every[me](alone)

                given = optimizer.step(closure)
                wanted = plain.step(of_all)
                assert float(given) == float(losses[0]) == float(wanted)
                assert len(losses) == (4 if kind is torch.optim.LBFGS else 1)
                assert digest(model) == digest(alone), (kind, step)
            assert same_everywhere(*model.parameters())
        offbeat.shutdown()

    ranks(script, 2)


def test_copies_of_a_wrapped_model_are_on_their_own(ranks):
    """Averages of weights and target networks are deep copies: their forward and backward concern nobody."""

    def script():
        import copy

        import torch
        from support import (
            check_gradients,
            digest,
            loss_of,
            make_batch,
            make_model,
            make_optimizer,
            mean_gradients,
            train,
        )

        import offbeat

        offbeat.init(timeout=20.0)
        me = offbeat.rank()
        model = make_model("cnn")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        average = torch.optim.swa_utils.AveragedModel(model)
        train(model, optimizer, "cnn", range(2))
        average.update_parameters(model)
        other = copy.deepcopy(model)
        if me == 0:  # alone, in training, with gradients
            want = mean_gradients(make_model("cnn"), [lambda m: loss_of(m, make_batch("cnn", 9, 9))])
            fresh = copy.deepcopy(model)
            fresh.load_state_dict(make_model("cnn").state_dict())
            fresh.zero_grad()
            loss_of(fresh, make_batch("cnn", 9, 9)).backward()
            check_gradients(fresh, want)
            average(make_batch("cnn", 9, 9)[0])
            other(make_batch("cnn", 9, 9)[0]).sum().backward()
        offbeat.barrier()
        # the copy can be wrapped on its own account
        second = offbeat.DistributedOptimizer(make_optimizer("sgd", other), other)
        other.load_state_dict(model.state_dict())
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors
        train(other, second, "cnn", range(2, 5))
        train(model, optimizer, "cnn", range(2, 5))
        assert digest(other) == digest(model)
        offbeat.shutdown()

    ranks(script, 2)


def test_a_wrapped_model_can_be_saved_whole(ranks):
    """Not only its state: the copy that is loaded is plain, and trains like one."""

    def script():
        import io

        import torch
        from support import (
            check_gradients,
            digest,
            gradients_of,
            loss_of,
            make_batch,
            make_model,
            make_optimizer,
            train,
            wrap,
        )

        import offbeat

        offbeat.init(timeout=20.0)
        me = offbeat.rank()
        for wraps in ("DistributedOptimizer", "DataParallel"):
            model = make_model("cnn")
            optimizer = make_optimizer("sgd", model)
            wrapped = wrap(wraps, model, optimizer)
            train(wrapped, optimizer, "cnn", range(3))
            if me == 0:
                file = io.BytesIO()
                torch.save(model, file)
                file.seek(0)
                loaded = torch.load(file, weights_only=False)
                assert digest(loaded) == digest(model)
                alone = make_model("cnn")
                alone.load_state_dict(loaded.state_dict())
                want = gradients_of(alone, loss_of(alone, make_batch("cnn", 5, 5)))
                loaded.zero_grad()
                loss_of(loaded, make_batch("cnn", 5, 5)).backward()  # nobody else does
                check_gradients(loaded, want)
            offbeat.barrier()
            train(wrapped, optimizer, "cnn", range(3, 5))
        offbeat.shutdown()

    ranks(script, 2)


def test_copies_of_data_parallel_are_wrapped_when_they_are_trained(ranks):
    """As in DDP the wrapper can be saved, loaded and copied whole; here that concerns nobody else until training."""

    def script():
        import copy
        import io

        import torch
        from support import digest, fails, loss_of, make_batch, make_model, make_optimizer, same_everywhere, train

        import offbeat
        from offbeat.errors import InvalidArgument, NotInitialized

        def load(data):
            return torch.load(io.BytesIO(data), weights_only=False)

        def gradients(model):
            model.zero_grad()
            loss_of(model, make_batch("cnn", offbeat.rank(), 9)).backward()
            return [parameter.grad for parameter in model.parameters()]

        offbeat.init(timeout=20.0)
        wrapped = offbeat.DataParallel(make_model("cnn"), algorithm="bytegrad", check_every=2)
        optimizer = make_optimizer("sgd", wrapped)
        train(wrapped, optimizer, "cnn", range(2))
        file = io.BytesIO()
        torch.save(wrapped, file)
        if offbeat.rank() == 0:  # alone
            average = torch.optim.swa_utils.AveragedModel(wrapped)
            average.update_parameters(wrapped)
            average.eval()(make_batch("cnn", 0, 0)[0])
            with torch.no_grad():
                load(file.getvalue())(make_batch("cnn", 0, 0)[0])
            loss_of(load(file.getvalue()).remove(), make_batch("cnn", 0, 0)).backward()

        # it trains as the original does, and so does a copy of the copy
        for second in load(file.getvalue()), copy.deepcopy(load(file.getvalue())), copy.deepcopy(wrapped):
            other = make_optimizer("sgd", second)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert list(second.state_dict()) == list(wrapped.state_dict())
            train(second, other, "cnn", range(2, 5))
            assert second._replica.algorithm == wrapped._replica.algorithm
            assert second._replica.check_every == 2
            results = digest(second)
            train(third := copy.deepcopy(wrapped), (last := make_optimizer("sgd", third)), "cnn", ())
            last.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(third, last, "cnn", range(2, 5))
            assert digest(third) == results
        train(wrapped, optimizer, "cnn", range(2, 5))
        assert digest(wrapped) == results
        assert same_everywhere(*wrapped.parameters())

        # no_sync() counts from the first forward on
        held = copy.deepcopy(wrapped)
        with held.no_sync():
            assert not same_everywhere(*gradients(held))
        assert same_everywhere(*gradients(held))

        # one that exchanges weights needs its optimizer, which is not copied with it
        model = make_model("cnn")
        local = offbeat.DataParallel(model, make_optimizer("sgd", model), "local_sgd")
        second = copy.deepcopy(local)
        second.eval()(make_batch("cnn", 0, 0)[0])
        for _ in range(2):
            fails(InvalidArgument, "there is no optimizer", second.train(), make_batch("cnn", 0, 0)[0])
        offbeat.shutdown()
        late = load(file.getvalue())
        late.eval()(make_batch("cnn", 0, 0)[0])
        fails(NotInitialized, "offbeat.init()", late.train(), make_batch("cnn", 0, 0)[0])

    ranks(script, 2)


def test_a_model_that_is_wrapped_again_changes_hands(ranks):
    """The new wrapper takes over, whatever is still held of the old one, which does not train silently alone."""

    def script():
        from support import fails, loss_of, make_batch, make_model, make_optimizer, same_everywhere, train

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init(timeout=20.0)
        me, model = offbeat.rank(), make_model("cnn")
        wrapped, held = None, []
        for algorithm in ("allreduce", "bytegrad", "local_sgd", "allreduce"):
            optimizer = make_optimizer("sgd", model)
            wrapped = offbeat.DataParallel(model, optimizer, algorithm)
            train(wrapped, optimizer, "cnn", range(3))
            held.append(wrapped)
        for old in held[:-1]:
            fails(InvalidArgument, "wrapped again|remove()", old, make_batch("cnn", me, 0)[0])
            old.eval()(make_batch("cnn", me, 0)[0])
            old.train()
        wrapped.zero_grad()
        loss_of(wrapped, make_batch("cnn", me, 5)).backward()
        assert same_everywhere(*(parameter.grad for parameter in model.parameters()))
        # what only shares its parameters does not
        fails(InvalidArgument, "another wrapper", offbeat.DataParallel, wrapped)
        fails(InvalidArgument, "another wrapper", offbeat.DistributedOptimizer, make_optimizer("sgd", model), model)
        offbeat.shutdown()

    ranks(script, 2)
