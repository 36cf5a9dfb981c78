"""Steps of Onestem on a GGUF file, told and timed as those of step_llama_cpp.py.

python step_onestem.py MODEL.gguf THREADS
"""

from __future__ import annotations

import json
import sys

import torch

from onestem.ops.cpu import status
from onestem_lab.cpu_weights import Ours


def main() -> None:
    torch.set_grad_enabled(False)
    path, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    steps = Ours(path, None, int(threads))
    print(json.dumps(status()), flush=True)
    for line in sys.stdin:
        print(json.dumps(steps.take(line.strip())), flush=True)


if __name__ == "__main__":
    main()
