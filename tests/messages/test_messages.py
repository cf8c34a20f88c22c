"""SamplingParams is valid by construction: accepted values cross the wire, refused ones are refused by name."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.errors import InvalidRequest
from octavo.messages import SamplingParams

WRONG: list[tuple[str, Any]] = [
    *((name, value) for name in ("n", "top_k", "min_tokens", "max_tokens", "seed")
      for value in (50.0, "5", True, 2**63, np.int64(5), [5])),
    *((name, None) for name in ("n", "top_k", "min_tokens", "temperature", "ignore_eos", "stop", "stop_token_ids")),
    *((name, value)
      for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
      for value in (math.nan, math.inf, -math.inf, True, "0.5", np.float64(0.5), np.float32(0.5), 1j, 10**400)),
    *(("stop", value) for value in (5, b"x", [5], ["a", None], [b"x"], {"a": 1}, "\ud800", ["a", "é\udfff"], "", [""])),
    *(("stop_token_ids", value)
      for value in (5, [5.0], [True], ["5"], [None], "5", [2**63], [-(2**63) - 1], [np.int64(5)])),
    ("ignore_eos", 1),
    ("ignore_eos", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_of_the_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be ") as raised:
        SamplingParams(**{name: value})
    assert raised.value.param == name


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0, "top_p": 1, "min_p": 0, "presence_penalty": -2, "repetition_penalty": 2},
        {"n": 2**63 - 1, "top_k": 2**63 - 1, "min_tokens": 2**63 - 1, "max_tokens": None, "seed": -(2**63)},
        {"stop": "one"},
        {"stop": ["日本", "a\x00"], "stop_token_ids": [0, -(2**63), 2**63 - 1]},
        {"stop": ("a",), "stop_token_ids": (1,), "ignore_eos": True},
        {"logprobs": 0, "prompt_logprobs": 20, "logit_bias": {5: -100, 2**40: 0.5}, "allowed_token_ids": [7]},
        {"bad_words": ["no"], "bad_word_ids": ((1, 2), (3,)), "skip_special_tokens": False},
    ],
)
def test_what_is_taken_survives_the_wire(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
