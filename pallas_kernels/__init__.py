"""Attention and delta-rule kernels with an explicit rounding format at every step."""
