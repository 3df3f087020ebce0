"""Data computed from numbers, of which nothing is stored: regression, and sums."""
