"""② Queue and schedule: who computes what in the next step.
Knows nothing of tensors, clocks or processes."""

from octavo.schedule.scheduler import Scheduler, WaitReason

__all__ = ["Scheduler", "WaitReason"]
