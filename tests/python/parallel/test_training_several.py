"""Several models, optimizers and threads in one process, and one model with several optimizers."""

from support import told


def test_models_trained_in_turn_and_in_threads(ranks):
    """The bits of training each of them alone."""

    def script():
        import threading

        from support import digest, make_model, make_optimizer, tell, train

        import offbeat

        offbeat.init(timeout=20.0)
        kinds = ["cnn", "transformer", "mlp"]
        found = {}
        for way in ("alone", "in turn", "threads", "DataParallel in threads"):
            models = [make_model(kind, seed=at) for at, kind in enumerate(kinds)]
            optimizers = [make_optimizer("sgd", model) for model in models]
            wrapped = list(models)
            for at, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if way == "DataParallel in threads":
                    wrapped[at] = offbeat.DataParallel(model, optimizer, bucket_bytes=3000)
                else:
                    offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=3000)
            work = list(zip(wrapped, optimizers, kinds, strict=True))
            if way == "alone":
                for one in work:
                    train(*one, range(10))
            elif way == "in turn":
                for step in range(10):
                    for one in work if step % 2 else reversed(work):
                        train(*one, [step])
            else:
                threads = [threading.Thread(target=train, args=(*one, range(10))) for one in work]
                # ranks begin in different orders
                for thread in threads if offbeat.rank() else reversed(threads):
                    thread.start()
                for thread in threads:
                    thread.join()
            found[way] = [digest(model) for model in models]
        tell(**found)
        offbeat.shutdown()

    job = ranks(script, 2)
    for rank in job.ranks:
        (found,) = told(rank)
        for way, digests in found.items():
            assert digests == found["alone"], way


def test_generator_and_discriminator(ranks):
    """One's loss goes through the other, which gets gradients that it does not want; frozen meanwhile or not."""

    def script():
        import torch
        from support import digest, mean_in_order, tell
        from torch import nn

        import offbeat

        offbeat.init()
        me, world = offbeat.rank(), offbeat.world_size()

        def noise(rank, step, width):
            return torch.randn(5, width, generator=torch.Generator().manual_seed(50 * step + 7 * rank + width))

        def make():
            torch.manual_seed(3)
            maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
            judge = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
            return maker, judge, *(torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (maker, judge))

        def judge_loss(maker, judge, rank, step):
            real, fake = noise(rank, step, 3), maker(noise(rank, step, 4)).detach()
            return judge(fake).sigmoid().mean() - judge(real).sigmoid().mean()

        def maker_loss(maker, judge, rank, step):
            return -judge(maker(noise(rank, step + 100, 4))).sigmoid().mean()

        # in one process, for all ranks: rank 0's buffers before each forward
        maker, judge, of_maker, of_judge = make()
        for step in range(8):
            for loss, model, optimizer in ((judge_loss, judge, of_judge), (maker_loss, maker, of_maker)):
                before = [buffer.clone() for buffer in maker.buffers()]
                parts = []
                for rank in range(world):
                    for buffer, value in zip(maker.buffers(), before, strict=True):
                        buffer.copy_(value)
                    parts.append(torch.autograd.grad(loss(maker, judge, rank, step), list(model.parameters())))
                    if rank == 0:
                        after = [buffer.clone() for buffer in maker.buffers()]
                for buffer, value in zip(maker.buffers(), after, strict=True):
                    buffer.copy_(value)
                for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
                    parameter.grad = mean_in_order(gradients)
                optimizer.step()
        want = [digest(maker, buffers=False), digest(judge)]

        for freezes in (False, True):
            maker, judge, of_maker, of_judge = make()
            offbeat.DistributedOptimizer(of_maker, maker, bucket_bytes=64)
            offbeat.DistributedOptimizer(of_judge, judge, bucket_bytes=64)
            for step in range(8):
                of_judge.zero_grad()
                judge_loss(maker, judge, me, step).backward()
                of_judge.step()
                of_maker.zero_grad()
                if freezes:
                    judge.requires_grad_(False)
                maker_loss(maker, judge, me, step).backward()
                if freezes:
                    judge.requires_grad_(True)
                of_maker.step()
            assert [digest(maker, buffers=False), digest(judge)] == want, freezes
            of_maker.remove()
            of_judge.remove()
        tell(want=want)
        offbeat.shutdown()

    ranks(script, 2)


