"""② Queue and schedule: which requests compute what in the next step."""

from octavo.schedule.fairness import Fairness
from octavo.schedule.policy import POLICIES
from octavo.schedule.results import HeadWaitReason
from octavo.schedule.scheduler import Scheduler

__all__ = ["POLICIES", "Fairness", "HeadWaitReason", "Scheduler"]
