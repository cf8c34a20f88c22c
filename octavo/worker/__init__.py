"""One rank's share of a step: a StepPlan in, sampled tokens out."""
