"""The plain, obvious model of a round: lists and dicts, no locks, one caller."""

from dataclasses import dataclass, field

from gradquorum import ApplyStatus, Defer, Window

WINDOW = 64


class BelowWindow(Exception):
    pass


@dataclass(frozen=True)
class Gradient:
    rows: tuple  # of (id, int), repeats allowed
    worker: object = None


@dataclass(frozen=True)
class Batch:
    gradients: tuple
    step: int

    def sums(self):
        total, counts = {}, {}
        for gradient in self.gradients:
            for i, value in gradient.rows:
                total[i] = total.get(i, 0) + value
            for i in {i for i, _ in gradient.rows}:
                counts[i] = counts.get(i, 0) + 1
        return total, counts

    def workers(self):
        named = {gradient.worker for gradient in self.gradients} - {None}
        return tuple(sorted(named, key=lambda name: (isinstance(name, str), name)))

    def total(self):
        return sum(value for gradient in self.gradients for _, value in gradient.rows)


@dataclass(eq=False)
class Ticket:
    need: int
    exact: bool
    handle: int = 0
    future: object = None


@dataclass
class Model:
    max_per_worker: int | None = None
    staleness: object = "strict"
    step: int = 0
    published: int = 0
    num_stale: int = 0
    open: list = field(default_factory=list)
    deferred: list = field(default_factory=list)
    undelivered: list = field(default_factory=list)
    queue: list = field(default_factory=list)
    marks: dict = field(default_factory=dict)  # worker -> {sequence: status}
    joined: set = field(default_factory=set)

    def highest(self, worker):
        return max(self.marks.get(worker, {}), default=-1)

    def apply(self, gradient, local_step, sequence=None):
        """Return the status, the lag and, for a duplicate, the first status."""
        worker = gradient.worker
        seen = self.marks.get(worker, {})
        if sequence is not None and sequence < self.highest(worker) - WINDOW:
            raise BelowWindow
        if worker is not None:
            self.joined.add(worker)
        if sequence is not None and sequence in seen:
            return ApplyStatus.DUPLICATE, 0, seen[sequence]
        status, lag = ApplyStatus.ACCEPTED, 0
        if local_step is not None and local_step < self.step:
            lag = self.step - local_step
        most = self.staleness.max_lag if isinstance(self.staleness, Window) else 0
        log = self.open
        if lag > most and isinstance(self.staleness, Defer):
            status, log = ApplyStatus.DEFERRED, self.deferred
        elif lag > most:
            status, log = ApplyStatus.STALE, None
            self.num_stale += 1
        if log is not None and self.is_full(log, worker):
            status = ApplyStatus.REFUSED
        elif log is not None:
            log.append(gradient)
        if sequence is not None:
            self.marks.setdefault(worker, {})[sequence] = status
        return status, lag, None

    def is_full(self, log, worker):
        mine = sum(other.worker == worker for other in log)
        return self.max_per_worker is not None and mine >= self.max_per_worker

    def begin_round(self, log):
        """Begin a round with what is left of the last one, then what was deferred and has a place."""
        self.open, waiting, self.deferred = log, self.deferred, []
        for gradient in waiting:
            (self.deferred if self.is_full(self.open, gradient.worker) else self.open).append(gradient)

    def serve(self):
        """Serve the oldest tickets as long as that is possible; return them with their batches."""
        served = []
        while self.queue:
            ticket = self.queue[0]
            if self.undelivered:
                served.append((ticket, self.undelivered.pop(0)))
            elif len(self.open) >= ticket.need:
                end = ticket.need if ticket.exact else len(self.open)
                served.append((ticket, Batch(tuple(self.open[:end]), self.step)))
                self.begin_round(self.open[end:])
                self.step += 1
                self.num_stale = 0
            else:
                break
            self.queue.pop(0)
        return served
