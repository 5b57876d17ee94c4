"""`python -m benchmarks`: runs the questions, prints a table for each and one of all floors."""

from __future__ import annotations

import argparse
import importlib
import json
import time
import warnings
from pathlib import Path

from benchmarks import docs, plot
from benchmarks.cases import CASES
from benchmarks.report import Options, environment, environment_line, floors_summary, floors_table
from gradquorum.engine import available_engines

QUESTIONS = (
    "imports",
    "round",
    "flat",
    "memory",
    "parallel",
    "process",
    "ray",
    "density",
    "kept_memory",
    "shapes",
    "adapters",
)
"""In this order: frameworks are loaded by the last two only."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*QUESTIONS, *CASES]
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names, help=f"questions or cases of shapes: {', '.join(names)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: under a minute in all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", metavar="FILE", help="draw the shapes as .svg or .png (needs matplotlib)")
    parser.add_argument(
        "--profile", action="store_true", help="show where the time of one-row calls and of the shapes goes"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=available_engines(), help="engines; the first is judged (default: the best one)"
    )
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="write the figures into README.md, docs/ and benchmarks/results/ (needs all rivals and questions)",
    )
    arguments = parser.parse_args()
    if arguments.write_docs and (lines := ["--only was given"] * bool(arguments.only) + docs.missing()):
        parser.error(f"--write-docs needs a run of everything: {'; '.join(lines)}. Try: {docs.COMMAND}")
    return arguments


def main() -> None:
    arguments = parse()
    chosen = arguments.only or list(QUESTIONS)
    cases = [name for name in CASES if name in chosen] or list(CASES)
    questions = [q for q in QUESTIONS if q in chosen or (q == "shapes" and set(chosen) & set(CASES))]
    engines = arguments.engines or [available_engines()[0]]
    options = Options(engines, cases, arguments.quick, arguments.profile)
    warnings.filterwarnings("ignore", module="tensorflow")
    env = environment(engines)
    print(environment_line(env), flush=True)

    reports = {}
    for question in questions:
        start = time.monotonic()
        reports[question] = importlib.import_module(f"benchmarks.bench_{question}").run(options)
        reports[question].show()
        print(f"({question}: {time.monotonic() - start:.0f} s)", flush=True)
    floors = [floor for report in reports.values() for floor in report.floors]
    if floors:
        print(f"\n## Floors\n\n{floors_table(floors)}\n{floors_summary(floors)}")
    result = {"environment": env, "quick": options.quick, "floors": [floor.to_json() for floor in floors]}
    result["questions"] = {name: {"title": r.title, **r.data} for name, r in reports.items()}
    text = json.dumps(result, indent=1) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
        print(f"written: {arguments.json}")
    if arguments.write_docs:
        print("written:", *docs.write(env, options.quick, reports, floors, text))
    if arguments.plot and "shapes" in reports:
        print(plot.draw(reports["shapes"].data, arguments.plot))


if __name__ == "__main__":
    main()
