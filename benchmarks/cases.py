"""The shapes of work, seeded: the same gradients on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Gradient = tuple[NDArray[np.int64], NDArray[Any]]
"""Ids `[n]` and values `[n, dim]`."""


@dataclass(frozen=True)
class Case:
    """One shape of work.

    Attributes:
        rows: rows per gradient.
        dim: numbers per row.
        num_gradients: gradients in the round.
        table: the ids lie below this.
        zipf: ids are ranks drawn log-uniformly (Zipf's law with exponent 1, ids in order of frequency, as in a
            vocabulary); otherwise uniform.
        unique: ids ascend without repeats; otherwise they come as they were drawn.
    """

    name: str
    rows: int
    dim: int
    num_gradients: int
    table: int
    zipf: bool = True
    unique: bool = True
    dtype: str = "float32"

    def gradients(self, num_gradients: int | None = None, seed: int = 2021) -> list[Gradient]:
        """Return the gradients of one round."""
        rng = np.random.default_rng([seed, self.rows, self.dim])
        return [self._gradient(rng) for _ in range(num_gradients or self.num_gradients)]

    def _gradient(self, rng: np.random.Generator) -> Gradient:
        values = rng.standard_normal((self.rows, self.dim), dtype=np.float32)
        return self._ids(rng), values.astype(self.dtype, copy=False)

    def _ids(self, rng: np.random.Generator) -> NDArray[np.int64]:
        if not self.unique:
            return self._draw(rng, self.rows)
        num_drawn = self.rows
        while True:
            num_drawn *= 2
            ids, first = np.unique(self._draw(rng, num_drawn), return_index=True)
            if len(ids) >= self.rows:
                return np.sort(ids[np.argsort(first)[: self.rows]])

    def _draw(self, rng: np.random.Generator, num: int) -> NDArray[np.int64]:
        if not self.zipf:
            return rng.integers(self.table, size=num)
        return (self.table ** rng.random(num)).astype(np.int64) - 1

    def describe(self) -> str:
        ids = f"{self.table:,} {'Zipf' if self.zipf else 'uniform'}{'' if self.unique else ', unsorted with repeats'}"
        return f"{self.num_gradients} x {self.rows} x {self.dim} {self.dtype}, ids below {ids}"


CASES = {
    case.name: case
    for case in (
        Case("tiny", 32, 16, 4, 1_000, zipf=False),
        Case("small", 256, 32, 8, 100_000),
        Case("mid", 4096, 64, 8, 1_000_000),
        Case("large", 65536, 64, 8, 4_000_000, zipf=False),
        Case("many", 4096, 32, 128, 10_000_000, zipf=False),
        Case("wide", 2048, 512, 8, 200_000),
        Case("thin", 100_000, 1, 8, 1_000_000),
        Case("raw", 16384, 64, 8, 1_000_000, unique=False),
        Case("half", 4096, 64, 8, 1_000_000, dtype="float16"),
    )
}


def row_counts(gradients: list[Gradient]) -> NDArray[np.int64]:
    """Return in how many gradients each id of the round occurs, ids ascending."""
    unique = [np.unique(ids) for ids, _ in gradients]
    return np.unique(np.concatenate(unique), return_counts=True)[1]
