"""Reads what callgrind wrote, and compares counts with the accepted ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.report import table

TOLERANCE = 0.03
"""A count may differ by this share from the accepted one."""

Counts = dict[str, int]
"""Instructions of each case."""

_OBJECT = re.compile(r"ob=\((\d+)\)(?: (.*))?")
_NAMED = re.compile(r"cob=\((\d+)\) (.*)")
_COST = re.compile(r"[+*\-\d]\S* (\d+)")


def own_instructions(dump: Iterable[str], program: str) -> int:
    """Return the instructions spent in the program's own code, given the lines of a callgrind file.

    What the C library does is left out: it chooses its `memcpy` by processor.
    """
    names: dict[str, str] = {}
    own, skip, total = False, False, 0
    for line in dump:
        if match := _OBJECT.match(line):
            number, name = match.groups()
            names[number] = name or names[number]
            own = Path(names[number].strip()).name == program
        elif match := _NAMED.match(line):
            names[match[1]] = match[2]
        elif line.startswith("calls="):
            skip = True  # the next line is what the callee took, which is counted with the callee
        elif match := _COST.match(line):
            if own and not skip:
                total += int(match[1])
            skip = False
    return total


def read(path: Path) -> dict[str, Counts]:
    """Return the accepted counts: compiler -> case -> instructions."""
    accepted: dict[str, Counts] = json.loads(path.read_text())
    return accepted


def write(path: Path, accepted: Mapping[str, Counts]) -> None:
    path.write_text(json.dumps(dict(sorted(accepted.items())), indent=1) + "\n")


def compare(got: Mapping[str, int], accepted: Mapping[str, int]) -> list[str]:
    """Return a line for each case that is not as accepted; a case that one of the two does not have is one."""
    faults = []
    for name in [*accepted, *(name for name in got if name not in accepted)]:
        if name not in got:
            faults.append(f"{name}: has an accepted count, but is not measured")
        elif name not in accepted:
            faults.append(f"{name}: {got[name]:,} instructions, and no accepted count")
        elif abs(got[name] - accepted[name]) > TOLERANCE * accepted[name]:
            faults.append(
                f"{name}: {got[name]:,} instructions, accepted are {accepted[name]:,} +- {TOLERANCE:.0%}; "
                f"{_change(got[name], accepted[name])}"
            )
    return faults


def without_wide(counts: Mapping[str, int]) -> Counts:
    """Return the cases that every processor can run."""
    return {name: count for name, count in counts.items() if not is_wide(name)}


def is_wide(name: str) -> bool:
    return name.endswith(" wide")


def counts_table(got: Mapping[str, int], accepted: Mapping[str, int]) -> str:
    rows = [
        [name, f"{count:,}", *((f"{a:,}", _change(count, a)) if (a := accepted.get(name)) else ("-", "-"))]
        for name, count in got.items()
    ]
    return table(["case", "instructions", "accepted", "change"], rows)


def _change(got: int, accepted: int) -> str:
    return f"{got / accepted - 1:+.2%}"