def test_one_model_with_two_optimizers_and_parameters_from_elsewhere(ranks):
    """Each optimizer has its own part of the model; a parameter that is not the model's needs a name."""

    def script():
        import torch
        from support import digest, fails, loss_of, make_batch, make_model, mean_gradients, same_everywhere, simulate

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init()
        me = offbeat.rank()

        def split(model):
            low = torch.optim.SGD(model[:4].parameters(), lr=0.1, momentum=0.9)
            return low, torch.optim.AdamW(model[4:].parameters(), lr=1e-3, eps=1e-3)

        class Both:
            def __init__(self, *parts):
                self.parts = parts

            def step(self):
                for part in self.parts:
                    part.step()

        alone = make_model("cnn")
        simulate(alone, Both(*split(alone)), "cnn", range(6), [[0, 1]])
        model = make_model("cnn", seed=me)
        both = split(model)
        for part in both:
            offbeat.DistributedOptimizer(part, model, bucket_bytes=1000)
        for step in range(6):
            model.zero_grad()
            loss_of(model, make_batch("cnn", me, step)).backward()
            Both(*both).step()
        assert digest(model, buffers=False) == digest(alone, buffers=False)

        model = make_model("mlp")
        temperature = torch.nn.Parameter(torch.tensor([2.0 + me]))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
        fails(InvalidArgument, "1 parameters|(1,)|named_parameters=", offbeat.DistributedOptimizer, optimizer, model)
        offbeat.DistributedOptimizer(optimizer, model, named_parameters=[("temperature", temperature)])
        assert temperature.tolist() == [2.0]
        for step in range(3):
            optimizer.zero_grad()
            value = float(temperature.detach())
            losses = [lambda m, r=rank, s=step, v=value: loss_of(m, make_batch("mlp", r, s)) * v for rank in range(2)]
            want = mean_gradients(model, losses)
            own = [loss_of(model, make_batch("mlp", rank, step)).detach() for rank in range(2)]
            (loss_of(model, make_batch("mlp", me, step)) * temperature).sum().backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, want[name])
            torch.testing.assert_close(temperature.grad, (own[0] + own[1]).reshape(1) / 2)
            optimizer.step()
            assert same_everywhere(temperature)
        offbeat.shutdown()

    ranks(script, 2)


def test_workers_of_a_data_loader(ranks):
    """Forked while the model is wrapped, in every epoch: the bits of training without them."""

    def script():
        import warnings

        import torch
        from support import digest, make_batch, make_model, make_optimizer, simulate
        from torch.utils.data import DataLoader

        import offbeat

        warnings.simplefilter("ignore", DeprecationWarning)
        offbeat.init(timeout=20.0)
        model = make_model("cnn")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        batches = [make_batch("cnn", offbeat.rank(), step) for step in range(6)]
        for epoch in range(2):
            for images, labels in DataLoader(batches[3 * epoch : 3 * epoch + 3], batch_size=None, num_workers=2):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
        alone = make_model("cnn")
        simulate(alone, make_optimizer("sgd", alone), "cnn", range(6), [[0, 1]])
        assert digest(model, buffers=False) == digest(alone, buffers=False)
        offbeat.shutdown()

    ranks(script, 2)


def test_wrappers_leave_nothing_behind(ranks):
    """Threads and memory of forty wrappers are gone, removed or just forgotten; also when all were used."""

    def script():
        import gc
        import time
        import weakref
        from pathlib import Path

        from support import make_model, make_optimizer, noted_warnings, same_everywhere, train

        import offbeat

        offbeat.init(timeout=20.0)

        def threads():
            names = []
            for task in Path("/proc/self/task").iterdir():
                try:
                    names.append((task / "comm").read_text().strip())
                except OSError:
                    continue
            return sum(name.startswith(("offbeat-train", "offbeat-group")) for name in names)

        def mapped():
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssShmem" in line)
            return int(line.split()[1])

        def cycle(at):
            model = make_model("cnn")
            optimizer = make_optimizer("sgd", model)
            wrapped = offbeat.DataParallel(model) if at % 2 else offbeat.DistributedOptimizer(optimizer, model)
            train(wrapped if at % 2 else model, optimizer, "cnn", range(3))
            if at % 3:
                wrapped.remove()
            return weakref.ref(model)

        cycle(0)
        gc.collect()
        before = threads(), mapped()
        references = [cycle(at) for at in range(40)]
        gc.collect()
        offbeat.barrier()
        alive = [at for at, reference in enumerate(references) if reference() is not None]
        assert not alive, alive
        # nobody waits for them to end, and those of the last ones may be at it
        patience = time.monotonic() + 10
        while threads() > before[0] + 2 and time.monotonic() < patience:
            time.sleep(0.05)
        after = threads(), mapped()
        assert after[0] <= before[0] + 2, (before, after)
        assert after[1] <= before[1] + 2000, (before, after)

        # nor does a model keep anything of wrappers that were dropped, once it has a new one
        model = make_model("cnn")
        for at in range(3):
            with noted_warnings() as texts:
                wrapped = offbeat.DataParallel(model)
            assert texts == [], (at, texts)
            assert {len(p._post_accumulate_grad_hooks) for p in model.parameters()} == {1}, at
            train(wrapped, make_optimizer("sgd", model), "cnn", range(2))
            assert same_everywhere(*model.parameters())
            del wrapped
            gc.collect()
        offbeat.shutdown()

    ranks(script, 2)


def test_a_model_let_go_later_elsewhere_is_no_news(ranks):
    """Ranks forget models when their collector feels so, minutes apart: no warning, and nothing else is the worse."""

    def script():
        import gc
        import time

        from support import make_model, make_optimizer, same_everywhere, train

        import offbeat

        offbeat.init(timeout=3.0)
        group = offbeat.Group([0, 1])
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        train(model, optimizer, "mlp", range(2))
        if offbeat.rank() == 0:
            del model, optimizer
            gc.collect()
        time.sleep(4.0)  # longer than the time in which a call is warned about, and fails
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        gc.collect()
        train(model, optimizer, "mlp", range(2))
        assert same_everywhere(*model.parameters())
        # one that somebody waits for is told of
        time.sleep(2.0 * offbeat.rank())
        group.close()
        offbeat.shutdown()

    job = ranks(script, 2)
    assert job.ranks[0].err.count("waiting for") == job.ranks[0].err.count("close()") == 1, job.ranks[0].err
    assert not job.ranks[1].err
