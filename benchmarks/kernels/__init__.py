"""Benchmarks of kernels, one file per group of kernels: tensors in, microseconds out."""
