"""Models that are converted, lazy, or made of odd tensors; wrappers whose runtime is gone."""

from support import told


def test_tensors_of_odd_kinds(ranks):
    """Lazy, on another device, sparse, overlapping, of strange types: an error with a name in it, or it works."""

    def script():
        import torch
        from support import make_model, make_optimizer, same_everywhere, tell, train, wrap
        from torch import nn

        import offbeat
        from offbeat.errors import OffbeatError

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me = offbeat.rank()

        def buffer(tensor):
            model = nn.Linear(3, 3)
            model.register_buffer("odd", tensor)
            return model

        def parameter(tensor):
            model = nn.Linear(3, 3)
            model.odd = nn.Parameter(tensor)
            return model

        class Named(nn.Module):
            def __init__(self, **layers):
                super().__init__()
                for name, layer in layers.items():
                    setattr(self, name, layer)

        makers = {
            "lazy": lambda: Named(odd=nn.LazyLinear(3)),
            "meta": lambda: Named(odd=nn.Linear(3, 3, device="meta")),
            "meta buffer": lambda: buffer(torch.zeros(3, device="meta")),
            "other buffer": lambda: buffer(torch.zeros(me + 1)),
            "other type of buffer": lambda: buffer(torch.zeros(2, dtype=(torch.int32, torch.float64)[me])),
            "buffer more": lambda: buffer(torch.zeros(2)) if me else nn.Linear(3, 3),
            "sparse buffer": lambda: buffer(torch.eye(3).to_sparse()),
            "expanded buffer": lambda: buffer(torch.full((1,), 5.0 + me).expand(4)),
            "byte-wide floats": lambda: buffer(torch.full((3,), 5.0 + me).to(torch.float8_e5m2)),
            "complex buffer": lambda: buffer(torch.full((3,), 5.0 + me, dtype=torch.complex128)),
            "expanded parameter": lambda: parameter(torch.full((1,), 5.0 + me).expand(4)),
            "byte-wide parameter": lambda: parameter(torch.zeros(3).to(torch.float8_e5m2)),
        }
        for name, maker in makers.items():
            for wraps in ("DistributedOptimizer", "DataParallel"):
                model = maker()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                kind = message = value = None
                try:
                    wrap(wraps, model, optimizer)
                    value = model.odd.to(torch.complex64).abs().tolist()
                except OffbeatError as error:
                    kind, message = type(error).__name__, str(error)
                tell(name=name, wraps=wraps, kind=kind, message=message, value=value)
        model = make_model("mlp", seed=me)
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        train(model, optimizer, "mlp", range(3))
        assert same_everywhere(*model.parameters())
        offbeat.shutdown()

    job = ranks(script, 2)
    one, other = (told(rank) for rank in job.ranks)
    assert one == other
    assert len(one) == 24
    for case in one:
        if case["kind"] is None:
            assert set(case["value"]) == {5.0}, case
        else:
            assert "odd" in case["message"], case
        if "other" in case["name"] or "more" in case["name"]:
            assert case["kind"] == "Mismatch", case
        if case["name"] in ("lazy", "meta", "meta buffer"):
            assert case["kind"] in ("InvalidArgument", "Unsupported"), case


def test_a_model_converted_after_wrapping(ranks):
    """Torch drops our hooks then: gradients are exchanged all the same, or somebody says so."""

    def script():
        import torch
        from support import make_model, make_optimizer, same_everywhere, tell, train, wrap

        import offbeat
        from offbeat.errors import OffbeatError

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me = offbeat.rank()
        for wraps in ("DistributedOptimizer", "DataParallel"):
            for steps in (0, 3):
                model = make_model("mlp")
                optimizer = make_optimizer("sgd", model)
                wrapped = wrap(wraps, model, optimizer)
                train(wrapped, optimizer, "mlp", range(steps))
                model.double()
                kind, equal = None, False
                try:
                    for _ in range(2):
                        model.zero_grad()
                        wrapped(torch.full((2, 8), 1.0 + me, dtype=torch.float64)).sum().backward()
                    equal = same_everywhere(*(parameter.grad for parameter in model.parameters()))
                except OffbeatError as error:
                    kind = type(error).__name__
                tell(kind=kind, equal=equal)
        offbeat.shutdown()

    job = ranks(script, 2)
    one, other = (told(rank) for rank in job.ranks)
    assert one == other
    assert len(one) == 4
    for case in one:
        assert case["equal"] or case["kind"] == "InvalidArgument", case


