"""How many experts of a mixture a step's tokens reach, beside the number that uniform routing reaches: an engine of its own, without CUDA
graphs, in which every layer's choice is counted."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu import workloads
from benchmarks.gpu.limits import Experts as Shape
from benchmarks.gpu.show import Results, table
from benchmarks.gpu.subject import Subject
from octavo.layers.experts import Experts

OUTPUT_LEN = 64  # tokens of each request: what is generated may be less varied than the prompts


class Counts:
    """Distinct experts of each call, on the device until they are read."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, int, torch.Tensor]] = []  # tokens, experts, chosen of them; distinct

    @contextmanager
    def watching(self) -> Iterator[None]:
        forward = Experts.forward

        def counted(
            module: Experts, x: torch.Tensor, logits: torch.Tensor, num_chosen: int, *others: Any
        ) -> torch.Tensor:
            chosen = logits.topk(num_chosen, dim=1).indices.flatten()
            used = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device).index_fill_(0, chosen, 1)
            self._calls.append((len(logits), logits.shape[1], num_chosen, used.sum()))
            return forward(module, x, logits, num_chosen, *others)

        few = Experts.sum_of_few  # which routes by itself
        Experts.forward = counted  # type: ignore[method-assign]
        Experts.sum_of_few = lambda *others: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            Experts.forward, Experts.sum_of_few = forward, few  # type: ignore[method-assign]

    def figures(self) -> list[dict[str, Any]]:
        """For each number of tokens in a step, the means over its steps and layers."""
        groups: dict[tuple[int, int, int], list[torch.Tensor]] = defaultdict(list)
        for tokens, num_experts, num_chosen, distinct in self._calls:
            groups[tokens, num_experts, num_chosen].append(distinct)
        return [
            {
                "tokens": tokens,
                "calls": len(found),
                "experts": num_experts,
                "reached": round(float(torch.stack(found).float().mean()), 2),
                "uniform": round(Shape(1, num_experts, num_chosen, 1, 1.0).reached(tokens), 2),
            }
            for (tokens, num_experts, num_chosen), found in sorted(groups.items())
        ]


def run(subject: Subject, names: Sequence[str], seed: int, scale: float, results: Results) -> int:
    """Returns 1 if the model has no experts."""
    counts = Counts()
    with counts.watching():
        for name in names:
            items = workloads.make(name, seed, scale)
            subject.generate([item._replace(output_len=min(item.output_len, OUTPUT_LEN)) for item in items])
    figures = counts.figures()
    results.put("routing", figures)
    if not figures:
        print("routing: no step sent tokens to experts")
        return 1
    most = max(figure["calls"] for figure in figures)
    shown = [figure for figure in figures if figure["calls"] * 20 >= most]
    rows = [
        [f"{figure['tokens']:,}", f"{figure['calls']:,}", f"{figure['reached']:.1f}", f"{figure['uniform']:.1f}", f"{figure['reached'] / figure['uniform']:.1%}"]
        for figure in shown
    ]  # fmt: skip
    print(
        f"\nexperts that a step's tokens reach, of {shown[0]['experts']} in a layer; uniform: each token to random ones"
    )
    print(table(("tokens", "steps and layers", "reached", "uniform", "share"), rows))
    return 0
