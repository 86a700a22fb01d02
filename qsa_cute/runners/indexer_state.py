"""Where the indexer's state lies in the widened paged pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks
from qsa_cute.runners.tensors import Binder


@dataclass(frozen=True, slots=True, kw_only=True)
class QsaIndexerPoolState:
    """The pool [2 * num_pages, 128, num_kv_heads, pool_head_dim] and its page table [batch, 2, max_pages_per_seq].

    Element (page, row, head, column) lies at `element(...)`. Columns [head_size, head_size + 128) of head 0 are the
    indexer's:

    - K plane, page table[b][0][t // 128], row t % 128: the raw key of token t, as it came, valid only while t's block
      of 4 is incomplete (token 4g + 3 is never stored; rows of complete blocks are stale and never read);
    - V plane, page table[b][1][4g // 128], row 4g % 128: the key of block g. V's ids include the + num_pages.

    An entry outside [0, 2 * num_pages), such as -1, is unmapped: nothing is read or stored there.

    Attributes:
        pool_ptr: device address, a multiple of 16.
        page_table: device address of int32.
        num_pages: pages of the K plane.
        head_size: column where the tail begins.
        page_stride, token_stride: in elements; contiguous where None.
        page_table_stride: entries from a sequence to the next; contiguous where None.
        num_flat_pages, tail_offset, k_page_table, v_page_table: what follows from the rest.

    Raises:
        ArgumentError: a value that no launch could take.
    """

    pool_ptr: int
    page_table: int
    max_pages_per_seq: int
    num_pages: int
    num_kv_heads: int = geometry.NUM_KV_HEADS
    pool_head_dim: int = geometry.POOL_HEAD_DIM
    head_size: int = geometry.HEAD_DIM
    page_stride: int | None = None
    token_stride: int | None = None
    page_table_stride: int | None = None
    num_flat_pages: int = field(init=False)
    tail_offset: int = field(init=False)
    k_page_table: int = field(init=False)
    v_page_table: int = field(init=False)

    def __post_init__(self) -> None:
        max_pages = checks.integer("max_pages_per_seq", self.max_pages_per_seq, 1)
        pages = checks.integer("num_pages", self.num_pages, 0, checks.MAX_FLAT_PAGES // 2)
        heads = checks.integer("num_kv_heads", self.num_kv_heads, 1)
        head_size = checks.integer("head_size", self.head_size, 0)
        pool_head = checks.integer("pool_head_dim", self.pool_head_dim, head_size + geometry.INDEX_HEAD_DIM)
        for name, value in (("head_size", head_size), ("pool_head_dim", pool_head)):
            if value % 8:
                raise ArgumentError(f"{name} is {value}; it takes a multiple of 8")
        table = checks.address("page_table", self.page_table, 4)
        token = checks.stride("token_stride", self.token_stride, heads * pool_head)
        checked = {
            "pool_ptr": checks.address("pool_ptr", self.pool_ptr, checks.ALIGNMENT, pages > 0),
            "token_stride": token,
            "page_stride": checks.stride("page_stride", self.page_stride, geometry.PAGE_TOKENS * token),
            "page_table_stride": checks.stride("page_table_stride", self.page_table_stride, 2 * max_pages, step=1),
            "num_flat_pages": 2 * pages,
            "tail_offset": head_size,
            "k_page_table": table,
            "v_page_table": table + 4 * max_pages,
        }
        checks.settle(self, checked)

    def element(self, page: int, row: int, head: int, column: int) -> int:
        """Offset of an element from `pool_ptr`, in elements."""
        return page * (self.page_stride or 0) + row * (self.token_stride or 0) + head * self.pool_head_dim + column

    @property
    def reach(self) -> int:
        """Tokens that a sequence's row of the page table can map."""
        return self.max_pages_per_seq * geometry.PAGE_TOKENS

    @classmethod
    def from_tensors(
        cls, kv_pool: Any, page_table: Any, *, head_size: int = geometry.HEAD_DIM, binder: Binder | None = None
    ) -> QsaIndexerPoolState:
        """From CUDA tensors of the shapes above.

        Args:
            kv_pool: bf16 or fp16 [2 * num_pages, 128, num_kv_heads, pool_head_dim].
            page_table: int32 [batch, 2, max_pages_per_seq].
            binder: the call's other tensors, to whose type, device and batch these are held.

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit.
        """
        binder = binder or Binder()
        pool = binder.take("kv_pool", kv_pool, f"flat_pages {geometry.PAGE_TOKENS} kv_heads pool_head_dim", "elem")
        table = binder.page_table(page_table)
        if binder.size("flat_pages") % 2:
            raise ArgumentError(f"kv_pool has {binder.size('flat_pages')} pages; it takes as many for V as for K")
        if binder.size("kv_heads") > 1 and pool.strides[2] != binder.size("pool_head_dim"):
            raise ArgumentError(f"kv_pool has strides {pool.strides}; its heads must follow one another")
        return cls(
            pool_ptr=pool.pointer,
            page_table=table.pointer,
            max_pages_per_seq=binder.size("max_pages"),
            num_pages=binder.size("flat_pages") // 2,
            num_kv_heads=binder.size("kv_heads"),
            pool_head_dim=binder.size("pool_head_dim"),
            head_size=head_size,
            page_stride=pool.strides[0],
            token_stride=pool.strides[1],
            page_table_stride=table.strides[0],
        )
