"""Record what TensorFlow's accumulators do: `python -m tests.parity.record` where TensorFlow is installed.

Writes `recorded.json.gz` beside this file: plain JSON, one program a line after a first line that says what
it was recorded with. Floats are their bits in hexadecimal, so nothing is rounded on the way. Every step is
checked against what the generator expects of it: a mistake there is not recorded as a truth.
"""

import argparse
import collections
import dataclasses
import gzip
import json
import os
from pathlib import Path

import numpy as np

from tests.parity.generator import generate
from tests.parity.programs import Program, from_plain
from tests.parity.replay import TensorFlowGraphs, run

FILE = Path(__file__).with_name("recorded.json.gz")
SEED = 20260
NUM_PROGRAMS = 720


def check(program, trace):
    """Raise if TensorFlow did something that the generator did not foresee."""
    count = 0
    for number, (step, entry) in enumerate(zip(program.steps, trace, strict=True)):
        refused = step["outcome"] not in ("accepted", "stale", "taken", "set")
        count = 0 if step["outcome"] == "taken" else count + (step["outcome"] == "accepted")
        if refused != ("error" in entry) or entry["count"] != count:
            raise AssertionError(f"program {program.number}, step {number}: {step} came to {entry}")
        if "values" in entry:
            values = from_plain(program.dtype, entry["values"])
            small = (values != 0) & (np.abs(values) < np.finfo(values.dtype).smallest_normal)
            if small.any():
                raise AssertionError(f"program {program.number}, step {number}: subnormal result")


def read():
    """Return (what it was recorded with, [(program, trace), ...])."""
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        about, *lines = map(json.loads, file)
    return about, [(Program(**line["program"]), line["trace"]) for line in lines]


def write(about, recorded):
    lines = [about]
    lines += [{"program": dataclasses.asdict(program), "trace": trace} for program, trace in recorded]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    with open(FILE, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(text.encode())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--programs", type=int, default=NUM_PROGRAMS)
    options = parser.parse_args()

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow

    graphs = TensorFlowGraphs(tensorflow)
    recorded = []
    for number in range(options.programs):
        program = generate(options.seed, number)
        with graphs.adapter(program) as adapter:
            trace = run(program, adapter)
        check(program, trace)
        recorded.append((program, trace))

    kinds = collections.Counter(program.kind for program, _ in recorded)
    steps = collections.Counter(step["outcome"] for program, _ in recorded for step in program.steps)
    about = {"tensorflow": tensorflow.__version__, "numpy": np.__version__}
    about |= {"seed": options.seed, "programs": len(recorded)}
    write(about, recorded)
    print(about, dict(kinds), dict(steps), f"{FILE.stat().st_size} bytes", sep="\n")


if __name__ == "__main__":
    main()
