"""What does `import gradquorum` cost on top of NumPy? Each figure from a fresh process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.measure import cell
from benchmarks.report import Floor, Options, Report, table

MOST_MILLISECONDS = 100.0

PROGRAM = """
import time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
import gradquorum
end = time.perf_counter()
print([middle - start, end - middle])
"""


def import_once(bytecode: str) -> tuple[float, float]:
    """Return the seconds to import NumPy, and those to import the library after it.

    Args:
        bytecode: a folder for compiled modules. An installed package has its own, which an editable one may not.
    """
    env = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    # The warning that there is no native engine, if so, comes later, at the first accumulator.
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True, env=env)
    numpy_seconds, own_seconds = json.loads(done.stdout)
    return numpy_seconds, own_seconds


def run(options: Options) -> Report:
    report = Report("`import gradquorum` on top of NumPy, in fresh processes")
    with tempfile.TemporaryDirectory() as bytecode:
        import_once(bytecode)  # compiles, and brings the files into memory
        samples = [import_once(bytecode) for _ in range(7 if options.quick else 21)]
    numpy_ms, own_ms = ([seconds * 1e3 for seconds in each] for each in zip(*samples, strict=True))
    share = [own / numpy for own, numpy in zip(own_ms, numpy_ms, strict=True)]
    rows = [["import numpy, ms", cell(numpy_ms)], ["then import gradquorum, ms", cell(own_ms)]]
    rows.append(["gradquorum / NumPy", cell(share)])
    report.text.append(table(["what", "median (quartiles)"], rows))
    median = statistics.median(own_ms)
    report.floors = [Floor("import beyond NumPy", median, MOST_MILLISECONDS, at_least=False, unit="ms", samples=own_ms)]
    report.data = {"numpy_ms": numpy_ms, "gradquorum_ms": own_ms}
    return report
