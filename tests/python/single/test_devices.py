"""What a GPU of torch's is asked for, in which order; torch's own part is a diary here."""

import contextlib

import pytest
import torch

from offbeat import devices


class Stream:
    """A stream, by its handle."""

    def __init__(self, diary, handle):
        self.diary, self.cuda_stream = diary, handle

    def synchronize(self):
        self.diary.append(f"{self.cuda_stream} is waited for")


class Memory:
    def __init__(self, diary):
        self.diary = diary

    def record_stream(self, stream):
        self.diary.append(f"used on {stream.cuda_stream}")


@pytest.fixture
def diary(monkeypatch):
    written: list[str] = []

    def zeros(count, *, dtype, device):
        written.append(f"{count} {dtype} on {device}")
        return Memory(written)

    @contextlib.contextmanager
    def within(stream):
        written.append(f"{stream.cuda_stream} is current")
        yield
        written.append(f"{stream.cuda_stream} was current")

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(written, 5))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: Stream(written, handle))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(written, 70 - priority))
    return written


def test_memory_of_a_bucket_is_kept_for_our_stream_and_there_when_it_is_given(diary):
    device = devices.Cuda(torch.device("cuda", 2))
    device.zeros(3, "float32", 77)
    assert diary == ["3 torch.float32 on cuda:2", "used on 77", "5 is waited for"]


def test_a_function_works_on_our_stream(diary):
    device = devices.Cuda(torch.device("cuda", 2))
    with device.within(77):
        diary.append("works")
    assert diary == ["77 is current", "works", "77 was current"]
    assert device.current_stream() == 5


def test_our_stream_is_one_of_torchs_pool(diary):
    # which outlives the model: torch's allocator uses it when the last view of a bucket goes
    assert devices.Cuda(torch.device("cuda", 2)).stream() == 71
