"""Argument checks shared by the wrappers. They read metadata only: no value, no synchronisation."""

import torch


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """`tensor` has this dtype and shape (None: any size) and its last dimension is contiguous; rows may be strided.

    A vector must be contiguous as a whole. Raises: ValueError, naming the argument and what it should be.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
    sizes = tensor.shape
    if len(sizes) != len(shape):
        raise _wrong_shape(name, tensor, shape)
    for have, want in zip(sizes, shape, strict=True):
        if want is not None and have != want:
            raise _wrong_shape(name, tensor, shape)
    if sizes and tensor.stride(-1) != 1 and sizes[-1] > 1 and tensor.numel() > 0:
        raise ValueError(f"{name}: the last dimension must be contiguous, its stride is {tensor.stride(-1)}")


def _wrong_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> ValueError:
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    return ValueError(f"{name}: expected shape [{wanted}], got {list(tensor.shape)}")


def check_same_device(**tensors: torch.Tensor) -> None:
    """All tensors lie on one device. Raises: ValueError, naming the first that doesn't."""
    named = iter(tensors.items())
    first, reference = next(named)
    for name, tensor in named:
        if tensor.device != reference.device:
            raise ValueError(f"{name} is on {tensor.device}, but {first} is on {reference.device}")
