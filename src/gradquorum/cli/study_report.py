"""What a study found: figures with their spread, a verdict, JSON, and plots where matplotlib is installed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from gradquorum import __version__
from gradquorum.cli.report import Report
from gradquorum.cli.study import Curve, Spread, Stragglers, StudySettings
from gradquorum.engine import engine_name

CLEAR = 1.05  # a ratio of times counts as a difference if all seeds are on one side of it


@dataclass(frozen=True)
class Row:
    """What one regime did under one kind of stragglers, over the seeds.

    Attributes:
        seconds_to_target: until the loss that every training under these stragglers reached.
        gradients_to_target: used until then.
    """

    stragglers: str
    regime: str
    steps_per_second: Spread
    stale_share: Spread
    lag: Spread
    loss: Spread
    seconds_to_target: Spread
    gradients_to_target: Spread


def target_loss(curves: Sequence[Curve]) -> float:
    """Return the lowest loss that each of the curves reached."""
    return max(min(curve.losses) for curve in curves)


def reached(curve: Curve, target: float) -> tuple[float, float]:
    """Return the seconds and the gradients after which a curve reached a loss, interpolated between points."""
    losses = np.minimum.accumulate(curve.losses)
    last = int(np.argmax(losses <= target))
    if last == 0:
        return curve.seconds[0], float(curve.gradients[0])
    part = (losses[last - 1] - target) / (losses[last - 1] - losses[last])
    return tuple(  # type: ignore[return-value]
        float(numbers[last - 1] + part * (numbers[last] - numbers[last - 1]))
        for numbers in (curve.seconds, curve.gradients)
    )


def summarise(curves: Sequence[Curve], settings: StudySettings) -> list[Row]:
    """Return a row for each kind of stragglers and each regime."""
    rows = []
    for stragglers in settings.stragglers:
        under = [curve for curve in curves if curve.stragglers == stragglers.name]
        target = target_loss(under)
        for regime in settings.regimes:
            mine = [curve for curve in under if curve.regime == regime.name]
            when = [reached(curve, target) for curve in mine]
            rows.append(
                Row(
                    stragglers.name,
                    regime.name,
                    Spread.of([curve.steps / max(curve.seconds[-1], 1e-9) for curve in mine]),
                    Spread.of([curve.stale / max(curve.stale + curve.gradients[-1], 1) for curve in mine]),
                    Spread.of([curve.lag for curve in mine]),
                    Spread.of([curve.losses[-1] for curve in mine]),
                    Spread.of([seconds for seconds, _ in when]),
                    Spread.of([gradients for _, gradients in when]),
                )
            )
    return rows


def verdicts(curves: Sequence[Curve], settings: StudySettings) -> list[str]:
    """Return for each kind of stragglers, in words, whether backups and asynchrony paid against waiting for all."""
    lines = []
    everybody, *others = (regime.name for regime in settings.regimes)
    for stragglers in settings.stragglers:
        under = [curve for curve in curves if curve.stragglers == stragglers.name]
        target = target_loss(under)
        seconds = {(curve.regime, curve.seed): reached(curve, target)[0] for curve in under}
        for regime in others:
            ratios = Spread.of([seconds[everybody, seed] / max(seconds[regime, seed], 1e-9) for seed in settings.seeds])
            if settings.num_seeds < 3:
                verdict = "too few seeds to say more"
            elif ratios.least > CLEAR:
                verdict = "it paid"
            elif ratios.most < 1 / CLEAR:
                verdict = "it did not pay: it was slower"
            else:
                verdict = "no difference beyond the spread"
            lines.append(
                f"stragglers {stragglers.name}: {regime} reached loss {target:.3f} {ratios.median:.2f} times as fast "
                f"as {everybody} (seeds: {ratios.least:.2f} to {ratios.most:.2f}): {verdict}"
            )
    return lines


def show(report: Report, curves: Sequence[Curve], settings: StudySettings) -> None:
    """Print the tables and the verdicts."""
    rows = summarise(curves, settings)
    for stragglers in settings.stragglers:
        mine = [row for row in rows if row.stragglers == stragglers.name]
        target = target_loss([curve for curve in curves if curve.stragglers == stragglers.name])
        table = Table(title=_title(stragglers), title_justify="left", title_style="")
        table.add_column("")
        for row in mine:
            table.add_column(row.regime, justify="right")
        for what, attribute, form in (
            ("steps/s", "steps_per_second", ".1f"),
            ("stale share", "stale_share", ".0%"),
            ("lag, steps", "lag", ".1f"),
            ("loss at the end", "loss", ".3f"),
            (f"s to loss {target:.3f}", "seconds_to_target", ".2f"),
            ("gradients to it", "gradients_to_target", ".0f"),
        ):
            table.add_row(what, *(_text(getattr(row, attribute), form) for row in mine))
        report.console.print(table)
    report.line(f"median over {settings.num_seeds} seeds (least-most); {settings.seconds:g} s each")
    for line in verdicts(curves, settings):
        report.line(line)


def _title(stragglers: Stragglers) -> str:
    return f"stragglers {stragglers.name}: {stragglers.words}"


def _text(spread: Spread, form: str) -> str:
    if spread.least == spread.most:
        return f"{spread.median:{form}}"
    return f"{spread.median:{form}} ({spread.least:{form}}-{spread.most:{form}})"


def write_json(path: Path, curves: Sequence[Curve], settings: StudySettings) -> None:
    """Write all curves, what they come to, and what they were made with."""
    found: dict[str, Any] = {
        "version": __version__,
        "engine": settings.engine or engine_name,
        "machine": {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()},
        "settings": asdict(settings),
        "stragglers": {stragglers.name: stragglers.words for stragglers in settings.stragglers},
        "summary": [asdict(row) for row in summarise(curves, settings)],
        "verdicts": verdicts(curves, settings),
        "trials": [asdict(curve) for curve in curves],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def plot(paths: Sequence[Path], curves: Sequence[Curve], settings: StudySettings) -> None:
    """Draw loss against seconds and against gradients, a row for each kind of stragglers: median and range of seeds.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(len(settings.stragglers), 2, sharey="row", squeeze=False)
    for line, stragglers in zip(axes, settings.stragglers, strict=True):
        for axis, (attribute, label) in zip(
            line, (("seconds", "seconds"), ("gradients", "gradients used")), strict=True
        ):
            for regime in settings.regimes:
                mine = [c for c in curves if (c.stragglers, c.regime) == (stragglers.name, regime.name)]
                grid = np.linspace(0, min(getattr(curve, attribute)[-1] for curve in mine), 100)
                losses = np.array([np.interp(grid, getattr(curve, attribute), curve.losses) for curve in mine])
                (drawn,) = axis.plot(grid, np.median(losses, axis=0), label=regime.name)
                axis.fill_between(
                    grid, losses.min(axis=0), losses.max(axis=0), alpha=0.2, color=drawn.get_color(), linewidth=0
                )
            axis.set_xlabel(label)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("held-out loss")
        line[0].set_title(_title(stragglers), loc="left", fontsize="medium")
        line[1].legend()
    figure.suptitle(
        f"{settings.workers} workers, {settings.num_seeds} seeds: median and range; engine "
        f"{settings.engine or engine_name}, gradquorum {__version__}"
    )
    for path in paths:
        figure.savefig(path, dpi=120)
