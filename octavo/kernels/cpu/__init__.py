"""Native kernels for CPUs: C++ behind a plain C interface, compiled once per machine.
Knows nothing of requests, models or layers: pointers in, numbers out."""
