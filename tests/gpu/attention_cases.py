"""Inputs of the attention tests: ragged batches whose every cell that may not be read holds NaN, outputs of NaN
between guard bands, workspaces of 0xFF.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qsa_cute.geometry import BLOCK_TOKENS, INDEX_WIDTH, PAGE_TOKENS
from qsa_cute.reference import attention as reference
from qsa_cute.runners import SparseDecodeParams, SparseDecodeRunner, SparsePrefillParams, SparsePrefillRunner

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROUPS = (1, 3, 6, 12, 16)
LENGTHS = (0, 1, 4, 128, 2048, 2051, 2052, 3000)
BLOCK_KINDS = ("blocks", "holed", "shifted", "runs", "mixed", "backwards")
KINDS = ("full", "holes", "none", "one", "two", "zoo", "twice", "late")
BAD_IDS = (-(2**31), -(2**31) + 1, -129, -2, 2**31 - 1, 2**31 - 128, 1 << 24)
ATOL = 2e-2  # of outputs against FP32, inputs of unit scale
LSE_ATOL = 2e-3
BAND = 4096  # bytes
BAND_BYTE = 0x5A


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=DEVICE).clamp_(-4, 4).to(dtype)


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def strewn(values: Tensor, end: int, generator: torch.Generator, share: float = 0.1) -> Tensor:
    """int32 values of which so large a share is out of range: INT_MIN, -1, `end` and INT_MAX."""
    bad = ints([-(2**31), -1, end, 2**31 - 1])
    pick = torch.randint(len(bad), values.shape, generator=generator, device=DEVICE)
    return torch.where(torch.rand(values.shape, generator=generator, device=DEVICE) < share, bad[pick], values)


# Lists.


def token_list(kind: str, length: int, width: int, generator: torch.Generator) -> Tensor:
    """int32 [width] on the CPU: ids below `length`, unsorted, in one of the ways a list may look."""
    ids = torch.full((width,), -1, dtype=torch.int32)
    tokens = torch.randperm(length, generator=generator).int()[:width]
    count = len(tokens)
    if not count or kind == "none":
        return ids
    if kind == "one":
        ids[width // 3] = tokens[0]
    elif kind == "two":
        ids[0], ids[-1] = tokens[0], tokens[-1]
    elif kind == "late":
        ids[width - min(3, count) :] = tokens[: min(3, count)]
    elif kind == "twice":
        half = tokens[: max(1, width // 2)]
        ids[: len(half)] = half
        ids[len(half) : 2 * len(half)] = half[: width - len(half)]
    else:
        ids[:count] = tokens
    if kind == "holes":
        ids[torch.rand(width, generator=generator) < 0.3] = -1
        ids[:40] = -1
    if kind == "zoo":
        bad = torch.tensor([*BAD_IDS, length, length + 1, length + 127], dtype=torch.int32)
        at = torch.rand(width, generator=generator) < 0.2
        ids[at] = bad[torch.randint(len(bad), (int(at.sum()),), generator=generator)]
    return ids


def block_list(kind: str, length: int, width: int, generator: torch.Generator) -> Tensor:
    """int32 [width] on the CPU: whole 4-token blocks and the open tail, as the indexer makes them, or nearly so.

    holed: single entries of blocks taken away. shifted: no block at a multiple of four of the list. runs: four
    consecutive tokens each, wherever they begin, also across a page. mixed: single tokens between blocks. backwards:
    the tokens of each block in falling order.
    """
    blocks = torch.randperm(length // BLOCK_TOKENS, generator=generator)[: width // BLOCK_TOKENS]
    ids = blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
    if kind == "runs":
        ids = (ids + torch.randint(BLOCK_TOKENS, (len(blocks), 1), generator=generator)).clamp(max=max(0, length - 1))
    elif kind == "backwards":
        ids = ids.flip(1)
    elif kind == "mixed" and len(blocks):
        lone = torch.rand(len(blocks), generator=generator) < 0.3
        ids[lone] = torch.randint(length, (int(lone.sum()), BLOCK_TOKENS), generator=generator)
    ids = torch.cat([ids.flatten(), torch.arange(length // BLOCK_TOKENS * BLOCK_TOKENS, length)])
    if kind == "holed":
        ids[torch.rand(len(ids), generator=generator) < 0.05] = -1
    if kind == "shifted":
        ids = torch.cat([torch.tensor([-1]), ids])
    row = torch.full((width,), -1, dtype=torch.int32)
    row[: len(ids)] = ids[:width].int()
    return row


def token_lists(lengths: tuple[int, ...], rows: int, width: int, seed: int, kinds: tuple[str, ...] = KINDS) -> Tensor:
    """[batch, rows, width] on the device; row r of each sequence is of kind r."""
    generator = torch.Generator().manual_seed(seed)

    def one(kind: str, length: int) -> Tensor:
        return (block_list if kind in BLOCK_KINDS else token_list)(kind, length, width, generator)

    lists = [[one(kinds[r % len(kinds)], n) for r in range(rows)] for n in lengths]
    return torch.stack([torch.stack(row) for row in lists]).to(DEVICE)


# Outputs and workspaces.


class Guarded:
    """A tensor full of NaN (all bytes 0xFF) between two bands that must stay as they are."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._bytes = torch.full((size + 2 * BAND,), BAND_BYTE, dtype=torch.uint8, device=DEVICE)
        self._bytes[BAND : BAND + size] = 0xFF
        self.tensor = self._bytes[BAND : BAND + size].view(dtype).view(shape)

    def check(self) -> None:
        size = self.tensor.numel() * self.tensor.dtype.itemsize
        assert (self._bytes[:BAND] == BAND_BYTE).all(), "written before the output"
        assert (self._bytes[BAND + size :] == BAND_BYTE).all(), "written past the output"


