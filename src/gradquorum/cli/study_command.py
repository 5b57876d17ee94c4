"""What `gradquorum demo --study` does: checks, trains, prints, writes."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from gradquorum.cli.report import Report
from gradquorum.cli.study import Curve, StudySettings, run_study
from gradquorum.cli.study_report import plot, show, write_json
from gradquorum.cli.training import Examples, Settings

STUDY_STRAGGLER = 200  # ms, when --straggler is not given


def check_study(settings: Settings, folder: Path | None, num_seeds: int, seconds: int) -> StudySettings:
    """Return the settings of a study; with a folder for it, refuse what cannot be."""
    straggler = settings.straggler
    if click.get_current_context().get_parameter_source("straggler") is ParameterSource.DEFAULT:
        straggler = STUDY_STRAGGLER / 1000
    if folder is not None:
        if not seconds:
            raise click.BadParameter("a study needs at least 1", param_hint="'--compare'")
        if settings.workers < 2:
            raise click.BadParameter("a study needs at least 2", param_hint="'--workers'")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "study.json").touch()
        except OSError as error:
            raise click.BadParameter(f"cannot write to {folder}: {error.strerror}", param_hint="'--study'") from None
    return StudySettings(
        workers=settings.workers,
        required=min(settings.required, settings.workers - 1),
        seconds=seconds,
        straggler=straggler,
        dim=settings.dim,
        seed=settings.seed,
        num_seeds=num_seeds,
        engine=settings.engine,
    )


def make_study(examples: Examples, settings: StudySettings, folder: Path, report: Report) -> None:
    """Compare regimes under stragglers, over several seeds; print what came out, and write it to files."""
    num_trials = len(settings.stragglers) * len(settings.regimes) * len(settings.seeds)
    report.line(f"{num_trials} trainings of {settings.seconds:g} s each; {settings.engine} engine")

    def on_trial(curve: Curve) -> None:
        text = f"{curve.steps} steps, loss {curve.losses[-1]:.3f}"
        report.line(f"stragglers {curve.stragglers}, seed {curve.seed}, {curve.regime}: {text}")

    curves = run_study(examples, settings, on_trial)
    show(report, curves, settings)
    write_json(folder / "study.json", curves, settings)
    written = ["study.json"]
    try:
        plot([folder / "study.svg", folder / "study.png"], curves, settings)
        written += ["study.svg", "study.png"]
    except ModuleNotFoundError:
        report.line("no plots: matplotlib is missing: pip install matplotlib")
    report.line(f"written to {click.format_filename(folder)}: {', '.join(written)}")
