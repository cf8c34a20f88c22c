"""Families whose traits reach into the kernels of a GPU, run by those: in Triton's interpreter, against transformers.
Offsets of norms, norms after a product, soft caps, windows, scales, and heads of which a part is rotated."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.attention.triton import TritonAttention
from octavo.attention.triton_invariant import InvariantTritonAttention
from octavo.models import load_family
from tests.contexts import context
from tests.interpreter import mend
from tests.models.batches import Store
from tests.models.test_models_gemma import gemma2, gemma3
from tests.models.test_models_granite_olmo2 import granite, olmo2
from tests.models.test_models_phi3 import PARTIAL, WIDE, longrope
from tests.models.walk import CPU, prompts, reference_logits, tensors, walk

# A query that is padding sees nothing, which numpy mentions and a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16, "final_logit_softcapping": 3.0}


@pytest.mark.parametrize(
    ("reference", "is_invariant"),
    [
        pytest.param(gemma2(**SMALL, **TYPES), False, id="gemma2"),
        pytest.param(gemma3(**SMALL, **TYPES), False, id="gemma3"),
        pytest.param(granite(**SMALL), False, id="granite"),
        pytest.param(olmo2(**SMALL), False, id="olmo2"),
        pytest.param(longrope(PARTIAL, WIDE, **SMALL), False, id="phi3"),
        pytest.param(gemma2(**SMALL, **TYPES), True, id="gemma2, deterministic"),
        pytest.param(olmo2(**SMALL), True, id="olmo2, deterministic"),
    ],
)
def test_logits_equal_the_reference(reference: Any, is_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)
    config = reference.config.to_dict()
    family = load_family(config["model_type"])
    spec, attention = family.spec(config), InvariantTritonAttention() if is_invariant else TritonAttention()
    assert attention.supports(spec, CPU, torch.float32, torch.float32) is None
    kernels = "invariant" if is_invariant else "triton"
    ours = family.Model(config, spec, context(attention=attention, kernels=kernels, max_len=64))
    ours.load(tensors(reference))
    store = Store(spec, attention, num_pages=8, page_size=16)
    sequences = prompts(seed=7, lengths=(2, 11), vocab_size=48)
    for tokens, logits in zip(sequences, walk(ours, store, sequences, seed=3), strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=1e-4)
