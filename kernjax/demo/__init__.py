"""The demo checkpoint: how it is made (`python -m kernjax.demo.train`, `kernjax.demo.export`)."""
