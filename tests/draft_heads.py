"""Random draft heads on disk, and what they must say: the published architectures once more, in plain torch, over whole sequences."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from octavo.weights.sources.source import ModelSource, local
from tests.models import checkpoints

VOCAB_SIZE = 258
Weights = dict[str, Tensor]


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    if len(shape) == 1:  # a norm
        return 1 + 0.3 * torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)


# ── EAGLE-3 ─────────────────────────────────────────────────────────────────────────────────────────


def write_eagle3(
    folder: Path,
    target: Path,
    *,
    draft_vocab_size: int = 100,
    tapped: list[int] | None = None,
    num_layers: int = 1,
    family: str = "llama",
    is_speculators: bool = True,
    has_embedding: bool = False,
    head_size: int = 12,
    inner: int = 40,
    seed: int = 7,
    **options: Any,
) -> Path:
    """A head for the model in the folder `target`. `options`: of its config.json. `tapped`: None: it names none."""
    config = json.loads((target / "config.json").read_text())
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = 4, 2
    r = torch.Generator().manual_seed(seed)
    count = 3 if tapped is None else len(tapped)
    tensors: Weights = {
        "fc.weight": _random(r, hidden, count * hidden),
        "norm.weight": _random(r, hidden),
        "lm_head.weight": _random(r, draft_vocab_size, hidden),
    }
    for layer in range(num_layers):
        first = "midlayer" if not is_speculators else "layers.0"
        name = first if layer == 0 else f"layers.{layer}"
        width = 2 * hidden if layer == 0 else hidden
        tensors |= {
            f"{name}.self_attn.q_proj.weight": _random(r, heads * head_size, width),
            f"{name}.self_attn.k_proj.weight": _random(r, kv_heads * head_size, width),
            f"{name}.self_attn.v_proj.weight": _random(r, kv_heads * head_size, width),
            f"{name}.self_attn.o_proj.weight": _random(r, hidden, heads * head_size),
            f"{name}.mlp.gate_proj.weight": _random(r, inner, hidden),
            f"{name}.mlp.up_proj.weight": _random(r, inner, hidden),
            f"{name}.mlp.down_proj.weight": _random(r, hidden, inner),
            f"{name}.input_layernorm.weight": _random(r, hidden),
            f"{name}.post_attention_layernorm.weight": _random(r, hidden),
        }
        if layer == 0:
            tensors[f"{name}.hidden_norm.weight"] = _random(r, hidden)
        if family == "qwen3":
            tensors |= {f"{name}.self_attn.{part}_norm.weight": _random(r, head_size) for part in "qk"}
    if draft_vocab_size < vocab_size:
        tokens = torch.randperm(vocab_size, generator=r)[:draft_vocab_size].sort().values
        tensors["d2t"] = tokens - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
    if has_embedding:
        tensors["embed_tokens.weight"] = torch.randn(vocab_size, hidden, generator=r)
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = _random(r, count * hidden)
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": _random(r, hidden) for number in range(count)}
    layers = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "intermediate_size": inner,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    own = {"draft_vocab_size": draft_vocab_size, **options}
    if is_speculators:
        if tapped is not None:
            own["eagle_aux_hidden_state_layer_ids"] = tapped
        written = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        written |= {"transformer_layer_config": layers, **own}
    else:
        written = {**layers, **own, "architectures": ["LlamaForCausalLMEagle3"]}
        if tapped is not None:
            written["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": tapped, "use_aux_hidden_state": True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def few_tokens_of(head: Path, count: int = 2) -> list[int]:
    """Some of the model's tokens that a head has."""
    offsets = load_file(head / "model.safetensors")["d2t"]
    tokens: list[int] = (offsets + torch.arange(len(offsets)))[5 : 5 + 35 * count : 35].tolist()
    return tokens


