"""Triton kernels of the lab."""
