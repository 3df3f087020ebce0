"""ttrain: a training step derived once, planned into persistent buffers, and replayed."""

__version__ = "0.1.0"
