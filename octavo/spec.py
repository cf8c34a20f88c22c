"""ModelSpec: what the rest of the house must know of a model, as plain integers.
Knows nothing of any family, file format or device."""

from dataclasses import dataclass

from octavo.errors import ConfigError

_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # the file in models/ that runs it
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    context_len: int  # positions the model was trained for
    longest_len: int = 0  # positions it can be stretched to where that is asked for; 0: no more than context_len
    windows: tuple[
        int, ...
    ] = ()  # each layer's: it sees its own position and the window − 1 before it; 0, or empty: all
    has_softcap: bool = False  # some layer bounds its scores
    is_encoder: bool = (
        False  # every token sees every other of its prompt, nothing is kept for later, and there is no head
    )
    has_sinks: bool = False  # some layer's heads have a share of the softmax that goes to no token

    def __post_init__(self) -> None:
        # A damaged or hostile configuration would have layers built until memory ends.
        if self.num_layers > _MOST_LAYERS:
            raise ConfigError(
                f"the model has {self.num_layers} layers: more than {_MOST_LAYERS} are taken for a mistake"
            )

    @property
    def has_window(self) -> bool:
        """Some layer sees only the latest positions."""
        return any(self.windows)

    def rank_kv_heads(self, tensor_parallel: int) -> int:
        """KV heads that one rank holds. A single one, as of a model whose heads share it, is whole on every rank."""
        return max(1, self.num_kv_heads // tensor_parallel)

    def kv_bytes_per_token(self, element_bytes: int, tensor_parallel: int = 1) -> int:
        """Bytes one token's keys and values take on one rank, over all layers."""
        heads = self.rank_kv_heads(tensor_parallel)
        return 2 * self.num_layers * heads * self.head_size * element_bytes

    def page_layout(self, max_model_len: int) -> "PageLayout":
        """How its layers share pages, when no sequence is longer than that."""
        return PageLayout.of(self.windows or (0,) * self.num_layers, max_model_len)


_MAX_GROUPS = 8  # page tables a sequence: each costs the host some time when a page is full
_MAX_PADDING = 1 / 8  # of a kind's bytes: places in its pages that none of its layers fills


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Which layers share a page table. Layers that see equally far back are of one kind; a kind's layers are cut into
    groups of at most `num_places`, so that a page, which holds some tokens of one group's layers, is of the same size in
    all groups, and any group can have any page."""

    windows: tuple[int, ...]  # of each group; 0: it keeps everything
    group_of: tuple[int, ...]  # each layer's group
    place_of: tuple[int, ...]  # each layer's place in its group's pages
    num_places: int
    why: str = ""  # where layers have windows and yet keep everything: in words

    @classmethod
    def of(cls, windows: tuple[int, ...], max_model_len: int) -> "PageLayout":
        """`windows`: of each layer. One that is longer than any sequence is none."""
        windows = tuple(window if window < max_model_len else 0 for window in windows)
        kinds = {window: windows.count(window) for window in sorted(set(windows))}
        fitting = [n for n in range(1, len(windows) + 1) if _is_fitting(list(kinds.values()), n)]
        if not fitting:
            seen = [f"{n} {'sees' if n == 1 else 'see'} {f'{w} tokens' if w else 'all'}" for w, n in kinds.items()]
            why = f"its layers keep all their KV pages: of {len(windows)}, {' and '.join(seen)}: no few groups of one size"
            return cls((0,), (0,) * len(windows), tuple(range(len(windows))), len(windows), why)
        num_places = min(fitting, key=lambda n: (sum(-(-count // n) for count in kinds.values()), n))
        groups: list[int] = []  # windows
        so_far = dict.fromkeys(kinds, 0)  # layers of each kind
        base: dict[int, int] = {}  # each kind's first group
        for window, count in kinds.items():
            base[window] = len(groups)
            groups += [window] * -(-count // num_places)
        group_of, place_of = [], []
        for window in windows:
            group, place = divmod(so_far[window], num_places)
            group_of.append(base[window] + group)
            place_of.append(place)
            so_far[window] += 1
        return cls(tuple(groups), tuple(group_of), tuple(place_of), num_places)


def _is_fitting(counts: list[int], num_places: int) -> bool:
    """Whether kinds of so many layers fill groups of `num_places` well, and few of them."""
    groups = [-(-count // num_places) for count in counts]
    paddings = [group * num_places / count - 1 for group, count in zip(groups, counts, strict=True)]
    return max(paddings) <= _MAX_PADDING and sum(groups) <= _MAX_GROUPS
