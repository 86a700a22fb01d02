"""Prefill that shares its gather over vLLM's paged cache (SM90): workspace and launches, for the paged runner.

The kernels are those of `union.py`, `union_rows_paged` in the place of `union_rows`. The rows of all requests are one
sequence of tiles; where a request ends within a tile, the tile's union holds the blocks of both.
"""

from __future__ import annotations

from typing import Any, Protocol

from qsa_cute import geometry, union_layout
from qsa_cute.runners import checks
from qsa_cute.runners.union import KINDS, LEAST_ROWS, MAIN, PREPARE, Launches, Shape
from qsa_cute.runners.workspace import Workspace
from qsa_cute.runtime import Loader

ROWS = "union_rows_paged"
KERNELS = (PREPARE, MAIN, ROWS)

DECODE_ROWS = 8  # that a request has at most while it decodes, speculating

__all__ = ["KERNELS", "LEAST_ROWS", "PagedLaunches", "PagedParams", "fits", "pays", "shape", "workspace"]


class PagedParams(Protocol):
    """What a launch needs, checked by whoever made it.

    Q, O and the gate [rows, num_q_heads, head_dim]; K and V [num_pages, page_size, num_kv_heads, head_dim], all of one
    type, bf16 or fp16, with strides in elements, rows 16-byte aligned. `indices` is int32 [rows, width + 1], counted
    lists of a request's tokens; `block_table` int32 [num_requests, table_width], `token_to_req` int32 [rows].

    Attributes:
        page_size: tokens of a page, a multiple of 4.
        gate_ptr: 0 for no gate.
    """

    q_ptr: int
    k_ptr: int
    v_ptr: int
    o_ptr: int
    gate_ptr: int
    indices: int
    block_table: int
    token_to_req: int
    rows: int
    num_requests: int
    num_q_heads: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    num_pages: int
    page_size: int
    table_width: int
    width: int
    attention_scale: float
    q_stride_row: int
    q_stride_head: int
    k_stride_page: int
    k_stride_token: int
    k_stride_head: int
    v_stride_page: int
    v_stride_token: int
    v_stride_head: int
    o_stride_row: int
    o_stride_head: int
    gate_stride_row: int
    gate_stride_head: int
    indices_stride_row: int
    table_stride: int
    stream: int
    device: int


_NAMES = tuple(name for name in PagedParams.__annotations__ if name not in ("stream", "device"))


def shape(p: Any) -> Shape:
    """Of the parameters of a paged launch."""
    return Shape(
        rows=p.rows,
        batch=1,
        num_kv_heads=p.num_kv_heads,
        group_size=p.group_size,
        head_dim=p.head_dim,
        blocks_per_row=union_layout.blocks_of(p.width),
        context=min(p.table_width * p.page_size, checks.INT32_MAX),
        known=False,
        requests=2,
        pages=p.num_pages,
        page_tokens=p.page_size,
    )


def fits(p: Any) -> bool:
    """Whether the kernels take these parameters; pages, tokens and heads must lie apart for the copies."""
    sizes = {"page": p.num_pages, "token": p.page_size, "head": p.num_kv_heads}
    apart = all(getattr(p, f"{plane}_stride_{dim}") or sizes[dim] <= 1 for plane in "kv" for dim in sizes)
    return apart and p.page_size % geometry.BLOCK_TOKENS == 0 and shape(p).fits


def pays(p: Any) -> bool:
    """Whether enough rows can be prefill: where all requests but one decode, their rows share nothing."""
    return bool(p.rows >= LEAST_ROWS + DECODE_ROWS * (p.num_requests - 1))


def workspace(p: Any) -> Workspace:
    """What the launches need between them; it may hold anything at entry. As much for fewer rows, or less."""
    return shape(p).workspace()


class PagedLaunches(Launches):
    """The three launches of one params object.

    Args:
        memory: address of `workspace(p).size` bytes, 256-byte aligned, which may hold anything.
    """

    rows_kernel = ROWS

    def __init__(self, p: Any, dtype: str, loader: Loader, memory: int) -> None:
        what = shape(p)
        values = {name: getattr(p, name) for name in _NAMES}
        values |= dict.fromkeys(("lse_ptr", "context_lengths", "query_starts", "indices_stride_batch"), 0)
        values |= dict.fromkeys(("q_stride_batch", "o_stride_batch", "gate_stride_batch"), 0)
        values |= {
            "index_kind": KINDS["counted"],
            "seq_len": p.rows,
            "kv_seq_len": what.context,
            "top_k": p.width,
            "page_blocks": p.page_size // geometry.BLOCK_TOKENS,
            "token_shift": union_layout.entry_shift(p.page_size) + 2,
        }
        planes = {
            plane: (
                getattr(p, f"{plane}_ptr"),
                tuple(getattr(p, f"{plane}_stride_{dim}") for dim in ("token", "head", "page")),
            )
            for plane in "kv"
        }
        self._make(what, values, what.maps(loader, dtype, planes), memory)
