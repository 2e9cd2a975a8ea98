"""Moves tensors from files to their places on the device, through two halves of a buffer in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specgen.models.checkpoint import StoredTensor, TensorFile

if TYPE_CHECKING:
    from specgen.models.weights import Target


class Staging:
    """While one half is on its way, the other is filled; what is larger than a half goes in slices of rows.

    On CUDA the buffer is page-locked, so that copies run beside the reading, on the current stream of the thread that
    uses it; the device never holds more than a half beside the weights. On the CPU a tensor that needs no change is
    read right into its weight.
    """

    def __init__(self, device: torch.device, half_bytes: int = 16 << 20) -> None:
        """`half_bytes` is a multiple of 16."""
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._half_bytes = half_bytes
        self._halves: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def fill(self, target: Target, stored: StoredTensor, file: TensorFile) -> None:
        """Fills a target from a stored tensor."""
        weight = target.parts[0][0]
        is_whole = len(target.parts) == 1 and target.parts[0][1] is None
        is_same = is_whole and weight.dtype == stored.dtype and weight.is_contiguous()
        num_rows = stored.shape[0] if stored.shape else 1
        if is_same and not self._is_cuda:
            file.read_rows(stored, 0, num_rows, weight.detach().view(-1).view(torch.uint8))
        elif stored.num_bytes <= self._half_bytes:
            tensor = self._read(stored, 0, num_rows, file)
            self._send(tensor, target, is_same)
        elif is_whole and stored.row_bytes <= self._half_bytes:
            step = self._half_bytes // stored.row_bytes
            for start in range(0, num_rows, step):
                end = min(start + step, num_rows)
                part = target._replace(parts=[(weight[start:end], None)])
                self._send(self._read(stored, start, end, file), part, is_same)
        else:
            buffer = torch.empty(stored.num_bytes, dtype=torch.uint8)
            _copy(target, file.read_rows(stored, 0, num_rows, buffer).to(self._device))

    def wait(self) -> None:
        """Returns when everything has arrived."""
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def _read(self, stored: StoredTensor, start: int, end: int, file: TensorFile) -> torch.Tensor:
        """The rows in the next half, once what it held is gone."""
        if not self._halves:
            self._halves = [
                torch.empty(self._half_bytes, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)
            ]
        event = self._sent[self._next]
        if event is not None:
            event.synchronize()
        return file.read_rows(stored, start, end, self._halves[self._next])

    def _send(self, tensor: torch.Tensor, target: Target, is_same: bool) -> None:
        # What must be changed on its way is changed on the device: there it costs nothing.
        _copy(target, tensor if is_same else tensor.to(self._device, non_blocking=True))
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._sent[self._next] = event
        self._next = 1 - self._next


def _copy(target: Target, tensor: torch.Tensor) -> None:
    for weight, part in target.parts:
        weight.copy_(tensor if part is None else part(tensor), non_blocking=True)
