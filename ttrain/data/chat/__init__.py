"""Conversations as text: templates that are filled in, and those of tokenizers."""
