"""What one streamed chat request runs through stays small: a request that does not use a feature does not run the feature's code."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Of the tree before its rooms were regrouped (docs/internals/request.md). A feature that exceeds one of them is called by requests that do
# not use it, or takes the place of something that is then to go.
MAX_FILES, MAX_CALLS, MAX_OBSERVING = 60, 836, 36  # the last in percent


def test_a_streamed_chat_request_runs_through_few_files() -> None:
    # A process of its own: what other tests have left behind must not be counted.
    run = subprocess.run(
        [sys.executable, "-m", "scripts.trace_request"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    found = re.search(r"^(\d+) files, \d+ functions, (\d+) calls\nobserving: \d+ files, \d+ calls, (\d+)%$", run.stdout)
    assert found is not None, run.stdout
    num_files, num_calls, observing = map(int, found.groups())
    how = "`python -m scripts.trace_request --table` lists every call"
    assert 40 < num_files <= MAX_FILES, how
    assert 400 < num_calls <= MAX_CALLS, how
    assert 0 < observing <= MAX_OBSERVING, how
