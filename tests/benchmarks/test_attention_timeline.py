"""The time stamps of `benchmarks.attention_timeline` still find their places in the kernels."""

from pathlib import Path

import pytest

from benchmarks.attention_timeline import HOPPER, MERGE, changed
from onestem.ops.triton import kernels, sm90


@pytest.mark.parametrize("name", HOPPER)
def test_stamps_go_into_the_kernel_for_hopper(name):
    text = (Path(sm90.__path__[0]) / name).read_text()
    stamped = changed(text, HOPPER[name])
    compile(stamped, name, "exec")
    assert stamped.count("globaltimer") > text.count("globaltimer")


def test_stamps_go_into_the_kernel_that_merges():
    text = Path(str(kernels.__file__)).read_text()
    assert "tl.store(stamps + tl.program_id(0), globaltimer())" in changed(text, MERGE)
