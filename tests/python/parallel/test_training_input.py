"""Wrong input to the wrappers: a named error that says what to try, the same on every rank."""

from support import told


def test_ranks_with_different_models(ranks):
    """Names, shapes, types, frozen or not, more or fewer: every rank prints the same readable difference."""

    def script():
        import torch
        from support import fails, make_model, make_optimizer, same_everywhere, tell, train
        from torch import nn

        import offbeat
        from offbeat.errors import Mismatch

        offbeat.init(timeout=20.0)
        odd = offbeat.rank() == 1

        def make(change):
            torch.manual_seed(0)
            width = 5 if change == "shape" and odd else 4
            layers = {"first": nn.Linear(3, width), "second": nn.Linear(width, 2)}
            if change == "name" and odd:
                layers = {"premier": layers["first"], "second": layers["second"]}
            if change == "more" and odd:
                layers["third"] = nn.Linear(1, 1)
            if change == "fewer" and odd:
                del layers["second"]
            if change == "order" and odd:
                layers = dict(reversed(layers.items()))
            model = nn.ModuleDict(layers)
            if change == "layout":
                conv = nn.Conv2d(3, 4, 2)
                return conv.to(memory_format=torch.channels_last) if odd else conv
            if change == "dtype" and odd:
                model["second"].double()
            if change == "frozen" and odd:
                model["first"].weight.requires_grad_(False)
            if change == "many" and odd:
                return nn.ModuleDict({f"layer{at}": nn.Linear(2, 2) for at in range(50)})
            return model

        for change in ("shape", "name", "more", "fewer", "order", "dtype", "frozen", "many", "layout"):
            for wraps in ("DistributedOptimizer", "DataParallel"):
                model = make(change)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                if wraps == "DistributedOptimizer":
                    error = fails(Mismatch, "rank 1|rank 0", offbeat.DistributedOptimizer, optimizer, model)
                else:
                    error = fails(Mismatch, "rank 1|rank 0", offbeat.DataParallel, model)
                assert type(optimizer) is torch.optim.SGD
                hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
                hooks += [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
                assert not any(hooks)
                tell(change=change, message=str(error))
        # the ranks are still together
        model = make_model("mlp", seed=odd)
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        train(model, optimizer, "mlp", range(3))
        assert same_everywhere(*model.parameters())
        offbeat.shutdown()

    job = ranks(script, 3)
    first, *others = [told(rank) for rank in job.ranks]
    for theirs in others:
        assert theirs == first
    messages = {case["change"]: case["message"] for case in first}
    words = {
        "shape": ["-first.weight float32[4, 3]", "+first.weight float32[5, 3]"],
        "name": ["-first.weight", "+premier.weight"],
        "more": ["+third.weight float32[1, 1]", "+third.bias"],
        "fewer": ["-second.weight", "-second.bias"],
        "order": ["+second.weight", "-second.weight", "same order"],
        "dtype": ["float64", "second.bias"],
        "frozen": ["+first.weight float32[4, 3] frozen"],
        "many": ["layer0.weight", "more lines"],
        "layout": ["+weight float32[4, 3, 2, 2] with dimensions in memory as [0, 2, 3, 1]"],
    }
    for change, expected in words.items():
        for word in expected:
            assert word in messages[change], (word, messages[change])
        assert "rank 2" not in messages[change], "rank 2 is like rank 0"
        assert "try:" in messages[change]
        assert len(messages[change].splitlines()) < 40


def test_ranks_with_different_optimizers_and_settings(ranks):
    """Another algorithm, other bucket sizes, other groups: an error that all ranks share, or rank 0's choice."""

    def script():
        import os
        from collections.abc import Callable
        from dataclasses import dataclass

        import torch
        from support import loss_of, make_batch, make_model, make_optimizer, same_everywhere, tell, train

        import offbeat
        from offbeat.algorithms import GradientAllReduce
        from offbeat.steps import AllReduce, Apply

        me = int(os.environ["RANK"])

        def case(name, wrap):
            # each in a world of its own, since a difference that shows later fails the group
            offbeat.init(timeout=20.0, first_step_timeout=20.0)
            model = make_model("mlp", seed=me)
            kind = message = None
            equal = False
            try:
                optimizer = wrap(model)
                train(model, optimizer, "mlp", range(3))
                loss_of(model, make_batch("mlp", me, 9)).backward()
                equal = same_everywhere(*(p.grad for p in model.parameters()))
            except Exception as error:  # the test judges it
                kind, message = type(error).__name__, str(error).partition(" (while this rank")[0]
            tell(name=name, kind=kind, message=message, equal=equal)
            offbeat.shutdown()

        def sizes(model):
            size = (100, 1 << 20)[me]
            return offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, bucket_bytes=size)

        def averages(model):
            algorithm = GradientAllReduce(average=bool(me))
            return offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, algorithm)

        @dataclass(frozen=True)
        class Own(offbeat.Algorithm):
            function: Callable

            def steps(self):
                return [Apply(self.function), AllReduce()]

        def functions(model):
            # every process has it at another address
            algorithm = Own(lambda bucket: bucket.values.mul_(2))
            return offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, algorithm)

        def groups(model):
            parts = [{"params": model[0].parameters()}, {"params": model[2:].parameters()}]
            optimizer = torch.optim.SGD(parts if me else model.parameters(), lr=0.1)
            return offbeat.DistributedOptimizer(optimizer, model)

        def classes(model):
            return offbeat.DistributedOptimizer(make_optimizer(("sgd", "adamw")[me], model), model)

        for wrap in (sizes, averages, functions, groups, classes):
            case(wrap.__name__, wrap)

    job = ranks(script, 2)
    one, other = ({case["name"]: case for case in told(rank)} for rank in job.ranks)
    assert one["sizes"] == other["sizes"]
    assert one["sizes"]["equal"] or one["sizes"]["kind"] == "Mismatch", one["sizes"]
    for name in ("averages", "groups", "classes"):
        assert one[name]["kind"] == other[name]["kind"] == "Mismatch", (one[name], other[name])
        assert one[name]["message"] == other[name]["message"]
        advice = "the same algorithm with the same arguments"
        assert advice in one[name]["message"].partition("try:")[2], one[name]
    assert one["functions"]["equal"], one["functions"]
    assert other["functions"]["equal"], other["functions"]


