"""Batches built by hand, and rows that walk through a paged store in chunks of any size."""

import dataclasses
import random
from dataclasses import dataclass, field

import torch

from octavo.attention.base import AttentionBackend
from octavo.batch import Batch
from octavo.spec import ModelSpec


@dataclass
class Row:
    tokens: list[int]
    pages: list[int]
    computed: int = 0


@dataclass
class Store:
    """Pages in random order, some of which were used before, so that stale contents would show."""

    spec: ModelSpec
    backend: AttentionBackend
    num_pages: int = 64
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    tensor_parallel: int = 1
    seed: int = 0
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.backend.kv_shape(self.spec, self.num_pages, self.page_size, self.tensor_parallel)
        torch.manual_seed(self.seed)
        # Of an integer store some bytes are floating-point numbers in disguise: it begins as the worker's do.
        fresh = torch.randn if self.dtype.is_floating_point else torch.zeros
        self.kv = [fresh(shape, dtype=self.dtype) for _ in range(self.spec.num_layers)]
        self.backend.bind(self.kv, 64)
        self.free = list(range(1, self.num_pages))
        random.Random(self.seed).shuffle(self.free)

    def row(self, tokens: list[int], capacity: int = 0) -> Row:
        num = -(-max(len(tokens), capacity) // self.page_size)
        return Row(list(tokens), [self.free.pop() for _ in range(num)])


def make_batch(steps: list[tuple[Row, int]], page_size: int) -> Batch:
    """Each row advances by that many tokens. Rows of one token come first, as the assembler sorts them."""
    steps = [s for s in steps if s[1] == 1] + [s for s in steps if s[1] > 1]
    input_ids, positions, slots, starts, lengths, counts, sample_at = [], [], [], [0], [], [], []
    for row, count in steps:
        for position in range(row.computed, row.computed + count):
            input_ids.append(row.tokens[position])
            positions.append(position)
            slots.append(row.pages[position // page_size] * page_size + position % page_size)
        row.computed += count
        starts.append(len(input_ids))
        lengths.append(row.computed)
        counts.append(count)
        sample_at.append(len(input_ids) - 1)
    most = max(-(-length // page_size) for length in lengths)
    table = torch.zeros(len(steps), most, dtype=torch.int32)
    for index, (row, _) in enumerate(steps):
        used = row.pages[: -(-lengths[index] // page_size)]
        table[index, : len(used)] = torch.tensor(used, dtype=torch.int32)
    return Batch(
        input_ids=torch.tensor(input_ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        page_table=table,
        sample_at=torch.tensor(sample_at),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        num_decodes=sum(count == 1 for count in counts),
        query_lens_host=counts,
        seq_lens_host=lengths,
    )


def placed(batch: Batch, device: torch.device | str) -> Batch:
    names = [field.name for field in dataclasses.fields(batch)]
    tensors = {name: getattr(batch, name) for name in names if isinstance(getattr(batch, name), torch.Tensor)}
    return dataclasses.replace(batch, **{name: tensor.to(device) for name, tensor in tensors.items()})
