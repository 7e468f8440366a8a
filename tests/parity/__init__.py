"""Parity with transformers' modelling code on small random checkpoints in the published layout."""
