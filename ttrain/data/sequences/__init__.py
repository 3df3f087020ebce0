"""Sequences of documents: the stream that they are cut from, and sequences of several sources mixed by weights."""
