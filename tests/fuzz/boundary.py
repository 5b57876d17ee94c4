"""Throws arguments of all kinds at the library and its native module: a right result or a proper error, nothing else.

Run by test_boundary.py in a process of its own, because what it looks for may end the process. By hand:

    python -m tests.fuzz.boundary --seed 7 --calls 1000000      # a long run
    python -m tests.fuzz.boundary --seed 7 --only 1234          # one case of it again
"""

import argparse
import faulthandler
import json
import logging
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

import gradquorum as gq
from tests.fuzz.hostile import HostileError

PROPER = (gq.GradQuorumError, TypeError, ValueError, HostileError)
"""What a call of a public method may raise."""
PROPER_INSIDE = (*PROPER, MemoryError, OverflowError)
"""What a call of the native module may raise."""


class Wrong(Exception):
    """A wrong answer."""


class Fuzz:
    """Counts calls and lets them raise what they may."""

    def __init__(self):
        self.calls = 0
        self.results = 0

    def call(self, function, *args, **kwargs):
        """Return `(result, None)` or `(None, error)` of a public call."""
        return self._call(PROPER, function, args, kwargs)

    def inside(self, function, *args, **kwargs):
        """The same for a call of the native module."""
        return self._call(PROPER_INSIDE, function, args, kwargs)

    def _call(self, proper, function, args, kwargs):
        self.calls += 1
        try:
            result = function(*args, **kwargs)
        except proper as error:
            return None, error
        self.results += 1
        return result, None


def check(condition, what, *details):
    if not condition:
        raise Wrong(": ".join([what, *map(repr, details)]))


def run_case(fuzz, seed, number):
    from tests.fuzz import at_once, public, raw, strange

    cases = [
        raw.sparse, public.sparse, raw.dense, public.dense, raw.sparse, public.group, strange.arguments, public.sparse,
        public.construction, at_once.mutated, at_once.together, at_once.dropped,
    ]  # fmt: skip
    case = strange.every if number < 0 else cases[number % len(cases)]
    try:
        case(fuzz, *([np.random.default_rng([seed, number])] if number >= 0 else []))
    except BaseException:
        print(f"FAILED: python -m tests.fuzz.boundary --seed {seed} --only {number}   ({case.__qualname__})")
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        raise SystemExit(1) from None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=3000, help="stop after so many calls")
    parser.add_argument("--only", type=int, help="run this case alone")
    parser.add_argument("--progress", type=Path, help="file that names the case at work, for when the process dies")
    options = parser.parse_args()
    faulthandler.enable()
    logging.getLogger("gradquorum").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")  # of hostile arguments; but the library's own arithmetic must be quiet
    warnings.simplefilter("error", RuntimeWarning)

    fuzz, started = Fuzz(), time.monotonic()
    if options.only is not None:
        run_case(fuzz, options.seed, options.only)
    else:
        progress = options.progress.open("wb", buffering=0) if options.progress else None
        number = -1
        while fuzz.calls < options.calls:
            if progress:
                progress.seek(0)
                progress.write(struct.pack("q", number))
            run_case(fuzz, options.seed, number)
            number += 1
    seconds = time.monotonic() - started
    print(json.dumps({"calls": fuzz.calls, "results": fuzz.results, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
