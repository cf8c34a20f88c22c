"""What a configuration's weights count, and what each takes as a GPU holds it: the model is built with shapes and no weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.gpu.limits import Experts, Model
from octavo.spec import ModelSpec

# Bytes of a weight by how it is held, scales included (methods' packings: triton_int4, triton_groups, triton_mxfp4).
_INT4, _INT8, _MXFP4 = 0.5 + 4 / 128, 34 / 32, 17 / 32
_ROUNDED = {"fp8": 1.0, "int8": _INT8, "int4": 0.5 + 4 / 32}  # by --quantization


class Counted(NamedTuple):
    dense: int  # parameters of products in layers, without experts and the small routers
    experts: Experts | None


def model_of(
    config: dict[str, Any], spec: ModelSpec, kv_bytes: float, itemsize: int = 2, quantization: str = "auto"
) -> Model:
    """`itemsize`: of weights that are not packed. `quantization`: as the flag."""
    product, expert = bytes_each(config, itemsize, quantization)
    counted = count(config, spec, expert)
    return Model.of(spec, kv_bytes, product, itemsize, layer_parameters=counted.dense, experts=counted.experts)


def bytes_each(config: Mapping[str, Any], itemsize: int, quantization: str) -> tuple[float, float]:
    """Of a product's weight and of an expert's."""
    if quantization in _ROUNDED:
        return _ROUNDED[quantization], itemsize
    from octavo.weights.formats.dummy import dummy_packed_types, dummy_packing

    packing = None if quantization == "none" else dummy_packing(config, dummy_packed_types(config))
    match packing and packing.type:
        case "Q4_0":
            # A scale and a zero take four bytes for each group of at most 128.
            assert packing is not None
            return 0.5 + 4 / min(packing.group_size or 128, 128), itemsize
        case "Q8_0":
            return _INT8, itemsize
        case "FP8":
            return 1.0, itemsize
        case "MXFP4":
            return itemsize, _MXFP4
        case _:
            return itemsize, itemsize


def count(config: dict[str, Any], spec: ModelSpec, expert_bytes: float) -> Counted:
    import torch

    from octavo.attention.reference import ReferenceAttention
    from octavo.kernels.torch_ops import torch_ops
    from octavo.layers.context import BuildContext
    from octavo.layers.experts import Experts as ExpertLayer
    from octavo.layers.linear import Linear
    from octavo.models import load_family
    from octavo.parallel import Group
    from octavo.weights.methods.base import Settings, Use
    from octavo.weights.methods.registry import Methods

    nowhere = torch.device("meta")
    settings = Settings(nowhere, torch.float32, torch_ops(nowhere, torch.float32))
    context = BuildContext(Group.single(), ReferenceAttention(), Methods(settings))
    model = load_family(config["model_type"]).Model(config, spec, context)
    requests = [module.request for module in model.modules() if isinstance(module, Linear)]
    dense = sum(request.out_features * request.in_features for request in requests if request.use is not Use.VOCABULARY)
    layers = [module for module in model.modules() if isinstance(module, ExpertLayer)]
    if not layers:
        return Counted(dense, None)
    chosen = next(module.routing.num_chosen for module in model.modules() if hasattr(module, "routing"))
    first = layers[0]
    # Gate, up and down.
    parameters = 3 * first.hidden_size * first.inner_size
    return Counted(dense, Experts(len(layers), first.num_experts, int(chosen), parameters, expert_bytes))
