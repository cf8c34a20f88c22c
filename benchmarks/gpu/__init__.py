"""Benchmarks of the GPU path: the five workloads, growth, a trace, cold start, the server, and the accuracy of fp8.
They use the engine as its callers do, and count the bytes and FLOPs that no implementation can avoid."""
