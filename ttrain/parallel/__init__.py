"""Ranks: processes that train one model together, and the shard that each of them owns."""
