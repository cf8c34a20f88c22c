"""Native CPU kernels: C++ behind a plain C interface, compiled once per machine."""
