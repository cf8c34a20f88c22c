"""What benchmarks.tenants says of its rounds."""

from benchmarks.tenants import ratio_of


def test_rounds_give_a_ratio_with_its_interval() -> None:
    assert ratio_of([0.9, 1.0, 1.1, 1.04]) == "ratio: 1.020 (median), 1.010 on average, 95 % interval 0.928 to 1.092"


def test_one_round_has_a_ratio_and_no_interval() -> None:
    assert ratio_of([0.98]) == "ratio: 0.980 (median), 0.980 on average"
