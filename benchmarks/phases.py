"""Where the time of a shape goes inside the library: CPU time of the calling thread, by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.cases import Gradient
from benchmarks.measure import digits
from gradquorum import SparseConditionalAccumulator
from gradquorum.engine import ReducerSpec, get_engine
from gradquorum.round import Round
from gradquorum.targets.host import RoundHost

PHASES = ("plain_block", "offer", "distinct_bytes", "compact", "merge")
NUM_ROUNDS = 7


@contextmanager
def _clocked(host: RoundHost, engine: str, spent: dict[str, float]) -> Iterator[None]:
    """Clock the library's own functions, on this round and of all, while this lasts."""
    float32 = np.dtype(np.float32)
    reducer = type(get_engine(engine).sparse_reducer(ReducerSpec(float32, float32, "MEAN")))
    places: dict[str, Any] = dict.fromkeys(PHASES, reducer) | {"plain_block": host, "offer": Round}
    attributes = {name: "_plain_block" if name == "plain_block" else name for name in PHASES}
    before = {name: getattr(place, attributes[name]) for name, place in places.items()}

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **kwargs)
            spent[name] += time.thread_time() - start
            return result

        return call

    try:
        for name, place in places.items():
            setattr(place, attributes[name], clocked(name, before[name]))
        yield
    finally:
        for name, place in places.items():
            setattr(place, attributes[name], before[name])


def row(name: str, gradients: list[Gradient], engine: str, copy: bool) -> list[str]:
    """Return a table row: milliseconds of all applies, of the take, and of each phase in a round."""
    accumulator = SparseConditionalAccumulator(gradients[0][1].dtype, engine=engine)
    applies = takes = 0.0
    spent: dict[str, float] = defaultdict(float)
    with _clocked(accumulator._target._host, engine, spent):
        for i in range(NUM_ROUNDS + 1):
            if i == 1:  # the first round warms up
                applies = takes = 0.0
                spent.clear()
            start = time.thread_time()
            for ids, values in gradients:
                accumulator.apply_grad(ids, values, local_step=None, copy=copy)
            middle = time.thread_time()
            accumulator.take_grad(len(gradients))
            applies += middle - start
            takes += time.thread_time() - middle
    own = applies + takes - sum(spent.values())
    figures = [applies, takes, *(spent[phase] for phase in PHASES), own]
    return [f"{name}, {'copy' if copy else 'lend'}", *(digits(x / NUM_ROUNDS * 1e3) for x in figures)]


HEADERS = ["case", "applies", "take", *PHASES, "the rest"]
