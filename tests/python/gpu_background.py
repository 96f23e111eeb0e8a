"""Exchanges in the background of models on a GPU, with CPU tensors in its place (`standin.py`), beside the CPU's."""

import contextlib

import torch
from gpu_training import end, kept_by, make, names_of, step

import offbeat

STEPS = 6


def begin(algorithm, dtype=torch.float32, *, seed=0, staleness=0):
    """A model and its optimizer, of which every step waits for its exchange unless it is told otherwise."""
    model, optimizer = make(algorithm, dtype, seed=seed)
    optimizer._offbeat.replica.staleness = staleness
    return model, optimizer


def train(algorithm, dtype=torch.float32, steps=STEPS):
    """Weights after each step, and what was kept."""
    model, optimizer = begin(algorithm, dtype)
    seen = [step(model, optimizer, number) for number in range(steps)]
    kept = kept_by(optimizer)
    stats = offbeat.stats()["models"][0]
    counted = [stats["syncs"], stats["background"]["staleness"], stats["background"]["spread"]]
    end(optimizer)
    return [*seen, [kept[name][label] for name, label in names_of(kept)]], (names_of(kept), counted)


@contextlib.contextmanager
def elsewhere(double, name):
    """Tells the core of a stream that is idle instead of torch's: in "fetch", which weights were copied on, or in
    "land", which the delta is added on."""
    from offbeat import snapshots

    idle = double.new_stream()
    double.streams.append(idle)

    class Wrong:
        def __init__(self, core):
            self.core = core

        def __getattr__(self, attribute):
            call = getattr(self.core, attribute)
            return (lambda _: call(idle.value)) if attribute == name else call

    def misled(method):
        def call(it):
            right, it.core = it.core, Wrong(it.core)
            try:
                method(it)
            finally:
                it.core = right

        return call

    methods = {"fetch": "copy", "land": "add"}
    right = getattr(snapshots.Snapshots, methods[name])
    setattr(snapshots.Snapshots, methods[name], misled(right))
    try:
        yield
    finally:
        setattr(snapshots.Snapshots, methods[name], right)
