"""② Queue and schedule: who computes what in the next step.
Knows nothing of tensors, clocks or processes."""

from octavo.schedule.policy import POLICIES
from octavo.schedule.scheduler import Scheduler, WaitReason

__all__ = ["POLICIES", "Scheduler", "WaitReason"]
