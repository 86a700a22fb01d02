"""Inputs of the kpool tests: seeded, in memory with guard bands, with NaN where nothing may be read."""

from __future__ import annotations

import torch
from attention_cases import DEVICE, Guarded, normal, seeded
from torch import Tensor

FP8 = torch.float8_e4m3fn


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def differing(one: Tensor, other: Tensor) -> int:
    """Bytes that differ."""
    return int((bits(one) != bits(other)).sum())


def tokens(seed: int, *shape: int) -> Tensor:
    """bf16 keys or gate scores of very different magnitudes."""
    generator = seeded(seed)
    magnitude = torch.exp2(torch.randint(-12, 6, shape[:-1], generator=generator, device=DEVICE).float())
    return (normal(generator, torch.float32, *shape) * magnitude[..., None]).bfloat16()


def ape(seed: int, pool: int) -> Tensor:
    return normal(seeded(seed), torch.float32, pool, 128)


class Cache:
    """kv_cache uint8 [pages, page_size, 132], pages `pad` bytes further apart than they need, all bytes 0xFF."""

    def __init__(self, pages: int, page_size: int, pad: int = 0) -> None:
        stride = page_size * 132 + pad
        self.memory = Guarded(pages * stride, dtype=torch.uint8)
        self.tensor = self.memory.tensor.as_strided(
            (pages, page_size, 132), (stride, 132, 1), self.memory.tensor.storage_offset()
        )

    @property
    def slots(self) -> int:
        return self.tensor.shape[0] * self.tensor.shape[1]

    def copy(self) -> Tensor:
        """The same layout and bytes elsewhere, to be written by something else."""
        flat = self.memory.tensor.clone()
        return flat.as_strided(self.tensor.shape, self.tensor.stride(), 0)

    def bytes(self) -> Tensor:
        return self.memory.tensor


def flat_of(cache: Tensor) -> Tensor:
    """All bytes of a `Cache.copy`, the padding between its pages too."""
    return torch.tensor([], dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


class Tail:
    """tail_kv_cache bf16 [blocks, 2, ring, 128] in the first bytes of wider blocks, NaN all over."""

    def __init__(self, blocks: int, ring: int, block_elems: int | None = None, half_pad: int = 0) -> None:
        half = ring * 128 + half_pad
        stride = block_elems or 2 * half
        self.memory = Guarded(blocks * stride, dtype=torch.bfloat16)
        self.tensor = self.memory.tensor.as_strided(
            (blocks, 2, ring, 128), (stride, half, 128, 1), self.memory.tensor.storage_offset()
        )

    def copy(self) -> Tensor:
        flat = self.memory.tensor.clone()
        return flat.as_strided(self.tensor.shape, self.tensor.stride(), 0)
