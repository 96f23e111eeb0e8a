"""`join()` where loops do more than steps: gradients of inputs, parameters that change, two models at once."""

import pytest
from support import told


@pytest.mark.parametrize("who", ["all", "rank 0", "rank 1"])
def test_gradients_of_inputs_are_no_round(ranks, who):
    """Ranks without data stay in step, whoever asks for such gradients, and the model is what it is without them."""

    def script():
        import sys

        import torch
        from support import (
            digest,
            loss_of,
            make_batch,
            make_model,
            make_optimizer,
            noted_warnings,
            same_everywhere,
            tell,
        )

        import offbeat
        from offbeat.algorithms import GradientAllReduce

        offbeat.init(timeout=20.0)
        me = offbeat.rank()
        asks = sys.argv[1] in ("all", f"rank {me}")

        def loop(count, *, look):
            model = make_model("mlp")
            # a sum shows at once whether gradients were exchanged twice
            algorithm = GradientAllReduce(average=False)
            optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, algorithm, check_every=2)

            def saliency(batch):
                inputs = batch.clone().requires_grad_()
                (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
                model(inputs).sum().backward(inputs=[inputs])
                return slope.square().mean()

            with noted_warnings() as texts, optimizer.join():
                for step in range(count):
                    inputs, labels = make_batch("mlp", me, step)
                    optimizer.zero_grad()
                    with optimizer.no_sync():
                        loss_of(model, (inputs, labels)).backward()
                    penalty = saliency(inputs) if look else 0.0
                    (loss_of(model, (inputs, labels)) + 0.0 * penalty).backward()
                    optimizer.step()
                if look:
                    saliency(inputs)
            assert same_everywhere(*model.parameters())
            steps = offbeat.stats()["models"][-1]["step"]
            optimizer.remove()
            return digest(model), steps, texts

        for counts in ((3, 5), (5, 3), (4, 4)):
            tell(found=loop(counts[me], look=asks), want=loop(counts[me], look=False), steps=max(counts))
        offbeat.shutdown()

    job = ranks(script, 2, args=[who])
    for rank in job.ranks:
        for case in told(rank):
            assert case["found"] == case["want"], case
            assert case["want"][1:] == [case["steps"], []], case


def test_parameters_that_change_while_a_rank_has_no_data(ranks):
    """The same error on every rank, which names join(), and no wait; where all still work it is as outside."""

    def script():
        import torch
        from support import fails, loss_of, make_batch, make_model, same_everywhere

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init(timeout=20.0)
        me = offbeat.rank()
        for algorithm in ("allreduce", "local_sgd"):
            for change in ("thaw", "add"):
                model = make_model("mlp")
                model[0].requires_grad_(change == "add")
                optimizer = torch.optim.SGD(model[:3].parameters(), lr=0.1, momentum=0.9)
                offbeat.DistributedOptimizer(optimizer, model, algorithm)

                def changes(change=change, model=model, optimizer=optimizer):
                    if change == "thaw":
                        model[0].requires_grad_(True)
                    else:
                        optimizer.add_param_group({"params": model[4].parameters()})

                def loop(count, at, model=model, optimizer=optimizer, changes=changes):
                    with optimizer.join():
                        for step in range(count):
                            if step == at:
                                changes()
                            model.zero_grad()
                            loss_of(model, make_batch("mlp", me, step)).backward()
                            optimizer.step()

                words = "rank 1 has no more data|join()|try: do it on every rank before"
                fails(InvalidArgument, words, loop, 5 - 3 * me, at=3)
                # the rank that had no data has not made the change
                if me == 1:
                    model[0].requires_grad_(True)
                if change == "add":
                    optimizer.remove()
                    continue
                loop(3, at=None)
                changed = model[0].weight.grad.clone()
                assert same_everywhere(*model.parameters(), changed), algorithm
                assert changed.any()
                optimizer.remove()
        model = make_model("mlp")
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        offbeat.DistributedOptimizer(optimizer, model)
        loop(4 + me, 2, model, optimizer, lambda: model[0].requires_grad_(True))
        assert same_everywhere(*model.parameters())
        assert not torch.equal(model[0].weight, make_model("mlp")[0].weight)
        offbeat.shutdown()

    ranks(script, 2)


def test_an_optimizer_that_join_does_not_know(ranks):
    """Its state stays behind on ranks that had fewer batches, which is said once; with `optimizer=` it does not."""

    def script():
        from support import make_model, make_optimizer, noted_warnings, same_everywhere, tell, train

        import offbeat

        offbeat.init(timeout=20.0)
        for given in (False, True):
            model = make_model("mlp")
            optimizer = make_optimizer("sgd", model)
            wrapped = offbeat.DataParallel(model, optimizer if given else None)
            texts = []
            for counts in ([2, 2], [4, 2], [4, 2]):
                with noted_warnings() as noted, wrapped.join():
                    train(wrapped, optimizer, "mlp", range(counts[offbeat.rank()]))
                texts.append(noted)
            train(wrapped, optimizer, "mlp", range(1))
            tell(given=given, texts=texts, equal=same_everywhere(*model.parameters()))
            wrapped.remove()
        offbeat.shutdown()

    job = ranks(script, 2)
    for rank in job.ranks:
        without, given = told(rank)
        assert given == {"given": True, "texts": [[], [], []], "equal": True}
        assert not without["equal"]
        assert [len(noted) for noted in without["texts"]] == [0, int(rank.rank == 0), 0]
        if rank.rank == 0:
            assert "rank 1 had fewer batches in join()" in without["texts"][1][0]
            assert "Pass optimizer=" in without["texts"][1][0]


def test_two_models_in_one_loop(ranks):
    """Two joins are refused; one that ends the loop on all ranks stands for both, where its forward is the first."""

    def script():
        from support import fails, make_model, make_optimizer, same_everywhere, train

        import offbeat
        from offbeat.errors import Exhausted, InvalidArgument

        offbeat.init(timeout=20.0)
        models = [make_model("mlp", seed) for seed in range(2)]
        optimizers = [offbeat.DistributedOptimizer(make_optimizer("sgd", model), model) for model in models]
        made = []

        def loop(first, second):
            with first, second:
                for step in range(3 + 2 * offbeat.rank()):
                    for model, optimizer in zip(models, optimizers, strict=True):
                        train(model, optimizer, "mlp", [step])
                    made.append(step)

        one, other = optimizers
        fails(InvalidArgument, "one join() at a time|try:|docs/training.md", loop, one.join(), other.join())
        assert made == []
        ending = one.join(throw_on_early_termination=True)
        fails(Exhausted, "rank 0 has no more data", loop, ending, other.join(enable=False))
        assert made == [0, 1, 2]
        assert same_everywhere(*models[0].parameters(), *models[1].parameters())
        offbeat.shutdown()

    ranks(script, 2)
