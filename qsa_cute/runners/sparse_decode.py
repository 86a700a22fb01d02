"""Sparse decode attention over the widened paged pool: parameters of a launch, and the runner.

Two algorithms compute the same: "tma" (SM90: whole 4-token blocks of a list are copied as one, and its splits are the
blocks of a cluster, which merge in shared memory) and "split_kv" (every SM: partials in a workspace, merged by the last
block to arrive).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import boxes, checks, dispatch, splits
from qsa_cute.runners.tensors import Binder, current_stream
from qsa_cute.runners.workspace import Workspace
from qsa_cute.runtime import Loader, default_loader
from qsa_cute.support import Support, SupportCode

SPLIT_KV = "split_kv"
TMA = "tma"
ALGORITHMS = (TMA, SPLIT_KV)

_KERNELS = {SPLIT_KV: "sparse_decode", TMA: "sparse_decode_tma"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseDecodeParams:
    """One launch of sparse decode: addresses, sizes, and what the kernel takes, checked when it is made.

    Q and O are [batch_size, query_len, num_q_heads, head_dim]; the pool is [num_flat_pages, 128, num_kv_heads,
    pool_head_dim], of which only columns [0, head_dim) are read; bf16 or fp16, unit inner stride, every row 16-byte
    aligned. `page_table` is int32 [batch_size, 2, max_pages_per_seq]: K pages, then V pages. `indices` is int32
    [batch_size, query_len, top_k]; `context_lengths` int32 [batch_size], with the new tokens. Strides, in elements,
    are contiguous where None; a row is sequence * query_len + token.

    An id counts where 0 <= id < context length and both its pages are in [0, num_flat_pages).

    Attributes:
        query_len: new tokens a sequence.
        lse_ptr: FP32 [batch_size, query_len, num_q_heads] for the natural-log LSE (-inf: no valid entry); 0 for none.
        partial_o, partial_stats, split_counters: workspace as `SparseDecodeRunner.workspace_size` describes it. It may
            hold anything at entry; counters are zero afterwards. "tma" needs none of it.
        max_splits: split stride of the workspace, a constant of the built kernel.
        algorithm: "tma" or "split_kv"; None picks what suits the device, and "split_kv" for a pool that is empty, or
            whose tokens, heads or pages do not lie apart or 2^40 bytes apart: TMA does not take it.
        num_splits: blocks that share a list; 0 lets the runner choose. "tma" takes up to 16.
        stream: CUstream as an integer.
        device: ordinal; -1 is the current context's.
        dtype: of Q, the pool and O, which `run` must then be given; "" where it is not known, of raw addresses.
        k_pool_ptr, v_pool_ptr, k_page_table, v_page_table, group_size, grid, map_strides: what follows from the rest.

    Raises:
        ArgumentError: a value that no launch could take, or an output that overlaps another tensor.
    """

    q_ptr: int
    kv_pool_ptr: int
    page_table: int
    indices: int
    context_lengths: int
    o_ptr: int
    batch_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    pool_head_dim: int
    num_flat_pages: int
    max_pages_per_seq: int
    top_k: int
    attention_scale: float
    partial_o: int = 0
    partial_stats: int = 0
    split_counters: int = 0
    stream: int = 0
    lse_ptr: int = 0
    query_len: int = 1
    max_splits: int = geometry.HOST_MAX_SPLITS
    algorithm: str | None = None
    num_splits: int = 0
    q_stride_row: int | None = None
    q_stride_head: int | None = None
    o_stride_row: int | None = None
    o_stride_head: int | None = None
    page_table_stride: int | None = None
    page_stride: int | None = None
    token_stride: int | None = None
    head_stride: int | None = None
    indices_stride_row: int | None = None
    device: int = -1
    dtype: str = ""
    packed: object = field(init=False, default=None, repr=False, compare=False)  # kept by the launch
    group_size: int = field(init=False)
    k_pool_ptr: int = field(init=False)
    v_pool_ptr: int = field(init=False)
    k_page_table: int = field(init=False)
    v_page_table: int = field(init=False)
    grid: tuple[int, int, int] = field(init=False)
    map_strides: boxes.Strides | None = field(init=False)  # None: TMA does not take the pool
    _with_map: SimpleNamespace | None = field(init=False, default=None, repr=False, compare=False)
    _as_split_kv: SparseDecodeParams | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked = self._sizes()
        rows = checked["batch_size"] * checked["query_len"]
        checked |= self._splits(rows * checked["num_kv_heads"], checked)
        checked["grid"] = (rows, checked["num_splits"], checked["num_kv_heads"])
        checked |= self._addresses(rows > 0, checked)
        checked |= self._strides(checked)
        checked["map_strides"] = self._map_strides(rows > 0, checked)
        checked["attention_scale"] = checks.scalar("attention_scale", self.attention_scale)
        checked["stream"] = checks.address("stream", self.stream, 1, required=False)
        checks.settle(self, checked)
        if rows:
            self._check_overlap()

    def _sizes(self) -> dict[str, Any]:
        q_heads, kv_heads = checks.heads(self.num_q_heads, self.num_kv_heads)
        checks.integer("num_kv_heads", kv_heads, 1, checks.MAX_GRID_YZ)
        batch = checks.integer("batch_size", self.batch_size, 0)
        query_len = checks.integer("query_len", self.query_len, 1)
        checks.grid("batch_size x query_len x num_kv_heads", batch * query_len * kv_heads)
        head_dim = checks.head_dim(self.head_dim)
        pool_head_dim = checks.integer("pool_head_dim", self.pool_head_dim, head_dim)
        if pool_head_dim % 8:
            raise ArgumentError(f"pool_head_dim is {pool_head_dim}; it takes a multiple of 8")
        return {
            "batch_size": batch,
            "query_len": query_len,
            "num_q_heads": q_heads,
            "num_kv_heads": kv_heads,
            "group_size": q_heads // kv_heads,
            "head_dim": head_dim,
            "pool_head_dim": pool_head_dim,
            "num_flat_pages": checks.integer("num_flat_pages", self.num_flat_pages, 0, checks.MAX_FLAT_PAGES),
            "max_pages_per_seq": checks.integer("max_pages_per_seq", self.max_pages_per_seq, 1),
            "top_k": checks.integer("top_k", self.top_k, 1, geometry.MAX_TOP_K),
            "max_splits": checks.integer("max_splits", self.max_splits, 1, checks.MAX_GRID_YZ),
            "device": checks.integer("device", self.device, -1),
            "dtype": checks.element("dtype", self.dtype),
        }

    def _splits(self, units: int, sizes: dict[str, Any]) -> dict[str, Any]:
        if self.algorithm is not None and self.algorithm not in ALGORITHMS:
            taken = ", ".join(map(repr, ALGORITHMS))
            raise ArgumentError(f"algorithm is {checks.show(self.algorithm)}; it takes {taken} or None")
        most = sizes["max_splits"] if self.algorithm == SPLIT_KV else geometry.MAX_CLUSTER
        number = checks.integer("num_splits", self.num_splits, 0, most)
        if number and self.algorithm is None:
            raise ArgumentError(f"num_splits is {number} without an algorithm; name the one it is meant for")
        top_k = sizes["top_k"] if sizes["num_flat_pages"] else 1  # nothing to share in an empty pool
        if not number and self.algorithm == SPLIT_KV:
            number = splits.of_workspace(units, top_k, most)
        return {"num_splits": number or splits.of_cluster(units, top_k)}

    def _addresses(self, launches: bool, sizes: dict[str, Any]) -> dict[str, int]:
        aligned, merges = checks.ALIGNMENT, self.algorithm == SPLIT_KV and sizes["num_splits"] > 1
        found = {}
        for name, align, required in (
            ("q_ptr", aligned, launches),
            ("o_ptr", aligned, launches),
            ("kv_pool_ptr", aligned, launches and sizes["num_flat_pages"] > 0),
            ("page_table", 4, launches),
            ("indices", 4, launches),
            ("context_lengths", 4, launches),
            ("lse_ptr", 4, False),
            ("partial_o", aligned, launches and merges),
            ("partial_stats", 4, launches and merges),
            ("split_counters", 4, launches and merges),
        ):
            found[name] = checks.address(name, getattr(self, name), align, required)
        v_table = found["page_table"] + 4 * sizes["max_pages_per_seq"] if found["page_table"] else 0
        return found | {
            "k_pool_ptr": found["kv_pool_ptr"],
            "v_pool_ptr": found["kv_pool_ptr"],
            "k_page_table": found["page_table"],
            "v_page_table": v_table,
        }

    def _strides(self, sizes: dict[str, Any]) -> dict[str, int]:
        head, pool_head = sizes["head_dim"], sizes["pool_head_dim"]
        q_row, token = sizes["num_q_heads"] * head, sizes["num_kv_heads"] * pool_head
        found = {
            name: checks.stride(name, getattr(self, name), contiguous)
            for name, contiguous in (
                ("q_stride_row", q_row),
                ("q_stride_head", head),
                ("o_stride_row", q_row),
                ("o_stride_head", head),
                ("page_stride", geometry.PAGE_TOKENS * token),
                ("token_stride", token),
                ("head_stride", pool_head),
            )
        }
        table = 2 * sizes["max_pages_per_seq"]
        found["page_table_stride"] = checks.stride("page_table_stride", self.page_table_stride, table, step=1)
        found["indices_stride_row"] = checks.stride("indices_stride_row", self.indices_stride_row, sizes["top_k"], 1)
        return found

    def _map_strides(self, launches: bool, sizes: dict[str, Any]) -> boxes.Strides | None:
        dims = (geometry.PAGE_TOKENS, sizes["num_kv_heads"], sizes["num_flat_pages"])
        elements = (sizes["token_stride"], sizes["head_stride"], sizes["page_stride"])
        found = boxes.strides(dims, elements, sizes["head_dim"])
        if found is None and launches and self.algorithm == TMA:
            raise ArgumentError(
                f"the pool has {dims[2]} pages of {dims[0]} tokens and {dims[1]} KV heads; its strides are "
                f"{elements[2]}, {elements[0]} and {elements[1]} elements. Algorithm 'tma' takes at least one page, "
                "and pages, tokens and heads that lie apart, by less than 2^40 bytes"
            )
        return found

    def _check_overlap(self) -> None:
        rows, heads, elem = self.grid[0], self.num_q_heads, checks.ELEM_BYTES
        kv_heads, units = self.num_kv_heads, self.grid[0] * self.num_kv_heads * self.max_splits
        q_dims = ((rows, self.q_stride_row or 0), (heads, self.q_stride_head or 0))
        o_dims = ((rows, self.o_stride_row or 0), (heads, self.o_stride_head or 0))
        pool_dims = (
            (self.num_flat_pages, self.page_stride or 0),
            (geometry.PAGE_TOKENS, self.token_stride or 0),
            (kv_heads, self.head_stride or 0),
        )
        outputs = (
            checks.extent("o", self.o_ptr, o_dims, self.head_dim, elem),
            checks.extent("lse", self.lse_ptr, (), rows * heads, 4),
            checks.extent("partial_o", self.partial_o, (), units * geometry.PARTIAL_ROWS * self.head_dim, 4),
            checks.extent("partial_stats", self.partial_stats, (), units * 2 * geometry.PARTIAL_ROWS, 4),
            checks.extent("split_counters", self.split_counters, (), rows * kv_heads, 4),
        )
        tables = ((self.batch_size, self.page_table_stride or 0),)
        inputs = (
            checks.extent("q", self.q_ptr, q_dims, self.head_dim, elem),
            checks.extent("kv_pool", self.kv_pool_ptr, pool_dims, self.head_dim, elem),
            checks.extent("indices", self.indices, ((rows, self.indices_stride_row or 0),), self.top_k, 4),
            checks.extent("page_table", self.page_table, tables, 2 * self.max_pages_per_seq, 4),
        )
        checks.disjoint(outputs, inputs)

    def with_map(self, loader: Loader) -> SimpleNamespace | None:
        """These parameters and the words of the pool's tensor map, made at the first call; None where there is none."""
        if self._with_map is None and self.map_strides is not None:
            dims = (geometry.PAGE_TOKENS, self.num_kv_heads, self.num_flat_pages)
            words = boxes.encode(
                loader, self.device, "kv_map", "bf16", self.kv_pool_ptr, self.head_dim, dims, self.map_strides
            )
            object.__setattr__(self, "_with_map", _TAKEN.beside(self, words))
        return self._with_map

    def as_split_kv(self) -> SparseDecodeParams:
        """These parameters for "split_kv", made at the first call.

        Raises:
            ArgumentError: it needs a workspace that is not there.
        """
        if self._as_split_kv is None:
            names = [one.name for one in dataclasses.fields(self) if one.init]
            values = {name: getattr(self, name) for name in names}
            twin = SparseDecodeParams(**(values | {"algorithm": SPLIT_KV, "num_splits": 0}))
            object.__setattr__(self, "_as_split_kv", twin)
        return self._as_split_kv or self

    @classmethod
    def from_tensors(
        cls,
        q: Any,
        kv_pool: Any,
        page_table: Any,
        indices: Any,
        context_lengths: Any,
        o: Any,
        *,
        attention_scale: float,
        lse: Any = None,
        partial_o: Any = None,
        partial_stats: Any = None,
        split_counters: Any = None,
        max_splits: int = geometry.HOST_MAX_SPLITS,
        max_context_len: int | None = None,
        algorithm: str | None = None,
        num_splits: int = 0,
        stream: int | None = None,
    ) -> SparseDecodeParams:
        """From CUDA tensors of the shapes above: torch's, or what `runners.tensors` takes.

        Args:
            partial_o, partial_stats, split_counters: FP32 [rows * kv_heads * max_splits, 16, head_dim],
                FP32 [rows * kv_heads * max_splits, 2, 16] and int32 [rows * kv_heads], with rows = batch * query_len.
            max_context_len: longest context, where the host knows it: the page table must reach that far.
            stream: CUstream as an integer; None is torch's current stream on the tensors' device.

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit, or memory overlaps.
        """
        binder = Binder()
        q_ = binder.take("q", q, "batch query_len q_heads head_dim", "elem")
        pool = binder.take("kv_pool", kv_pool, f"flat_pages {geometry.PAGE_TOKENS} kv_heads pool_head_dim", "elem")
        table = binder.page_table(page_table)
        ids = binder.take("indices", indices, "batch query_len top_k", "i32")
        lengths = binder.take("context_lengths", context_lengths, "batch", "i32", contiguous=True)
        o_ = binder.take("o", o, "batch query_len q_heads head_dim", "elem")
        size = binder.size
        if max_context_len is not None:
            checks.reach(size("max_pages"), checks.integer("max_context_len", max_context_len, 0))
        units = size("batch") * size("query_len") * size("kv_heads")
        slots = f"{units * checks.integer('max_splits', max_splits, 1, checks.MAX_GRID_YZ)}"
        return cls(
            q_ptr=q_.pointer,
            kv_pool_ptr=pool.pointer,
            page_table=table.pointer,
            indices=ids.pointer,
            context_lengths=lengths.pointer,
            o_ptr=o_.pointer,
            partial_o=binder.pointer("partial_o", partial_o, f"{slots} {geometry.PARTIAL_ROWS} head_dim", "f32"),
            partial_stats=binder.pointer("partial_stats", partial_stats, f"{slots} 2 {geometry.PARTIAL_ROWS}", "f32"),
            split_counters=binder.pointer("split_counters", split_counters, f"{units}", "i32"),
            lse_ptr=binder.pointer("lse", lse, "batch query_len q_heads", "f32"),
            batch_size=size("batch") if size("query_len") else 0,
            query_len=max(1, size("query_len")),
            num_q_heads=size("q_heads"),
            num_kv_heads=size("kv_heads"),
            head_dim=size("head_dim"),
            pool_head_dim=size("pool_head_dim"),
            num_flat_pages=size("flat_pages"),
            max_pages_per_seq=size("max_pages"),
            top_k=size("top_k"),
            attention_scale=attention_scale,
            max_splits=max_splits,
            algorithm=algorithm,
            num_splits=num_splits,
            q_stride_row=q_.row_stride(),
            q_stride_head=q_.strides[2],
            o_stride_row=o_.row_stride(),
            o_stride_head=o_.strides[2],
            page_table_stride=table.strides[0],
            page_stride=pool.strides[0],
            token_stride=pool.strides[1],
            head_stride=pool.strides[2],
            indices_stride_row=ids.row_stride(),
            stream=current_stream(binder.device, q) if stream is None else stream,
            device=binder.device,
            dtype=binder.dtype,
        )


