"""Ranks: processes that train one model together, and who of them owns what."""
