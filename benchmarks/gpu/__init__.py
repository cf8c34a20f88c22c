"""The GPU path, measured: the five workloads, growth, a trace, cold start, the server, and what fp8 costs in accuracy.
Knows nothing of kernels: it sees the engine as its callers do, and counts bytes and FLOPs that nobody can avoid."""
