"""Which layers share page tables: every layer has a place, groups are of one kind, and little is padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.spec import PageLayout


def every(period: int, num_layers: int, window: int) -> tuple[int, ...]:
    """Every so manieth layer sees everything."""
    return tuple(0 if (index + 1) % period == 0 else window for index in range(num_layers))


@pytest.mark.parametrize(
    ("windows", "num_places", "groups"),
    [
        ((0,) * 30, 30, (0,)),
        ((4096,) * 32, 32, (4096,)),
        (every(2, 24, 128), 12, (0, 128)),
        (every(6, 26, 512), 4, (0, *[512] * 6)),
        (every(6, 48, 1024), 8, (0, *[1024] * 5)),
        (every(6, 62, 1024), 11, (0, *[1024] * 5)),  # 10 and 52: 1 of 11 places is empty, and 3 of 55
        ((0,) * 21 + (4096,) * 7, 7, (0, 0, 0, 4096)),
    ],
)
def test_as_models_have_it(windows: tuple[int, ...], num_places: int, groups: tuple[int, ...]) -> None:
    layout = PageLayout.of(windows, 131072)
    assert (layout.num_places, layout.windows, layout.why) == (num_places, groups, "")


def test_layers_that_make_no_few_groups_keep_everything() -> None:
    layout = PageLayout.of((0,) * 27 + (512,), 4096)
    assert (layout.windows, layout.num_places) == ((0,), 28)
    assert (
        layout.why
        == "all layers keep all their KV pages: of 28 layers, 27 see all and 1 sees 512 tokens, which does not divide "
        "into few groups of equal size"
    )


def test_a_window_that_no_sequence_reaches_is_none() -> None:
    assert PageLayout.of(every(2, 4, 512), 512).windows == (0,)
    assert PageLayout.of(every(2, 4, 512), 513).windows == (0, 512)


@given(st.lists(st.sampled_from([0, 0, 8, 32]), min_size=1, max_size=40))
def test_every_layer_has_a_place_of_its_own(windows: list[int]) -> None:
    layout = PageLayout.of(tuple(windows), 100)
    places = set(zip(layout.group_of, layout.place_of, strict=True))
    assert len(places) == len(windows) and all(0 <= place < layout.num_places for _, place in places)
    assert len(layout.windows) <= 8
    if not layout.why:
        assert [layout.windows[group] for group in layout.group_of] == windows
        for kind in set(windows):
            assert layout.windows.count(kind) * layout.num_places <= 1.125 * windows.count(kind)
