"""The engine: the step loop, the driver that feeds it, and the process that it runs in.
It does not import torch: the executor is loaded by name."""
