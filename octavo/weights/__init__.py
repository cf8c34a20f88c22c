"""Finding a model's files (sources/) and reading them as tensors (formats/)."""
