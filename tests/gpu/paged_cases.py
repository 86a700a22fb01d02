"""Inputs of the paged attention's tests: interleaved caches whose every unreadable cell holds NaN, stale lists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attention_cases import BAD_IDS, BLOCK_KINDS, Guarded, block_list, ints, seeded, strewn
from torch import Tensor

from qsa_cute.reference import paged as reference
from qsa_cute.runners.paged_attention import PagedAttentionParams, PagedAttentionRunner

CACHE_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
NAN_BYTE = 0x7F  # of e4m3
KINDS = ("full", "holes", "short", "twice", "zoo", "none", "stale", "late")


@dataclass
class Paged:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    indices: Tensor
    block_table: Tensor
    token_to_req: Tensor
    gate: Tensor | None
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.indices, self.block_table, self.token_to_req

    def reference(self) -> Tensor:
        scales = {"k_scale": float(self.k_scale or 1.0), "v_scale": float(self.v_scale or 1.0)}
        return reference.sparse_paged_attention(*self.inputs, gate=self.gate, **scales)

    def params(self, out: Tensor, **changes: object) -> PagedAttentionParams:
        more = {"gate": self.gate, "k_scale": self.k_scale, "v_scale": self.v_scale, **changes}
        return PagedAttentionParams.from_tensors(*self.inputs, out, **more)

    def run(self, **changes: object) -> Guarded:
        out = Guarded(*self.q.shape, dtype=self.q.dtype)
        PagedAttentionRunner.run(self.params(out.tensor, **changes))
        return out

    def workspace(self) -> dict[str, Tensor]:
        layout = PagedAttentionRunner.workspace_size(self.q.shape[0], self.k_cache.shape[2], self.q.shape[2])
        memory = torch.full((layout.size,), 0xFF, dtype=torch.uint8, device="cuda")
        return {part.name: layout.tensor(memory, part.name) for part in layout.parts}


def _list(kind: str, length: int, width: int, generator: torch.Generator) -> Tensor:
    """int32 [width + 1] on the CPU of a row that may see `length` tokens; what is stale would be valid."""
    ids = torch.randint(max(1, length), (width + 1,), generator=generator, dtype=torch.int32)
    if kind in BLOCK_KINDS or kind == "cut":
        blocks = block_list("blocks" if kind == "cut" else kind, length, width, generator)
        count = int((blocks >= 0).nonzero().max()) + 1 if (blocks >= 0).any() else 0
        ids[:count] = blocks[:count]
        ids[width] = count - min(count, 5) if kind == "cut" else count  # where blocks are cut, their rest is stale
        return ids
    tokens = torch.randperm(length, generator=generator).int()[:width]
    count = len(tokens)
    if kind == "none":
        count = 0
    elif kind == "short":
        count = min(count, 37)
    elif kind == "twice":
        half = tokens[: max(1, count // 2)]
        tokens = torch.cat([half, half])[:count]
    elif kind == "late":
        tokens[: max(0, count - 2)] = -1
    ids[: len(tokens)] = tokens
    if kind == "holes":
        ids[:width][torch.rand(width, generator=generator) < 0.3] = -1
    if kind == "zoo":
        bad = torch.tensor(BAD_IDS, dtype=torch.int32)
        at = torch.rand(width, generator=generator) < 0.2
        ids[:width][at] = bad[torch.randint(len(bad), (int(at.sum()),), generator=generator)]
    ids[width] = {"stale": min(count, 100), "none": -5}.get(kind, count)
    return ids


def paged(
    cache_dtype: str = "bf16",
    head_dim: int = 256,
    group: int = 12,
    kv_heads: int = 2,
    lengths: tuple[int, ...] = (3000, 77, 2051, 0, 5200, 1),
    rows: int = 12,
    width: int = 2051,
    page_size: int = 784,
    kinds: tuple[str, ...] = KINDS,
    interleaved: bool = True,
    seed: int = 0,
) -> Paged:
    """`rows` rows over requests of these lengths in turn, one row in seven of a request that does not exist. The
    longest request lacks pages, and its table names foreign ones."""
    generator, host = seeded(seed), torch.Generator().manual_seed(seed)
    kind = CACHE_DTYPES[cache_dtype]
    table_width = -(-max(*lengths, 1) // page_size) + 1
    pages = len(lengths) * table_width + 2
    planes = [torch.randn(pages, kv_heads, page_size, head_dim, generator=generator, device="cuda") for _ in range(2)]
    # fp8 values span a few binades; the scales bring them back to unit size.
    scale = 1.0 if cache_dtype == "bf16" else 3.7
    cells = [(plane * scale).clamp(-400, 400).to(kind) for plane in planes]
    table = torch.randperm(pages, generator=generator, device="cuda").int()[: len(lengths) * table_width]
    table = table.view(len(lengths), table_width).contiguous()
    context = ints(lengths)
    unused = torch.arange(table_width, device="cuda") >= ((context + page_size - 1) // page_size)[:, None]
    table[unused] = ints([-1, pages, 2**31 - 1, -(2**31)]).repeat(table.numel())[: table.numel()].view_as(table)[unused]
    longest = max(range(len(lengths)), key=lambda b: lengths[b])
    if table_width > 3:
        table[longest, 1], table[longest, 2] = pages, -1
    requests = torch.arange(rows) % len(lengths)
    lists = [_list(kinds[r % len(kinds)], lengths[int(requests[r])], width, host) for r in range(rows)]
    requests[6::7] = torch.tensor([-1, len(lengths), 2**31 - 1, -(2**31)]).repeat(rows)[: len(requests[6::7])]
    ids = torch.stack(lists).cuda()
    requests = requests.int().cuda()
    q = torch.randn(rows, kv_heads * group, head_dim, generator=generator, device="cuda").bfloat16()
    gate = (2 * torch.randn(q.shape, generator=generator, device="cuda")).bfloat16()
    gate[(requests < 0) | (requests >= len(lengths))] = torch.nan
    poison(cells, table, ids, requests, page_size)
    if interleaved:  # [pages, kv_heads, page, 2, D]: K and V of a token side by side
        cache = torch.stack([plane.view(torch.uint8) for plane in cells], 3).view(kind)
        k, v = (cache[..., i, :].transpose(1, 2) for i in range(2))
    else:
        k, v = (plane.view(torch.uint8).transpose(1, 2).contiguous().view(kind) for plane in cells)
    scales = (None, None) if cache_dtype == "bf16" else (0.31, 0.27)
    return Paged(q, k, v, ids, table, requests, gate, *scales)


def poison(cells: list[Tensor], table: Tensor, ids: Tensor, requests: Tensor, page_size: int) -> None:
    """NaN in every cell that no valid entry names."""
    pages, _, _, _ = cells[0].shape
    width = ids.shape[1] - 1
    tokens, count = ids[:, :width].long(), ids[:, width:].clamp(0, width)
    logical = tokens // page_size
    valid = (torch.arange(width, device="cuda") < count) & (tokens >= 0) & (logical < table.shape[1])
    valid = valid & ((requests >= 0) & (requests < len(table)))[:, None]
    page = table[requests.clamp(0, len(table) - 1).long()[:, None], torch.where(valid, logical, 0)].long()
    valid = valid & (page >= 0) & (page < pages)
    named = torch.zeros(pages * page_size + 1, dtype=torch.bool, device="cuda")
    named[torch.where(valid, page * page_size + tokens % page_size, pages * page_size).flatten()] = True
    unnamed = ~named[:-1].view(pages, 1, page_size, 1)
    for plane in cells:
        if plane.dtype == torch.bfloat16:
            plane.masked_fill_(unnamed, torch.nan)
        else:
            plane.view(torch.uint8).masked_fill_(unnamed, NAN_BYTE)


def out_of_range(case: Paged, seed: int) -> Paged:
    """The same with a share of its pages, requests, entries and counts out of range; the caches are changed in place,
    so that what is unnamed now is NaN."""
    generator, width = seeded(seed), case.indices.shape[1] - 1
    pages, page_size = case.k_cache.shape[:2]
    table = strewn(case.block_table, pages, generator)
    requests = strewn(case.token_to_req, len(table), generator)
    entries = strewn(case.indices[:, :width], table.shape[1] * page_size, generator)
    ids = torch.cat((entries, strewn(case.indices[:, width:], width + 1, generator)), 1)
    for cache in (case.k_cache, case.v_cache):
        cache.copy_(cache.float().nan_to_num(nan=0.0).to(cache.dtype))
    poison([cache.transpose(1, 2) for cache in (case.k_cache, case.v_cache)], table, ids, requests, page_size)
    unknown = (requests < 0) | (requests >= len(table))
    gate = case.gate.nan_to_num(nan=1.0).masked_fill(unknown[:, None, None], torch.nan)
    return replace(case, block_table=table, token_to_req=requests, indices=ids, gate=gate)


def moved_far(case: Paged, elements: int = 2**31) -> Paged:
    """The same with the cache at the end of one of more than `elements` elements; pages before it are not read."""
    whole = case.k_cache.untyped_storage().nbytes() // case.k_cache.element_size()
    page = case.k_cache.stride(0)
    used, before = whole // page, elements // page + 1
    raw = torch.empty((before + used) * page * case.k_cache.element_size(), dtype=torch.uint8, device="cuda")
    begin = before * page * case.k_cache.element_size()
    raw[begin:] = torch.empty(0, dtype=torch.uint8, device="cuda").set_(case.k_cache.untyped_storage())
    flat = raw.view(case.k_cache.dtype)

    def view(cache: Tensor) -> Tensor:
        shape = (before + used, *cache.shape[1:])
        return flat.as_strided(shape, cache.stride(), cache.storage_offset())

    known = (case.block_table >= 0) & (case.block_table < case.k_cache.shape[0])
    table = torch.where(known, case.block_table + before, -1)
    return replace(case, k_cache=view(case.k_cache), v_cache=view(case.v_cache), block_table=table)
