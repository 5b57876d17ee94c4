"""Word vectors trained by many workers: each computes gradients, a chief takes a quorum and updates.

This is the part of the demo to read first: `Worker` is all that a worker does, `Training.run` all that the chief does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from threading import Timer
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import gradquorum as gq
from gradquorum.cli.corpus import Corpus, Ids
from gradquorum.cli.ray_workers import RayExecutor
from gradquorum.cli.word_vectors import Adagrad, Batch, NegativeSampler, WordVectors
from gradquorum.groups import GroupGradient

Engine = Literal["native", "reference"]
Place = gq.Server | Literal["ray"] | None
"""Where workers and group are: with a server, on a Ray cluster of this machine, or in this process."""

MAX_HELD_OUT = 4096  # pairs
_NEVER = 2**63 - 1  # a step that nobody publishes


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        workers: threads or processes that compute gradients.
        required: the quorum, gradients that a step waits for.
        straggler: seconds that the last worker sleeps before each of its gradients.
        dim: numbers in a word vector.
        seed: of everything drawn at random.
        engine: the gradquorum engine, None for the best there is.
        batch_size: pairs in a gradient; in a short text less.
        learning_rate: of Adagrad.
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
        corpus: the text.
        pairs: what is trained on `[num_pairs, 2]`.
        sampler: draws their negatives.
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


@dataclass(frozen=True)
class Worker:
    """One worker, to be called where it works: in a thread of the chief's process, or unpickled in its own.

    Attributes:
        index: which worker this is.
        settings: how to train.
        examples: of which it has every `settings.workers`-th.
        vectors: the tables that the chief updates.
        group: where its gradients go.
        stale: for each worker, the gradients that came too late; each entry is written by its worker only.
    """

    index: int
    settings: Settings
    examples: Examples
    vectors: WordVectors
    group: gq.AccumulatorGroup
    stale: npt.NDArray[np.int64]

    def __call__(self) -> None:
        """Compute gradients for this worker's part of the pairs until the group is closed."""
        with contextlib.suppress(gq.ClosedError, gq.CancelledError):
            self._work()

    def _work(self) -> None:
        group = self.group
        part = self.examples.pairs[self.index :: self.settings.workers]
        rng = np.random.default_rng([self.settings.seed, self.index])
        batches = self.examples.sampler.batches(part, self.settings.batch_size, rng)
        worker = group.worker(self.index)
        batch = next(batches)
        while True:
            worker.begin()  # remembers the published step: the one of the tables read below
            if self.index == self.settings.workers - 1:
                self._straggle()
            receipt = worker.apply(self.vectors.gradients(batch))
            if receipt:
                batch = next(batches)
                group.wait_published(receipt.step + 1)
            else:  # stale: nothing is lost, the batch is tried again on the parameters that came instead
                self.stale[self.index] += 1
                group.wait_published(receipt.step)

    def _straggle(self) -> None:
        """Sleep, but not longer than the training lasts."""
        with contextlib.suppress(gq.DeadlineExceededError):
            self.group.wait_published(_NEVER, timeout=self.settings.straggler)


