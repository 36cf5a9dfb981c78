"""The time stamps of `onestem_lab.attention_timeline` still find their places in the kernels."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onestem.ops.triton import Kernels, States, Workspace, kernels, load_config, sm90
from onestem_lab.attention.cases import decode_step
from onestem_lab.attention_timeline import HOPPER, MERGE, changed, launch


@pytest.mark.parametrize("name", HOPPER)
def test_stamps_go_into_the_kernel_for_hopper(name):
    text = (Path(sm90.__path__[0]) / name).read_text()
    stamped = changed(text, HOPPER[name])
    compile(stamped, name, "exec")
    assert stamped.count("globaltimer") > text.count("globaltimer")


def test_stamps_go_into_the_kernel_that_merges():
    text = Path(str(kernels.__file__)).read_text()
    assert "tl.store(stamps + tl.program_id(0), globaltimer())" in changed(text, MERGE)


def test_the_copies_get_the_arguments_of_their_kernels_and_the_stamps():
    config, _ = load_config("NVIDIA H100 80GB HBM3", torch.bfloat16, 128, 4, True)
    made = Kernels(8, 2, 128, 16, config, 132, windowed=False, hopper=True, dependent=True)
    space = Workspace(made, States.empty(4096, 8, 128, torch.device("cpu")), max_rows=64)
    work = space.write(decode_step((1, 64), (2048, 64), page_size=16).plan)
    launched = {}

    class Copy:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            def run(*args, **options):
                launched[self.name] = args, options

            return run

    q, pages = torch.zeros(64, 8, 128), torch.zeros(200, 16, 2, 128, dtype=torch.bfloat16)
    stamps, ends, out = torch.zeros(1), torch.zeros(2), torch.empty_like(q)
    attend = SimpleNamespace(attend_hopper=Copy("attend"))
    merge = SimpleNamespace(merge_kernel=Copy("merge"))
    launch(space, attend, merge, (q, pages, pages, out), stamps, ends)
    states = (space.states.out, space.states.lse)
    args, options = launched["attend"]
    for at, tensor in {0: space.control, 1: q, 4: out, 5: space.lse, 8: stamps}.items():
        assert args[at] is tensor
    assert args[6:8] == states
    assert args[11] == len(space.control)
    assert len(args) == 12
    assert options["FORM"].most == 64
    assert work.num_wide == 0
    args, options = launched["merge"]
    assert all(
        a is b for a, b in zip(args, (space.control, out, space.lse, *states, ends), strict=True)
    )
