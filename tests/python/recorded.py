"""Recordings of worlds that never were, for the tests of what is made of recordings; `import recorded` works there."""

import random

from offbeat.timeline import Recording, Span

MS = 1_000_000


def recording(rank=0, spans=(), **changes):
    """A recording of host "a" in a world of two."""
    told = {"rank": rank, "world_size": 2, "host": "a", "job": "1f", "clock": "boot-a", "monotonic": 5, "unix": 10**18}
    return Recording(**(told | {"version": "0.1.0", "dropped": 0, "spans": list(spans)} | changes))


def world(hosts="ab", steps=50, buckets=3, *, skews=None, drifts=None, late=None, transit=None, wait=2 * MS, seed=0):
    """One rank for each letter of `hosts`, which names its host; the ranks of a host read one clock.

    `skews` and `drifts` say by host how much its clock shows too little, and how much too little it gains in each
    nanosecond; `late` by how much each rank is late in each step. With `transit`, frames between hosts take that long.
    """
    chance = random.Random(seed)
    skews, drifts, late = skews or {}, drifts or {}, late or {}
    spans = {rank: [] for rank in range(len(hosts))}

    def add(rank, kind, of, step, begin, end, count=0):
        skew, drift = skews.get(hosts[rank], 0), drifts.get(hosts[rank], 0.0)
        read = [round(time - skew - drift * time) for time in (begin, end)]
        spans[rank].append(Span(kind, of, 0, step, *read, count))

    for step in range(steps):
        start = 10**12 + step * 30 * MS
        ready = {rank: start + 10 * MS + late.get(rank, 0) + chance.randint(0, MS // 10) for rank in spans}
        for rank in spans:
            add(rank, "forward", 0, step, start, start + 4 * MS)
            add(rank, "backward", 0, step, start + 4 * MS, ready[rank])
        for bucket in range(buckets):
            # everybody ends at about the same time, after the last one has come
            over = max(ready.values()) + 2 * MS
            ends = {rank: over + chance.randint(0, MS // 10) for rank in spans}
            for rank in spans:
                add(rank, "reduce", bucket, step, ready[rank], ends[rank], 1 << 20)
                for peer in spans if transit else ():
                    if hosts[peer] != hosts[rank]:
                        call, took = step * buckets + bucket, transit + chance.randint(0, MS // 10)
                        add(rank, "send", peer, call, ready[rank], ready[rank] + took // 2, 1 << 17)
                        add(peer, "receive", rank, call, ready[rank] + took // 2, ready[rank] + took, 1 << 17)
            ready = {rank: end + chance.randint(0, MS // 10) for rank, end in ends.items()}
        for rank in spans:
            add(rank, "wait", 0, step, ends[rank] - wait, ends[rank])
    return [
        recording(
            rank, spans[rank], world_size=len(hosts), host=host, clock=f"boot-{host}", monotonic=-skews.get(host, 0)
        )
        for rank, host in enumerate(hosts)
    ]
