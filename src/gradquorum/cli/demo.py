"""`gradquorum demo`: word vectors from real text, trained by several threads or processes through one group."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import click
from click.core import ParameterSource

import gradquorum as gq
from gradquorum.cli.corpus import MAX_BYTES, Corpus, TextError, python_documentation, read_text
from gradquorum.cli.ray_workers import local_ray
from gradquorum.cli.report import Report
from gradquorum.cli.study_command import STUDY_STRAGGLER, check_study, make_study
from gradquorum.cli.training import Engine, Examples, Place, Progress, Settings, Training
from gradquorum.engine import available_engines, engine_name

WORDS_TO_READ = 400_000  # over all epochs, when --epochs is not given: the Python documentation seven times
MAX_EPOCHS = 50  # when --epochs is not given
PROBES = ("float", "bytes", "exception", "yield", "import", "list")
NUM_NEIGHBOURS = 6


@click.command()
@click.option("--workers", type=click.IntRange(1, 64), show_default="4", help="Worker threads.")
@click.option("--processes", type=click.IntRange(1, 64), metavar="N", help="Worker processes, instead of threads.")
@click.option("--ray", "on_ray", is_flag=True, help="The workers are tasks of a Ray cluster on this machine.")
@click.option(
    "--required",
    type=click.IntRange(1),
    show_default="workers - 1",
    help="Quorum: the gradients that a step waits for.",
)
@click.option(
    "--straggler",
    type=click.IntRange(0, 60_000),
    default=50,
    show_default=True,
    metavar="MS",
    help="The last worker sleeps that long before each gradient; 0: it doesn't.",
)
@click.option("--dim", type=click.IntRange(1, 1024), default=64, show_default=True, help="Size of a vector.")
@click.option(
    "--epochs",
    type=click.IntRange(1, 10_000),
    show_default="400,000 words' worth",
    help="How often the text is gone through.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of all random draws.")
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    show_default="Python's documentation",
    help=f"UTF-8 text to learn from, of which the first {MAX_BYTES >> 20} MiB are read.",
)
@click.option(
    "--engine",
    type=click.Choice(["native", "reference"]),
    show_default="the best there is",
    help="What sorts and adds the gradients.",
)
@click.option(
    "--compare",
    type=click.IntRange(0, 600),
    default=5,
    show_default=True,
    metavar="SECONDS",
    help="How long each side of the comparison at the end trains; 0: no comparison.",
)
@click.option(
    "--study",
    type=click.Path(path_type=Path, file_okay=False),
    is_flag=False,
    flag_value=Path("study"),
    metavar="[DIR]",
    help="Instead, train under three regimes with and without stragglers (one gradient in ten takes --straggler MS, "
    f"{STUDY_STRAGGLER} if not given, longer), --compare SECONDS each; write study.json and plots to DIR (study).",
)
@click.option(
    "--seeds", type=click.IntRange(1, 100), default=3, show_default=True, help="Of a --study, from --seed on."
)
def demo(
    *,
    workers: int | None,
    processes: int | None,
    on_ray: bool,
    required: int | None,
    straggler: int,
    dim: int,
    epochs: int | None,
    seed: int,
    text: Path | None,
    engine: Engine | None,
    compare: int,
    study: Path | None,
    seeds: int,
) -> None:
    """Train word vectors on real text with several workers and a quorum.

    Every worker computes gradients for its part of the text. A chief takes their mean as soon as enough of
    them have arrived, updates, and publishes the next step; what comes too late is dropped as stale.
    """
    start = time.perf_counter()
    if workers is not None and processes is not None:
        raise click.BadParameter(
            "the workers are threads or processes: give one of the two", param_hint="'--processes'"
        )
    if on_ray and (processes is not None or study is not None):
        raise click.BadParameter("it goes with --workers, not with --processes or --study", param_hint="'--ray'")
    if on_ray and importlib.util.find_spec("ray") is None:
        raise click.BadParameter("it needs Ray: pip install 'gradquorum[ray]'", param_hint="'--ray'")
    if study is not None and processes is not None:
        raise click.BadParameter(
            "a study compares regimes of threads: give --workers instead", param_hint="'--processes'"
        )
    if study is None and click.get_current_context().get_parameter_source("seeds") is not ParameterSource.DEFAULT:
        raise click.BadParameter("only a study has several: give --study too, or --seed", param_hint="'--seeds'")
    num_workers = processes or workers or 4
    if required is not None and required > num_workers:
        option = "--workers" if processes is None else "--processes"
        raise click.BadParameter(f"{required} is more than {option} {num_workers}", param_hint="'--required'")
    if engine is not None and engine not in available_engines():
        raise click.BadParameter(f"{engine} is not in this installation", param_hint="'--engine'")
    try:
        corpus = Corpus.from_text(python_documentation() if text is None else read_text(text))
    except TextError as error:
        raise click.BadParameter(str(error), param_hint="'--text'") from None
    examples = Examples.from_corpus(corpus, seed)
    settings = Settings(
        workers=num_workers,
        required=required or max(num_workers - 1, 1),
        straggler=straggler / 1000,
        dim=dim,
        seed=seed,
        engine=engine or cast("Engine", engine_name),  # by name: which one it is, we say ourselves
    )
    studied = check_study(settings, study, seeds, compare)
    report = Report()
    report.line(
        f"{len(corpus.ids):,} words of {_name(text)}, {len(corpus.words):,} different; "
        f"{len(examples.pairs):,} pairs of neighbours"
    )
    if study is not None:
        make_study(examples, studied, study, report)
        report.line(f"gradquorum demo --study: succeeded in {time.perf_counter() - start:.0f} s")
        return
    with _place(on_ray, processes) as server:
        _train(examples, settings, server, epochs or _default_epochs(corpus), report)
        if compare and num_workers > 1:
            _compare_quorums(examples, settings, server, compare, report)
    report.line(f"gradquorum demo: succeeded in {time.perf_counter() - start:.0f} s")


def _train(examples: Examples, settings: Settings, server: Place, epochs: int, report: Report) -> None:
    """Train, showing progress, and print what the vectors have learned."""
    quorum = f"quorum {settings.required}; epochs {epochs}"
    report.line(f"{_workers(settings, server)}{_sleeping(settings)}; {quorum}; {settings.engine} engine")
    training = Training(examples, settings, server)
    num_pairs = epochs * len(examples.pairs)
    with report.training(training, num_pairs) as on_step:
        training.run(num_pairs=num_pairs, on_step=on_step)
    words = examples.corpus.words
    nearest = {
        probe: [words[i] for i in training.vectors.nearest(words.index(probe), NUM_NEIGHBOURS)]
        for probe in _probes(words)
    }
    report.nearest(nearest)


def _compare_quorums(examples: Examples, settings: Settings, server: Place, seconds: int, report: Report) -> None:
    """Train from the start for the same time with all workers required, and with fewer; print both."""
    fewer = min(settings.required, settings.workers - 1)
    rows: list[tuple[str, Progress, float]] = []
    for required in (settings.workers, fewer):
        training = Training(examples, replace(settings, required=required), server)
        progress = training.run(seconds=seconds)
        rows.append((f"{required} of {settings.workers}", progress, training.held_out_loss()))
    title = f"after {seconds} s from the start, {_workers(settings, server)}{_sleeping(settings)}:"
    report.comparison(title, rows)


def _default_epochs(corpus: Corpus) -> int:
    return min(max(WORDS_TO_READ // len(corpus.ids), 1), MAX_EPOCHS)


def _probes(words: list[str]) -> list[str]:
    """Return words to show the neighbours of: ours, or, in a text about other things, frequent long ones."""
    if set(PROBES) <= set(words):
        return list(PROBES)
    return sorted(words[:200], key=len, reverse=True)[: len(PROBES)]


def _name(text: Path | None) -> str:
    if text is None:
        return "the Python documentation"
    name = click.format_filename(text)
    return f"the first {MAX_BYTES >> 20} MiB of {name}" if text.stat().st_size > MAX_BYTES else name


@contextlib.contextmanager
def _place(on_ray: bool, processes: int | None) -> Iterator[Place]:
    """Yield where the group is to be."""
    if on_ray:
        with local_ray():
            yield "ray"
    elif processes is not None:
        with gq.Server() as server:
            yield server
    else:
        yield None


def _workers(settings: Settings, server: Place) -> str:
    if server is None:
        return f"{settings.workers} workers"
    return f"{settings.workers} {'tasks on Ray' if server == 'ray' else 'worker processes'}"


def _sleeping(settings: Settings) -> str:
    milliseconds = round(settings.straggler * 1000)
    return f", one of which sleeps {milliseconds} ms before each gradient" if milliseconds else ""
