"""What a decoded state says of gradients and their workers, checked against its spec and against itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from gradquorum.arrays import MAX_INT64
from gradquorum.errors import InvalidArgumentError
from gradquorum.records import Contribution
from gradquorum.specs import RoundSpec

if TYPE_CHECKING:
    from gradquorum.state_header import ContributionHeader

__all__ = ["by_name", "check_accepted", "check_deferred", "check_offer", "check_workers", "num_gradients_of"]

_MAX_LAG = 2**64 - 1
"""Between two steps of int64."""

Worker = int | str
V = TypeVar("V")


def check_offer(where: str, header: ContributionHeader, spec: RoundSpec) -> None:
    """Check that a round of that spec can hold a gradient, or a merged prefix, of whom a header says."""
    options, policy = spec.options, spec.policy
    if header.num_gradients != 1:
        if not options.compacts:
            raise InvalidArgumentError(
                f"state: {where}: expected one gradient, as nothing is merged before a take, got {header.num_gradients}"
            )
        if header.worker is not None:
            raise InvalidArgumentError(f"state: {where}: expected no worker of a merged prefix, got {header.worker!r}")
    elif header.worker is None and options.order == "worker":
        raise InvalidArgumentError(f"state: {where}: expected a worker, as order='worker' is set")
    if header.sequence is not None and header.worker is None:
        raise InvalidArgumentError(f"state: {where}: expected a worker beside sequence {header.sequence}")
    if header.lag and not (policy.weighs and header.lag <= min(policy.max_lag, _MAX_LAG)):
        raise InvalidArgumentError(f"state: {where}: expected a lag that {policy!r} weighs, got {header.lag}")


def check_accepted(accepted: Mapping[Worker, int], log: Sequence[Contribution], spec: RoundSpec) -> None:
    """Check the counts of gradients by worker against a log, of which a merged prefix has forgotten its workers."""
    options, number = spec.options, num_gradients_of(log)
    named = dict(_by_worker(log))
    if _is_whole(log) and accepted != named:
        raise InvalidArgumentError(f"state: expected the counts of gradients by worker {named}, got {accepted}")
    total = sum(accepted.values())
    if total > number or any(accepted.get(worker, 0) < count for worker, count in named.items()):
        raise InvalidArgumentError(
            f"state: expected {number} gradients, some of them of {named}, got those of {accepted}"
        )
    if options.max_per_worker is None:
        return
    if total != number or any(not 0 < count <= options.max_per_worker for count in accepted.values()):
        raise InvalidArgumentError(
            f"state: expected {number} gradients, 1 to max_per_worker={options.max_per_worker} of each worker, "
            f"got {accepted}"
        )


def _by_worker(log: Sequence[Contribution]) -> Counter[Worker]:
    return Counter(contribution.worker for contribution in log if contribution.worker is not None)


def by_name(what: str, pairs: Sequence[tuple[Worker, V]]) -> dict[Worker, V]:
    """Return what is said of each worker, once."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise InvalidArgumentError(f"state: {what}: expected each worker once, got {[worker for worker, _ in pairs]}")
    return result


def check_deferred(deferred: Sequence[Contribution], spec: RoundSpec) -> None:
    """Check the gradients that wait for the next round."""
    most = spec.options.max_per_worker
    if deferred and not spec.policy.defers:
        raise InvalidArgumentError("state: expected no deferred gradients, as the policy defers none")
    if any(contribution.num_gradients != 1 for contribution in deferred):
        raise InvalidArgumentError("state: expected single gradients among the deferred ones")
    if most is not None and any(count > most for count in _by_worker(deferred).values()):
        raise InvalidArgumentError(f"state: expected at most max_per_worker={most} deferred gradients of each worker")


def check_workers(workers: Sequence[Worker], log: Sequence[Contribution], spec: RoundSpec) -> None:
    """Check who has gradients in an undelivered round."""
    named, most = _by_worker(log), spec.options.max_per_worker
    fits = len(set(workers)) == len(workers) and named.keys() <= set(workers)
    fits = fits and len(workers) <= (len(named) if _is_whole(log) else num_gradients_of(log))
    if not fits or (most is not None and any(count > most for count in named.values())):
        raise InvalidArgumentError(f"state: expected the workers of an undelivered round, {dict(named)}, got {workers}")


def _is_whole(log: Sequence[Contribution]) -> bool:
    return all(contribution.num_gradients == 1 for contribution in log)


def num_gradients_of(log: Sequence[Contribution]) -> int:
    """Return how many gradients a log holds."""
    number = sum(contribution.num_gradients for contribution in log)
    if number > MAX_INT64:
        raise InvalidArgumentError(f"state: expected a count of gradients in int64, got {number}")
    return number
