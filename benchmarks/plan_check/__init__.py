"""octavo plan against real runs: predicted beside seen."""
