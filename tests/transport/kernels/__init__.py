"""The kernels run on the GPU if there is one, else under Triton's interpreter on the CPU."""
