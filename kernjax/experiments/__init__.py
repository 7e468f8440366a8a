"""Questions that a verdict leaves open, each answered by one command on any checkpoint.

`long_decode`: thousands of decode steps with a rounded state · `lost_mass`: what P formats lose ·
`fp8_drift`: why direct fp8 drifts. `article` measures what the article's figures need of a model.
"""
