"""What a Ray cluster has, for `octavo doctor`: `python -m octavo.cluster.survey [ADDRESS]` prints one line of JSON, and starts nothing."""

import os
import sys

import msgspec

from octavo.cluster.messages import ClusterFailed, ClusterReport
from octavo.cluster.placer import RayCluster
from octavo.errors import ConfigError


def survey(address: str) -> ClusterReport | ClusterFailed:
    try:
        cluster = RayCluster(address, 1, may_start=False)
    except ConfigError as error:
        return ClusterFailed(error.message)
    try:
        return ClusterReport(f"{cluster.words}. {'; '.join(node.words for node in cluster.nodes())}")
    finally:
        cluster.close()


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, msgspec.json.encode(survey(sys.argv[1] if sys.argv[1:] else "")) + b"\n")
    os._exit(0)
