"""How the engine core reaches the workers that run a step.

`UniProcExecutor` runs one worker in this process. Another kind (a process a GPU, several machines) keeps this
interface: every method is called with the same arguments on every worker, and the first worker's answer counts.
"""

from __future__ import annotations

from typing import Protocol

from specgen.engine.step import ModelRunnerOutput, SchedulerOutput


class StepResult(Protocol):
    """A sampled step whose copy to the host may still be under way."""

    def wait(self) -> float:
        """Waits for the copy; seconds, 0 if it was there, which does not depend on what else the process does."""
        ...

    def get(self) -> ModelRunnerOutput:
        """Waits for the copy and returns the step's tokens."""
        ...


class Executor(Protocol):
    """The engine core's view of the workers, and an executor's view of one (`specgen.worker.worker.Worker`)."""

    def execute_model(self, step: SchedulerOutput) -> None:
        """Starts the target's forward pass; returns nothing: the workers keep the hidden states."""
        ...

    def sample_tokens(self) -> StepResult:
        """Starts sampling, verification and the next drafts; the result is read when needed."""
        ...

    def take_draft_token_ids(self) -> list[list[int]]:
        """The drafts of the last step (waits for the device)."""
        ...

    def shutdown(self) -> None:
        """Stops the workers."""
        ...


class UniProcExecutor:
    """One worker, in this process and thread."""

    def __init__(self, worker: Executor) -> None:
        """Calls go to `worker`."""
        self._worker = worker

    def execute_model(self, step: SchedulerOutput) -> None:
        """See `Executor`."""
        self._worker.execute_model(step)

    def sample_tokens(self) -> StepResult:
        """See `Executor`."""
        return self._worker.sample_tokens()

    def take_draft_token_ids(self) -> list[list[int]]:
        """See `Executor`."""
        return self._worker.take_draft_token_ids()

    def shutdown(self) -> None:
        """See `Executor`."""
        self._worker.shutdown()
