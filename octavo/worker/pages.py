"""PageStore: the memory behind the page numbers, on the device and in the swap space, and the moves between them.
Knows nothing of which page belongs to whom, nor of a page's inner layout."""

from collections.abc import Iterator

import torch

from octavo.messages import PageMove


class PageStore:
    def __init__(self, layers: list[torch.Tensor], host_layers: list[torch.Tensor], page_dim: int) -> None:
        """One store per layer; `page_dim` is the dimension that counts pages. Host stores hold the swap space's pages."""
        self.layers = layers
        self._host_layers = host_layers
        self._page_dim = page_dim

    def move(self, moves: list[PageMove]) -> None:
        """Carry the moves out, with the effect of one after the other."""
        for kind, sources, targets in runs(moves):
            for layer, store in enumerate(self.layers):
                host = self._host_layers[layer] if kind != "copy" else store
                source, target = {"copy": (store, store), "out": (store, host), "in": (host, store)}[kind]
                pages = source.index_select(self._page_dim, torch.tensor(sources, device=source.device))
                index = torch.tensor(targets, device=target.device)
                target.index_copy_(self._page_dim, index, pages.to(target.device))


def runs(moves: list[PageMove]) -> Iterator[tuple[str, list[int], list[int]]]:
    """(kind, sources, targets) of stretches that may be carried out at once: all reads first, then all writes.

    That is the same as one after the other unless a move reads or writes again what an earlier one wrote."""
    kind = ""
    sources: list[int] = []
    targets: list[int] = []
    written: set[int] = set()
    for move in moves:
        again = move.target in written or (move.kind == "copy" and move.source in written)
        if sources and (move.kind != kind or again):
            yield kind, sources, targets
            sources, targets, written = [], [], set()
        kind = move.kind
        sources.append(move.source)
        targets.append(move.target)
        written.add(move.target)
    if sources:
        yield kind, sources, targets
