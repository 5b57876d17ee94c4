"""Synchronous training with backup workers: `SyncReplicas`."""

from gradquorum.training.sync_replicas import SyncReplicas

__all__ = ["SyncReplicas"]
