"""Vocabulary that every layer shares: tensor specs, errors, names and units. Imports nothing of ours."""
