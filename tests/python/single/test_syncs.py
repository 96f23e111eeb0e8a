"""When weights are exchanged, and which: pure functions of the step."""

import pytest

import offbeat
from offbeat.algorithms import Decentralized, DiLoCo, LocalSGD, LowPrecisionDecentralized
from offbeat.errors import InvalidArgument
from offbeat.syncs import GRAIN, Sync, divide


def course(sync, steps):
    """(step, begun, ended) of each step in which something happens."""
    happened = [(step, sync.starts(step), sync.ends(step)) for step in range(1, steps + 1)]
    return [each for each in happened if each[1:] != (None, None)]


def test_every_so_many_steps():
    assert course(LocalSGD(3).sync(), 9) == [(3, 0, 0), (6, 0, 0), (9, 0, 0)]
    assert course(LocalSGD(3, warmup_steps=2).sync(), 9) == [(5, 0, 0), (8, 0, 0)]
    assert [step for step, _, _ in course(LocalSGD(1).sync(), 4)] == [1, 2, 3, 4]


def test_fragments_take_turns_and_overlap():
    sync = DiLoCo(6, fragments=3).sync()
    assert course(sync, 8) == [(2, 0, 0), (4, 1, 1), (6, 2, 2), (8, 0, 0)]
    sync = DiLoCo(8, fragments=2, overlap=1, warmup_steps=10).sync()
    assert course(sync, 19) == [(13, 0, None), (14, None, 0), (17, 1, None), (18, None, 1)]


@pytest.mark.parametrize("overlap", range(5))
def test_one_exchange_at_a_time_and_each_fragment_once(overlap):
    sync = DiLoCo(20, fragments=4, overlap=overlap).sync()
    flying, ended = None, []
    for step in range(1, 101):
        if (begun := sync.starts(step)) is not None:
            assert flying is None
            flying, since = begun, step
        if (done := sync.ends(step)) is not None:
            assert (done, step - since) == (flying, overlap)
            flying = None
            ended.append(done)
    assert ended == [0, 1, 2, 3] * 5


def test_before_forward():
    sync = Decentralized(every=2).sync()
    assert [sync.starts(step) for step in range(5)] == [0, None, 0, None, 0]
    assert all(sync.ends(step) is None for step in range(5))


def test_fragments_are_about_as_large():
    sizes = [1000, 10, 400, 300, 10, 300, 0, 1000]
    parts = divide(sizes, 3)
    assert sorted(piece.tensor for part in parts for piece in part) == list(range(8))
    assert max(sum(sizes[piece.tensor] for piece in part) for part in parts) <= 1020
    assert divide([5, 0, 0], 3) == [[(0, 0, 5)], [(1, 0, 0)], [(2, 0, 0)]]
    with pytest.raises(InvalidArgument, match=r"fragments=4 of 3 parameters"):
        divide([1, 1, 1], 4)


@pytest.mark.parametrize("fragments", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("sizes", [[10**6] * 6, [10**6, 0, 3 * 10**6 + 1, 17, 5 * 10**5, 5000], [10**6 + 3], [9] * 7])
def test_what_may_be_cut_is_divided_evenly(sizes, fragments):
    cut = [size != 5 * 10**5 for size in sizes]
    if sum(max(1, size // GRAIN) for size in sizes) < fragments:
        return
    parts = divide(sizes, fragments, cut=cut)
    pieces = sorted(piece for part in parts for piece in part)
    for tensor, size in enumerate(sizes):
        mine = [piece for piece in pieces if piece.tensor == tensor]
        assert [piece.first for piece in mine] == [0, *(piece.last for piece in mine[:-1])]
        assert mine[-1].last == size
        assert all(piece.first % GRAIN == 0 for piece in mine)
        assert cut[tensor] or len(mine) == 1
    loads = [sum(piece.last - piece.first for piece in part) for part in parts]
    whole = [size for size, may in zip(sizes, cut, strict=True) if not may]
    assert max(loads) <= max(sum(sizes) / fragments, *whole, 9) + fragments * GRAIN
    assert len(pieces) <= len(sizes) + fragments


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(0), "every=0"),
        (lambda: LocalSGD(2.5), r"every=2\.5"),
        (lambda: LocalSGD(True), "every=True"),
        (lambda: LocalSGD(2, warmup_steps=-1), "warmup_steps=-1"),
        (lambda: DiLoCo(10, fragments=3), "every=10 is no multiple of fragments=3"),
        (lambda: DiLoCo(10, fragments=0), "fragments=0"),
        (lambda: DiLoCo(10, fragments=2, overlap=5), "overlap=5 is not under every / fragments = 5"),
        (lambda: DiLoCo(10, overlap=-1), "overlap=-1"),
        (lambda: DiLoCo(outer_lr=0), "outer learning rate of 0"),
        (lambda: DiLoCo(outer_momentum=1.0), r"outer momentum of 1\.0"),
        (lambda: DiLoCo(codec="zip"), "zip"),
        (lambda: DiLoCo(feedback=True), "feedback without a codec"),
        (lambda: Decentralized("star"), "peers='star'"),
        (lambda: Decentralized(every=0), "every=0"),
        (lambda: Decentralized(seed=-1), "seed=-1"),
        (lambda: LowPrecisionDecentralized("random"), "others in every step"),
        (lambda: LowPrecisionDecentralized("nobody"), "peers='nobody'"),
        (lambda: LowPrecisionDecentralized(gamma=2), "gamma=2"),
        (lambda: LowPrecisionDecentralized(codec="zip"), "zip"),
        (lambda: Sync([], when="sometimes"), "sometimes"),
    ],
)
def test_wrong_input_is_named(make, words):
    with pytest.raises(InvalidArgument, match=words):
        make()


def test_alone_it_is_the_optimizer_itself():
    import torch

    offbeat.init()
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, DiLoCo(2))
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(5):
        data = torch.randn(4, 3)
        for each, by in ((model, optimizer), (other, plain)):
            by.zero_grad()
            each(data).square().sum().backward()
            by.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert offbeat.consolidate(model) == 0.0
    offbeat.shutdown()
