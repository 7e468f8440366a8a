"""What people and machines read of a verdict. NumPy at most; never imports jax."""

from kernjax.reporting.json import verdict_line as verdict_line
from kernjax.reporting.json import write_files as write_files
from kernjax.reporting.text import render_text as render_text
