"""What the kernels' speed is measured with, one file per room of kernels.
Knows nothing of the server: tensors in, microseconds out."""
