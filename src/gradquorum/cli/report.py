"""What the demo prints: progress, nearest words, the comparison. Plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from gradquorum.cli.training import Progress, Training

NUM_LINES = 10  # of progress, where there is no terminal

ReportStep = Callable[[Progress], None]


class Report:
    """Prints to standard output."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)

    def line(self, text: str = "") -> None:
        """Print one line as it is."""
        self.console.print(text, markup=False)

    @contextmanager
    def training(self, training: Training, num_pairs: int) -> Iterator[ReportStep]:
        """Show a bar, or plain lines, while `training` runs; it calls what this yields after each step."""
        on_terminal = self.console.is_terminal
        parts = 100 if on_terminal else NUM_LINES  # how often the loss is measured and shown
        shown = -1
        columns = [BarColumn(16), TaskProgressColumn(), TextColumn("{task.description}")]
        with Bar(*columns, console=self.console, disable=not on_terminal) as bar:
            task = bar.add_task("starting", total=num_pairs)

            def on_step(progress: Progress) -> None:
                nonlocal shown
                part = min(progress.pairs * parts // num_pairs, parts)
                if part == shown:
                    return
                shown = part
                text = (
                    f"loss {training.held_out_loss():.3f}  {progress.words / progress.seconds:,.0f} words/s  "
                    f"{progress.accepted} accepted  {progress.stale} stale"
                )
                bar.update(task, completed=progress.pairs, description=text)
                if not on_terminal:
                    self.line(f"{100 * shown // parts:3d}%  {text}")

            yield on_step

    def nearest(self, neighbours: Mapping[str, Sequence[str]]) -> None:
        """Print words and the words nearest to each."""
        width = max(map(len, neighbours))
        self.line("nearest words:")
        for word, others in neighbours.items():
            self.line(f"  {word:>{width}}  {', '.join(others)}")

    def comparison(self, title: str, rows: Sequence[tuple[str, Progress, float]]) -> None:
        """Print a table of quorums: what each did, and the loss it reached."""
        table = Table(title=title, title_justify="left", title_style="")
        table.add_column("quorum")
        for heading in ("steps/s", "stale share", "loss"):
            table.add_column(heading, justify="right")
        for quorum, progress, loss in rows:
            steps_per_second = progress.steps / progress.seconds
            table.add_row(quorum, f"{steps_per_second:.1f}", f"{progress.stale_share:.0%}", f"{loss:.3f}")
        self.console.print(table)
