"""Benchmarks of the CPU path: Octavo beside llama.cpp and vLLM on the same prompts, and the cost and gain of packed weights.
Servers are used as their clients use them, the engine as its callers do; of the kernels only the ceilings are used."""
