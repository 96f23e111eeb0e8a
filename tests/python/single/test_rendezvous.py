"""What stands between the core and torch's store."""

import gc
import threading
import time

import pytest

from offbeat.errors import OffbeatError, PeerLost, Timeout
from offbeat.rendezvous import Adapter


class Silent:
    """As the client on a host that was cut off: it never hears an answer."""

    def __init__(self):
        self.released = threading.Event()

    def set(self, key, value):
        self.released.wait(30)

    def check(self, keys):
        self.released.wait(30)


class Broken:
    def set(self, key, value):
        raise RuntimeError("Connection reset by peer\nand more")


@pytest.mark.parametrize("ask", [lambda store: store.set("a", b"1"), lambda store: store.get("a", 0.1)])
def test_a_store_that_never_answers_is_given_up(ask):
    silent = Silent()
    began = time.monotonic()
    with pytest.raises(Timeout, match=r"store of rank 0 at 10.0.0.1 did not answer within 0.5 s; try: "):
        ask(Adapter(silent, 0.5, "10.0.0.1"))
    assert time.monotonic() - began < 5
    silent.released.set()


def test_a_store_that_goes_goes_with_rank_0_where_that_hosts_it():
    with pytest.raises(PeerLost, match=r"rank 0 \(at 10.0.0.1\) is gone.*try: ") as lost:
        Adapter(Broken(), 5.0, "10.0.0.1").set("a", b"1")
    assert (lost.value.rank, lost.value.host) == (0, "10.0.0.1")
    with pytest.raises(OffbeatError, match="try: ") as unknown:
        Adapter(Broken(), 5.0).set("a", b"1")
    assert type(unknown.value) is OffbeatError


def test_the_thread_ends_with_the_adapter():
    def running():
        return [thread for thread in threading.enumerate() if thread.name == "offbeat-rendezvous"]

    adapter = Adapter(Broken(), 5.0)
    assert running()
    del adapter
    gc.collect()
    deadline = time.monotonic() + 5
    while running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running()
