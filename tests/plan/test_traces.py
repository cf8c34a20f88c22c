"""Reading, writing, scaling and making traces."""

import json
import random
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.plan.arrivals import Lengths, Shape, trace_of
from octavo.plan.trace import Trace, TraceRequest
from octavo.plan.trace_files import read_trace, write_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n"
MOONCAKE = '{"timestamp": 0, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}\n{"timestamp": 2500, "input_length": 900, "output_length": 4, "hash_ids": [0, 7]}\n'


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_azure(tmp_path):
    trace = read_trace(written(tmp_path, AZURE))
    assert [(each.prompt_len, each.output_len) for each in trace.requests] == [(4808, 10), (3180, 8)]
    assert trace.requests[0].seconds == 0 and abs(trace.requests[1].seconds - 0.052) < 1e-6


def test_burst_gpt(tmp_path):
    trace = read_trace(written(tmp_path, BURST))
    assert [(each.seconds, each.prompt_len, each.output_len) for each in trace.requests] == [
        (0, 472, 18),
        (40, 1087, 230),
    ]


def test_mooncake_has_milliseconds_and_blocks(tmp_path):
    trace = read_trace(written(tmp_path, MOONCAKE))
    assert [each.seconds for each in trace.requests] == [0, 2.5] and trace.block_size == 512
    assert trace.requests[1].prefix == [0, 7]


def test_what_is_written_is_read(tmp_path):
    requests = [
        TraceRequest(0.0, 100, 5, [1, 2], 0), TraceRequest(1.5, 20, 7), TraceRequest(3.0, 140, 5, [1, 2], 0, after_previous=True)
    ]  # fmt: skip
    write_trace(tmp_path / "own", Trace("own", requests, 16))
    again = read_trace(tmp_path / "own")
    assert again.requests == requests and again.block_size == 16


def test_times_need_not_be_in_order(tmp_path):
    trace = read_trace(written(tmp_path, "timestamp,input_tokens,output_tokens\n9,1,1\n4,2,2\n"))
    assert [(each.seconds, each.prompt_len) for each in trace.requests] == [(0, 2), (5, 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "line 1: no column has the time"),
        ("timestamp,input_tokens,output_tokens\n", "no requests"),
        ("timestamp,input_tokens,output_tokens\n1,2,3\n\n1,x,3\n", "line 4: the prompt length must be a whole number"),
        ("timestamp,input_tokens,output_tokens\n1,2,-3\n", "line 2: the output length"),
        ("timestamp,input_tokens,output_tokens\n1,2\n", "line 2: it has no outputlen"),
        ("timestamp,input_tokens,output_tokens\nsoon,2,3\n", "line 2: 'soon' is neither"),
        ("timestamp,input_tokens,output_tokens\nnan,2,3\n", "line 2: the time 'nan' is out of range"),
        ("timestamp,input_tokens,output_tokens\n1,99999999999,3\n", "from 0 to 10000000"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{', "line 2: it is not JSON"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n[]\n', "line 2: it is not a JSON object"),
        ('{"timestamp": 1, "input_length": true, "output_length": 3}\n', "line 1: the prompt length"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [-1]}\n', "line 1: the prefix"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": {"a": 1}}\n', "line 1: prefix must be a list"),
        ("timestamp,input_tokens,output_tokens\n1,2\r5,3\n", "line 2: it is not CSV"),
        ("timestamp,input_tokens,output_tokens\n" + "1" * 200_000 + ",2,3\n", "line 2: it is not CSV"),
        ('{"octavo_trace": 9}\n', "line 1: its format is 9"),
        ('{"octavo_trace": 1, "block_size": 0}\n', "line 1: the block_size"),
        ('{"octavo_trace": 1}\n{"seconds": 1, "prompt_len": 2, "output_len": 3, "after_previous": true}\n', "needs a session"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        read_trace(written(tmp_path, text))
    assert words in caught.value.message


def test_random_bytes_are_refused_or_read(tmp_path):
    dice = random.Random(5)
    whole = (AZURE + MOONCAKE).encode()
    for _ in range(300):
        data = bytearray(dice.choice([AZURE, BURST, MOONCAKE]).encode())
        for _ in range(dice.randrange(1, 6)):
            data[dice.randrange(len(data))] = dice.choice([*whole[:50], 0, 255, 10, 34])
        (tmp_path / "t").write_bytes(data)
        try:
            assert read_trace(tmp_path / "t").requests
        except ConfigError as error:
            assert str(tmp_path / "t") in error.message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nothing")


def test_scaling():
    trace = Trace("t", [TraceRequest(0.0, 100, 10), TraceRequest(8.0, 50, 4)], 64).scaled(rate=2.0, length=0.5)
    assert [(each.seconds, each.prompt_len, each.output_len) for each in trace.requests] == [(0, 50, 5), (4, 25, 2)]
    assert trace.block_size == 32 and trace.limited(count=1).requests == trace.requests[:1]
    assert len(trace.limited(seconds=3.0).requests) == 1


@pytest.mark.parametrize("arrivals", ["poisson", "bursty", "diurnal", "constant"])
def test_arrivals_have_the_rate_and_depend_on_the_seed(arrivals):
    shape = Shape(20.0, 2000.0, Lengths(300, 0.8), Lengths(50), arrivals, day_seconds=500.0)
    trace = trace_of(shape, 3)
    assert trace == trace_of(shape, 3)
    assert arrivals == "constant" or trace != trace_of(shape, 4)
    assert abs(trace.rate - 20) < (3 if arrivals == "bursty" else 1)
    mean = trace.prompt_tokens / len(trace.requests)
    assert abs(mean - 300) < 10 and {each.output_len for each in trace.requests} == {50}
    gaps = [b.seconds - a.seconds for a, b in zip(trace.requests, trace.requests[1:], strict=False)]
    variance = sum(gap**2 for gap in gaps) / len(gaps) * 20**2 - 1
    assert {
        "poisson": 0.9 < variance < 1.1,
        "bursty": variance > 1.5,
        "diurnal": variance > 1.1,
        "constant": variance < 0.01,
    }[arrivals]


def test_sessions_grow():
    trace = trace_of(Shape(1.0, 100.0, Lengths(40), Lengths(10), turns=3, shared_prefix=32), 0)
    turns = [each for each in trace.requests if each.session == 0]
    assert [each.prompt_len for each in turns] == [72, 122, 172] and [each.after_previous for each in turns] == [
        False,
        True,
        True,
    ]


def test_more_requests_than_a_trace_may_have():
    with pytest.raises(ConfigError, match="use --seconds 50"):
        trace_of(Shape(1e5, 1e5, Lengths(1), Lengths(1)), 0)


def test_own_files_have_one_object_a_line(tmp_path):
    write_trace(tmp_path / "own", Trace("own", [TraceRequest(0.0, 1, 1)]))
    assert [json.loads(line) for line in (tmp_path / "own").read_text().splitlines()][1]["prompt_len"] == 1