@dataclass
class Output:
    o: Guarded
    lse: Guarded

    @staticmethod
    def like(q: Tensor) -> Output:
        return Output(Guarded(*q.shape, dtype=q.dtype), Guarded(*q.shape[:3], dtype=torch.float32))

    def bits(self) -> Tensor:
        """Everything that was written, to be compared bit by bit."""
        return torch.cat([self.o.tensor.flatten().view(torch.uint8), self.lse.tensor.flatten().view(torch.uint8)])

    def check(self, want: Tensor, want_lse: Tensor, atol: float = ATOL) -> None:
        """Against the reference: rows without a valid entry exactly zero and -inf, the rest within tolerance."""
        o, lse = self.o.tensor, self.lse.tensor
        self.o.check()
        self.lse.check()
        empty = want_lse == -torch.inf
        assert (o[empty] == 0).all(), "a row with no valid entry must be exact zeros"
        assert torch.equal(lse == -torch.inf, empty), "-inf in other places than the reference's"
        error = (o.float() - want).abs().max().item()
        assert error <= atol, f"largest error {error}"  # false for NaN
        lse_error = (lse - want_lse)[~empty].abs()
        assert (lse_error <= LSE_ATOL + 1e-4 * want_lse[~empty].abs()).all(), f"LSE off by {lse_error.max().item()}"