class Eagle3Reference:
    """Drafts greedily behind any tokens, from the first one on each time."""

    def __init__(self, target: Path, head: Path) -> None:
        self.model = _reference_model(target)
        config = json.loads((head / "config.json").read_text())
        self.layers = config.get("transformer_layer_config", config)
        self.options = config | config.get("eagle_config", {})
        self.weights = load_file(head / "model.safetensors")
        self.weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in self.weights.items()}
        num_layers = self.model.config.num_hidden_layers
        self.tapped = self.options.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]

    def drafts(self, tokens: list[int], count: int, among: Sequence[int] = ()) -> tuple[list[int], list[Tensor]]:
        """→ `count` tokens, and the logits [Vd] that each was chosen by. `among`: the only tokens that may be chosen; empty: all may."""
        w = self.weights
        states: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, states=states: states.append(args[0][0].clone()))
            for layer in self.model.model.layers
        ]
        hooks.append(self.model.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0][0].clone())))
        self.model(torch.tensor([tokens[:-1]]))
        for hook in hooks:
            hook.remove()
        parts = [states[layer] for layer in self.tapped]
        if self.options.get("fc_norm"):
            parts = [self._norm(part, w[f"fc_norm.{number}.weight"]) for number, part in enumerate(parts)]
        joined = torch.cat(parts, dim=-1)
        if self.options.get("norm_before_fc"):
            joined = self._norm(joined, w["input_norm.weight"])
        features = joined @ w["fc.weight"].T
        table = w.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        inputs, found, logits = list(tokens[1:]), [], []
        for _ in range(count):
            output = self._pass(table[inputs], features)[-1:]
            normed = self._norm(output, w["norm.weight"])
            logits.append((normed @ w["lm_head.weight"].T)[0])
            ids = torch.arange(len(logits[-1])) + w.get("d2t", torch.zeros(1, dtype=torch.long))
            found.append(_best(logits[-1], ids, among))
            features = torch.cat((features, normed if self.options.get("norm_output") else output))
            inputs.append(found[-1])
        return found, logits

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * weight

    def _pass(self, embedded: Tensor, features: Tensor) -> Tensor:
        w, name = self.weights, "layers.0"
        normed = self._norm(features, w[f"{name}.hidden_norm.weight"])
        joined = torch.cat((self._norm(embedded, w[f"{name}.input_layernorm.weight"]), normed), dim=-1)
        x = normed if self.options.get("norm_before_residual") else features
        x = self._rest(name, joined, x)
        for layer in range(1, self.layers["num_hidden_layers"]):
            x = self._rest(f"layers.{layer}", self._norm(x, w[f"layers.{layer}.input_layernorm.weight"]), x)
        return x

    def _rest(self, name: str, before: Tensor, residual: Tensor) -> Tensor:
        w, size, length = self.weights, self.layers["head_dim"], len(before)
        q, k, v = (
            (before @ w[f"{name}.self_attn.{part}_proj.weight"].T).view(length, -1, size).transpose(0, 1)
            for part in "qkv"
        )
        if f"{name}.self_attn.q_norm.weight" in w:
            q, k = (self._norm(x, w[f"{name}.self_attn.{part}_norm.weight"]) for part, x in (("q", q), ("k", k)))
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat((each, each), dim=-1) for each in (angles.cos(), angles.sin()))
        q, k = (x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1) * sin for x in (q, k))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        scores = (q @ k.transpose(1, 2)) * size**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        attended = (scores.softmax(dim=-1) @ v).transpose(0, 1).reshape(length, -1)
        x = residual + attended @ w[f"{name}.self_attn.o_proj.weight"].T
        normed = self._norm(x, w[f"{name}.post_attention_layernorm.weight"])
        gate, up = (normed @ w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (F.silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T


# ── MTP ─────────────────────────────────────────────────────────────────────────────────────────────

MTP_SIZES: dict[str, Any] = {
    **{key: value for key, value in checkpoints.LLAMA.items() if key != "num_key_value_heads"},
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "num_key_value_heads": 4,
}


GPU_MTP_SIZES: dict[str, Any] = MTP_SIZES | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "kv_lora_rank": 96,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 128,
}
"""Of a model that a GPU's kernels are made for."""


def write_mtp(
    folder: Path,
    seed: int = 7,
    num_predicting: int = 1,
    has_copies: bool = False,
    sizes: dict[str, Any] = MTP_SIZES,
) -> ModelSource:
    """A small DeepSeek-V3 with layers for multi-token prediction. `has_copies`: of the embedding and the head, as published ones have."""
    config = DeepseekV3Config(**sizes)
    model = checkpoints._randomised(DeepseekV3ForCausalLM(config))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    r = torch.Generator().manual_seed(seed)
    size, count = config.hidden_size, config.num_hidden_layers
    for number in range(count, count + num_predicting):
        name = f"model.layers.{number}"
        last = f"model.layers.{count - 1}."
        own = {key.replace(last, f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(last)}
        tensors |= {key: tensor + 0.1 * torch.randn(tensor.shape, generator=r) for key, tensor in own.items()}
        tensors |= {f"{name}.{key}.weight": _random(r, size) for key in ("enorm", "hnorm", "shared_head.norm")}
        tensors[f"{name}.eh_proj.weight"] = _random(r, size, 2 * size)
        if has_copies:
            tensors[f"{name}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{name}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "num_nextn_predict_layers": num_predicting}))
    return local(folder)


class MTPReference:
    """Its decoder layer is transformers'; what is around it is written here."""

    def __init__(self, folder: Path) -> None:
        self.model = _reference_model(folder)
        config = self.model.config
        self.name = f"model.layers.{config.num_hidden_layers}"
        self.weights = load_file(folder / "model.safetensors")
        block = copy.deepcopy(config)
        block.first_k_dense_replace, block._attn_implementation = 0, "eager"
        self.block = DeepseekV3DecoderLayer(block, 0).eval()
        only = copy.deepcopy(block)
        only.num_hidden_layers = 1
        own = DeepseekV3ForCausalLM(only)
        wanted = {key.removeprefix("model.layers.0.") for key in own.state_dict() if key.startswith("model.layers.0.")}
        state = {key: self._stored(key) for key in wanted}
        self.block.load_state_dict(state)

    def _stored(self, key: str) -> Tensor:
        """The block's tensor: transformers may hold all experts in one."""
        name = f"{self.name}.{key}"
        if name in self.weights:
            return self.weights[name]
        count = self.model.config.n_routed_experts
        stem = f"{self.name}.mlp.experts"
        if key.endswith("experts.gate_up_proj"):
            return torch.stack(
                [
                    torch.cat([self.weights[f"{stem}.{expert}.{part}_proj.weight"] for part in ("gate", "up")])
                    for expert in range(count)
                ]
            )
        assert key.endswith("experts.down_proj"), key
        return torch.stack([self.weights[f"{stem}.{expert}.down_proj.weight"] for expert in range(count)])

    def drafts(self, tokens: list[int], count: int, among: Sequence[int] = ()) -> tuple[list[int], list[Tensor]]:
        w, name, epsilon = self.weights, self.name, self.model.config.rms_norm_eps

        def norm(x: Tensor, key: str) -> Tensor:
            return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * w[f"{name}.{key}.weight"]

        features = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        inputs, found, logits = list(tokens[1:]), [], []
        for _ in range(count):
            embedded = w["model.embed_tokens.weight"][inputs]
            x = torch.cat((norm(embedded, "enorm"), norm(features, "hnorm")), dim=-1) @ w[f"{name}.eh_proj.weight"].T
            positions = torch.arange(len(x))[None]
            rotation = self.model.model.rotary_emb(x[None], positions)
            mask = torch.zeros(1, 1, len(x), len(x)).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
            output = self.block(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotation)
            output = (output[0] if isinstance(output, tuple) else output).view(len(x), -1)[-1:]
            logits.append((norm(output, "shared_head.norm") @ w["lm_head.weight"].T)[0])
            found.append(_best(logits[-1], torch.arange(len(logits[-1])), among))
            features = torch.cat((features, output))
            inputs.append(found[-1])
        return found, logits


class DraftsMade:
    """What a drafter proposes from now on: (a row's tokens, the draft behind them)."""

    def __init__(self, drafter: Any) -> None:
        self.found: list[tuple[list[int], list[int]]] = []
        self._propose, self._tokens = drafter.propose, drafter._rows.tokens
        drafter.propose = self._noting

    def _noting(self, plan: Any) -> Any:
        proposed, work = self._propose(plan)
        for draft in proposed.drafts:
            row, start = plan.rows[draft.at], plan.starts[draft.at]
            self.found.append((self._tokens[row, : start + 1].tolist(), draft.tokens))
        return proposed, work

    def different(self, reference: Any, among: Sequence[int] = ()) -> list[tuple[list[int], list[int], list[int]]]:
        """Drafts other than the reference's, with both. `among`: the only tokens that may be chosen; empty: all may."""
        found = []
        with torch.inference_mode():
            for tokens, made in self.found:
                expected = reference.drafts(tokens, len(made), among)[0] if made else []
                if made != expected:
                    found.append((tokens, made, expected))
        return found


def _best(logits: Tensor, ids: Tensor, among: Sequence[int]) -> int:
    """The token with the highest logit. `ids`: the model's number of each token."""
    if among:
        logits = logits.masked_fill(~torch.isin(ids, torch.tensor(among)), -torch.inf)
    return int(ids[logits.argmax()])


def _reference_model(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager").float().eval()
