"""The loop that joins the rooms, the ways to reach it, and the processes it lives in.
Knows nothing of torch or HTTP: the executor is loaded by name."""
