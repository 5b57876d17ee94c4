"""Skip-gram with negative sampling in plain NumPy: the loss, its gradients, and the update.

Nothing here knows of workers or accumulators. Gradients come out *raw*, as any embedding layer makes them:
one row per look-up, in the order of the look-ups, the same id as often as it was looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradquorum.cli.corpus import Ids

Floats = npt.NDArray[np.float32]
RawGradient = tuple[Ids, Floats]  # ids [n], unsorted and repeated; rows [n, dim]


@dataclass(frozen=True)
class Batch:
    """Look-ups of one batch.

    Attributes:
        centers: the word whose neighbours are asked for `[batch]`.
        targets: its true neighbour, then words drawn at random `[batch, 1 + num_negatives]`.
    """

    centers: Ids
    targets: Ids


class NegativeSampler:
    """Draws words in proportion to count ** 0.75, as word2vec does."""

    def __init__(self, counts: Ids, num_negatives: int = 5) -> None:
        self._cumulative = np.cumsum(counts**0.75)
        self._num_negatives = num_negatives

    def batch(self, pairs: Ids, rng: np.random.Generator) -> Batch:
        """Put `pairs` `[batch, 2]` together with negatives."""
        uniform = rng.random((len(pairs), self._num_negatives)) * self._cumulative[-1]
        negatives = np.searchsorted(self._cumulative, uniform, side="right")
        return Batch(pairs[:, 0], np.concatenate([pairs[:, 1:], negatives], axis=1))

    def batches(self, pairs: Ids, size: int, rng: np.random.Generator) -> Iterator[Batch]:
        """Go through `pairs` again and again, in a new order each time, for ever; all batches are full."""
        while True:
            order = rng.permutation(len(pairs))
            for start in range(0, len(pairs) - size + 1, size):
                yield self.batch(pairs[order[start : start + size]], rng)


class WordVectors:
    """Two tables: a word looked up as a center (`input`), and as a neighbour (`output`)."""

    def __init__(
        self,
        num_words: int,
        dim: int,
        rng: np.random.Generator,
        zeros: Callable[[tuple[int, ...], Any], npt.NDArray[Any]] = np.zeros,
    ) -> None:
        """Make the tables with `zeros(shape, dtype)`."""
        self.input: Floats = zeros((num_words, dim), np.float32)
        self.input[...] = rng.uniform(-0.5 / dim, 0.5 / dim, (num_words, dim))
        self.output: Floats = zeros((num_words, dim), np.float32)

    def loss(self, batch: Batch) -> float:
        """Return the mean over the batch of -log sigmoid(true score) - sum of log sigmoid(-false score)."""
        scores = self._scores(self.input[batch.centers], self.output[batch.targets])
        scores[:, 0] *= -1
        return float(np.logaddexp(0, scores).sum(axis=1, dtype=np.float64).mean())

    def gradients(self, batch: Batch) -> dict[str, RawGradient]:
        """Return the gradient of `loss`: for each table the ids looked up and one row per look-up."""
        centers, targets = self.input[batch.centers], self.output[batch.targets]
        errors = 0.5 + 0.5 * np.tanh(0.5 * self._scores(centers, targets))  # sigmoid(score)
        errors[:, 0] -= 1  # the derivative of the loss by a score is sigmoid(score) - label
        errors /= len(batch.centers)
        center_rows = np.matmul(errors[:, None, :], targets)[:, 0, :]
        target_rows = errors[:, :, None] * centers[:, None, :]
        return {
            "input": (batch.centers, center_rows),
            "output": (batch.targets.ravel(), target_rows.reshape(-1, centers.shape[1])),
        }

    def nearest(self, word: int, num: int) -> list[int]:
        """Return the `num` words whose input vectors have the largest cosine with that of `word`."""
        vectors = self.input - self.input.mean(axis=0)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-12
        order = np.argsort(-(vectors @ vectors[word]), kind="stable")
        return [int(i) for i in order if i != word][:num]

    @staticmethod
    def _scores(centers: Floats, targets: Floats) -> Floats:
        scores: Floats = np.matmul(targets, centers[:, :, None])[:, :, 0]
        return scores


class Adagrad:
    """Adagrad on the rows that a gradient touches; all other rows and their history stay as they are.

    Source: Duchi, Hazan and Singer 2011. The history starts at `epsilon`, so a division by zero cannot be.
    """

    def __init__(self, table: Floats, learning_rate: float, epsilon: float = 1e-12) -> None:
        self._table = table
        self._history = np.full_like(table, epsilon)
        self._learning_rate = np.float32(learning_rate)

    def update(self, indices: Ids, rows: Floats) -> None:
        """Change `table[indices]` in place. `indices` must not repeat: that is what a take promises."""
        self._history[indices] += rows * rows
        self._table[indices] -= self._learning_rate * rows / np.sqrt(self._history[indices])
