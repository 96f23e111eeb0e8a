"""Every wait between streams on the path of the GPU is needed: without it something goes wrong on a schedule of the
streams, and on that schedule always."""

import pytest
from gpu import building
from gpu_waits import LAZY_OURS, LAZY_TORCH

pytestmark = [
    pytest.mark.skipif(building.missing() is not None, reason=str(building.missing())),
    pytest.mark.timeout(300),
]


@pytest.fixture
def outcome(ranks):
    """Runs something of `gpu_waits.py` on two hosts; gives what each rank has noticed."""

    def run(lazy, *args):
        env = {"DOUBLES": str(building.build()), "FAKECUDA_SCHED": str(lazy)}
        hosts = {"per_rank": lambda rank: {"OFFBEAT_HOST": "ab"[rank]}}
        job = ranks(noticing, 2, env=env, args=args, timeout=100, check=False, **hosts)
        # memory that is long gone may also end the process
        said = ["noticed" if (rank.code or 0) < 0 else rank.out.strip() for rank in job.ranks]
        assert set(said) <= {"noticed", "nothing noticed"}, job.report()
        return said

    return run


def noticing():
    import sys

    import gpu_waits

    import offbeat

    offbeat.init(timeout=20.0)
    what, *arguments = sys.argv[1:]
    getattr(gpu_waits, what)(*arguments)


# Which wait, on which schedule: the one after so many of them. A step begins with two broadcasts of buffers, floats and
# counters, then there are four buckets; weights have four buckets too. It is the first bucket of a round that shows a
# wait: those after it may have to wait for a peer, and torch's stream runs meanwhile.
TRAINING = {
    "before the first bucket": (LAZY_TORCH, "allreduce", "cuStreamWaitEvent", "ours", "2"),
    "before a bucket of a later round": (LAZY_TORCH, "allreduce", "cuStreamWaitEvent", "ours", "8"),
    "before an encoded bucket": (LAZY_TORCH, "bytegrad", "cuStreamWaitEvent", "ours", "2"),
    "before a selected bucket": (LAZY_TORCH, "TopK(ratio=0.1)", "cuStreamWaitEvent", "ours", "2"),
    "before a factored bucket": (LAZY_TORCH, "powersgd", "cuStreamWaitEvent", "ours", "2"),
    "before weights": (LAZY_TORCH, "LocalSGD(every=1)", "cuStreamWaitEvent", "ours", "0"),
    "before later weights": (LAZY_TORCH, "LocalSGD(every=1)", "cuStreamWaitEvent", "ours", "4"),
    "after the first round": (LAZY_OURS, "allreduce", "cuStreamWaitEvent", "torch's", "2"),
    "after a later round": (LAZY_OURS, "bytegrad", "cuStreamWaitEvent", "torch's", "5"),
    "after weights": (LAZY_OURS, "LocalSGD(every=1)", "cuStreamWaitEvent", "torch's", "1"),
    "after buffers": (LAZY_OURS, "allreduce", "cuStreamWaitEvent", "torch's", "3"),
    "before saving": (LAZY_OURS, "TopK(ratio=0.1)", "cuStreamSynchronize", "ours", "0"),
}


@pytest.mark.parametrize("wait", TRAINING)
def test_a_wait_that_is_forgotten_in_training_is_noticed(outcome, wait):
    lazy, *case = TRAINING[wait]
    assert "noticed" in outcome(lazy, "training", *case)


def test_where_nothing_is_forgotten_nothing_is_noticed(outcome):
    algorithms = sorted({case[1] for case in TRAINING.values()})
    assert outcome(LAZY_OURS, "undisturbed", *algorithms) == ["nothing noticed"] * 2


@pytest.mark.parametrize(("whose", "lazy"), [("ours", LAZY_TORCH), ("torch's", LAZY_OURS)])
def test_a_wait_that_is_forgotten_in_a_broadcast_is_noticed(outcome, whose, lazy):
    assert "noticed" in outcome(lazy, "broadcast", whose)
    assert outcome(lazy, "broadcast", "nobody") == ["nothing noticed"] * 2


def test_memory_is_given_back_when_no_kernel_uses_it_any_more(outcome):
    assert "noticed" in outcome(LAZY_OURS, "removal", "forgets")
    assert outcome(LAZY_OURS, "removal", "waits") == ["nothing noticed"] * 2
