"""The libFuzzer targets of the C++ core, briefly; `make fuzz FUZZ_SECONDS=3600` for longer."""

import pytest

from tests.fuzz import libfuzzer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS = 10


@pytest.fixture(scope="module")
def built():
    clang = libfuzzer.find_clang()
    if clang is None:
        pytest.skip("there is no clang++, which libFuzzer comes with")
    libfuzzer.build(clang)


def test_every_target_is_there():
    assert libfuzzer.TARGETS == ["compaction", "dense", "merge", "order", "scan"]


@pytest.mark.parametrize("target", libfuzzer.TARGETS)
def test_core_when_fuzzed_expect_what_the_model_says(built, target):
    assert libfuzzer.run(target, SECONDS) > 2 * libfuzzer.NUM_SEEDS
