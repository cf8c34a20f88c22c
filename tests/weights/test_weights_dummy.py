"""Random weights: as a quantised configuration's would arrive."""

from typing import Any

import pytest
import torch

from octavo.quants import Quants
from octavo.weights.formats.dummy import dummy_packed_types, dummy_packing, dummy_tensors

NAMES = {
    "layers.0.mlp.up_proj.weight": (64, 256),
    "layers.0.self_attn.kv_a_proj_with_mqa.weight": (32, 256),
    "layers.0.mlp.odd_proj.weight": (64, 72),
    "norm.weight": (64,),
    "lm_head.weight": (64, 256),
    "a.experts.down_proj": (64, 64),
}


def compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("settings", "type", "group"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "Q4_0", 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "Q4_0", 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "Q4_0", 256),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, "Q8_0", 32),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8", 128),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "FP8", 256),
        ({"quant_method": "fbgemm_fp8"}, "FP8", 256),
        (compressed(type="int", num_bits=4, group_size=128), "Q4_0", 128),
        (compressed(type="int", num_bits=8, strategy="channel", group_size=None), "Q8_0", 256),
        (compressed(type="float", num_bits=8, strategy="channel"), "FP8", 256),
        (compressed(type="float", num_bits=8, block_structure=[64, 64]), "FP8", 64),
        ({"quant_method": "mxfp4"}, "MXFP4", 32),
    ],
)
def test_random_weights_come_as_the_configuration_has_them(settings: dict[str, Any], type: str, group: int) -> None:
    config = {"quantization_config": settings}
    assert dummy_packed_types(config) == {type} and dummy_packing(config, frozenset()) is None
    packing = dummy_packing(config, dummy_packed_types(config))
    made = dict(dummy_tensors(NAMES, "cpu", torch.float32, packing=packing))
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == NAMES
    packed = {name: weight for name, weight in made.items() if isinstance(weight, Quants)}
    assert list(packed) == ([*NAMES][:2] if type != "MXFP4" else ["a.experts.down_proj"])
    for weight in packed.values():
        assert weight.type == type and weight.is_finite() and 0.01 < float(weight.dequantise().std()) < 0.04
    if type in ("Q4_0", "Q8_0"):
        weight = packed["layers.0.mlp.up_proj.weight"]
        scales = weight.stored.view(64, 8, -1)[:, :, :2].contiguous().view(torch.float16)[:, :, 0]
        assert all(len(row.unique()) == 256 // group for row in scales)


@pytest.mark.parametrize(
    "settings",
    [
        None, {"quant_method": "bitsandbytes"}, {"quant_method": "gptq", "bits": 3}, compressed(type="float", num_bits=4),
        {"quant_method": "compressed-tensors"}, {"quant_method": "compressed-tensors", "config_groups": {"group_0": 1}},
    ],
)  # fmt: skip
def test_others_are_not_packed(settings: Any) -> None:
    config = {} if settings is None else {"quantization_config": settings}
    assert dummy_packed_types(config) == frozenset() and dummy_packing(config, frozenset({"FP8"})) is None
