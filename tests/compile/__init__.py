"""Compiling the kernels with the real accelerator compilers, on machines that have none."""
