"""Random ragged batches for the soak, made and checked on the device by the group, without a host sync.

A group is `SLOTS` launches of one shape, each on memory of its own between guard bands. `regenerate` draws new
lengths, lists, pages and values, bad ones among them; `launch` is one launch; `check` counts, on the device, what
breaks an invariant. The invariants need no reference: they hold for every input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qsa_cute.geometry import BLOCK_TOKENS, PAGE_TOKENS, TOP_BLOCKS
from qsa_cute.reference import attention, indexer

SLOTS = 64
BAND = 512  # bytes after each slot's outputs, and before the first
BAND_BYTE = 0x5A
INT_MIN, INT_MAX = -(2**31), 2**31 - 1

Q_HEADS, KV_HEADS, HEAD_DIM, POOL_HEAD_DIM = 24, 2, 256, 384
FLAT_PAGES, MAX_PAGES = 96, 12
LARGEST = 4.0  # of any K or V
ATOL = 2e-2


class Slots:
    """An output of `SLOTS` launches, all bytes 0xFF, and bands that must stay as they are."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        pitch = -(-size // BAND) * BAND + BAND
        self._bytes = torch.full((BAND + SLOTS * pitch,), BAND_BYTE, dtype=torch.uint8, device=device)
        rows = self._bytes[BAND:].view(SLOTS, pitch)
        self._bands = (self._bytes[:BAND], rows[:, size:])
        strides = [torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))]
        flat = self._bytes[BAND:].view(dtype)
        self.tensor = flat.as_strided((SLOTS, *shape), (pitch // dtype.itemsize, *strides), flat.storage_offset())

    def poison(self) -> None:
        kind = torch.int32 if self.tensor.dtype.itemsize == 4 else torch.int16
        self.tensor.view(kind).fill_(-1)

    def touched(self) -> Tensor:
        """Bytes of the bands that were written."""
        before, after = self._bands
        return (before != BAND_BYTE).sum() + (after != BAND_BYTE).sum()


class Soak:
    """What both operations share: the tally of broken invariants, by name, and how a group is run."""

    INVARIANTS: tuple[str, ...] = ()

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        self._broken = torch.zeros(len(self.INVARIANTS), dtype=torch.int64, device=device)
        self.outputs: tuple[Slots, ...] = ()

    def broken(self) -> dict[str, int]:
        """Invariant -> how often it was broken; only those that were. Waits for the device."""
        return {name: count for name, count in zip(self.INVARIANTS, self._broken.tolist(), strict=True) if count}

    def count(self, name: str, wrong: Tensor) -> None:
        self._broken[self.INVARIANTS.index(name)] += wrong.sum()

    def group(self, launch: Callable[[int], None], sample: bool) -> None:
        """`SLOTS` launches on new inputs, checked; with `sample` also against the reference and launched again."""
        self.regenerate()
        self.run(launch)
        self.check()
        if sample:
            self.compare(int(torch.randint(SLOTS, ())))
            before = [slots.tensor.clone() for slots in self.outputs]
            self.run(launch)
            for slots, first in zip(self.outputs, before, strict=True):
                self.count("the same bits again", bits(slots.tensor) != bits(first))

    def run(self, launch: Callable[[int], None]) -> None:
        for slots in self.outputs:
            slots.poison()
        for slot in range(SLOTS):
            launch(slot)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def sprinkle(self, values: Tensor, bad: tuple[int, ...], share: float) -> Tensor:
        """Replace so large a share of int32 values by bad ones."""
        pick = (self.rand(*values.shape) * len(bad)).long()
        chosen = torch.tensor(bad, dtype=torch.int32, device=self.device)[pick]
        return torch.where(self.rand(*values.shape) < share, chosen, values)

    def regenerate(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def compare(self, slot: int) -> None:
        raise NotImplementedError


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


class DecodeSoak(Soak):
    """Decode attention of `batch` sequences with `query_len` new tokens each over lists of `width`.

    Column 0 of every V is 1, so that column 0 of a row with a valid entry is 1: the sum of its weights.
    """

    INVARIANTS = (
        "rows without a valid entry are zeros and -inf",
        "finite",
        "within the values' range",
        "weights sum to one",
        "LSE between what count and norms allow",
        "guard bands",
        "the same bits again",
        "the reference",
        "the reference's LSE",
    )

    def __init__(self, device: str, batch: int, query_len: int, width: int, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__(device, seed)
        shape = (SLOTS, batch, query_len)
        self.batch, self.query_len, self.width, self.scale = batch, query_len, width, HEAD_DIM**-0.5
        self.q = torch.empty(*shape, Q_HEADS, HEAD_DIM, dtype=dtype, device=device)
        self.ids = torch.empty(*shape, width, dtype=torch.int32, device=device)
        self.lengths = torch.empty(SLOTS, batch, dtype=torch.int32, device=device)
        self.table = torch.empty(SLOTS, batch, 2, MAX_PAGES, dtype=torch.int32, device=device)
        self.o = Slots((batch, query_len, Q_HEADS, HEAD_DIM), dtype, device)
        self.lse = Slots((batch, query_len, Q_HEADS), torch.float32, device)
        self.outputs = (self.o, self.lse)
        self.pool = self._pool(dtype)
        self._longest_key = LARGEST * HEAD_DIM**0.5

    def _pool(self, dtype: torch.dtype) -> Tensor:
        """Pages between two of NaN, which no table names; NaN also beside K and V."""
        shape = (FLAT_PAGES + 2, PAGE_TOKENS, KV_HEADS, POOL_HEAD_DIM)
        whole = torch.randn(shape, generator=self.generator, device=self.device).clamp_(-LARGEST, LARGEST).to(dtype)
        whole[0] = whole[-1] = torch.nan
        whole[..., HEAD_DIM:] = torch.nan
        whole[FLAT_PAGES // 2 + 1 : -1, :, :, 0] = 1  # V's half
        return whole[1:-1]

    def regenerate(self) -> None:
        most = MAX_PAGES * PAGE_TOKENS
        lengths = (self.rand(*self.lengths.shape) * (most + 2)).int()
        self.lengths.copy_(self.sprinkle(lengths, (0, 1, most, INT_MAX, -1, INT_MIN), 0.1))
        reach = self.lengths.clamp(1, most)[..., None, None]
        ids = (self.rand(*self.ids.shape) * reach).int()
        ids = self.sprinkle(ids, (INT_MIN, INT_MIN + 1, -129, -1, most, most + 127, INT_MAX - 127, INT_MAX), 0.1)
        empty = self.rand(*ids.shape[:3]) < 0.1
        self.ids.copy_(torch.where(empty[..., None], -1, ids))
        pages = (self.rand(*self.table.shape) * (FLAT_PAGES // 2)).int()
        pages[:, :, 1] += FLAT_PAGES // 2
        self.table.copy_(self.sprinkle(pages, (-1, -129, INT_MIN, FLAT_PAGES, FLAT_PAGES + 1, INT_MAX), 0.05))
        self.q.normal_(generator=self.generator).clamp_(-LARGEST, LARGEST)

    def valid(self) -> Tensor:
        """Number of valid entries of each row, [SLOTS, batch, query_len]."""
        ids, lengths = self.ids, self.lengths[..., None, None]
        good = (ids >= 0) & (ids < lengths) & (ids < MAX_PAGES * PAGE_TOKENS)
        slot = torch.where(good, ids // PAGE_TOKENS, 0).long().flatten(2)
        for plane in (0, 1):
            page = self.table[:, :, plane].gather(2, slot).view_as(ids)
            good &= (page >= 0) & (page < FLAT_PAGES)
        return good.sum(-1)

    def check(self) -> None:
        o, lse, count = self.o.tensor, self.lse.tensor, self.valid()
        none = (count == 0)[..., None]
        self.count("rows without a valid entry are zeros and -inf", none & ((o != 0).any(-1) | (lse != -torch.inf)))
        finite = o.isfinite().all(-1) & lse.isfinite()
        self.count("finite", ~none & ~finite)
        self.count("within the values' range", (o.abs() > LARGEST * (1 + 2**-7)).any(-1))
        self.count("weights sum to one", ~none & ((o[..., 0].float() - 1).abs() > 2**-6))
        most = self.q.float().norm(dim=-1) * (self._longest_key * self.scale) + 0.05
        off = (lse - count.clamp(min=1).float().log()[..., None]).abs()
        self.count("LSE between what count and norms allow", ~none & ~(off <= most))
        self.count("guard bands", self.o.touched() + self.lse.touched())

    def compare(self, slot: int) -> None:
        inputs = (self.q[slot], self.pool, self.table[slot], self.ids[slot], self.lengths[slot])
        o, lse = attention.sparse_decode(*inputs, self.scale)
        self.count("the reference", ~((self.o.tensor[slot].float() - o).abs() <= ATOL))
        error = (self.lse.tensor[slot] - lse).abs()
        self.count("the reference's LSE", (lse != -torch.inf) & ~(error <= 2e-3 + 1e-4 * lse.abs()))


class SelectSoak(Soak):
    """Selection of `rows` rows from logits of `blocks` blocks, with ties, NaN, infinities and zeros of both signs.

    What is chosen is checked in full without sorting: nothing left out is better than what is kept, and of those equal
    to the least that is kept, the lowest ids are.
    """

    INVARIANTS = (
        "as many ids as the row has",
        "ids ascend among those seen",
        "nothing better is left out",
        "ties go to the lowest ids",
        "guard bands",
        "the same bits again",
        "the reference",
    )

    def __init__(self, device: str, rows: int, blocks: int, seed: int = 0) -> None:
        super().__init__(device, seed)
        self.rows, self.blocks = rows, blocks
        self.logits = torch.empty(SLOTS, rows, blocks, device=device)
        self.lengths = torch.empty(SLOTS, rows, dtype=torch.int32, device=device)
        self.out = Slots((rows, TOP_BLOCKS), torch.int32, device)
        self.outputs = (self.out,)

    def regenerate(self) -> None:
        longest = BLOCK_TOKENS * (self.blocks + 1)
        lengths = ((1 - self.rand(SLOTS, self.rows) ** 3) * (longest + 1)).int()  # long ones are more frequent
        self.lengths.copy_(self.sprinkle(lengths, (0, 1, 2048, 2051, 2052, longest, INT_MAX, -1, INT_MIN), 0.1))
        kind = self.rand(SLOTS, self.rows, 1)
        values = self.logits.normal_(generator=self.generator)
        values.copy_(torch.where(kind < 0.3, (values * 4).round() / 4, values))  # many ties, -0 among them
        values.copy_(torch.where((kind > 0.3) & (kind < 0.35), 1.5, values))  # all the same
        odd = self.rand(*values.shape)
        for low, value in ((0.0, torch.nan), (0.01, torch.inf), (0.02, -torch.inf), (0.03, -0.0), (0.04, 0.0)):
            values.masked_fill_((odd >= low) & (odd < low + 0.01) & (kind > 0.8), value)

    def seen(self) -> Tensor:
        """Blocks that a row sees, [SLOTS, rows]."""
        return (self.lengths.clamp(min=0) // BLOCK_TOKENS).clamp(max=self.blocks).long()

    def check(self) -> None:
        found, seen = self.out.tensor.long(), self.seen()
        slots = torch.arange(TOP_BLOCKS, device=self.device) < seen.clamp(max=TOP_BLOCKS)[..., None]
        self.count("as many ids as the row has", torch.where(slots, found < 0, found != -1))
        rising = (found.diff(dim=-1) > 0) | ~slots[..., 1:]
        self.count("ids ascend among those seen", ~rising.all(-1) | (slots & (found >= seen[..., None])).any(-1))
        blocks = torch.arange(self.blocks, device=self.device)
        held = torch.zeros(SLOTS, self.rows, self.blocks + 1, dtype=torch.bool, device=self.device)
        inside = slots & (found >= 0) & (found < self.blocks)
        held.scatter_(2, torch.where(inside, found, self.blocks), True)
        held = held[..., :-1]
        left = (blocks < seen[..., None]) & ~held
        keys = indexer.orderable(self.logits)
        least = torch.where(held, keys, 2**41).amin(-1)
        best_left = torch.where(left, keys, -(2**41)).amax(-1)
        self.count("nothing better is left out", best_left > least)
        tied = keys == least[..., None]
        last_held = torch.where(held & tied, blocks, -1).amax(-1)
        first_left = torch.where(left & tied, blocks, self.blocks).amin(-1)
        self.count("ties go to the lowest ids", first_left < last_held)
        self.count("guard bands", self.out.touched())

    def compare(self, slot: int) -> None:
        want = indexer.select(self.logits[slot], self.seen()[slot]).sort(-1).values
        want = torch.where(want < 0, self.blocks, want).sort(-1).values
        found = self.out.tensor[slot].long()
        self.count("the reference", torch.where(found < 0, self.blocks, found) != want)
