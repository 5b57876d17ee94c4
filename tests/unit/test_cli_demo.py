"""`gradquorum demo` from the command line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.cli import main

QUICK = ["--dim", "8", "--epochs", "2", "--straggler", "1", "--compare", "0"]


def some_text(num_words: int = 3000) -> str:
    rng = np.random.default_rng(0)
    return " ".join(f"word{i:02d}" for i in (50 * rng.random(num_words) ** 2).astype(int))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(some_text())
    return path


def fails_with_one_line(capsys, *arguments: str) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


# Runs that succeed


def test_demo_when_run_prints_progress_and_neighbours_and_succeeds(text, capsys):
    assert main(["demo", "--text", str(text), *QUICK]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert re.search(r"^3,000 words of .*text\.txt, 50 different; [\d,]+ pairs of neighbours$", lines[0])
    sleeping = "one of which sleeps 1 ms before each gradient"
    assert lines[1] == f"4 workers, {sleeping}; quorum 3; epochs 2; {gq.engine_name} engine"
    assert re.search(r"^100%  loss \d\.\d+  [\d,]+ words/s  \d+ accepted  \d+ stale$", out, re.MULTILINE)
    assert len(re.findall(r"^  word\d\d  (word\d\d, ){5}word\d\d$", out, re.MULTILINE)) == 6
    assert re.fullmatch(r"gradquorum demo: succeeded in \d+ s", lines[-1])
    assert "\x1b" not in out


def test_demo_when_comparing_prints_a_table_of_both_quorums(text, capsys):
    assert main(["demo", "--text", str(text), *QUICK, "--compare", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"quorum .* steps/s .* stale share .* loss", out)
    for quorum in ("4 of 4", "3 of 4"):
        row = re.search(rf"{quorum} \W+ (\d+\.\d) \W+ (\d+)% \W+ (\d\.\d+) ", out)
        assert row, out
        assert float(row[1]) > 0
    assert re.search(r"4 of 4 \W+ \S+ \W+ 0% ", out)  # with everyone required nothing can be late


def test_demo_when_all_are_required_compares_with_one_fewer(text, capsys):
    arguments = ["demo", "--text", str(text), *QUICK, "--compare", "1", "--workers", "2", "--required", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "2 of 2" in out
    assert "1 of 2" in out


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_demo_when_workers_are_few_or_many_succeeds(text, workers, capsys):
    assert main(["demo", "--text", str(text), *QUICK, "--workers", str(workers)]) == 0
    assert f"quorum {max(workers - 1, 1)};" in capsys.readouterr().out


def test_demo_when_a_step_needs_one_succeeds(text):
    assert main(["demo", "--text", str(text), *QUICK, "--required", "1"]) == 0


def test_demo_when_the_engine_is_named_uses_it(text):
    assert main(["demo", "--text", str(text), *QUICK, "--engine", "reference"]) == 0


def test_demo_when_the_straggler_sleeps_a_minute_does_not_wait_for_it(text, capsys):
    arguments = ["demo", "--text", str(text), *QUICK, "--straggler", "60000", "--compare", "1"]
    assert main(arguments) == 0
    assert re.search(r"4 of 4 \W+ 0\.0 ", capsys.readouterr().out)


# Input that cannot be used


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory"),
        (b"", "is empty"),
        (b"just a few words", "too short"),
        (b"\x7fELF\0\1\2", "is a binary file"),
        (b"spam \xff eggs", "is not UTF-8 text"),
    ],
)
def test_demo_when_the_text_is_unusable_says_so_in_one_line(tmp_path, capsys, content, words):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    err = fails_with_one_line(capsys, "demo", "--text", str(path))
    assert err.startswith("gradquorum: Invalid value for '--text': ")
    assert words in err


def test_demo_when_the_text_is_a_folder_says_so_in_one_line(tmp_path, capsys):
    assert "Is a directory" in fails_with_one_line(capsys, "demo", "--text", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "'--workers': 0 is not in the range"),
        (["--workers", "-3"], "'--workers'"),
        (["--workers", "65"], "'--workers'"),
        (["--workers", "two"], "'two' is not a valid integer"),
        (["--required", "0"], "'--required'"),
        (["--required", "5"], "'--required': 5 is more than --workers 4"),
        (["--straggler", "-1"], "'--straggler'"),
        (["--straggler", "nan"], "'--straggler'"),
        (["--dim", "0"], "'--dim'"),
        (["--epochs", "0"], "'--epochs'"),
        (["--seed", "-1"], "'--seed'"),
        (["--engine", "steam"], "'--engine'"),
        (["--compare", "-1"], "'--compare'"),
        (["--nonsense"], "--nonsense"),
        (["surplus"], "surplus"),
    ],
)
def test_demo_when_an_option_is_invalid_says_so_in_one_line(capsys, arguments, words):
    assert words in fails_with_one_line(capsys, "demo", *arguments)


def test_command_when_unknown_says_so_in_one_line(capsys):
    assert "No such command" in fails_with_one_line(capsys, "dmeo")


# The program


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False, **options)


def test_version_when_asked_is_printed():
    done = run(sys.executable, "-m", "gradquorum", "--version")
    assert (done.returncode, done.stdout) == (0, f"gradquorum, version {gq.__version__}\n")


def test_command_when_given_nothing_prints_help(capsys):
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_command_when_a_dependency_is_missing_says_what_to_install(missing):
    program = f"import sys; sys.modules[{missing!r}] = None; import gradquorum.cli as cli; exit(cli.main([]))"
    done = run(sys.executable, "-c", program)
    assert done.returncode == 1
    assert done.stderr == f"gradquorum: {missing} is missing: pip install click rich\n"


def test_library_when_imported_imports_neither_click_nor_rich():
    program = "import sys, gradquorum; print(sorted({'click', 'rich'} & set(sys.modules)))"
    assert run(sys.executable, "-c", program).stdout == "[]\n"


def test_demo_when_standard_output_is_ascii_still_succeeds(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(some_text().replace("word", "größe"), encoding="utf-8")
    arguments = ["-X", "utf8=0", "-m", "gradquorum", "demo", "--text", str(path), *QUICK, "--compare", "1"]
    done = run(sys.executable, *arguments, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr??e" in done.stdout


def test_demo_when_interrupted_says_so_in_one_line_and_exits_130(text):
    command = [sys.executable, "-m", "gradquorum", "demo", "--text", str(text)]
    command += ["--epochs", "10000", "--straggler", "60000"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            for _ in range(3):
                process.stdout.readline()  # the third is the first of the progress: all threads are at work
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=100)  # the sleeping straggler does not hold it up
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "gradquorum: interrupted\n")
