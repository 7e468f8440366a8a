"""What people and machines read of a verdict. NumPy at most; never imports jax."""

from kernjax.reporting.annotations import annotations as annotations
from kernjax.reporting.comment import render_markdown as render_markdown
from kernjax.reporting.files import remove_files as remove_files
from kernjax.reporting.files import write_files as write_files
from kernjax.reporting.json import verdict_line as verdict_line
from kernjax.reporting.junit import render_junit as render_junit
from kernjax.reporting.loading import load_verdict as load_verdict
from kernjax.reporting.text import render_text as render_text
