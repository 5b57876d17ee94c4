"""Builds and runs the libFuzzer targets of cpp/fuzz; `make fuzz` is python -m tests.fuzz.libfuzzer --seconds 30."""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
TARGETS = sorted(source.stem for source in (ROOT / "cpp" / "fuzz").glob("*.cpp"))
NUM_SEEDS = 200


def find_clang():
    """Return a clang++, the newest if there are several without a plain one; None if there is none."""
    plain = shutil.which("clang++")
    if plain:
        return plain
    return next((path for version in range(40, 13, -1) if (path := shutil.which(f"clang++-{version}"))), None)


def _tool(name):
    """Return a tool of this environment, or else of the system."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def build(clang):
    """Build what is not built yet."""
    cmake, ninja = _tool("cmake"), _tool("ninja")
    configure = [cmake, "-S", ROOT / "cpp" / "fuzz", "-B", BUILD, "-G", "Ninja", "--log-level=WARNING"]
    configure += [f"-DCMAKE_CXX_COMPILER={clang}", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=None"]
    for command in (configure, [cmake, "--build", BUILD]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode:
            raise RuntimeError(f"building the fuzzers failed:\n{done.stdout}")


def corpus(target):
    """Return the folder of a target's inputs; what earlier runs found worth keeping is in it, too."""
    folder = BUILD / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(target)
    for number in range(NUM_SEEDS):
        (folder / f"seed-{number}").write_bytes(rng.randbytes(rng.choice([8, 60, 300, 1500])))
    return folder


def run(target, seconds, seed=1):
    """Run one target so long; return how many inputs it was given.

    Raises:
        RuntimeError: it found something. The message has the report and the file with the input.
    """
    found = BUILD / "found"
    found.mkdir(exist_ok=True)
    command = [
        BUILD / f"fuzz_{target}", f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=4096", "-len_control=0",
        "-timeout=30", "-rss_limit_mb=4096", "-print_final_stats=1", f"-artifact_prefix={found}/{target}-",
        corpus(target),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"{target}: exit status {done.returncode}\n{done.stdout[-8000:]}")
    return int(re.search(r"stat::number_of_executed_units: (\d+)", done.stdout)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=30, help="for each target")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31))
    options = parser.parse_args()
    clang = find_clang()
    if clang is None:
        sys.exit("the libFuzzer targets need clang++ (on Debian and Ubuntu: apt-get install clang)")
    print(f"building {len(TARGETS)} targets with {clang}", flush=True)
    try:
        build(clang)
        for target in TARGETS:
            print(f"{target}: {run(target, options.seconds, options.seed)} inputs, nothing found", flush=True)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
