"""Inputs of the tests over vLLM's compressed key cache: NaN in all that may not be read, strides, broken pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attention_cases import Guarded, ints, normal, seeded, strewn
from torch import Tensor

from qsa_cute.geometry import TOP_BLOCKS
from qsa_cute.reference import paged_select as reference

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
TOKEN_TOPK, RATIO = 2048, 4
BAND = 1e-3


@dataclass
class Paged:
    """A batch: rows of one request follow each other."""

    q: Tensor
    k_cache: Tensor
    page_table: Tensor
    query_start_loc: Tensor  # int32 [requests + 1]
    visible: Tensor
    query_len: int = 1  # of decode

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def columns(self) -> int:
        return self.page_table.shape[1] * self.k_cache.shape[1]

    def logits(self, columns: int | None = None) -> Tensor:
        """FP64 [rows, columns], NaN where a row does not see."""
        requests = reference.request_of_rows(self.rows, self.query_start_loc)
        return reference.scores(self.q, self.k_cache, self.page_table, requests, self.visible, columns)


def fill(tensor: Tensor, mask: Tensor, value: float) -> None:
    """Poison through bytes where the type has no masked fill (e4m3's NaN is 0x7F)."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[mask] = 0x7F
    else:
        tensor[mask] = value


def paged(
    dtype: str = "bf16",
    page: int = 392,
    visible: tuple[tuple[int, ...], ...] = ((3000,),),
    heads: int = 4,
    extra_pages: int = 1,
    base: int = 0,
    broken: bool = False,
    seed: int = 0,
    poison: float = float("nan"),
) -> Paged:
    """`visible[b]` are the columns that the rows of request b see. Tokens that no row of any request sees, the rest of
    the pages, and the padding between strided rows, are poisoned. `broken`: pages 1 and 2 of request 0 are not there.
    """
    generator, kind = seeded(seed), DTYPES[dtype]
    rows, most = sum(map(len, visible)), max(max(each, default=0) for each in visible)
    width = -(-most // page) + extra_pages
    pages = len(visible) * width + 2
    wide = normal(generator, torch.float32, rows, heads + 1, 128).to(kind)
    q = wide[:, :heads]
    store = normal(generator, torch.float32, pages, page, 2, 128).to(kind)  # keys and another layer's, interleaved
    k_cache = store[:, :, :1]
    fill(store, torch.ones(pages, page, 2, dtype=torch.bool, device=DEVICE) & ints([0, 1]).bool(), poison)
    fill(wide, (torch.arange(heads + 1, device=DEVICE) == heads).expand(rows, -1), poison)
    order = torch.randperm(pages, generator=generator, device=DEVICE).int()
    table = torch.full((len(visible), width + 3), -7, dtype=torch.int32, device=DEVICE)[:, :width]
    table.copy_(order[: len(visible) * width].view(len(visible), width))
    named = torch.zeros(pages, page, dtype=torch.bool, device=DEVICE)
    foreign = ints([-1, pages, 2**31 - 1, -(2**31)])
    for b, each in enumerate(visible):
        seen = max(each, default=0)
        at = torch.arange(seen, device=DEVICE)
        named[table[b, at // page].long(), at % page] = True
        first = -(-max(seen, 0) // page)
        table[b, first:] = foreign.repeat(width)[: width - first]
    if broken:
        for slot, bad in ((1, -1), (2, pages)):
            if slot * page >= max(visible[0]):
                continue
            named[table[0, slot].long()] = False
            table[0, slot] = bad
    fill(store[:, :, 0], ~named, poison)
    lengths = [0, *(len(each) for each in visible)]
    starts = (torch.tensor(lengths).cumsum(0) + base).int().to(DEVICE)
    flat = [count for each in visible for count in each]
    return Paged(q, k_cache, table, starts, ints(flat), len(visible[0]))


def ids(rows: int) -> Guarded:
    return Guarded(rows, TOP_BLOCKS, dtype=torch.int32)


def check_ids(found: Tensor, case: Paged, logits: Tensor, band: float = BAND) -> None:
    """Lists against the reference's choice from FP64 logits: as many as visible, ascending, the same set outside the
    tie band."""
    limits = case.visible.long().clamp(0, logits.shape[1])
    requests = reference.request_of_rows(case.rows, case.query_start_loc)
    limits = torch.where(requests >= 0, limits, 0)
    filled = torch.arange(TOP_BLOCKS, device=DEVICE) < limits.clamp(max=TOP_BLOCKS)[:, None]
    assert torch.equal(found >= 0, filled), "a row has the wrong number of ids"
    assert (found[~filled] == -1).all()
    assert (found < limits[:, None])[filled].all(), "a column that the row does not see"
    assert (found.diff(dim=1) > 0)[filled[:, 1:]].all(), "ids ascend, each once"
    clean = logits.nan_to_num(nan=-1.0).float()
    want = reference.select(clean, limits)
    width = logits.shape[1]

    def members(chosen: Tensor) -> Tensor:
        out = torch.zeros(len(chosen), width + 1, dtype=torch.bool, device=DEVICE)
        return out.scatter_(1, torch.where(chosen >= 0, chosen, width).long(), True)[:, :width]

    different = members(found) != members(want)
    kth = clean.gather(1, want[:, -1].clamp(min=0)[:, None])
    near = (clean - kth).abs() <= band * kth.abs().clamp(min=1)
    assert not different[limits <= TOP_BLOCKS].any()
    assert (~different | near)[limits > TOP_BLOCKS].all(), "a selection differs outside the tie band"


def short_rows(case: Paged, every: int = 3) -> Paged:
    """Every third row sees little."""
    small = ints([0, 1, 5, 511, 512, 513, -3]).repeat(case.rows)[: case.rows]
    third = torch.arange(case.rows, device=DEVICE) % every == 2
    return replace(case, visible=torch.where(third, torch.minimum(small, case.visible), case.visible).int())


def out_of_range(case: Paged, seed: int) -> Paged:
    """The same with a share of its pages and of what its rows see out of range, over a cache without NaN: a row that
    sees more than there is sees all of it."""
    generator = seeded(seed)
    case.k_cache.copy_(normal(generator, torch.float32, *case.k_cache.shape).to(case.k_cache.dtype))
    table = strewn(case.page_table, case.k_cache.shape[0], generator)
    return replace(case, page_table=table, visible=strewn(case.visible, case.columns + 1, generator, 0.3))
