"""ModelSpec: the sizes and properties of a model that other packages need, whatever its family or file format."""

from dataclasses import dataclass, replace

from octavo.errors import ConfigError

_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # the module in models/ that implements it
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    context_len: int  # positions the model was trained for
    longest_len: int = 0  # positions that rope scaling can extend it to on request; 0: no more than context_len
    # Attention window of each layer: a token sees its own position and the window − 1 before it. 0, or an empty tuple: all.
    windows: tuple[int, ...] = ()
    has_softcap: bool = False  # some layer soft-caps its attention scores
    # Every token sees every other token of its prompt, no KV is kept between steps, and there is no LM head.
    is_encoder: bool = False
    num_labels: int = 0  # of the classification head; 0: there is none
    num_experts: int = 0  # of each layer that is a mixture
    has_sinks: bool = False  # some layer has attention sinks: a share of the softmax that goes to no token

    def __post_init__(self) -> None:
        # A damaged or hostile configuration could otherwise make us build layers until memory runs out.
        if self.num_layers > _MOST_LAYERS:
            raise ConfigError(
                f"the model has {self.num_layers} layers, and at most {_MOST_LAYERS} are supported: check its configuration"
            )

    @property
    def has_window(self) -> bool:
        """Whether some layer has an attention window."""
        return any(self.windows)

    def rank_kv_heads(self, tensor_parallel: int) -> int:
        """KV heads that one rank holds. A single KV head (multi-query attention) is replicated on every rank."""
        return max(1, self.num_kv_heads // tensor_parallel)

    def kv_bytes_per_token(self, element_bytes: int, tensor_parallel: int = 1) -> int:
        """Bytes of one token's keys and values on one rank, over all layers."""
        heads = self.rank_kv_heads(tensor_parallel)
        return 2 * self.num_layers * heads * self.head_size * element_bytes

    def page_layout(self, max_model_len: int) -> "PageLayout":
        """How the model's layers share pages if no sequence is longer than `max_model_len`."""
        return PageLayout.of(self.windows or (0,) * self.num_layers, max_model_len)


_MAX_GROUPS = 8  # page tables per sequence: each costs host time whenever a page fills up
_MAX_PADDING = 1 / 8  # share of a kind's bytes that may be places in pages that no layer of it fills


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Which layers share a page table. Layers with the same window are of one kind. Each kind is cut into groups of at most
    `num_places` layers. A page holds the tokens of one group's layers, so pages have the same size in all groups, and any
    group can use any page."""

    windows: tuple[int, ...]  # window of each group; 0: it keeps all its pages
    group_of: tuple[int, ...]  # group of each layer
    place_of: tuple[int, ...]  # place of each layer in its group's pages
    num_places: int
    why: str = ""  # why all pages are kept although layers have windows, for the start-up report

    @classmethod
    def of(cls, windows: tuple[int, ...], max_model_len: int) -> "PageLayout":
        """Choose the groups. `windows`: one per layer; a window at least as long as the longest sequence counts as none."""
        windows = tuple(window if window < max_model_len else 0 for window in windows)
        kinds = {window: windows.count(window) for window in sorted(set(windows))}
        fitting = [n for n in range(1, len(windows) + 1) if _is_fitting(list(kinds.values()), n)]
        if not fitting:
            seen = [f"{n} {'sees' if n == 1 else 'see'} {f'{w} tokens' if w else 'all'}" for w, n in kinds.items()]
            why = (
                f"all layers keep all their KV pages: of {len(windows)} layers, {' and '.join(seen)}, which does not divide "
                "into few groups of equal size"
            )
            return cls((0,), (0,) * len(windows), tuple(range(len(windows))), len(windows), why)
        num_places = min(fitting, key=lambda n: (sum(-(-count // n) for count in kinds.values()), n))
        groups: list[int] = []  # window of each group
        so_far = dict.fromkeys(kinds, 0)  # layers placed, by kind
        base: dict[int, int] = {}  # first group of each kind
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

    def of_stage(self, layers: range) -> "PageLayout":
        """The layout of a rank that has only these layers. Page tables stay the same for all ranks; its pages hold its own layers."""
        num_placed = [0] * len(self.windows)
        place_of = [0] * len(self.group_of)  # other layers' are not used
        for layer in layers:
            group = self.group_of[layer]
            place_of[layer] = num_placed[group]
            num_placed[group] += 1
        return replace(self, place_of=tuple(place_of), num_places=max(num_placed))


def _is_fitting(counts: list[int], num_places: int) -> bool:
    """Whether kinds with these layer counts make few groups of `num_places`, with little padding."""
    groups = [-(-count // num_places) for count in counts]
    paddings = [group * num_places / count - 1 for group, count in zip(groups, counts, strict=True)]
    return max(paddings) <= _MAX_PADDING and sum(groups) <= _MAX_GROUPS
