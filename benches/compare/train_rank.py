"""One rank of a training row: every engine trains its own copy of the model in one process, by turns.

Reads a job (JSON) and writes <directory>/rank<R>.json: samples by name. training.py says what follows from them. For
memory a job has one engine only, since engines in one process would share what they use.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from . import engines
from .idle import memory
from .rank import die_with_parent

Part = Callable[[], dict[str, float]]  # does something, and gives seconds by name
WARM = 3  # rounds that are not counted: in the first ones both engines arrange their buckets
MEMORY_STEPS = 10
PAUSE = 0.06  # seconds that a paused layer's backward takes
SMALL = 256  # elements of a small parameter in an uneven model: 1 kB


class Tiny(nn.Module):
    """Many small parameters in one operation, so that the model itself costs next to nothing for each."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(size)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self._parameters.values())) * x


class Uneven(nn.Module):
    """Small parameters on both sides of a large one."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.before = nn.ParameterList(torch.zeros(SMALL) for _ in range(count // 2))
        self.large = nn.Parameter(torch.randn(width, width) / width)
        self.after = nn.ParameterList(torch.zeros(SMALL) for _ in range(count // 2))

    def forward(self, x: Tensor) -> Tensor:
        first, last = (torch.stack(list(some)).sum(0) for some in (self.before, self.after))
        room = (0, self.large.shape[0] - SMALL)
        return functional.linear(x + functional.pad(first, room), self.large) + functional.pad(last, room)


class Pause(torch.autograd.Function):
    """Backward takes its time without a processor, as if it ran on an accelerator. A single sample takes none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.seconds = PAUSE if len(x) > 1 else 0.0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(ctx.seconds)
        return gradient


class Paused(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Pause.apply(super().forward(x))


def build(kind: str, layers: int, width: int) -> nn.Module:
    if kind in ("mlp", "paused"):
        linear = nn.Linear if kind == "mlp" else Paused
        parts = [layer for _ in range(layers) for layer in (linear(width, width), nn.ReLU())]
        return nn.Sequential(*parts[:-1])
    if kind == "cnn":
        body = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))
    return Tiny(layers, width) if kind == "tiny" else Uneven(layers, width)


def shape_of(kind: str, width: int, batch: int) -> tuple[int, ...]:
    """Of what a model is given."""
    return {"cnn": (batch, 1, 8, 8), "tiny": (width,)}.get(kind, (batch, width))


def samples(kind: str, width: int, batch: int) -> Tensor:
    """What this rank trains on; another on each rank, the same for each engine."""
    lot = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    return torch.randn(shape_of(kind, width, batch), generator=lot)


