"""Rows with a NaN are found, wherever it is; infinities are none."""

import torch

from specgen.kernels.nan_rows import nan_rows


def test_found_wherever_it_is() -> None:
    logits = torch.randn(9, 9001, generator=torch.Generator().manual_seed(0))
    logits[:, 1], logits[:, 2] = torch.inf, -torch.inf
    for row, column in ((0, 0), (2, 9000), (3, 8192), (7, 5)):
        logits[row, column] = torch.nan
    want = [True, False, True, True, False, False, False, True, False]
    assert nan_rows(logits).tolist() == want