def test_arguments_that_make_no_sense(ranks):
    """On every rank the same error, before anybody waits for anybody; then a right call works."""

    def script():
        import torch
        from support import fails, make_model, make_optimizer, noted_warnings, same_everywhere, tell, train
        from torch import nn
        from torch.distributed.optim import _apply_optimizer_in_backward

        import offbeat
        from offbeat.algorithms import GradientAllReduce
        from offbeat.errors import InvalidArgument, Unsupported

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        messages = []
        model = make_model("mlp", seed=offbeat.rank())
        optimizer = make_optimizer("sgd", model)

        def wrong(words, **keywords):
            arguments = {"optimizer": optimizer, "model": model, **keywords}
            error = fails(InvalidArgument, words, offbeat.DistributedOptimizer, **arguments)
            messages.append(str(error))
            if "optimizer" not in keywords:
                messages.append(
                    str(fails(InvalidArgument, words, offbeat.DataParallel, **{**arguments, "optimizer": None}))
                )

        wrong("'bytgrad'|'allreduce'", algorithm="bytgrad")
        wrong("GradientAllReduce()", algorithm=GradientAllReduce)
        wrong("allreduce", algorithm=3)
        for size in (0, -5, True, 1.5, "large"):
            wrong(f"bucket_bytes={size!r}|positive|try: bucket_bytes=", bucket_bytes=size)
        for every in (0, -1, 2.5, "often", True):
            wrong(f"check_every={every!r}|try: check_every=", check_every=every)
        for named in (3, [1, 2], model.parameters(), [("name", 3)]):
            words = "named_parameters= must be pairs|model.named_parameters()"
            messages.append(
                str(
                    fails(
                        InvalidArgument,
                        words,
                        offbeat.DistributedOptimizer,
                        optimizer,
                        model,
                        named_parameters=named,
                    )
                )
            )
        wrong("torch.nn.Module|type", model=nn.Linear)
        wrong("torch.optim.Optimizer|dict", optimizer={"lr": 0.1})
        wrong("torch.optim.Optimizer|type", optimizer=torch.optim.SGD)
        wrong("none of the model's parameters|model.parameters()", optimizer=make_optimizer("sgd", make_model("mlp")))
        both = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(2, 3))], lr=0.1)
        wrong("1 parameters|(2, 3)|named_parameters=", optimizer=both)

        # state is saved by name
        twins = nn.Linear(3, 1), nn.Linear(3, 2)
        of_twins = torch.optim.SGD([p for twin in twins for p in twin.parameters()], lr=0.1)
        for named in ([pair for twin in twins for pair in twin.named_parameters()], twins[1].named_parameters()):
            words = "two parameters|weight|(1, 3)|(2, 3)"
            error = fails(
                InvalidArgument, words, offbeat.DistributedOptimizer, of_twins, twins[0], named_parameters=named
            )
            messages.append(str(error))

        # steps that come before the average
        early = make_model("mlp")
        _apply_optimizer_in_backward(torch.optim.SGD, early.parameters(), {"lr": 0.1})
        messages.append(str(fails(InvalidArgument, "0.weight|in backward", offbeat.DataParallel, early)))
        early = make_model("mlp")
        early[2].bias.register_post_accumulate_grad_hook(lambda parameter: None)
        with noted_warnings() as texts:
            offbeat.DataParallel(early)
        assert [text for text in texts if "1 parameters have hooks" in text and "2.bias" in text] == texts != []

        # nothing that could be trained: frozen, integers only, or no parameters at all
        frozen = make_model("mlp").requires_grad_(False)
        wrong("no parameters that require", model=frozen, optimizer=make_optimizer("sgd", frozen))
        messages.append(str(fails(InvalidArgument, "no parameters that require", offbeat.DataParallel, frozen)))
        whole = nn.Module()
        whole.table = nn.Parameter(torch.arange(3), requires_grad=False)
        wrong("no parameters that require", model=whole, optimizer=torch.optim.SGD([whole.table], lr=0.1))
        messages.append(str(fails(InvalidArgument, "no parameters that require", offbeat.DataParallel, whole)))
        words = "no parameters|requires_grad_(True)"
        messages.append(str(fails(InvalidArgument, words, offbeat.DataParallel, nn.ReLU())))
        messages.append(
            str(
                fails(
                    InvalidArgument,
                    "model's parameters|model.parameters()",
                    offbeat.DistributedOptimizer,
                    optimizer,
                    nn.ReLU(),
                )
            )
        )

        # integers beside others are fine, and come from rank 0
        mixed = make_model("mlp", seed=offbeat.rank())
        mixed.table = nn.Parameter(torch.arange(3) + 10 * offbeat.rank(), requires_grad=False)
        of_mixed = offbeat.DistributedOptimizer(make_optimizer("sgd", mixed), mixed)
        assert mixed.table.tolist() == [0, 1, 2]
        train(mixed, of_mixed, "mlp", range(3))
        assert same_everywhere(*mixed.parameters())

        # everything that failed has left nothing behind
        assert type(optimizer) is torch.optim.SGD
        offbeat.DistributedOptimizer(optimizer, model)
        train(model, optimizer, "mlp", range(3))
        assert same_everywhere(*model.parameters())

        words = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        sparse = torch.optim.SGD(words.parameters(), lr=0.1)
        offbeat.DistributedOptimizer(sparse, words)
        error = fails(Unsupported, "0.weight|sparse=False", lambda: words(torch.tensor([1, 2])).sum().backward())
        tell(messages=[*messages, str(error)])
        offbeat.shutdown()

    job = ranks(script, 2)
    one, other = (told(rank)[0]["messages"] for rank in job.ranks)
    assert one == other
    assert all(not message.endswith(".") for message in one)