class Contender:
    """A model that is trained in one way: by "ours", by torch's "ddp" (or "ddp-bf16", with its own hook), or alone."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        bucket_bytes: int | None = None,
        engine: str = "",
        optimizer: str = "sgd",
        algorithm: str = "GradientAllReduce()",
    ) -> None:
        self.name, self.engine = name, engine or name
        self.weights = self.model = model
        rates = {"sgd": (torch.optim.SGD, 0.01), "adam": (torch.optim.Adam, 1e-3)}
        kind, rate = rates[optimizer]
        self.optimizer: Any = kind(self.weights.parameters(), lr=rate)
        self.hold: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if self.engine == "ours":
            import offbeat

            self.algorithm = chosen = engines.algorithm(algorithm)
            wrapped: Any = offbeat.DistributedOptimizer(self.optimizer, self.model, chosen, bucket_bytes=bucket_bytes)
            self.hold = wrapped.no_sync
        elif self.engine.startswith("ddp"):
            cap = {} if bucket_bytes is None else {"bucket_cap_mb": bucket_bytes / (1 << 20)}
            self.model = DistributedDataParallel(self.weights, gradient_as_bucket_view=True, **cap)
            self.hold = self.model.no_sync
            if self.engine == "ddp-bf16":
                self.model.register_comm_hook(None, bf16_compress_hook)

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x).backward()
        self.optimizer.step()


def clock(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def turns(parts: list[Part], repetitions: int, warm: int = WARM) -> dict[str, list[float]]:
    """Round after round each part once, in an order by lot: who comes after whom matters, if only for the caches."""
    lot = random.Random(0)  # the same order on all ranks
    seconds: dict[str, list[float]] = {}
    gc.collect()
    gc.disable()  # it would run in whosever turn it happens to be due
    for repetition in range(-warm, repetitions):
        for part in lot.sample(parts, len(parts)):
            for name, spent in part().items():
                if repetition >= 0:
                    seconds.setdefault(name, []).append(spent)
    gc.enable()
    return seconds


def step_parts(contenders: list[Contender], x: Tensor, inner: int, barrier: Callable[[], None]) -> list[Part]:
    def part(contender: Contender) -> dict[str, float]:
        barrier()
        return {contender.name: clock(lambda: [contender.step(x) for _ in range(inner)]) / inner}

    return [lambda c=c: part(c) for c in contenders]


def overlap_parts(contenders: list[Contender], x: Tensor, barrier: Callable[[], None]) -> list[Part]:
    """With and without communication, with and (nearly) without compute."""

    def part(contender: Contender, tail: str) -> dict[str, float]:
        batch = x[:1] if "wire" in tail else x
        barrier()
        with contender.hold() if "alone" in tail else contextlib.nullcontext():
            return {contender.name + tail: clock(lambda: contender.step(batch))}

    tails = ("", "-alone", "-wire", "-wire-alone")
    return [lambda c=c, tail=tail: part(c, tail) for c in contenders for tail in tails]


def hook_parts(contenders: list[Contender], x: Tensor, barrier: Callable[[], None]) -> list[Part]:
    """Forward and backward of each contender, and what the copy of gradients into buckets costs by itself.

    A wrapper has to put every gradient into its bucket; that copy is no cost of hooks. It is measured as the same two
    statements in a loop, on tensors of the same sizes in memory of the same kind (shared where ours is there), with the
    gradients at hand: whatever it takes to get at a gradient in the hook, and to free it, counts as the hook's.
    The exchange itself is in the backward of a wrapper, too: 64 kB take some 10 µs, which is 0.01 µs a parameter.
    """

    def part(contender: Contender) -> dict[str, float]:
        contender.optimizer.zero_grad()
        barrier()
        began = time.perf_counter()
        loss = contender.loss(x)
        between = time.perf_counter()
        loss.backward()
        return {contender.name: time.perf_counter() - between, f"{contender.name}-forward": between - began}

    spare = copy.deepcopy(contenders[0].weights)
    parameters = list(spare.parameters())
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    flat = flat_like(contenders, sum(gradient.numel() for gradient in gradients))
    pieces = flat.split([gradient.numel() for gradient in gradients])
    views = [piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True)]

    def copies() -> None:
        for parameter, gradient, view in zip(parameters, gradients, views, strict=True):
            view.copy_(gradient)
            parameter.grad = view

    def copy_part() -> dict[str, float]:
        spare.zero_grad()
        barrier()
        return {"copy": clock(copies)}

    return [*(lambda c=c: part(c) for c in contenders), copy_part]


def flat_like(contenders: list[Contender], count: int) -> Tensor:
    if any(contender.name == "ours" for contender in contenders):
        import offbeat

        return offbeat.shared_empty(count)
    return torch.empty(count)


def peak_memory(model: nn.Module, engine: str, x: Tensor) -> dict[str, list[float]]:
    """In bytes. A thread looks every few milliseconds; it sees the engine's transient copies too."""
    before, peak, over = memory()["pss"], 0.0, threading.Event()
    contender = Contender(engine, model, None)

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, memory()["pss"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(MEMORY_STEPS):
        contender.step(x)
    over.set()
    watcher.join()
    return {engine: [peak * (1 << 20)], f"{engine}-before": [before * (1 << 20)]}


def differ(contenders: list[Contender]) -> list[str]:
    """Both engines took the same steps on the same data, so they have the same weights, but for rounding."""
    both = {c.name: nn.utils.parameters_to_vector(c.weights.parameters()).detach() for c in contenders}
    if not {"ours", "ddp"} <= both.keys():
        return []
    distance = (both["ours"] - both["ddp"]).norm() / both["ddp"].norm()
    return [] if distance < 1e-4 else ["ours"]


def measure(job: dict[str, Any], barrier: Callable[[], None]) -> dict[str, Any]:
    kind, names, repetitions = job["kind"], job["engines"], job["repetitions"]
    torch.manual_seed(0)
    model = build(**job["model"])
    assert sum(p.numel() for p in model.parameters()) == job["parameters"]
    x = samples(job["model"]["kind"], job["model"]["width"], job["batch"])
    if kind == "memory":
        return {"samples": peak_memory(model, names[0], x), "wrong": []}
    contenders = [Contender(name, copy.deepcopy(model), job["bucket_bytes"]) for name in names]
    if kind == "overlap":
        parts = overlap_parts(contenders, x, barrier)
    elif kind in ("hooks", "backward"):
        parts = hook_parts(contenders, x, barrier)
    else:
        parts = step_parts(contenders, x, job["inner"], barrier)
    return {"samples": turns(parts, repetitions), "wrong": differ(contenders)}


def main() -> None:
    die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    gloo, ours = "ddp" in job["engines"], "ours" in job["engines"]
    # without an engine (compute alone) ranks still begin together
    if gloo or not ours:
        dist.init_process_group("gloo")
    if ours:
        import offbeat

        offbeat.init()
    barrier: Callable[[], None] = offbeat.barrier if ours else dist.barrier
    result = measure(job, barrier)
    Path(job["directory"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    barrier()  # nobody leaves while another still needs it
    if ours:
        offbeat.shutdown()
    if gloo or not ours:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
