"""Coverage-guided fuzzing of every parser of bytes or texts that come from clients or model files. `make fuzz` runs it."""
