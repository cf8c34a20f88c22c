"""The scheduler and the cache against the oracle, over random workloads: prefix sharing, fork, swap, abort, overlap."""

from collections import Counter
from dataclasses import asdict

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.schedule.workload import Workload


def test_two_thousand_seeded_workloads():
    total: Counter[str] = Counter()
    for seed in range(2000):
        try:
            total.update(asdict(Workload(seed).run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    # The campaign is worth something only if it reached what it is about.
    for what in ("preemptions", "swaps", "copies", "forks", "hits", "aborts", "vectors"):
        assert total[what] > 200, (what, total)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(min_value=2**32, max_value=2**64))
def test_any_workload(seed):
    Workload(seed).run()
