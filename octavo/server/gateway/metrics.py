"""The metrics of several servers as one text: each family once, and the model's name in every sample."""

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+(?: \S+)?)$")
USAGE = "octavo:key_"
"""Begins families that are about keys, over all models: every server has them, and they are wanted once."""
_PARTS = ("_total", "_created", "_bucket", "_count", "_sum", "_info")
LABEL = "model_name"


def merged(texts: Mapping[str, str]) -> str:
    """`texts`: the metrics of each model by its name, in Prometheus' text format. Samples without a model_name get one."""
    heads: dict[str, dict[str, str]] = {}  # family → kind of line → line
    samples: dict[str, list[str]] = {}
    for model, text in texts.items():
        for line in text.split("\n"):
            if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(USAGE):
                continue
            if line.startswith("#"):
                words = line.split(" ", 3)
                if len(words) < 4:  # a comment
                    continue
                _, kind, family, _ = words
                heads.setdefault(family, {}).setdefault(kind, line)
                samples.setdefault(family, [])
            elif (found := _SAMPLE.fullmatch(line)) is not None:
                name, labels, value = found[1], found[2] or "", found[3]
                if f'{LABEL}="' not in labels:
                    labels = f'{LABEL}="{escaped(model)}"' + (f",{labels}" if labels else "")
                samples.setdefault(_family(name, heads), []).append(f"{name}{{{labels}}} {value}")
    lines: list[str] = []
    for family, found_samples in samples.items():
        lines += [*heads.get(family, {}).values(), *found_samples]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """As the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _family(name: str, heads: Mapping[str, object]) -> str:
    """The family of a sample: its own name, or that without the ending of its kind."""
    if name in heads:
        return name
    return next((base for part in _PARTS if (base := name.removesuffix(part)) != name and base in heads), name)
