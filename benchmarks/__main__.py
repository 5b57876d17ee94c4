"""`python -m benchmarks`: runs the questions, prints a table for each and one of all floors."""

from __future__ import annotations

import argparse
import importlib
import json
import time
import warnings
from pathlib import Path

from benchmarks import plot
from benchmarks.cases import CASES
from benchmarks.report import Options, environment, environment_line, floors_table
from gradquorum.engine import available_engines

QUESTIONS = ("round", "flat", "memory", "parallel", "process", "density", "shapes")  # frameworks last


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
    return parser.parse_args()


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
        print("\n## Floors: base for every release, goal for the finished library\n")
        print(floors_table(floors))
    if arguments.json:
        result = {"environment": env, "quick": options.quick, "floors": [floor.to_json() for floor in floors]}
        result["questions"] = {name: {"title": r.title, **r.data} for name, r in reports.items()}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {arguments.json}")
    if arguments.plot and "shapes" in reports:
        print(plot.draw(reports["shapes"].data, engines[0], arguments.plot))


if __name__ == "__main__":
    main()
