"""`octavo bench`: measures the latency and throughput of a model in this process, or any OpenAI-compatible server. It only uses
LLM and HTTP, like any other caller."""
