"""The round of a coordinator: like any other, but for its blocks, which are elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from gradquorum.specs import RoundSpec
from gradquorum.targets.host import RoundHost
from gradquorum.targets.ray.planning import RemoteReducer, Shards, compacted

__all__ = ["RemoteHost"]

_logger = logging.getLogger("gradquorum")


class RemoteHost(RoundHost):
    """A round whose blocks are elsewhere. Its logs are compacted in a thread: that waits for the shards."""

    def __init__(self, spec: RoundSpec, shards: Shards, threads: Executor) -> None:
        super().__init__(spec, [RemoteReducer(spec, member, shards) for member in range(len(spec.members))])
        self._shards = shards
        self._threads = threads
        self._is_compacting = False
        """Set without a lock: at worst a second thread finds nothing to do."""

    def _compact_large(self) -> None:
        if not self._is_compacting:
            self._is_compacting = True
            self._threads.submit(self._try_to_compact)

    def _compacted(
        self, logs: Sequence[list[Any]], num_bytes: int, growth: float
    ) -> tuple[tuple[Any, ...] | None, int]:
        return compacted(self._shards, self._reducers, logs, num_bytes, growth)

    def _try_to_compact(self) -> None:
        try:
            self._compact()
        except Exception as error:  # the log is as it was; if a shard has died, the round is about to be void
            _logger.info("a round was not compacted: %s", error)
            self._is_compacting = False
            return
        self._is_compacting = False
        if self.is_large:  # by what came after the last look
            self._compact_large()
