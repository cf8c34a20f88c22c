"""Measurements a user can run: latency and throughput of a model in this process, and any OpenAI-compatible server.
Knows nothing of the engine's inside: it sees what a caller of LLM or of a URL sees."""
