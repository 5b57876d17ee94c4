"""Writes the figures of a run into the README, docs/ and benchmarks/results/; nobody copies them by hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot, rivals
from benchmarks.report import Floor, Report, environment_line, floors_summary, floors_table

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures of make bench: begin -->", "<!-- figures of make bench: end -->"
HEADLINES = ("small", "mid", "large", "many")
"""The shapes that the README shows, short or met; all floors are in docs/benchmarks.md."""
COMMAND = "make bench RIVALS=1 BENCH_ARGS=--write-docs"


def missing() -> list[str]:
    """Return what a run for the documents needs and does not have here."""
    lines = rivals.missing()
    if importlib.util.find_spec("matplotlib") is None:
        lines.append("matplotlib is not installed")
    return lines


def replace_between_marks(text: str, figures: str, where: str) -> str:
    """Return the text with what is between the marks replaced.

    Raises:
        ValueError: not each mark is there once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{where}: expected one line {BEGIN} and below it one line {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{figures.strip()}\n\n{END}{after}"


def figures_of_readme(source: str, floors: Sequence[Floor]) -> str:
    """Return the picture and a short table."""
    shown = [f for f in floors if f.what.partition(":")[0] in HEADLINES and f.what.endswith(" / ours")]
    count = f"{sum(f.result == 'met' for f in floors)} of {len(floors)} floors are met"
    return (
        f"![How many times longer others take](docs/shapes.svg)\n\n{source}\n\n{floors_table(shown)}\n"
        f"Of all, {count}; [docs/benchmarks.md](docs/benchmarks.md#floors) says which are not."
    )


def figures_of_page(source: str, reports: Mapping[str, Report], floors: Sequence[Floor]) -> str:
    """Return the floors, then the answer to each question."""
    summary = f"### Floors\n\n{floors_summary(floors)}\n\n{floors_table(floors)}"
    return "\n".join([f"{source}\n", summary, *(f"### {r.title}\n\n{r.body()}" for r in reports.values())])


def write(
    environment: dict[str, Any], quick: bool, reports: Mapping[str, Report], floors: Sequence[Floor], result: str
) -> list[str]:
    """Write everything; `result` is the JSON. Return the paths."""
    source = f"{'Quick run' if quick else 'Run'} of {environment['date'][:10]}: {environment_line(environment)}."
    pages = {
        "README.md": figures_of_readme(source, floors),
        "docs/benchmarks.md": figures_of_page(source, reports, floors),
    }
    for path, figures in pages.items():
        text = (ROOT / path).read_text()
        (ROOT / path).write_text(replace_between_marks(text, figures, path))
    plot.draw(reports["shapes"].data, str(ROOT / "docs" / "shapes.svg"))
    (ROOT / "benchmarks" / "results" / "latest.json").write_text(result)
    return [*pages, "docs/shapes.svg", "benchmarks/results/latest.json"]
