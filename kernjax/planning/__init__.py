"""Whether a model fits a slice of TPUs, by the real compiler and without a TPU."""
