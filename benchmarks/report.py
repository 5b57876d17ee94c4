"""What a benchmark hands back: tables, floors and figures; and how they are printed."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import cell


@dataclass
class Options:
    """What the command line chose."""

    engines: list[str]
    cases: list[str]
    quick: bool
    profile: bool


@dataclass
class Floor:
    """A bound to keep.

    Attributes:
        got: what was measured; None if it could not be.
        floor: the bound; None if only the goal counts.
        goal: bound that is better still; None if there is none.
        at_least: whether more is better.
        samples: what `got` is the median of, to show how far they spread.
        judged: False if it was measured against less than it should be.
    """

    what: str
    got: float | None
    floor: float | None = None
    goal: float | None = None
    at_least: bool = True
    unit: str = "x"
    samples: list[float] = field(default_factory=list)
    judged: bool = True

    def verdict(self, bound: float | None) -> str:
        if bound is None:
            return ""
        if self.got is None:
            return "not measured"
        if not self.judged:
            return "not judged"
        return "met" if (self.got >= bound if self.at_least else self.got <= bound) else "SHORT"

    @property
    def result(self) -> str:
        """The verdict that counts."""
        return self.verdict(self.goal if self.floor is None else self.floor)

    def row(self) -> list[str]:
        sign = ">=" if self.at_least else "<="
        bounds = ["" if b is None else f"{sign} {b:g} {self.unit}" for b in (self.floor, self.goal)]
        got = "-" if self.got is None else f"{cell(self.samples or [self.got])} {self.unit}"
        return [self.what, got, bounds[0], self.verdict(self.floor), bounds[1], self.verdict(self.goal)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"floor_verdict": self.verdict(self.floor), "goal_verdict": self.verdict(self.goal)}


@dataclass
class Report:
    """The answer to one question."""

    title: str
    text: list[str] = field(default_factory=list)
    floors: list[Floor] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def body(self) -> str:
        return "\n".join(self.text)

    def show(self) -> None:
        print(f"\n## {self.title}\n\n{self.body()}", flush=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, aligned for reading as it is."""
    widths = [max(len(line[i]) for line in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "| " + " | ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|"
    return "\n".join([line(headers), rule, *map(line, rows)]) + "\n"


def floors_table(floors: Sequence[Floor]) -> str:
    return table(["what", "got (quartiles)", "floor", "", "goal", ""], [floor.row() for floor in floors])


def floors_summary(floors: Sequence[Floor]) -> str:
    """Return a line that says how many floors are met, and names those that are not."""
    met = sum(floor.result == "met" for floor in floors)
    parts = [f"{met} of {len(floors)} floors are met"]
    for result in ("SHORT", "not measured", "not judged"):
        if names := [floor.what for floor in floors if floor.result == result]:
            parts.append(f"{result}: {', '.join(names)}")
    return "; ".join(parts) + "."


def environment(engines: Sequence[str]) -> dict[str, Any]:
    """Return where and with what the figures were taken."""
    versions = {"python": platform.python_version()}
    for package in ("gradquorum", "numpy", "scipy", "torch", "tensorflow", "tensorflow_cpu", "ray"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "engines": list(engines),
        "versions": versions,
    }


def environment_line(env: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    load = "" if env["load"] is None else f", load {env['load']:.1f}"
    engines = ", ".join(env["engines"])
    return f"{env['cpu']}, {env['num_cpus']} cores{load}; {versions}; commit {env['commit']}; engine {engines}"


def _commit() -> str | None:
    """Return the commit, marked if the tree differs from it."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match=-"]
        here = Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
