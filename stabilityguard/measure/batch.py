"""What a batch looked like, so that the one that hurt can be found again."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

SAMPLED_BYTES = 1 << 20
"""Tensors up to this size are hashed whole; larger ones by evenly spaced elements of about this many bytes."""


def describe_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Name, shape, dtype, device and fingerprint of every tensor that a forward call was given.

    Waits for the device, and copies at most ``SAMPLED_BYTES`` of each tensor to the host.
    """
    named = [*_tensors(args, "args"), *_tensors(kwargs, "")]
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": str(tensor.device),
            "fingerprint": fingerprint(tensor),
        }
        for name, tensor in named
    ]


def has_bad_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor that a forward call was given holds NaN or Inf. Waits for the device."""
    given = [*_tensors(args, "args"), *_tensors(kwargs, "")]
    return any(t.is_floating_point() and not bool(t.detach().isfinite().all()) for _, t in given)


def fingerprint(tensor: Tensor) -> str | None:
    """First 16 hexadecimal digits of the SHA-256 of dtype, shape and elements (sampled where large).

    None for tensors whose elements cannot be read as one block of memory (meta, nested, …).
    """
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    try:
        digest.update(_bytes(_sample(tensor.detach())))
    except (RuntimeError, NotImplementedError):
        return None
    return digest.hexdigest()[:16]


def _sample(tensor: Tensor) -> Tensor:
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1)
    return flat[:: max(1, flat.numel() * flat.element_size() // SAMPLED_BYTES)]


def _bytes(values: Tensor) -> bytes:
    values = values.resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()) if values.numel() else b""


def _tensors(value: Any, name: str, within: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested containers, by name; one that contains itself is entered once."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (Mapping, tuple, list)) and id(value) not in within:
        for part, entry in _entries(value, name):
            yield from _tensors(entry, part, (*within, id(value)))


def _entries(value: Mapping[Any, Any] | Sequence[Any], name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}.{key}" if name else str(key), entry) for key, entry in value.items())
    else:
        yield from ((f"{name}[{i}]", entry) for i, entry in enumerate(value))
