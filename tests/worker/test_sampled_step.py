"""What the host reads of a step's packed tokens."""

import time

import pytest
import torch

from specgen.engine.step import ModelRunnerOutput
from specgen.worker.sampled_step import SampledStep, pack_tokens


def test_a_row_has_its_tokens_of_all_times_and_counts_of_each() -> None:
    """K = 2. An entry: how many ids count, then what was sampled, also behind the row's end, -1 where nothing was."""
    first = [[3, 10, 11, 12], [1, 13, -1, -1]]  # two drafts kept; none kept
    ended = [[2, 20, 21, 22], [0, -1, -1, -1]]  # ended with a draft, behind which was sampled; had ended before
    nothing = [[0, -1, -1, -1], [0, -1, -1, -1]]
    at_once = [[1, 30, 31, -1], [0, 32, -1, -1]]  # ended with its first draft; sampled for nobody
    step = SampledStep(torch.tensor([first, ended, nothing, at_once]))
    assert step.wait() == 0
    assert step.get() == ModelRunnerOutput(
        [[10, 11, 12, 13], [20, 21], [], [30]], [3, 1, 2, 0, 0, 0, 1, 0], [2, 0, 2, 0, 0, 0, 1, 0]
    )


def test_the_next_step_writes_elsewhere() -> None:
    packed = pack_tokens(torch.tensor([[5], [6], [-1]]), torch.tensor([1, 1, 0], dtype=torch.int32))
    assert packed.tolist() == [[1, 5], [1, 6], [0, -1]]
    step = SampledStep(packed.unsqueeze(1))
    packed.zero_()  # the next step's
    assert step.get() == ModelRunnerOutput([[5], [6], []], [1, 1, 0], [0, 0, 0])


def test_the_wait_for_the_copy_is_told_and_is_none_if_it_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copy:
        is_done = False

        def query(self) -> bool:
            return self.is_done

        def synchronize(self) -> None:
            time.sleep(0.02)
            self.is_done = True

    step = SampledStep(torch.tensor([[[1, 5]]]))
    monkeypatch.setattr(step, "_event", Copy())
    assert 0.02 <= step.wait() < 2
    assert step.wait() == 0
    assert step.get().sampled_token_ids == [[5]]
