"""Train adapters of a small model with PEFT: minutes on a CPU. What they learn does not matter, only that all of their numbers have moved."""

import argparse
import time
from pathlib import Path

TEXT = Path(__file__).parent.parent / "cpu" / "text.txt"
KINDS = {
    "qv-r8": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all-r16": {
        "r": 16,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    },
    "all-r4-rslora": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    },
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of the base")
    parser.add_argument("--out", required=True, help="folder for the adapters")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128, help="of one step")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = TEXT.read_text()
    for number, (name, settings) in enumerate(KINDS.items()):
        started = time.perf_counter()
        words = text[number * len(text) // 3 : (number + 1) * len(text) // 3]  # each learns another part
        ids = torch.tensor(tokenizer(words).input_ids)
        base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
        losses = []
        for step in range(options.steps):
            at = step * options.tokens % max(1, len(ids) - options.tokens)
            batch = ids[at : at + options.tokens][None]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.save_pretrained(Path(options.out) / name)
        print(f"{name}: loss {losses[0]:.3f} → {losses[-1]:.3f} in {time.perf_counter() - started:.0f} s")
    return 0
