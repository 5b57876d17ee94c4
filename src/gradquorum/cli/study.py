"""The study: the same model trained by all of M, N of M, and asynchronously, with and without stragglers.

`Trial` is one training. Everything that is drawn at random comes from its seed: in each regime worker i sees the same
batches, and its k-th gradient takes equally long. What is measured is real: threads, waiting and wall time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gradquorum as gq
from gradquorum.cli.training import Engine, Examples
from gradquorum.cli.word_vectors import Adagrad, Batch, WordVectors
from gradquorum.groups import GroupGradient

NUM_POINTS = 40  # of a curve
_MEMBERS = ("input", "output")


@dataclass(frozen=True)
class Regime:
    """When the chief makes a step.

    Attributes:
        required: the quorum; None for asynchronous training: a step for each gradient that comes, however old.
    """

    name: str
    required: int | None


@dataclass(frozen=True)
class Stragglers:
    """How long a gradient takes besides its arithmetic: `base` seconds, and with `probability` so much `more`."""

    name: str
    base: float
    probability: float = 0.0
    more: float = 0.0

    def delays(self, seed: int, worker: int) -> Iterator[float]:
        """Yield the seconds for one gradient after the other of a worker."""
        rng = np.random.default_rng([seed, worker, 1])
        while True:
            yield self.base + (self.more if rng.random() < self.probability else 0.0)

    @property
    def words(self) -> str:
        """What happens, in words."""
        base = f"each gradient takes {self.base * 1000:.0f} ms"
        if not self.probability:
            return base
        return f"{base}, one in {1 / self.probability:.0f} takes {self.more * 1000:.0f} ms more"


@dataclass(frozen=True)
class StudySettings:
    """What all trials of a study share."""

    workers: int
    required: int
    seconds: float
    straggler: float
    dim: int = 64
    seed: int = 0
    num_seeds: int = 3
    base: float = 0.02
    probability: float = 0.1
    batch_size: int = 256
    learning_rate: float = 0.05
    engine: Engine | None = None

    @property
    def regimes(self) -> list[Regime]:
        """Those that are compared."""
        return [
            Regime(f"all {self.workers}", self.workers),
            Regime(f"{self.required} of {self.workers}", self.required),
            Regime("async", None),
        ]

    @property
    def stragglers(self) -> list[Stragglers]:
        """Those that they are compared under."""
        return [
            Stragglers("none", self.base),
            Stragglers("tail", self.base, self.probability, self.straggler),
        ]

    @property
    def seeds(self) -> range:
        """One trial of each regime for each."""
        return range(self.seed, self.seed + self.num_seeds)


@dataclass
class Curve:
    """What one trial did.

    Attributes:
        seconds: since its workers were started, for each point.
        gradients: that were used in steps by then.
        losses: on the pairs that were set aside.
        steps: made at the end.
        stale: gradients dropped at the end, as their step had been made without them.
        lag: steps made between reading parameters and using the gradient, on average.
    """

    stragglers: str
    regime: str
    seed: int
    seconds: list[float] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    stale: int = 0
    lag: float = 0.0


class Trial:
    """One training of word vectors, for a time."""

    def __init__(self, examples: Examples, settings: StudySettings, stragglers: Stragglers, regime: Regime, seed: int):
        self._examples, self._settings, self._stragglers = examples, settings, stragglers
        self._seed = seed
        self._curve = Curve(stragglers.name, regime.name, seed)
        shape = len(examples.corpus.words), settings.dim
        self._vectors = WordVectors(*shape, np.random.default_rng(seed))
        self._adagrad = {name: Adagrad(getattr(self._vectors, name), settings.learning_rate) for name in _MEMBERS}
        self._regime = regime
        membership: dict[str, Any] = {}
        if regime.required is not None:
            membership = {"expected_workers": settings.workers, "max_per_worker": 1}
        spec = gq.SparseSpec(np.float32, shape, "MEAN_BY_COUNT")
        self._group = gq.AccumulatorGroup(
            dict.fromkeys(_MEMBERS, spec), order="worker", engine=settings.engine, **membership
        )
        self._snapshots: list[WordVectors] = []
        self._used = 0
        self._stale = [0] * settings.workers  # each entry is written by its worker only, like the next one's
        self._lags = [(0, 0)] * settings.workers
        self._over = threading.Event()
        self._start = 0.0

    def run(self) -> Curve:
        """Train, and measure the losses when the time is over, so that measuring takes none of it.

        Raises:
            Exception: whatever a worker failed with. All threads have ended by then.
        """
        workers = self._settings.workers
        with ThreadPoolExecutor(workers) as pool, self._time_limit():
            self._keep_point()
            if self._regime.required is None:
                futures = [pool.submit(self._work_asynchronously, index) for index in range(workers)]
                for gradients in self._group.rounds(1):
                    self._update(gradients)
            else:
                futures = []
                with suppress(gq.ClosedError):  # the time is over before it has begun
                    sync = gq.SyncReplicas(self._group, self._regime.required, num_workers=workers, update=self._update)
                    futures = [pool.submit(self._work, sync, index) for index in range(workers)]
                    sync.run(None)
        for future in futures:
            future.result()
        return self._finish()

    def _work(self, sync: gq.SyncReplicas, index: int) -> None:
        """Begin, compute, apply, with a quorum."""
        with suppress(gq.ClosedError), sync.worker(index) as worker:
            for (batch, delay), _ in zip(self._tasks(index), worker, strict=False):
                gradients = self._vectors.gradients(batch)
                if self._over.wait(delay):
                    return
                receipt = worker.apply(gradients)
                self._account(index, receipt.step - worker.step, used=bool(receipt))

    def _work_asynchronously(self, index: int) -> None:
        """The same without waiting for anybody: no gradient is too old."""
        with suppress(gq.ClosedError):  # the time is over
            for batch, delay in self._tasks(index):
                step = self._group.published_step
                gradients = self._vectors.gradients(batch)
                if self._over.wait(delay):
                    return
                receipt = self._group.apply(gradients, local_step=None, worker=index)
                self._account(index, receipt.step - step, used=True)

    def _tasks(self, index: int) -> Iterator[tuple[Batch, float]]:
        """Yield batches, and how long their gradients take: the same in each regime."""
        settings = self._settings
        part = self._examples.pairs[index :: settings.workers]
        size = min(settings.batch_size, len(part))
        batches = self._examples.sampler.batches(part, size, np.random.default_rng([self._seed, index]))
        return zip(batches, self._stragglers.delays(self._seed, index), strict=False)

    def _account(self, index: int, lag: int, *, used: bool) -> None:
        if used:
            count, total = self._lags[index]
            self._lags[index] = count + 1, total + lag
        else:
            self._stale[index] += 1

    def _update(self, gradients: GroupGradient) -> None:
        for table, adagrad in self._adagrad.items():
            indices, rows, _ = gradients[table]
            adagrad.update(indices, rows)
        self._used += gradients.num_gradients
        self._curve.steps += 1
        if self._elapsed() >= len(self._snapshots) * self._settings.seconds / NUM_POINTS:
            self._keep_point()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start

    def _keep_point(self) -> None:
        copied = WordVectors.__new__(WordVectors)
        copied.input, copied.output = self._vectors.input.copy(), self._vectors.output.copy()
        self._snapshots.append(copied)
        self._curve.seconds.append(self._elapsed())
        self._curve.gradients.append(self._used)

    def _finish(self) -> Curve:
        curve = self._curve
        if curve.gradients[-1] < self._used:
            self._keep_point()
        curve.losses = [vectors.loss(self._examples.held_out) for vectors in self._snapshots]
        curve.stale = sum(self._stale)
        counts, totals = (sum(column) for column in zip(*self._lags, strict=True))
        curve.lag = totals / max(counts, 1)
        return curve

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Close the group when the time is over or an exception comes through, and wake who sleeps."""

        def end() -> None:
            self._over.set()
            self._group.close(for_all=True)

        timer = threading.Timer(self._settings.seconds, end)
        self._start = time.perf_counter()
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            end()


def run_study(
    examples: Examples, settings: StudySettings, on_trial: Callable[[Curve], None] | None = None
) -> list[Curve]:
    """Run all trials. Regimes take turns within a seed, so that a slow minute of the machine meets them all."""
    curves = []
    for stragglers in settings.stragglers:
        for seed in settings.seeds:
            for regime in settings.regimes:
                curves.append(Trial(examples, settings, stragglers, regime, seed).run())
                if on_trial:
                    on_trial(curves[-1])
    return curves


@dataclass(frozen=True)
class Spread:
    """What something was over the seeds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Return the spread of one number for each seed."""
        return cls(float(np.median(numbers)), float(min(numbers)), float(max(numbers)))
