"""Selected pools into tokens, the open pool's tokens in fixed columns behind them; conventions as in `kpool.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks
from qsa_cute.runners.indexer_launch import addresses, place
from qsa_cute.runners.kpool import KpoolLaunch, index_of
from qsa_cute.runners.tensors import Binder, TensorView, current_stream, view

MAX_COLUMNS = 1 << 24  # of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandTail(KpoolLaunch):
    """out int32 [num_rows, topk + tail]: tokens of topk // pool_size pools a row, then the open pool's.

    Column c < topk is ids[r, c // pool_size] * pool_size + c % pool_size, or -1 where the pool is not valid (`valid`'s
    byte is 0, or without one the id is negative); with `copy` it is ids[r, c]. Column topk + i is the open pool's i-th
    token, closed * pool_size + i, where that is below seq_lens[r]; else -1. closed is pool_lens[r], or seq_lens[r] //
    pool_size where there are none. With a page table a token becomes page_table[r, token], the token clamped to its
    columns; with offsets it becomes token + offsets[r].

    Attributes:
        tail: columns for the open pool; 0 needs no seq_lens.
        *_stride_row: in elements.
    """

    KERNEL: ClassVar[str] = "kpool_expand"

    out_ptr: int
    ids_ptr: int
    num_rows: int
    topk: int
    pool_size: int
    tail: int = 0
    valid_ptr: int = 0
    seq_lens_ptr: int = 0
    pool_lens_ptr: int = 0
    page_table_ptr: int = 0
    offsets_ptr: int = 0
    copy: bool = False
    table_width: int = 0
    id_words: int = 1
    seq_words: int = 1
    pool_len_words: int = 1
    table_words: int = 1
    offset_words: int = 1
    out_stride_row: int | None = None
    ids_stride_row: int | None = None
    valid_stride_row: int | None = None
    table_stride_row: int | None = None

    def __post_init__(self) -> None:
        rows = checks.integer("num_rows", self.num_rows, 0)
        pool = checks.integer("pool_size", self.pool_size, 1, MAX_COLUMNS)
        topk = checks.integer("topk", self.topk, 0, MAX_COLUMNS)
        tail = checks.integer("tail", self.tail, 0, MAX_COLUMNS)
        if not self.copy and topk % pool:
            raise ArgumentError(f"topk is {topk}; it takes a multiple of pool_size {pool}")
        if self.page_table_ptr and self.offsets_ptr:
            raise ArgumentError("page_table and topk_offsets are both given; tokens go through one of them")
        if self.copy and self.valid_ptr:
            raise ArgumentError("valid is given with copy; copied tokens are taken as they are")
        groups = topk if self.copy else topk // pool
        work = rows > 0 and topk + tail > 0
        checked: dict[str, Any] = place(self) | addresses(self, work, out_ptr=4)
        checked |= addresses(self, work and topk > 0, ids_ptr=4) | addresses(self, work and tail > 0, seq_lens_ptr=4)
        checked |= addresses(self, False, valid_ptr=1, pool_lens_ptr=4, page_table_ptr=4, offsets_ptr=4)
        for name in ("id_words", "seq_words", "pool_len_words", "table_words", "offset_words"):
            checked[name] = checks.integer(name, getattr(self, name), 1, 2)
        width = checks.integer("table_width", self.table_width, 1 if self.page_table_ptr else 0)
        columns = {"out": topk + tail, "ids": groups, "valid": groups, "table": width}
        for name, contiguous in columns.items():
            stride = f"{name}_stride_row"
            checked[stride] = checks.stride(stride, getattr(self, stride), contiguous, step=1)
        checks.settle(self, checked | {"copy": int(bool(self.copy)), "grid": rows if work else 0})
        out = checks.extent("out", self.out_ptr, ((rows, self.out_stride_row or 0),), topk + tail, 4)
        size = 4 * self.id_words
        ids = checks.extent("ids", self.ids_ptr, ((rows, self.ids_stride_row or 0),), groups, size)
        checks.disjoint([out], [ids])

    @classmethod
    def from_tensors(
        cls,
        out: Any,
        ids: Any,
        pool_size: int,
        *,
        valid: Any = None,
        seq_lens: Any = None,
        pool_lens: Any = None,
        page_table: Any = None,
        offsets: Any = None,
        copy: bool = False,
        stream: int | None = None,
    ) -> ExpandTail:
        """From CUDA tensors: out int32 [rows, topk + tail], ids int32 or int64 [rows, groups], valid bool [rows,
        groups], seq_lens and pool_lens [rows], page_table [rows, width], offsets [rows] or [rows, 1].

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit.
        """
        binder = Binder()
        to = binder.take("out", out, "rows columns", "i32")
        pools, id_words = _strided(binder, "ids", ids, "rows groups")
        flags = None if valid is None else binder.take("group_valid", valid, "rows groups", "bool")
        table, table_words = None, 1
        if page_table is not None:
            table, table_words = _strided(binder, "page_table", page_table, "rows width")
        topk = binder.size("groups") * (1 if copy else pool_size)
        each = (
            ("seq_lens_ptr", "seq_words", "seq_lens", seq_lens),
            ("pool_lens_ptr", "pool_len_words", "pool_lens", pool_lens),
            ("offsets_ptr", "offset_words", "topk_offsets", offsets),
        )
        given: dict[str, int] = {}
        for pointer, words, name, tensor in each:
            if tensor is not None:
                dims = "rows 1" if tensor is offsets and len(tensor.shape) == 2 else "rows"
                found, count = index_of(binder, name, tensor, dims)
                given |= {pointer: found.pointer, words: count}
        return cls(
            out_ptr=to.pointer,
            ids_ptr=pools.pointer,
            num_rows=binder.size("rows"),
            topk=topk,
            pool_size=pool_size,
            tail=binder.size("columns") - topk,
            valid_ptr=flags.pointer if flags else 0,
            page_table_ptr=table.pointer if table else 0,
            copy=copy,
            table_width=table.shape[1] if table else 0,
            id_words=id_words,
            table_words=table_words,
            out_stride_row=to.strides[0],
            ids_stride_row=pools.strides[0],
            valid_stride_row=flags.strides[0] if flags else None,
            table_stride_row=table.strides[0] if table else None,
            stream=current_stream(binder.device, ids) if stream is None else stream,
            device=binder.device,
            **given,
        )


def _strided(binder: Binder, name: str, tensor: Any, dims: str) -> tuple[TensorView, int]:
    """As `index_of`, rows any stride apart."""
    kind = view(name, tensor).dtype
    if kind not in ("i32", "i64"):
        raise ArgumentError(f"{name} has type {kind}; it takes i32 or i64")
    return binder.take(name, tensor, dims, kind), 1 + (kind == "i64")
