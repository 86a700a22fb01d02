"""One launch of sparse attention over vLLM's paged cache: its parameters, checked. The runner: `paged_attention.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.paged_union_layout import entry_shift
from qsa_cute.runners import boxes, checks, splits, union_paged, workspace
from qsa_cute.runners import paged_places as places
from qsa_cute.runners.tensors import Binder, TensorView, current_stream
from qsa_cute.runtime import Loader

ROWS = "rows"
TMA = "tma"
SHARED = "shared"
ALGORITHMS = (TMA, ROWS, SHARED)
FP8 = "fp8_e4m3"
CACHE_DTYPES = ("bf16", FP8)
PAGE_STEP = 16  # tokens of a page are a multiple
MAX_SPLITS = 32  # of "rows", the split stride of its workspace: a constant of the built kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionParams:
    """One launch of sparse attention over a paged cache, checked when it is made.

    Q, O and the gate are bf16 [rows, num_q_heads, head_dim]; K and V [num_pages, page_size, num_kv_heads, head_dim],
    each with strides of its own, bf16 or fp8 e4m3; unit inner stride, rows of K and V 16-byte aligned. `indices` is
    int32 [rows, width + 1], counted lists: the last column is the number of entries, those past it are never looked at.
    `block_table` is int32 [num_requests, table_width], `token_to_req` int32 [rows]. Strides, in elements, are
    contiguous where None.

    A token counts where it is >= 0, its page lies in the table and its physical page in [0, num_pages). A row whose
    request is outside [0, num_requests) is zeros. An output of exactly zero stays zero whatever its gate.

    Attributes:
        cache_dtype: "bf16" or "fp8_e4m3", whose values stand for themselves times a scale.
        page_size: tokens of a page, a multiple of 16.
        width: entries that a list has room for, without the count.
        gate_ptr: 0 for no gate: O is then the plain attention output.
        attention_scale: factor of the scores; K's scale belongs in here, or behind `k_scale_ptr`.
        output_scale: V's scale, of an fp8 cache only.
        k_scale_ptr, v_scale_ptr: FP32 factors on the device, 0 for none.
        partial_o, partial_stats, split_counters: workspace of "rows" with several splits, see `workspace_size`.
        workspace: memory of "shared", see `PagedAttentionRunner.workspace_wanted`.
        algorithm: "tma", "rows", "shared" or None, which lets the runner choose.
        num_splits: blocks that share a list; 0 lets the runner choose. "tma" takes up to 16, "rows" up to 32.
        stream: CUstream as an integer.
        device: ordinal; -1 is the current context's.
        grid and what stands after it: what follows from the rest.

    Raises:
        ArgumentError: a value that no launch could take, or an output that overlaps another tensor.
    """

    q_ptr: int
    k_ptr: int
    v_ptr: int
    indices: int
    block_table: int
    token_to_req: int
    o_ptr: int
    rows: int
    num_requests: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    table_width: int
    width: int
    cache_dtype: str = "bf16"
    gate_ptr: int = 0
    k_scale_ptr: int = 0
    v_scale_ptr: int = 0
    attention_scale: float
    output_scale: float = 1.0
    partial_o: int = 0
    partial_stats: int = 0
    split_counters: int = 0
    workspace: int = 0
    algorithm: str | None = None
    num_splits: int = 0
    q_stride_row: int | None = None
    q_stride_head: int | None = None
    o_stride_row: int | None = None
    o_stride_head: int | None = None
    gate_stride_row: int | None = None
    gate_stride_head: int | None = None
    k_stride_page: int | None = None
    k_stride_token: int | None = None
    k_stride_head: int | None = None
    v_stride_page: int | None = None
    v_stride_token: int | None = None
    v_stride_head: int | None = None
    indices_stride_row: int | None = None
    table_stride: int | None = None
    stream: int = 0
    device: int = -1
    packed: object = field(init=False, default=None, repr=False, compare=False)  # kept by the launch
    grid: tuple[int, int, int] = field(init=False)
    group_size: int = field(init=False)
    page_magic: int = field(init=False)
    page_shift: int = field(init=False)
    unit: int = field(init=False)
    k_page_units: int = field(init=False)
    k_token_units: int = field(init=False)
    v_page_units: int = field(init=False)
    v_token_units: int = field(init=False)
    k_head_bytes: int = field(init=False)
    v_head_bytes: int = field(init=False)
    block_bits: int = field(init=False)
    rows_per_request: int = field(init=False)
    map_strides: tuple[boxes.Strides, boxes.Strides] | None = field(init=False)  # None: TMA does not take the cache
    _with_maps: SimpleNamespace | None = field(init=False, default=None, repr=False, compare=False)
    _as_rows: PagedAttentionParams | None = field(init=False, default=None, repr=False, compare=False)
    _launches: union_paged.PagedLaunches | None = field(init=False, default=None, repr=False, compare=False)
    _bytes: dict[str, int] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked = self._sizes()
        checked |= self._splits(checked)
        checked["grid"] = (checked["rows"], checked["num_splits"] or 1, checked["num_kv_heads"])
        checked |= self._addresses(checked)
        checked |= self._strides(checked)
        checked["map_strides"] = self._map_strides(checked)
        checked["attention_scale"] = checks.scalar("attention_scale", self.attention_scale)
        checked["output_scale"] = checks.scalar("output_scale", self.output_scale)
        if checked["cache_dtype"] == "bf16" and (checked["output_scale"] != 1.0 or checked["v_scale_ptr"]):
            raise ArgumentError("output_scale belongs to an fp8 cache; a bf16 cache takes 1 and no v_scale_ptr")
        checks.settle(self, checked)
        if self.algorithm == SHARED and self.unshared:
            raise ArgumentError(f"algorithm is 'shared', which does not take {self.unshared}; use None")
        if checked["rows"]:
            self._check_overlap()

    def _sizes(self) -> dict[str, Any]:
        q_heads, kv_heads = checks.heads(self.num_q_heads, self.num_kv_heads)
        checks.integer("num_kv_heads", kv_heads, 1, checks.MAX_GRID_YZ)
        rows = checks.integer("rows", self.rows, 0)
        checks.grid("rows x num_kv_heads", rows * kv_heads)
        kind = checks.dtype_name(self.cache_dtype)
        if kind not in CACHE_DTYPES:
            raise ArgumentError(f"cache_dtype is {checks.show(self.cache_dtype)}; it takes {' or '.join(CACHE_DTYPES)}")
        page_size = checks.integer("page_size", self.page_size, PAGE_STEP)
        if page_size % PAGE_STEP:
            raise ArgumentError(f"page_size is {page_size}; it takes a multiple of {PAGE_STEP} tokens")
        magic, shift = places.divisor(page_size)
        num_requests = checks.integer("num_requests", self.num_requests, 1)
        return {
            "rows": rows,
            "num_q_heads": q_heads,
            "num_kv_heads": kv_heads,
            "group_size": q_heads // kv_heads,
            "head_dim": checks.head_dim(self.head_dim),
            "num_requests": num_requests,
            "rows_per_request": max(1, rows // num_requests),
            "num_pages": checks.integer("num_pages", self.num_pages, 1),
            "page_size": page_size,
            "page_magic": magic,
            "page_shift": shift,
            "block_bits": entry_shift(page_size),
            "table_width": checks.integer("table_width", self.table_width, 1),
            "width": checks.integer("width", self.width, 1, geometry.MAX_TOP_K),
            "cache_dtype": kind,
            "device": checks.integer("device", self.device, -1),
        }

    def _splits(self, sizes: dict[str, Any]) -> dict[str, int]:
        """Of the algorithm that is named; what the runner chooses is settled when it runs."""
        if self.algorithm is not None and self.algorithm not in ALGORITHMS:
            taken = ", ".join(map(repr, ALGORITHMS))
            raise ArgumentError(f"algorithm is {checks.show(self.algorithm)}; it takes {taken} or None")
        most = {ROWS: MAX_SPLITS, SHARED: 1}.get(self.algorithm or "", geometry.MAX_CLUSTER)
        number = checks.integer("num_splits", self.num_splits, 0, most)
        if number and self.algorithm is None:
            raise ArgumentError(f"num_splits is {number} without an algorithm; name the one it is meant for")
        if not number:
            units = sizes["rows"] * sizes["num_kv_heads"]
            if self.algorithm == ROWS:
                number = splits.of_workspace(units, sizes["width"], most) if self.partial_o else 1
            elif self.algorithm == SHARED:
                number = 1
            else:
                number = splits.of_cluster(units, sizes["width"])
        return {"num_splits": number}

    def _addresses(self, sizes: dict[str, Any]) -> dict[str, int]:
        aligned, launches = checks.ALIGNMENT, sizes["rows"] > 0
        merges = launches and self.algorithm == ROWS and sizes["num_splits"] > 1
        return {
            name: checks.address(name, getattr(self, name), align, required)
            for name, align, required in (
                ("q_ptr", aligned, launches),
                ("k_ptr", aligned, launches),
                ("v_ptr", aligned, launches),
                ("o_ptr", aligned, launches),
                ("gate_ptr", aligned, False),
                ("indices", 4, launches),
                ("block_table", 4, launches),
                ("token_to_req", 4, launches),
                ("k_scale_ptr", 4, False),
                ("v_scale_ptr", 4, False),
                ("partial_o", aligned, merges),
                ("partial_stats", 4, merges),
                ("split_counters", 4, merges),
                ("workspace", workspace.ALIGNMENT, launches and self.algorithm == SHARED),
                ("stream", 1, False),
            )
        }

    def _strides(self, sizes: dict[str, Any]) -> dict[str, int]:
        head, heads = sizes["head_dim"], sizes["num_q_heads"] * sizes["head_dim"]
        token = sizes["num_kv_heads"] * head
        item = _item(sizes["cache_dtype"])
        found = {
            name: checks.stride(name, getattr(self, name), contiguous)
            for rows, heads_, contiguous_row in (("q", "q", heads), ("o", "o", heads), ("gate", "gate", heads))
            for name, contiguous in ((f"{rows}_stride_row", contiguous_row), (f"{heads_}_stride_head", head))
        }
        for plane in "kv":
            for name, contiguous in (("page", sizes["page_size"] * token), ("token", token), ("head", head)):
                key = f"{plane}_stride_{name}"
                found[key] = checks.stride(key, getattr(self, key), contiguous, checks.ALIGNMENT // item)
            found[f"{plane}_head_bytes"] = found[f"{plane}_stride_head"] * item
        found |= places.units(found, sizes["num_pages"], sizes["page_size"], item)
        columns = sizes["width"] + 1
        found["indices_stride_row"] = checks.stride("indices_stride_row", self.indices_stride_row, columns, step=1)
        found["table_stride"] = checks.stride("table_stride", self.table_stride, sizes["table_width"], step=1)
        return found

    def _map_strides(self, sizes: dict[str, Any]) -> tuple[boxes.Strides, boxes.Strides] | None:
        dims, item = (sizes["page_size"], sizes["num_kv_heads"], sizes["num_pages"]), _item(sizes["cache_dtype"])
        elements = [tuple(sizes[f"{plane}_stride_{dim}"] for dim in ("token", "head", "page")) for plane in "kv"]
        k, v = (boxes.strides(dims, one, sizes["head_dim"], item) for one in elements)
        if k and v and sizes["num_pages"] << sizes["block_bits"] <= _MAX_PLACES:
            return k, v
        if sizes["rows"] and self.algorithm == TMA:
            raise ArgumentError(
                f"the cache has {dims[2]} pages of {dims[0]} tokens and {dims[1]} KV heads; the strides of tokens, "
                f"heads and pages are {elements[0]} elements in K, {elements[1]} in V. Algorithm 'tma' takes what lies "
                "apart, by less than 2^40 bytes, and up to 2^31 blocks of 4 tokens, a power of two of them a page"
            )
        return None

    def _check_overlap(self) -> None:
        rows, heads, dim = self.rows, self.num_q_heads, self.head_dim
        item = _item(self.cache_dtype)

        def outer(name: str) -> tuple[tuple[int, int], tuple[int, int]]:
            return (rows, getattr(self, f"{name}_stride_row")), (heads, getattr(self, f"{name}_stride_head"))

        def cache(name: str) -> tuple[tuple[int, int], ...]:
            sizes = (("page", self.num_pages), ("token", self.page_size), ("head", self.num_kv_heads))
            return tuple((size, getattr(self, f"{name}_stride_{dim}")) for dim, size in sizes)

        slots = rows * self.num_kv_heads * MAX_SPLITS
        shared = union_paged.workspace(self).size if self.workspace else 0
        outputs = (
            checks.extent("o", self.o_ptr, outer("o"), dim, checks.ELEM_BYTES),
            checks.extent("partial_o", self.partial_o, (), slots * geometry.PARTIAL_ROWS * dim, 4),
            checks.extent("partial_stats", self.partial_stats, (), slots * 2 * geometry.PARTIAL_ROWS, 4),
            checks.extent("split_counters", self.split_counters, (), rows * self.num_kv_heads, 4),
            checks.extent("workspace", self.workspace, (), shared, 1),
        )
        inputs = (
            checks.extent("q", self.q_ptr, outer("q"), dim, checks.ELEM_BYTES),
            checks.extent("k_cache", self.k_ptr, cache("k"), dim, item),
            checks.extent("v_cache", self.v_ptr, cache("v"), dim, item),
            checks.extent("gate", self.gate_ptr, outer("gate"), dim, checks.ELEM_BYTES),
            checks.extent("indices", self.indices, ((rows, self.indices_stride_row or 0),), self.width + 1, 4),
            checks.extent(
                "block_table", self.block_table, ((self.num_requests, self.table_stride or 0),), self.table_width, 4
            ),
            checks.extent("token_to_req", self.token_to_req, (), rows, 4),
        )
        checks.disjoint(outputs, inputs)
        sizes = {one.name: one.end - one.begin for one in (*outputs, *inputs)}
        object.__setattr__(self, "_bytes", {field: sizes[name] for field, name in _TENSORS.items()})

    def with_workspace(self, addresses: Mapping[str, int]) -> PagedAttentionParams:
        """These parameters with the parts of `workspace_wanted` at these addresses, by name, for what wanted them."""
        algorithm = SHARED if "workspace" in addresses else ROWS
        return dataclasses.replace(self, algorithm=algorithm, num_splits=0, **addresses)  # type: ignore[arg-type]

    def moved(self, stream: int, **addresses: int) -> PagedAttentionParams:
        """The same launch on other tensors of the same layout; a fraction of what making it anew costs.

        Args:
            addresses: of the tensors that moved, by field.

        Raises:
            ArgumentError: an address is null or not aligned, or the output overlaps another tensor.
        """
        made = object.__new__(PagedAttentionParams)
        for name in _KEPT:
            _set(made, name, getattr(self, name))
        for name, value in addresses.items():
            if not value or value % _ALIGNMENTS[name]:
                checks.address(name, value, _ALIGNMENTS[name], name != "gate_ptr")
            _set(made, name, value)
        _set(made, "stream", stream)
        _set(made, "packed", None)
        _set(made, "_as_rows", None)
        _set(made, "_launches", None)
        _set(made, "_with_maps", None)
        begin, end = made.o_ptr, made.o_ptr + self._bytes["o_ptr"]
        for name, size in self._bytes.items():
            at = getattr(made, name)
            if at and at < end and begin < at + size and name != "o_ptr":
                made._check_overlap()  # says which
        return made

    @property
    def unshared(self) -> str:
        """What keeps these rows from sharing their gather; "" where nothing does."""
        return "" if union_paged.fits(self) else "a cache or a table of this size and these strides"

    def launches(self, loader: Loader) -> union_paged.PagedLaunches:
        """Those of "shared", made at the first call."""
        if self._launches is None:
            object.__setattr__(
                self, "_launches", union_paged.PagedLaunches(self, self.cache_dtype, loader, self.workspace)
            )
        return self._launches  # type: ignore[return-value]

    def with_maps(self, loader: Loader) -> SimpleNamespace | None:
        """These parameters and the words of both tensor maps, made at the first call; None where there are none."""
        if self._with_maps is None and self.map_strides is not None:
            dims, dim, kind = (self.page_size, self.num_kv_heads, self.num_pages), self.head_dim, self.cache_dtype
            words: dict[str, int] = {}
            for name, address, steps in zip(
                ("k_map", "v_map"), (self.k_ptr, self.v_ptr), self.map_strides, strict=True
            ):
                words |= boxes.encode(loader, self.device, name, kind, address, dim, dims, steps)
            _set(self, "_with_maps", _TAKEN.beside(self, words))
        return self._with_maps

    def as_rows(self) -> PagedAttentionParams:
        """These parameters for "rows", made at the first call; one block a row where there is no workspace."""
        if self._as_rows is None:
            object.__setattr__(self, "_as_rows", dataclasses.replace(self, algorithm=ROWS, num_splits=0))
        return self._as_rows or self

    @classmethod
    def from_tensors(
        cls,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        indices: Any,
        block_table: Any,
        token_to_req: Any,
        o: Any,
        *,
        attention_scale: float | None = None,
        gate: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        partial_o: Any = None,
        partial_stats: Any = None,
        split_counters: Any = None,
        algorithm: str | None = None,
        num_splits: int = 0,
        stream: int | None = None,
    ) -> PagedAttentionParams:
        """From CUDA tensors of the shapes above: torch's, or what `runners.tensors` takes.

        Args:
            attention_scale: head_dim ** -0.5 when None.
            k_scale, v_scale: numbers or one-element FP32 tensors on the device, which are read there; both belong to an
                fp8 cache and are required with one.
            partial_o, partial_stats, split_counters: the parts of `PagedAttentionRunner.workspace_size`.
            stream: CUstream as an integer; None is torch's current stream on the tensors' device.

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit, or memory overlaps.
        """
        binder = Binder()
        q_ = binder.take("q", q, "rows q_heads head_dim", "bf16")
        kind = checks.dtype_name(getattr(k_cache, "dtype", None)) or ""
        if kind not in CACHE_DTYPES:
            found = checks.show(getattr(k_cache, "dtype", k_cache))
            raise ArgumentError(f"k_cache has type {found}; it takes {' or '.join(CACHE_DTYPES)}")
        cache = "pages page_size kv_heads head_dim"
        k, v = binder.take("k_cache", k_cache, cache, kind), binder.take("v_cache", v_cache, cache, kind)
        ids = binder.take("indices", indices, "rows columns", "i32")
        table = binder.take("block_table", block_table, "requests table_width", "i32")
        requests = binder.take("token_to_req", token_to_req, "rows", "i32", contiguous=True)
        o_ = binder.take("o", o, "rows q_heads head_dim", "bf16")
        gate_ = None if gate is None else binder.take("gate", gate, "rows q_heads head_dim", "bf16")
        size = binder.size
        if size("columns") < 2:
            raise ArgumentError(
                f"indices has shape {list(ids.shape)}; it takes a list and its count, 2 columns or more"
            )
        scales = places.scales(binder, kind, k_scale, v_scale)
        slots = f"{size('rows') * size('kv_heads') * MAX_SPLITS}"
        units = f"{size('rows') * size('kv_heads')}"
        scale = (
            size("head_dim") ** -0.5 if attention_scale is None else checks.scalar("attention_scale", attention_scale)
        )
        return cls(
            q_ptr=q_.pointer,
            k_ptr=k.pointer,
            v_ptr=v.pointer,
            indices=ids.pointer,
            block_table=table.pointer,
            token_to_req=requests.pointer,
            o_ptr=o_.pointer,
            rows=size("rows"),
            num_requests=size("requests"),
            num_q_heads=size("q_heads"),
            num_kv_heads=size("kv_heads"),
            head_dim=size("head_dim"),
            num_pages=size("pages"),
            page_size=size("page_size"),
            table_width=size("table_width"),
            width=size("columns") - 1,
            cache_dtype=kind,
            gate_ptr=gate_.pointer if gate_ else 0,
            k_scale_ptr=scales[0].pointer,
            v_scale_ptr=scales[1].pointer,
            attention_scale=scale * scales[0].number,
            output_scale=scales[1].number,
            partial_o=binder.pointer("partial_o", partial_o, f"{slots} {geometry.PARTIAL_ROWS} head_dim", "f32"),
            partial_stats=binder.pointer("partial_stats", partial_stats, f"{slots} 2 {geometry.PARTIAL_ROWS}", "f32"),
            split_counters=binder.pointer("split_counters", split_counters, units, "i32"),
            algorithm=algorithm,
            num_splits=num_splits,
            **_row_strides("q", q_),
            **_row_strides("o", o_),
            **(_row_strides("gate", gate_) if gate_ else {}),
            **_cache_strides("k", k),
            **_cache_strides("v", v),
            indices_stride_row=ids.strides[0],
            table_stride=table.strides[0],
            stream=current_stream(binder.device, q) if stream is None else stream,
            device=binder.device,
        )


_set = object.__setattr__
# Field -> the tensor's name in messages, and what its address is a multiple of.
_TENSORS = {
    "q_ptr": "q",
    "k_ptr": "k_cache",
    "v_ptr": "v_cache",
    "gate_ptr": "gate",
    "indices": "indices",
    "block_table": "block_table",
    "token_to_req": "token_to_req",
    "o_ptr": "o",
}
_ALIGNMENTS = {name: checks.ALIGNMENT if name.endswith("_ptr") else 4 for name in _TENSORS}
_ALIGNMENTS |= {"partial_o": checks.ALIGNMENT, "partial_stats": 4, "split_counters": 4}
_ALIGNMENTS |= {"workspace": workspace.ALIGNMENT}
_MADE = ("packed", "stream", "_as_rows", "_launches", "_with_maps")  # anew by each launch
_KEPT = tuple(one.name for one in dataclasses.fields(PagedAttentionParams) if one.name not in _MADE)
_TAKEN = boxes.Taken(PagedAttentionParams)
_MAX_PLACES = 1 << 31


def _item(cache_dtype: str) -> int:
    """Bytes of an element."""
    return 1 if cache_dtype == FP8 else checks.ELEM_BYTES


def _row_strides(name: str, found: TensorView) -> dict[str, Any]:
    return {f"{name}_stride_row": found.strides[0], f"{name}_stride_head": found.strides[1]}


def _cache_strides(name: str, found: TensorView) -> dict[str, Any]:
    return {f"{name}_stride_{dim}": step for dim, step in zip(("page", "token", "head"), found.strides, strict=False)}