def test_parameters_that_are_replaced_after_wrapping(ranks):
    """Nobody would exchange the gradients of the new ones: an error, also where the old still have a gradient."""

    def script():
        from support import fails, loss_of, make_batch, make_model, same_everywhere
        from torch import nn
        from torch.nn.utils import prune

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init(timeout=20.0)
        me = offbeat.rank()

        def backward(model, step=0):
            loss_of(model, make_batch("mlp", me, step)).backward()

        def load(model):
            model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)

        def layer(model):
            model[2] = nn.Linear(12, 12)

        def parameter(model):
            model[4].bias = nn.Parameter(model[4].bias.detach().clone())

        def nothing(model):
            load_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.load_state_dict(load_state)
            for tensor in model.parameters():
                tensor.data = tensor.data.clone()
            prune.identity(model[2], "weight")

        for change, name in ((load, "0.weight"), (layer, "2.weight"), (parameter, "4.bias"), (nothing, None)):
            for clears in (True, False):
                model = make_model("mlp")
                wrapped = offbeat.DataParallel(model)
                for step in range(2):
                    backward(wrapped, step)
                if clears:
                    wrapped.zero_grad()
                change(model)
                if name is None:
                    backward(wrapped)
                    assert same_everywhere(*(tensor.grad for tensor in model.parameters()))
                    continue
                fails(InvalidArgument, f"{name} is another parameter|assign=True|before wrapping", backward, wrapped)
                wrapped.remove()
                wrapped = offbeat.DataParallel(model)
                wrapped.zero_grad()
                backward(wrapped)
                assert same_everywhere(*(tensor.grad for tensor in model.parameters()))
        offbeat.shutdown()

    ranks(script, 2)


def test_gradients_of_another_type_than_their_parameter(ranks):
    """Where torch was told so (`grad_dtype`), they are exchanged in that type."""

    def script():
        import torch
        from support import loss_of, make_batch, make_model, mean_in_order

        import offbeat

        offbeat.init(timeout=20.0)
        model = make_model("mlp").bfloat16()
        if not hasattr(model[0].weight, "grad_dtype"):  # an older torch
            offbeat.shutdown()
            return
        for parameter in model[:3].parameters():
            parameter.grad_dtype = torch.float32
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offbeat.DistributedOptimizer(optimizer, model)

        def loss(rank, step):
            inputs, targets = make_batch("mlp", rank, step)
            return loss_of(lambda x: model(x).float(), (inputs.bfloat16(), targets))

        for step in range(3):
            parameters = list(model.parameters())
            parts = [torch.autograd.grad(loss(rank, step), parameters) for rank in range(2)]
            optimizer.zero_grad()
            loss(offbeat.rank(), step).backward()
            for at, parameter in enumerate(parameters):
                assert parameter.grad.dtype is parameter.grad_dtype
                want = mean_in_order([part[at].float() for part in parts])
                assert torch.equal(parameter.grad, want.to(parameter.grad_dtype)), (step, at)
        offbeat.shutdown()

    ranks(script, 2)


def test_after_shutdown_and_in_a_child(ranks):
    """What is wrapped says clearly that the runtime is gone; state and remove() still work, and so does a new init."""

    def script():
        import os
        import warnings

        import torch
        from support import digest, fails, loss_of, make_batch, make_model, make_optimizer, simulate, train

        import offbeat
        from offbeat.errors import NotInitialized

        def second():
            model = make_model("mlp")
            return make_optimizer("sgd", model), model

        warnings.simplefilter("ignore", DeprecationWarning)
        offbeat.init(timeout=20.0)
        me = offbeat.rank()
        model = make_model("cnn")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        train(model, optimizer, "cnn", range(2))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                fails(NotInitialized, "forked|parent", offbeat.DistributedOptimizer, *second())
                fails(NotInitialized, "forked|parent", offbeat.DataParallel, make_model("mlp"))
                fails(NotInitialized, "forked|parent", train, model, optimizer, "cnn", [2])
                model.eval()
                with torch.no_grad():  # a worker may look at the model
                    loss_of(model, make_batch("cnn", me, 1))
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        train(model, optimizer, "cnn", range(2, 4))

        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        loss = loss_of(model, make_batch("cnn", me, 9))
        offbeat.barrier()
        offbeat.shutdown()
        # they lie in shared memory, which outlives the runtime
        assert all(torch.equal(p.grad, want) for p, want in zip(model.parameters(), gradients, strict=True))
        words = "not initialised|offbeat.init()"
        fails(NotInitialized, words, loss.backward)
        fails(NotInitialized, words, train, model, optimizer, "cnn", [4])
        fails(NotInitialized, words, offbeat.DistributedOptimizer, *second())
        fails(NotInitialized, words, offbeat.DataParallel, make_model("mlp"))
        assert optimizer.state_dict()["offbeat"]["step"] == 4
        optimizer.remove()
        assert type(optimizer) is torch.optim.SGD

        offbeat.init(timeout=20.0)
        offbeat.DistributedOptimizer(optimizer, model)
        train(model, optimizer, "cnn", range(4, 6))
        alone = make_model("cnn")
        simulate(alone, make_optimizer("sgd", alone), "cnn", range(6), [[0, 1]])
        assert digest(model, buffers=False) == digest(alone, buffers=False)
        offbeat.shutdown()

    ranks(script, 2)
