"""Word vectors trained by many workers: each computes gradients, a chief takes a quorum and updates.

This is the part of the demo to read first: `Training._work` is all that a worker does, `Training.run` all
that the chief does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Timer
from typing import Literal

import numpy as np

import gradquorum as gq
from gradquorum.cli.corpus import Corpus, Ids
from gradquorum.cli.word_vectors import Adagrad, Batch, NegativeSampler, WordVectors
from gradquorum.groups import GroupGradient

Engine = Literal["native", "reference"]

MAX_HELD_OUT = 4096  # pairs


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        workers: threads that compute gradients.
        required: the quorum, gradients that a step waits for.
        straggler: seconds that the last worker sleeps before each of its gradients.
        dim: numbers in a word vector.
        seed: of everything drawn at random.
        engine: the gradquorum engine, None for the best there is.
    """

    workers: int
    required: int
    straggler: float = 0.0
    dim: int = 64
    seed: int = 0
    engine: Engine | None = None
    batch_size: int = 1024
    learning_rate: float = 0.05


@dataclass(frozen=True)
class Examples:
    """What there is to learn from a text: the same for every training that is compared with another.

    Attributes:
        pairs: what is trained on `[num_pairs, 2]`.
        held_out: pairs never trained on, with fixed negatives: the loss on them is comparable.
    """

    corpus: Corpus
    pairs: Ids
    sampler: NegativeSampler
    held_out: Batch

    @property
    def words_per_pair(self) -> float:
        """Words of the text for each pair of an epoch."""
        return len(self.corpus.ids) / len(self.pairs)

    @classmethod
    def from_corpus(cls, corpus: Corpus, seed: int) -> Examples:
        """Draw pairs from the text and set some of them aside."""
        rng = np.random.default_rng(seed)
        sampler = NegativeSampler(corpus.counts)
        pairs = corpus.skip_gram_pairs(rng)
        num_held_out = min(MAX_HELD_OUT, len(pairs) // 10)
        return cls(corpus, pairs[num_held_out:], sampler, sampler.batch(pairs[:num_held_out], rng))


@dataclass
class Progress:
    """What a training has done so far."""

    steps: int = 0
    pairs: int = 0
    words: float = 0.0  # of text gone through: the same share of an epoch as the pairs
    accepted: int = 0  # gradients in the steps made
    stale: int = 0  # gradients dropped, because their step had been made without them
    seconds: float = 0.0

    @property
    def stale_share(self) -> float:
        """Stale gradients per gradient computed."""
        return self.stale / max(self.accepted + self.stale, 1)


class Training:
    """Trains `vectors` on `examples` with a chief and `settings.workers` worker threads.

    Both tables are members of one group, so a gradient counts for both or for neither.

    The reduction is MEAN_BY_COUNT: a row's sum divided by the number of gradients in the round, which is the
    gradient of the mean loss over all pairs of the round, however many gradients made it. MEAN, which divides
    by the gradients that touched *that row*, would give a word seen by one worker of four the same weight as
    a word seen by all four; Adagrad would undo such a factor only if it were the same in every round.

    The chief updates the tables in place while slow workers still read them. That is safe: the step has
    advanced before the chief has the gradients in hand, so what is computed from half-updated tables carries
    an older step, and is dropped as stale.

    With `order="worker"` a round's rows are added in the order of the workers, not of arrival. When all
    workers are required, a seed therefore gives the same vectors to the last bit.
    """

    def __init__(self, examples: Examples, settings: Settings) -> None:
        self._examples = examples
        self._settings = settings
        num_words, dim = len(examples.corpus.words), settings.dim
        self.vectors = WordVectors(num_words, dim, np.random.default_rng(settings.seed))
        self._adagrad = {
            "input": Adagrad(self.vectors.input, settings.learning_rate),
            "output": Adagrad(self.vectors.output, settings.learning_rate),
        }
        spec = gq.SparseSpec(np.float32, (num_words, dim), "MEAN_BY_COUNT")
        tables = {"input": spec, "output": spec}
        self._group = gq.AccumulatorGroup(tables, order="worker", engine=settings.engine)
        self._batch_size = min(settings.batch_size, len(examples.pairs) // settings.workers)
        self._stale = [0] * settings.workers  # each entry is written by its worker only
        self._over = Event()

    def held_out_loss(self) -> float:
        """Return the loss on the pairs that were set aside."""
        return self.vectors.loss(self._examples.held_out)

    def run(
        self,
        *,
        num_pairs: int | None = None,
        seconds: float | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> Progress:
        """Make steps until `num_pairs` have been learned from or `seconds` have passed; then end the workers.

        It can be run once.

        Raises:
            Exception: whatever a worker failed with. All threads have ended by then.
        """
        num_workers, required = self._settings.workers, self._settings.required
        progress, start = Progress(), time.perf_counter()
        with ThreadPoolExecutor(num_workers) as pool, self._group as group, self._time_limit(seconds):
            workers = [pool.submit(self._work, index) for index in range(num_workers)]
            for gradients in group.rounds(required):  # each turn is a step, published when its body ends
                self._update(gradients)
                self._account(gradients, progress)
                progress.seconds = time.perf_counter() - start
                if on_step:
                    on_step(progress)
                if num_pairs is not None and progress.pairs >= num_pairs:
                    break
        for worker in workers:
            worker.result()  # raises what the worker raised
        progress.seconds = time.perf_counter() - start
        return progress

    def _update(self, gradients: GroupGradient) -> None:
        """Change the rows that the round touched: their ids come ascending and unique."""
        for table, adagrad in self._adagrad.items():
            indices, rows, _ = gradients[table]
            adagrad.update(indices, rows)

    def _account(self, gradients: GroupGradient, progress: Progress) -> None:
        progress.steps += 1
        progress.accepted += gradients.num_gradients
        progress.stale = sum(self._stale)
        progress.pairs += gradients.num_gradients * self._batch_size
        progress.words = progress.pairs * self._examples.words_per_pair

    @contextmanager
    def _time_limit(self, seconds: float | None) -> Iterator[None]:
        """Close the group after `seconds`, also while the chief waits; wake the straggler at the end."""
        timer = Timer(seconds or 0.0, self._group.close, kwargs={"for_all": True})
        if seconds is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._over.set()

    def _work(self, index: int) -> None:
        """Compute gradients for this worker's part of the pairs until the group is closed."""
        settings, examples, group = self._settings, self._examples, self._group
        is_straggler = index == settings.workers - 1
        part = examples.pairs[index :: settings.workers]
        rng = np.random.default_rng([settings.seed, index])
        batches = examples.sampler.batches(part, self._batch_size, rng)
        try:
            worker = group.worker(index)
            batch = next(batches)
            while True:
                worker.begin()  # remembers the published step: the one of the tables read below
                if is_straggler:
                    self._over.wait(settings.straggler)
                receipt = worker.apply(self.vectors.gradients(batch))
                if receipt:
                    batch = next(batches)
                    group.wait_published(receipt.step + 1)
                else:  # stale: nothing is lost, the batch is tried again on the parameters that came instead
                    self._stale[index] += 1
                    group.wait_published(receipt.step)
        except (gq.ClosedError, gq.CancelledError):
            pass  # the training is over
        except BaseException:
            group.close(for_all=True)  # ends the chief's loop, which then raises this
            raise
