"""Rounds on a Ray cluster: a coordinator actor hosts the round, shard actors hold what was offered and merge it."""