class Training:
    """Trains `vectors` on `examples` with a chief and `settings.workers` workers.

    Without a server the workers are threads. With one they are processes: the group is the server's, and the tables
    are in shared memory. The chief is in the server's process. With "ray" in its place the workers are tasks of a Ray
    cluster on this machine, where the group lives, too.

    Both tables are members of one group, so a gradient counts for both or for neither.

    The reduction is MEAN_BY_COUNT: a row's sum divided by the number of gradients in the round, which is the
    gradient of the mean loss over all pairs of the round, however many gradients made it. MEAN, which divides
    by the gradients that touched *that row*, would give a word seen by one worker of four the same weight as
    a word seen by all four; Adagrad would undo such a factor only if it were the same in every round.

    The chief updates the tables in place while slow workers still read them. That is safe: the step has
    advanced before the chief has the gradients in hand, so what is computed from half-updated tables carries
    an older step, and is dropped as stale.

    With `order="worker"` a round's rows are added in the order of the workers, not of arrival. When all
    workers are required, a seed therefore gives the same vectors to the last bit, by threads and by processes.
    """

    def __init__(self, examples: Examples, settings: Settings, server: Place = None) -> None:
        self._examples = examples
        self._settings = settings = replace(
            settings, batch_size=min(settings.batch_size, len(examples.pairs) // settings.workers)
        )
        self._server = server
        zeros: Callable[[tuple[int, ...], Any], npt.NDArray[Any]] = np.zeros if server is None else gq.shared_table
        num_words, dim = len(examples.corpus.words), settings.dim
        self.vectors = WordVectors(num_words, dim, np.random.default_rng(settings.seed), zeros)
        self._stale = zeros((settings.workers,), np.int64)
        self._adagrad = {
            "input": Adagrad(self.vectors.input, settings.learning_rate),
            "output": Adagrad(self.vectors.output, settings.learning_rate),
        }
        spec = gq.SparseSpec(np.float32, (num_words, dim), "MEAN_BY_COUNT")
        target = server or "local"
        self._group = gq.AccumulatorGroup(
            {"input": spec, "output": spec}, order="worker", engine=settings.engine, target=target
        )

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

        The clock starts when all workers have. It can be run once.

        Raises:
            Exception: whatever a worker failed with. All threads and processes have ended by then.
        """
        progress = Progress()
        with self._executor() as executor, self._closed_after(seconds) as begin:
            workers = [self._start(executor, index) for index in range(self._settings.workers)]
            start = begin()
            # A pool of processes lists whom it watches when it is woken, perhaps before the last one is in the list:
            # a death of that one would pass unseen. Now that all are there, this wakes it.
            executor.submit(bool)
            for gradients in self._group.rounds(self._settings.required):  # each turn is a step, published at its end
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

    def _executor(self) -> Executor:
        if self._server is None:
            return ThreadPoolExecutor(self._settings.workers)
        if self._server == "ray":
            return RayExecutor()
        return ProcessPoolExecutor(self._settings.workers, get_context("spawn"))

    def _start(self, executor: Executor, index: int) -> Future[None]:
        """Start a worker. If it fails or dies, the group is closed: that ends the others, and the chief's loop."""

        def close_if_failed(future: Future[None]) -> None:
            if future.exception():
                self._group.close(for_all=True)

        worker = Worker(index, self._settings, self._examples, self.vectors, self._group, self._stale)
        future = executor.submit(worker)
        future.add_done_callback(close_if_failed)
        return future

    def _update(self, gradients: GroupGradient) -> None:
        """Change the rows that the round touched: their ids come ascending and unique."""
        for table, adagrad in self._adagrad.items():
            indices, rows, _ = gradients[table]
            adagrad.update(indices, rows)

    def _account(self, gradients: GroupGradient, progress: Progress) -> None:
        progress.steps += 1
        progress.accepted += gradients.num_gradients
        progress.stale = int(self._stale.sum())
        progress.pairs += gradients.num_gradients * self._settings.batch_size
        progress.words = progress.pairs * self._examples.words_per_pair

    @contextlib.contextmanager
    def _closed_after(self, seconds: float | None) -> Iterator[Callable[[], float]]:
        """Close the group at the end, and `seconds` after the beginning also while the chief waits.

        It yields what begins: that waits for the workers and returns the time on the clock.
        """
        timer = Timer(seconds or 0.0, self._group.close, kwargs={"for_all": True})

        def begin() -> float:
            while self._group.num_workers < self._settings.workers and not self._group.closed:
                time.sleep(0.001)
            if seconds is not None:
                timer.start()
            return time.perf_counter()

        try:
            yield begin
        finally:
            timer.cancel()
            self._group.close(for_all=True)
