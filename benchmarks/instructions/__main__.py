"""`python -m benchmarks.instructions`: counts, and compares with the accepted counts of this compiler."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.instructions import counts

ROOT = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("accepted.json")
# One for each compiler: CMake keeps the one that it was first given.
BUILD = ROOT / "build" / "guard" / Path(os.environ.get("CXX", "c++")).name
PROGRAM = "instructions"


def _tool(name: str, hint: str) -> str:
    """Return a tool of this environment, or else of the system."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return found or sys.exit(f"the instruction counts need {name}: {hint}")


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        sys.exit(f"{command[0]} failed with exit status {done.returncode}:\n{done.stdout}")
    return done.stdout


def build() -> Path:
    hint = "`make guard` brings it along"
    cmake, ninja = _tool("cmake", hint), _tool("ninja", hint)
    _run(cmake, "-S", ROOT / "cpp" / "guard", "-B", BUILD, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}")
    _run(cmake, "--build", BUILD)
    return BUILD / PROGRAM


def count() -> tuple[str, counts.Counts]:
    """Build and run the program under callgrind; return its compiler, and the instructions of each case."""
    valgrind = _tool("valgrind", "on Debian and Ubuntu: apt-get install valgrind")
    program = build()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        options = ["--toggle-collect=measured", "--dump-after=measured", f"--callgrind-out-file={out}"]
        log = f"--log-file={folder}/log"
        compiler, *names = _run(valgrind, "--tool=callgrind", log, *options, program).splitlines()
        # One file for each case, numbered from 1 in the order of the names.
        dumps = [out.with_name(f"out.{number}").read_text() for number in range(1, len(names) + 1)]
    return " ".join(compiler.split()), {
        name: counts.own_instructions(dump.splitlines(), PROGRAM) for name, dump in zip(names, dumps, strict=True)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("--accept", action="store_true", help=f"write the counts into {ACCEPTED.relative_to(ROOT)}")
    parser.add_argument("--require", action="store_true", help="fail if no counts are accepted for this compiler")
    options = parser.parse_args(arguments)
    compiler, got = count()
    sys.exit(judge(compiler, got, ACCEPTED, accept=options.accept, required=options.require))


def judge(compiler: str, got: counts.Counts, path: Path, *, accept: bool = False, required: bool = False) -> str | None:
    """Print what was counted, and accept it if told to. Return what is wrong, or None."""
    accepted = counts.read(path)
    known = accepted.get(compiler, {})
    print(f"compiler: {compiler}\n\n{counts.counts_table(got, known)}", flush=True)
    has_wide = any(map(counts.is_wide, got))
    if not has_wide:
        print("This processor cannot run the wide kernels; they are not compared.")
    if accept:
        kept = {} if has_wide else {name: number for name, number in known.items() if counts.is_wide(name)}
        counts.write(path, accepted | {compiler: got | kept})
        print(f"accepted for {compiler}: {path}")
        return None
    if not known:
        others = ", ".join(accepted) or "no compiler"
        print(f"NOTHING COMPARED: no counts are accepted for {compiler}, only for {others}.")
        print("`make accept-instructions` adds those above.")
        return "they are required here" if required else None
    faults = counts.compare(got, known if has_wide else counts.without_wide(known))
    if faults:
        return "\n".join(
            [
                "instruction counts differ from the accepted ones:",
                *faults,
                "If this is meant, also where it is an improvement: make accept-instructions, and commit the file.",
            ]
        )
    print(f"all {len(got)} counts are within {counts.TOLERANCE:.0%} of the accepted ones")
    return None


if __name__ == "__main__":
    main()
