"""The agent of a rank, as octavo.cluster.agent, whose engine is tests.cluster.calm_engine."""

import os
import sys

from octavo.cluster import agent

if __name__ == "__main__":
    agent.ENGINE_MODULE = "tests.cluster.calm_engine"
    os._exit(agent.main(sys.argv[1:]))
