"""The CPU path, measured: Octavo beside llama.cpp and vLLM on the same prompts, and what the packed weights cost and gain.
Knows nothing of kernels but their ceilings: it sees servers as their clients do, and the engine as its callers do."""
