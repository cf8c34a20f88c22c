"""② Queue and schedule: which requests compute what in the next step."""

from octavo.schedule.policy import POLICIES
from octavo.schedule.results import WaitReason
from octavo.schedule.scheduler import Scheduler

__all__ = ["POLICIES", "Scheduler", "WaitReason"]
