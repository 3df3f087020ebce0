"""Engines: ways to run a recorded step."""
