"""`codec=` encodes what travels between hosts: by name or instance, with a bound on what it loses."""

import pytest


@pytest.mark.parametrize(
    "layout", [lambda rank: f"h{rank}", lambda rank: f"h{rank // 2}", lambda rank: "one"], ids=["3", "2+1", "one host"]
)
def test_codecs_stay_within_their_bound(ranks, layout):
    def script():
        import torch
        from support import fails, same_everywhere

        import offbeat
        from offbeat.codecs import BFloat16, Float16
        from offbeat.errors import InvalidArgument

        offbeat.init(timeout=30.0)
        me, world = offbeat.rank(), offbeat.world_size()
        bits = {"float16": 11, "bfloat16": 8}
        for count in (0, 1, 5, 1000, 100_003):
            parts = [torch.rand(count, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
            exact = sum(part.double() for part in parts)
            for codec in ("float16", "bfloat16", Float16(), BFloat16()):
                name = codec if isinstance(codec, str) else codec.name
                bound = 2.0 ** -bits[name] * 2  # each part is rounded once, and the sum once
                for make in torch.empty, offbeat.shared_empty:
                    tensor = make(count).copy_(parts[me])
                    offbeat.all_reduce(tensor, codec=codec)
                    assert same_everywhere(tensor), (name, count)
                    error = (tensor.double() - exact).abs() / exact.clamp(min=1e-9)
                    assert count == 0 or error.max() <= bound, (name, count, error.max())
                    tensor = make(count).copy_(parts[me])
                    offbeat.all_reduce(tensor, "mean", codec=codec, async_op=True).wait()
                    error = (tensor.double() * world - exact).abs() / exact.clamp(min=1e-9)
                    assert count == 0 or error.max() <= 1.5 * bound, (name, count, error.max())
                half = parts[me].to(torch.bfloat16)
                offbeat.all_reduce(half, codec=codec)
                assert same_everywhere(half)
        special = torch.tensor([0.0, float("inf"), float("nan"), 1.0])
        offbeat.all_reduce(special, codec="bfloat16")
        assert special[0] == 0
        assert special[3] == world
        assert not special[1:3].isfinite().any()

        ones = torch.ones(3)
        fails(InvalidArgument, "zip|float16|minmax8", offbeat.all_reduce, ones, codec="zip")
        fails(InvalidArgument, "offbeat.codecs|try", offbeat.all_reduce, ones, codec=16)
        fails(InvalidArgument, "float16|max|try", offbeat.all_reduce, ones, "max", codec="float16")
        fails(InvalidArgument, "int64|try", offbeat.all_reduce, torch.ones(3, dtype=torch.int64), codec="float16")
        fails(InvalidArgument, "float64|try", offbeat.all_reduce, torch.ones(3).double(), codec="float16")
        fails(offbeat.errors.Mismatch, "codec", offbeat.all_reduce, ones, codec=["float16", "bfloat16"][me % 2])
        offbeat.shutdown()

    ranks(script, 3, per_rank=lambda rank: {"OFFBEAT_HOST": layout(rank)})


@pytest.mark.parametrize("layout", [lambda rank: f"h{rank}", lambda rank: f"h{rank // 2}"], ids=["3", "2+1"])
def test_codecs_of_blocks_stay_within_their_bound(ranks, layout):
    def script():
        import torch
        from support import same_everywhere

        import offbeat
        from offbeat.codecs import QSGD, Int4, MinMax8, OneBit

        offbeat.init(timeout=30.0)
        me, world = offbeat.rank(), offbeat.world_size()
        hosts = len(set(offbeat.all_gather_object(offbeat.host())))
        # of the largest magnitude, for numbers from -1 to 1
        bounds = {"minmax8": 2 / 510, "int4": 1 / 14, "qsgd": 1 / 127, "onebit": 1.0}
        for count in (0, 1, 129, 2049, 100_003):
            parts = [torch.rand(count, generator=torch.Generator().manual_seed(rank)) * 2 - 1 for rank in range(world)]
            exact = sum(part.double() for part in parts)
            for codec in (*bounds, MinMax8(), Int4(), QSGD(), OneBit()):
                name = codec if isinstance(codec, str) else codec.name
                for make in torch.empty, offbeat.shared_empty:
                    tensor = make(count).copy_(parts[me])
                    offbeat.all_reduce(tensor, codec=codec)
                    assert same_everywhere(tensor), (name, count)
                    # what the hosts' sums lose, which have up to `world` ranks together, and then theirs
                    bound = bounds[name] * (world + (world + bounds[name] * hosts)) * 1.01
                    assert count == 0 or (tensor.double() - exact).abs().max() <= bound, (name, count)
        for codec in bounds:
            tensor = torch.zeros(5000)
            offbeat.all_reduce(tensor, "mean", codec=codec)
            assert (tensor == 0).all()
            tensor = torch.full((5000,), 0.5)
            if me == 1:
                tensor[4100] = float("nan")
            offbeat.all_reduce(tensor, "mean", codec=codec)
            assert tensor[:4096].isfinite().all(), codec
            assert tensor[4100].isnan(), codec
            assert same_everywhere(tensor.nan_to_num(7.0))
        offbeat.shutdown()

    ranks(script, 3, per_rank=lambda rank: {"OFFBEAT_HOST": layout(rank)})
