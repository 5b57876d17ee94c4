"""``gradquorum serve --checkpoint``: rounds outlive the command."""

import shutil
import signal
import subprocess

import pytest

import gradquorum as gq
from tests.support import STRICT_PYTHON, TIMEOUT, accept

pytest.importorskip("safetensors")


def start_command(address, *arguments):
    command = [*STRICT_PYTHON, "-m", "gradquorum", "serve", "--address", str(address), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "listening" in (line := process.stdout.readline()):
        return process
    return process, line + process.communicate(timeout=TIMEOUT)[0]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_command_keeps_rounds(tmp_path, how):
    address, arguments = tmp_path / "server", ("--checkpoint", str(tmp_path / "kept"), "--every", "0")
    for count in range(2):
        process = start_command(address, *arguments)
        try:
            if count == 0:
                acc = gq.SparseConditionalAccumulator("float32", (10, 1), "emb", target=address)
            else:
                acc = gq.attach("emb", address)
            assert acc.last_sequence("a") == count - 1
            accept(acc, [0], [1.0], worker="a", sequence=count)
        finally:
            process.send_signal(how)
            output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == (0 if how == signal.SIGTERM else -signal.SIGKILL), output


def test_command_whose_last_save_fails_says_so_and_ends_with_1(tmp_path):
    process = start_command(tmp_path / "server", "--checkpoint", str(tmp_path / "kept"))
    try:
        acc = gq.SparseConditionalAccumulator("float32", (10, 1), "emb", target=tmp_path / "server")
        accept(acc, [0], [1.0])
        shutil.rmtree(tmp_path / "kept")
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert "'emb' could not be saved" in output


def test_command_needs_a_folder_to_save_to(tmp_path):
    process, output = start_command(tmp_path / "server", "--every", "1")
    assert process.returncode == 2
    assert "--every needs --checkpoint" in output
