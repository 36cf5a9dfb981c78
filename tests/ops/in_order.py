"""Products of Triton's interpreter whose rows have the same bits wherever they stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch


def add_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add each element's terms in one order. NumPy's library has another in the rows at a block's
    end. A GPU is left as it is."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, *_):
        product = np.einsum("...mk,...kn->...mn", *(x.data.astype(np.float32) for x in (a, b)))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
