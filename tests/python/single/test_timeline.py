"""Spans as a file for Perfetto: tracks, lanes, and the way back."""

import json
from itertools import pairwise

import pytest
from recorded import recording

from offbeat import timeline
from offbeat.timeline import Span, lanes


def send(begin, end, peer=1):
    return Span("send", peer, 0, 0, begin, end, 4096)


SPANS = [
    Span("forward", 0, 0, 7, 1_000_000_000_123, 1_000_001_000_000, 0),
    Span("backward", 0, 0, 7, 1_000_001_000_000, 1_000_003_000_000, 0),
    Span("wait", 0, 0, 7, 1_000_003_000_000, 1_000_004_000_001, 0),
    Span("queued", 2, 0, 7, 1_000_001_000_000, 1_000_001_500_000, 0),
    Span("reduce", 2, 0, 7, 1_000_001_500_000, 1_000_003_900_000, 1 << 20),
    Span("python", 2, 0, 7, 1_000_001_600_000, 1_000_001_700_000, 0),
    Span("reduce", 0, 1, 7, 1_000_001_500_000, 1_000_003_900_000, 1 << 20),
    Span("send", 1, 0, 40, 1_000_001_600_000, 1_000_001_800_000, 131072),
    Span("send", 1, 0, 40, 1_000_001_700_000, 1_000_001_900_000, 131072),
    Span("receive", 1, 4294967295, 40, 1_000_001_600_000, 1_000_001_800_000, 131072),
]


def threads(document):
    return {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}


def test_a_file_leads_back_to_its_recording():
    made = recording(3, SPANS, world_size=8, host="b", dropped=12, names={0: ["head", "body", "tail"]})
    read = timeline.parse(json.loads(json.dumps(made.document())))
    assert sorted(read.spans) == sorted(SPANS)
    assert read == timeline.parse(read.document())
    assert {**vars(read), "spans": 0} == {**vars(made), "spans": 0}


def test_tracks_have_names_and_an_order():
    document = recording(3, SPANS, host="b", names={0: ["head", "body", "tail"]}).document()
    assert list(threads(document).values()) == [
        "compute",
        "model 0 bucket 2: tail",
        "model 1 bucket 0",
        "send to 1",
        "send to 1 (2)",
        "receive from 1",
    ]
    (process,) = [e for e in document["traceEvents"] if e["name"] == "process_name"]
    assert process["args"] == {"name": "rank 3 (host b)"}


def test_no_process_and_no_thread_is_zero():
    events = recording(0, SPANS).document()["traceEvents"]
    assert all(event["pid"] > 0 and event["tid"] > 0 for event in events)


def test_times_are_microseconds():
    document = recording(0, [Span("wait", 0, 0, 7, 5_000_123, 6_000_124, 0)]).document()
    (event,) = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert (event["ts"], event["dur"]) == (5000.123, 1000.001)
    assert event["args"] == {"model": 0, "step": 7}


def test_overlapping_spans_get_lanes():
    spans = [send(0, 10), send(5, 15), send(10, 20), send(12, 18), send(15, 30)]
    assert lanes(spans, nest=False) == [[spans[0], spans[2]], [spans[1], spans[4]], [spans[3]]]


def test_spans_inside_others_share_a_lane_where_they_may():
    outer, inner, innermost, across = send(0, 100), send(10, 50), send(20, 50), send(40, 60)
    assert lanes([innermost, across, inner, outer], nest=True) == [[outer, inner, innermost], [across]]
    assert len(lanes([outer, inner], nest=False)) == 2


def test_nothing_overlaps_in_a_file():
    spans = [send(begin, begin + length) for begin in range(0, 300, 3) for length in (1, 5, 20)]
    by_thread = {}
    for event in recording(0, spans).document()["traceEvents"]:
        if event["ph"] == "X":
            by_thread.setdefault(event["tid"], []).append((event["ts"], event["dur"]))
    for events in by_thread.values():
        events.sort()
        for (begin, length), (following, _) in pairwise(events):
            assert begin + length <= following + 1e-9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: [], "no trace of a rank"),
        (lambda d: {"traceEvents": []}, "no trace of a rank"),
        (lambda d: d | {"otherData": {"format": "offbeat trace 9"}}, "offbeat trace 9"),
        (lambda d: d | {"otherData": {"format": timeline.MERGED}}, "merged already"),
        (lambda d: d | {"otherData": {"format": timeline.FORMAT}}, "is damaged (KeyError"),
        (lambda d: {"otherData": d["otherData"]}, "is damaged"),
        (lambda d: d | {"traceEvents": [{"ph": "X", "cat": "coffee", "args": {}, "ts": 0, "dur": 0}]}, "'coffee'"),
        (lambda d: d | {"traceEvents": [7]}, "is damaged"),
    ],
)
def test_other_files_are_refused(change, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        timeline.parse(change(recording(0, SPANS).document()))
