"""Tensors as users have them: empty, strided, expanded, tracked by autograd, and those that are refused."""

import pytest
from support import LINKS


@pytest.mark.parametrize("env", LINKS.values(), ids=LINKS)
def test_any_layout_gives_the_right_sum(ranks, env):
    def script():
        import functools

        import torch
        from support import same_everywhere

        import offbeat

        offbeat.init(timeout=30.0)
        me, world = offbeat.rank(), offbeat.world_size()

        def base(*shape):
            return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * me

        views = {
            "0-dim": lambda: base(1)[0],
            "empty": lambda: base(0),
            "empty in the middle": lambda: base(3, 0, 2),
            "transposed": lambda: base(4, 6).t(),
            "permuted": lambda: base(2, 3, 4).permute(2, 0, 1),
            "strided slice": lambda: base(40)[3:35:3],
            "column": lambda: base(5, 7)[:, 2],
            "reversed by index": lambda: base(9)[torch.arange(8, -1, -1)],
            "channels_last": lambda: base(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "unfolded once": lambda: base(6, 4)[::2, ::2],
            "nine dimensions": lambda: base(1, 2, 1, 2, 1, 2, 1, 2, 3),
            "real part": lambda: torch.complex(base(6), base(6)).real,
            "one element of a conjugate": lambda: torch.complex(base(1), base(1)).conj().imag,
            "a conjugate": lambda: torch.complex(base(6), base(6)).conj().imag,
            "large and transposed": lambda: base(300, 700).t(),
            "shared and transposed": lambda: offbeat.shared_empty(4, 6).copy_(base(4, 6)).t(),
            "shared slice": lambda: offbeat.shared_empty(40).copy_(base(40))[5:25],
            "shared strided slice": lambda: offbeat.shared_empty(40).copy_(base(40))[::2],
        }
        for name, view in views.items():
            tensor = view()
            mine = tensor.clone()
            everyone = offbeat.all_gather(tensor)
            assert torch.equal(everyone[me], mine), name
            total = sum(everyone[1:], start=everyone[0].clone())
            address, stride = tensor.data_ptr(), tensor.stride()
            offbeat.all_reduce(tensor)
            assert torch.equal(tensor, total), (name, tensor, total)
            assert (tensor.data_ptr(), tensor.stride()) == (address, stride), name
            assert same_everywhere(tensor), name
            for op, reduce in {"min": torch.minimum, "product": torch.mul}.items():
                offbeat.all_reduce(tensor := view(), op)
                assert torch.equal(tensor, functools.reduce(reduce, everyone)), (name, op)

            tensor = view()
            offbeat.reduce(tensor, 1)
            assert torch.equal(tensor, total if me == 1 else mine), name
            tensor = view()
            offbeat.broadcast(tensor, 1)
            assert torch.equal(tensor, everyone[1]), name
            tensor = view()
            offbeat.scatter([view() + rank for rank in range(world)] if me == 1 else None, 1, tensor)
            assert torch.equal(tensor, everyone[1] + me), name
            assert torch.equal(offbeat.reduce_scatter([view()] * world), total), name
            parts = offbeat.all_to_all([view() + rank for rank in range(world)])
            assert all(torch.equal(part, theirs + me) for part, theirs in zip(parts, everyone, strict=True)), name
            tensor = view()
            if me == 0:
                offbeat.send(tensor, 1)
            elif me == 1:
                offbeat.recv(tensor, 0)
                assert torch.equal(tensor, everyone[0]), name
            handle = offbeat.all_reduce(tensor := view(), async_op=True)
            handle.wait()
            assert torch.equal(tensor, total), name

        # the base of a view keeps what lies between its elements
        whole = torch.zeros(10)
        whole[::2] = 1.0
        offbeat.all_reduce(whole[::2])
        assert whole.tolist() == [float(world), 0.0] * 5
        offbeat.shutdown()

    ranks(script, 3, env=env)


def test_autograd_is_left_alone(ranks):
    def script():
        import torch

        import offbeat

        offbeat.init()
        leaf = torch.ones(4, requires_grad=True)
        offbeat.all_reduce(leaf)
        assert leaf.tolist() == [2.0] * 4
        assert leaf.requires_grad
        assert leaf.is_leaf
        parameter = torch.nn.Parameter(torch.full((3, 2), 1.0 + offbeat.rank()))
        offbeat.broadcast(parameter)
        assert parameter.tolist() == [[1.0] * 2] * 3
        strided = torch.ones(4, 6, requires_grad=True)
        offbeat.all_reduce(strided.t())
        assert torch.equal(strided, torch.full((4, 6), 2.0))
        product = leaf * 2
        (gathered, _) = offbeat.all_gather(product)
        assert not gathered.requires_grad
        offbeat.all_reduce(product)
        assert product.tolist() == [8.0] * 4
        product.sum().backward()
        assert leaf.grad.tolist() == [2.0] * 4
        offbeat.all_reduce(leaf.grad, "mean")
        with torch.inference_mode():
            inference = torch.ones(3)
            offbeat.all_reduce(inference)
            assert inference.tolist() == [2.0] * 3
        buffer = torch.nn.Buffer(torch.ones(2))
        offbeat.all_reduce(buffer)
        assert buffer.tolist() == [2.0] * 2
        offbeat.shutdown()

    ranks(script, 2)


def test_autograd_notices_what_was_overwritten(ranks):
    def script():
        import torch

        import offbeat

        offbeat.init()
        me = offbeat.rank()

        def backward_raises(write):
            saved = torch.ones(4)
            factor = torch.full((4,), 3.0, requires_grad=True)
            result = (saved * factor).sum()
            write(saved)
            try:
                result.backward()
            except RuntimeError as error:
                return "modified by an inplace operation" in str(error)
            return False

        group = offbeat.Group([0, 1])
        parts = [torch.zeros(4), torch.zeros(4)]
        assert backward_raises(offbeat.all_reduce)
        assert backward_raises(lambda saved: offbeat.all_reduce(saved, group=group))
        assert backward_raises(lambda saved: offbeat.all_reduce(saved, async_op=True).wait())
        assert backward_raises(lambda saved: offbeat.all_reduce(saved.view(2, 2).t()))
        assert backward_raises(lambda saved: offbeat.scatter(parts if me == 0 else None, 0, saved))
        # only where something was written
        assert backward_raises(lambda saved: offbeat.broadcast(saved, 1)) == (me == 0)
        assert backward_raises(lambda saved: offbeat.reduce(saved, 1)) == (me == 1)
        assert backward_raises(lambda saved: offbeat.send(saved, 1) if me == 0 else offbeat.recv(saved, 0)) == (me == 1)
        assert not backward_raises(offbeat.all_gather)

        # a value that is saved while the call is under way may be an old one
        tensor = torch.ones(4)
        handle = offbeat.all_reduce(tensor, async_op=True)
        between = tensor._version
        handle.wait()
        assert tensor._version > between
        offbeat.shutdown()

    ranks(script, 2)


def test_what_cannot_be_sent_says_why(ranks):
    def script():
        import warnings

        import torch
        from support import fails

        import offbeat
        from offbeat.errors import InvalidArgument, Unsupported

        warnings.simplefilter("ignore")  # torch's, about the kinds of tensors below

        offbeat.init()
        me, world = offbeat.rank(), offbeat.world_size()
        unsupported = {
            "complex|view_as_real": torch.ones(3, dtype=torch.complex64),
            "meta|.cpu()": torch.ones(3, device="meta"),
            "sparse|to_dense": torch.eye(3).to_sparse(),
            "sparse|to_dense()": torch.eye(3).to_sparse_csr(),
            "quantized|dequantize": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
            "float8_e4m3fn|dtype": torch.ones(3).to(torch.float8_e4m3fn),
        }
        for words, tensor in unsupported.items():
            fails(Unsupported, words, offbeat.all_reduce, tensor)
            fails(Unsupported, words, offbeat.all_reduce, tensor, async_op=True)
            fails(Unsupported, words, offbeat.reduce, tensor, 0)
            fails(Unsupported, words, offbeat.broadcast, tensor)
            fails(Unsupported, words, offbeat.all_gather, tensor)
            fails(Unsupported, words, offbeat.gather, tensor, 0)
            fails(Unsupported, words, offbeat.scatter, None, 1 - me, tensor)
            fails(Unsupported, words, offbeat.reduce_scatter, [tensor] * world)
            fails(Unsupported, words, offbeat.all_to_all, [tensor] * world)
            fails(Unsupported, words, offbeat.send, tensor, 1 - me)
            fails(Unsupported, words, offbeat.recv, tensor, 1 - me)
        ones = torch.ones(3)
        wrong = [
            ("torch.Tensor|list|try", offbeat.all_reduce, [1.0, 2.0]),
            ("expanded|clone", offbeat.all_reduce, torch.ones(1).expand(4)),
            ("expanded|clone", offbeat.all_reduce, torch.ones(3, 1).expand(3, 4)),
            ("expanded|clone", offbeat.recv, torch.ones(1).expand(4), 1 - me),
            ("overlaps|clone", offbeat.all_reduce, torch.arange(6.0).as_strided((4, 3), (1, 1))),
            ("dst=2|0 to 1", offbeat.reduce, ones, 2),
            ("dst|int", offbeat.reduce, ones, "0"),
            ("src=-1|0 to 1", offbeat.broadcast, ones, -1),
            ("1 tensors for 2 ranks", offbeat.all_to_all, [ones]),
            ("list of tensors|chunk", offbeat.reduce_scatter, torch.ones(4)),
            ("tensors[1]|int", offbeat.all_to_all, [ones, 1]),
            ("has no tensors to scatter", offbeat.scatter, None, me, ones),
            ("different types", offbeat.all_to_all, [ones, torch.ones(3, dtype=torch.int32)]),
            (f"rank {me}|another rank", offbeat.send, ones, me),
            (f"rank {me}|another rank", offbeat.recv, ones, me),
            ("tag|try: tag=0", lambda: offbeat.send(ones, 1 - me, tag=-1)),
            ("offbeat.Group", lambda: offbeat.all_reduce(ones, group=[0, 1])),
            ("duplicates", offbeat.Group, [0, 0]),
            ("leaves the world of 2", offbeat.Group, [1, 2]),
            ("at least one rank", offbeat.Group, []),
            ("negative", offbeat.shared_empty, -1),
            ("sizes must be ints", offbeat.shared_empty, 1.5),
            ("torch.dtype", lambda: offbeat.shared_empty(2, dtype="float32")),
        ]
        for words, call, *args in wrong:
            fails(InvalidArgument, words, call, *args)
        # an expanded tensor can be read
        (mine, theirs) = offbeat.all_gather(torch.ones(1).expand(4))
        assert mine.tolist() == theirs.tolist() == [1.0] * 4
        # nothing of all that was sent: the world is in step
        offbeat.all_reduce(ones)
        assert ones.tolist() == [2.0] * 3
        offbeat.shutdown()

    ranks(script, 2)