class Workspace:
    """The decode workspace as a host would carve it, full of 0xFF."""

    def __init__(self, rows: int, kv_heads: int, head_dim: int, max_splits: int = 8) -> None:
        layout = SparseDecodeRunner.workspace_size(rows, kv_heads, head_dim, max_splits=max_splits)
        self.bytes = torch.full((layout.size + 2 * BAND,), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.parts = {}
        for part in layout.parts:
            kind = torch.float32 if part.dtype == "f32" else torch.int32
            begin = BAND + part.offset
            self.parts[part.name] = self.bytes[begin : begin + part.size].view(kind).view(part.shape)

    def poison(self) -> None:
        self.bytes.fill_(0xFF)

    def check(self) -> None:
        assert (self.parts["split_counters"] == 0).all(), "split counters must be left zero"
        assert (self.bytes[:BAND] == 0xFF).all()
        assert (self.bytes[-BAND:] == 0xFF).all()


# Prefill.


@dataclass
class Prefill:
    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    context_lengths: Tensor
    query_starts: Tensor | None
    scale: float

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.indices, self.context_lengths

    def reference(self) -> tuple[Tensor, Tensor]:
        return reference.sparse_prefill(*self.inputs, self.scale, self.query_starts)

    def params(self, out: Output, **changes: object) -> SparsePrefillParams:
        q, k, v, *lists = self.inputs
        more = {"query_starts": self.query_starts, "lse": out.lse.tensor, **changes}
        return SparsePrefillParams.from_tensors(q, k, v, out.o.tensor, *lists, attention_scale=self.scale, **more)

    def run(self, **changes: object) -> Output:
        out = Output.like(self.q)
        SparsePrefillRunner.run(self.q.dtype, self.params(out, **changes))
        return out


def prefill(
    dtype: str = "bf16",
    head_dim: int = 256,
    group: int = 12,
    kv_heads: int = 2,
    lengths: tuple[int, ...] = LENGTHS,
    rows: int = 16,
    width: int = INDEX_WIDTH,
    seed: int = 0,
) -> Prefill:
    """The last rows of each sequence and some past its end; NaN in dead queries and in all unlisted tokens."""
    generator, kind = seeded(seed), DTYPES[dtype]
    batch, kv_rows = len(lengths), max(*lengths, 1)
    q = normal(generator, kind, batch, rows, kv_heads * group, head_dim)
    k, v = (normal(generator, kind, batch, kv_rows, kv_heads, head_dim) for _ in range(2))
    ids = token_lists(lengths, rows, width, seed)
    starts = ints([max(0, length - rows * 3 // 4) for length in lengths])
    context = ints(lengths)
    live = starts[:, None] + torch.arange(rows, device=DEVICE) < context[:, None]
    q[~live] = torch.nan
    valid = (ids >= 0) & (ids < context[:, None, None]) & live[..., None]
    listed = torch.zeros(batch, kv_rows + 1, dtype=torch.bool, device=DEVICE)
    listed.scatter_(1, torch.where(valid, ids, kv_rows).long().flatten(1), True)
    for plane in (k, v):
        plane[~listed[:, :kv_rows]] = torch.nan
    return Prefill(q, k, v, ids, context, starts, head_dim**-0.5)


# Decode.


@dataclass
class Decode:
    q: Tensor
    kv_pool: Tensor
    page_table: Tensor
    indices: Tensor
    context_lengths: Tensor
    scale: float

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.kv_pool, self.page_table, self.indices, self.context_lengths

    @property
    def rows(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    def reference(self) -> tuple[Tensor, Tensor]:
        return reference.sparse_decode(*self.inputs, self.scale)

    def workspace(self, max_splits: int = 8) -> Workspace:
        return Workspace(self.rows, self.kv_pool.shape[2], self.q.shape[3], max_splits)

    def params(self, out: Output, workspace: Workspace | None, **changes: object) -> SparseDecodeParams:
        more = {"lse": out.lse.tensor, **(workspace.parts if workspace else {}), **changes}
        return SparseDecodeParams.from_tensors(*self.inputs, out.o.tensor, attention_scale=self.scale, **more)

    def run(self, algorithm: str | None, workspace: Workspace | None = None, **changes: object) -> Output:
        out = Output.like(self.q)
        workspace = workspace or self.workspace()
        params = self.params(out, workspace, algorithm=algorithm, **changes)
        SparseDecodeRunner.run(self.q.dtype, params)
        if params.num_splits > 1:
            workspace.check()
        return out


def decode(
    dtype: str = "bf16",
    head_dim: int = 256,
    group: int = 12,
    kv_heads: int = 2,
    lengths: tuple[int, ...] = LENGTHS,
    query_len: int = 8,
    width: int = INDEX_WIDTH,
    pool_head_dim: int = 384,
    broken_pages: bool = True,
    seed: int = 0,
    kinds: tuple[str, ...] = KINDS,
) -> Decode:
    """Sequences over a permuted pool: NaN in every cell that no list names, -1 and foreign ids in unused pages.

    broken_pages: also take away pages inside the longest sequence's context, of K in one place, of V in another.
    """
    generator, kind = seeded(seed), DTYPES[dtype]
    batch, max_pages = len(lengths), -(-max(*lengths, 1) // PAGE_TOKENS) + 1
    flat = 2 * batch * max_pages + 3
    q = normal(generator, kind, batch, query_len, kv_heads * group, head_dim)
    pool = normal(generator, kind, flat, PAGE_TOKENS, kv_heads, pool_head_dim)
    ids = token_lists(lengths, query_len, width, seed, kinds)
    table = torch.randperm(flat, generator=generator, device=DEVICE).int()[: 2 * batch * max_pages]
    table = table.view(batch, 2, max_pages).contiguous()
    context = ints(lengths)
    pages = (context + PAGE_TOKENS - 1) // PAGE_TOKENS
    unused = torch.arange(max_pages, device=DEVICE) >= pages[:, None]
    table[unused[:, None].expand_as(table)] = -1
    if broken_pages and max_pages > 8:
        longest = max(range(batch), key=lambda b: lengths[b])
        table[longest, 0, 3], table[longest, 1, 5], table[longest, 1, 6] = flat, -1, 2**31 - 1
        table[longest, 0, 7] = -(2**31)
    _poison_pool(pool, table, ids, context, head_dim)
    q[context == 0] = torch.nan
    return Decode(q, pool, table, ids, context, head_dim**-0.5)


def _poison_pool(pool: Tensor, table: Tensor, ids: Tensor, context: Tensor, head_dim: int) -> None:
    flat, batch = pool.shape[0], table.shape[0]
    tokens = ids.flatten(1).long()
    valid = (tokens >= 0) & (tokens < context[:, None])
    tokens = torch.where(valid, tokens, 0)
    sequence = torch.arange(batch, device=DEVICE)[:, None]
    pages = [table[sequence, plane, tokens // PAGE_TOKENS].long() for plane in (0, 1)]
    for page in pages:
        valid = valid & (page >= 0) & (page < flat)
    named = torch.zeros((flat + 1) * PAGE_TOKENS, dtype=torch.bool, device=DEVICE)
    for page in pages:
        named[torch.where(valid, page * PAGE_TOKENS + tokens % PAGE_TOKENS, flat * PAGE_TOKENS).flatten()] = True
    pool[~named[: flat * PAGE_TOKENS].view(flat, PAGE_TOKENS)] = torch.nan
    pool[..., head_dim:] = torch.nan
