"""How much of the shapes' ratios is memory? The rivals again, with a C library that keeps what they free.

Ours keeps freed memory in a pool. The rivals leave that to the C library, which by default gives large pieces back to
the system, and each round pays for fresh pages. A user can tell glibc not to; then what is left is the work itself.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import rivals
from benchmarks.measure import digits
from benchmarks.report import Options, Report, table

KEEP = {
    "MALLOC_MMAP_MAX_": "0",  # nothing in mappings of its own, which are given back when freed
    "MALLOC_TRIM_THRESHOLD_": str(2**40),  # nothing given back from the heap
    "MALLOC_TOP_PAD_": str(2**28),
}
SHAPES = ("mid", "large", "many", "wide", "thin", "raw")


def run(options: Options) -> Report:
    report = Report(
        "The shapes beside rivals whose freed memory is kept (quick run in a process of its own, no floors)"
    )
    shapes = [name for name in SHAPES if name in options.cases] or list(SHAPES)
    if platform.libc_ver()[0] != "glibc":
        report.text.append("left out: the C library is not glibc")
        return report
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "benchmarks", "--quick", "--only", *shapes, "--engines", options.engines[0]]
        root = Path(__file__).parents[1]
        subprocess.run(
            [*command, "--json", out], cwd=root, env=os.environ | KEEP, stdout=subprocess.DEVNULL, check=True
        )
        cases = json.loads(out.read_text())["questions"]["shapes"]
    rows = []
    for name in shapes:
        best = cases[name]["best_other"]
        each = [cases[name][how] for how in ("times_ours_copying", "times_ours_lending")]
        rows.append([name, best, *(digits(times[best]) for times in each)])
        rows[-1] += [digits(times[rivals.TENSORFLOW]) if rivals.TENSORFLOW in times else "-" for times in each]
        report.data[name] = cases[name]
    report.text.append(table(["case", "best other", "other / copy", "other / lend", "TF / copy", "TF / lend"], rows))
    return report
