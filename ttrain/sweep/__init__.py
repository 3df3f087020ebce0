"""Sweeps: every job of `-m` in a fresh process, with its own folder, log and status."""