_TAKEN = boxes.Taken(SparseDecodeParams)


class SparseDecodeRunner:
    """Sparse decode attention on every SM of the build. All methods are static; none synchronises.

    Attributes:
        max_splits, kMaxSplits: split stride of the default workspace.
        partial_rows, kPartialRows: accumulator rows of the partials, whatever the group size.
    """

    max_splits = kMaxSplits = geometry.HOST_MAX_SPLITS  # noqa: N815 - the hosts' names
    partial_rows = kPartialRows = geometry.PARTIAL_ROWS  # noqa: N815

    def __new__(cls) -> SparseDecodeRunner:
        raise ArgumentError("SparseDecodeRunner has static methods only; call them on the class")

    @staticmethod
    def can_implement(
        num_q_heads: object,
        num_kv_heads: object,
        head_dim: object,
        pool_head_dim: object,
        sm_version: object,
        dtype: object,
    ) -> Support:
        """Whether the kernels cover this shape, from numbers alone. Never raises.

        Args:
            pool_head_dim: columns of a row of the pool: at least head_dim, a multiple of 8.
            sm_version, dtype: as for `SparsePrefillRunner.can_implement`.

        Returns: a `Support`, true or with its reason.
        """
        kernel = _KERNELS[SPLIT_KV]
        found = dispatch.attention_support(kernel, num_q_heads, num_kv_heads, head_dim, sm_version, dtype)
        wide, dim = checks.whole(pool_head_dim), checks.whole(head_dim)
        if found and (wide is None or dim is None or not dim <= wide <= checks.INT32_MAX or wide % 8):
            reason = f"pool head dim {checks.show(pool_head_dim)}; it takes a multiple of 8 from head dim {dim} up"
            return Support.no(SupportCode.POOL_HEAD_DIM, reason)
        return found

    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def workspace_size(
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        query_len: int = 1,
        max_splits: int = geometry.HOST_MAX_SPLITS,
    ) -> Workspace:
        """Memory for the partials and counters of a launch, good for every smaller batch.

        Raises:
            ArgumentError: a size is out of range.
        """
        rows = checks.integer("batch_size", batch_size, 0) * checks.integer("query_len", query_len, 1)
        units = rows * checks.integer("num_kv_heads", num_kv_heads, 1, checks.MAX_GRID_YZ)
        slots = units * checks.integer("max_splits", max_splits, 1, checks.MAX_GRID_YZ)
        return Workspace.of(
            ("partial_o", "f32", (slots, geometry.PARTIAL_ROWS, checks.head_dim(head_dim))),
            ("partial_stats", "f32", (slots, 2, geometry.PARTIAL_ROWS)),
            ("split_counters", "i32", (units,)),
        )

    @staticmethod
    def preflight(
        dtype: object,
        stream: int | None = None,
        device: int | None = None,
        head_dim: int | None = None,
        max_splits: int = geometry.HOST_MAX_SPLITS,
    ) -> None:
        """Load what `run` may pick, in the current context or `device`'s. Idempotent; can be tried again.

        Args: as for `SparsePrefillRunner.preflight`; max_splits as in the parameters.

        Raises:
            UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
        """
        loader = default_loader()
        dims = geometry.SUPPORTED_HEAD_DIMS if head_dim is None else (checks.head_dim(head_dim),)
        each = [dispatch.wanted(_KERNELS[SPLIT_KV], dim, dtype, _baked(max_splits)) for dim in dims]
        if _suits(loader, -1 if device is None else device) == TMA:
            each += [dispatch.wanted(_KERNELS[TMA], dim, dtype) for dim in dims]
        dispatch.preload(loader, each, device, stream, strict=head_dim is not None)

    @staticmethod
    def run(dtype: object, params: SparseDecodeParams) -> None:
        """Launch on `params.stream`; nothing to do for an empty batch. Allocates nothing, safe under capture.

        Raises:
            UnsupportedError: no kernel for the type.
            CaptureError: the first use in this context is under capture; call `preflight` before.
            ArtifactError, DriverError: loading or launching failed.
            ArgumentError: params of another class, or of tensors of another type; or the device needs "split_kv", and
                that a workspace.
        """
        checks.instance("params", params, SparseDecodeParams)
        if not params.grid[0]:
            return
        loader = default_loader()
        boxed = params.map_strides is not None and (params.algorithm or _suits(loader, params.device)) == TMA
        if params.algorithm is None and not boxed:
            params = params.as_split_kv()
        kernel_name, baked = (_KERNELS[TMA], ()) if boxed else (_KERNELS[SPLIT_KV], _baked(params.max_splits))
        wanted = dispatch.wanted(kernel_name, params.head_dim, dtype, baked)
        if params.dtype and params.dtype != wanted.dtype:
            raise checks.other_dtype(dtype, params.dtype)
        stream = params.stream
        kernel = loader.peek(wanted, params.device, stream)
        if boxed:
            kernel.launch(params.with_map(loader), params.grid, stream, (1, params.num_splits, 1))
            return
        if params.num_splits > 1:
            # The kernel leaves them zero; the launch before may have been cut short, or been another's.
            kernel.zero(params.split_counters, params.grid[0] * params.grid[2], stream)
        kernel.launch(params, params.grid, stream)


def algorithm_for(device: int = -1) -> str:
    """The algorithm that `run` picks on a device (-1: the current context's), for a pool that it takes."""
    return _suits(default_loader(), device)


def _baked(max_splits: int) -> dispatch.Baked:
    return (("max_splits", max_splits),)


def _suits(loader: Loader, device: int) -> str:
    """The faster algorithm that runs on a device (-1: the current context's)."""
    return TMA if dispatch.capability(loader, device) == dispatch.SM90 else SPLIT_KV
