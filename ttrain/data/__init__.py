"""Corpora, tokenizers and batches: what a training step reads."""
