"""What shows that a wait between streams was forgotten: each of these does something without a wait, which the double
of libcuda lets go by, and prints "noticed" if anything came of it. Schedules are fixed: a stream is lazy and runs when
somebody waits for it, or runs at once."""

import contextlib
import ctypes
import gc
import os
import sys
import time

import torch
from gpu_training import differences, make, names_of, step
from standin import Double, in_place_of_a_gpu
from torch import nn

import offbeat

# the first stream is torch's, all others are ours
LAZY_TORCH, LAZY_OURS = 0b00000001, 0b11111110


def trained(algorithm, forget):
    model, optimizer = make(algorithm)
    forget()
    seen = [step(model, optimizer, number) for number in range(3)]
    # what every rank keeps for itself
    kept = optimizer.state_dict()["offbeat"].get("kept", {})
    seen.append([kept[name][label] for name, label in names_of(kept)])
    optimizer.remove()
    return seen


def training(algorithm, wait, whose, before):
    """Trains on both paths, on that of the GPU without a wait."""

    def forget():
        double.forget(wait, ours=whose == "ours", before=int(before))

    usual, double = trained(algorithm, lambda: None), Double()
    with in_place_of_a_gpu(double):
        try:
            noticed = bool(differences(usual, trained(algorithm, forget)))
        except offbeat.errors.OffbeatError:
            noticed = True
    say(noticed)


def undisturbed(*algorithms):
    """Trains with each on both paths and both schedules, with all waits."""
    double, noticed = Double(), False
    for algorithm in algorithms:
        usual = trained(algorithm, lambda: None)
        for lazy in (LAZY_TORCH, LAZY_OURS):
            double.schedule(lazy)
            with in_place_of_a_gpu(double):
                if wrong := differences(usual, trained(algorithm, lambda: None)):
                    print(algorithm, f"{lazy:b}", wrong, file=sys.stderr)
                    noticed = True
    say(noticed)


def broadcast(whose):
    """A tensor that torch's stream writes, and reads when it was broadcast: as buffers are."""
    double = Double()
    with in_place_of_a_gpu(double):
        _, optimizer = make("allreduce")
        values = torch.full((1000,), 1.0 + offbeat.rank())
        # torch's copy from one place to the other
        double.write(tensor := torch.empty(1000), values)
        if whose != "nobody":
            double.forget("cuStreamWaitEvent", ours=whose == "ours")
        replica = optimizer._offbeat.replica
        replica.gradients.carriage.broadcast(replica.group, tensor, 1)
        say(not torch.equal(tensor, torch.full((1000,), 2.0)))


def removal(forgets):
    """A round that ends early, in which some buckets are under way, and then the model goes."""
    double = Double()
    with in_place_of_a_gpu(double):
        model = nn.Sequential(*(nn.Linear(60, 60) for _ in range(4)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = offbeat.DistributedOptimizer(sgd, model, "bytegrad", bucket_bytes=4000)
        for number in range(3):
            optimizer.zero_grad()
            launched = double.counts()["kernels"]
            y = model[0](torch.ones(2, 60))
            if number == 2:
                y.register_hook(stop)
            with contextlib.suppress(ZeroDivisionError):
                model[1:](y).mean().backward()
                optimizer.step()
        # the communication thread may take its time
        until(lambda: double.counts()["kernels"] > launched)
        if forgets == "forgets":
            double.forget("cuEventQuery", ours=True, times=10**6)
            double.forget("cuStreamSynchronize", ours=True, times=10**6)
        optimizer.remove()
        gc.collect()
        # memory in which kernels count
        until(lambda: double.cuda.fakecuda_count(b"cuMemFreeHost") > 0)
        # a double that has seen it fails from then on
        say(double.cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != 0)


def until(happened, seconds=20.0):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def stop(_):
    raise ZeroDivisionError


def say(noticed):
    print("noticed" if noticed else "nothing noticed", flush=True)
    # who leaves early would be noticed too
    with contextlib.suppress(offbeat.errors.OffbeatError):
        offbeat.barrier()
    # what was not waited for may run when its memory is long gone
    os._exit(0)
