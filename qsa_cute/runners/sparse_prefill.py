"""Sparse prefill attention: parameters of a launch, and the runner. The mathematics: `reference/attention.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks, dispatch
from qsa_cute.runners.tensors import Binder, current_stream
from qsa_cute.runtime import default_loader
from qsa_cute.support import Support

KERNEL = "sparse_prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePrefillParams:
    """One launch of sparse prefill: addresses, sizes, and what the kernel takes, checked when it is made.

    Q and O are [batch_size, seq_len, num_q_heads, head_dim], K and V [batch_size, kv_seq_len, num_kv_heads, head_dim],
    bf16 or fp16, unit inner stride, every row 16-byte aligned; the other strides, in elements, are contiguous where
    None. `indices` is int32 [batch_size, seq_len, top_k], `context_lengths` int32 [batch_size].

    Row r of sequence b has position query_starts[b] + r. Rows at or past the context length are exact zeros and read
    nothing; an id counts where 0 <= id < min(context length, kv_seq_len). There is no positional mask.

    Attributes:
        kv_seq_len: rows of K and V; seq_len when None.
        lse_ptr: FP32 [batch_size, seq_len, num_q_heads] for the natural-log LSE (-inf: no valid entry); 0 for none.
        query_starts: int32 [batch_size]; 0 for none, all zero.
        attention_scale: factor of the scores, such as head_dim ** -0.5.
        stream: CUstream as an integer.
        device: ordinal; -1 is the current context's.
        group_size: query heads a KV head.
        num_blocks: extent of the grid.

    Raises:
        ArgumentError: a value that no launch could take, or an output that overlaps an input.
    """

    q_ptr: int
    k_ptr: int
    v_ptr: int
    o_ptr: int
    indices: int
    context_lengths: int
    batch_size: int
    seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    top_k: int
    attention_scale: float
    stream: int = 0
    lse_ptr: int = 0
    query_starts: int = 0
    kv_seq_len: int | None = None
    q_stride_batch: int | None = None
    q_stride_row: int | None = None
    q_stride_head: int | None = None
    k_stride_batch: int | None = None
    k_stride_row: int | None = None
    k_stride_head: int | None = None
    v_stride_batch: int | None = None
    v_stride_row: int | None = None
    v_stride_head: int | None = None
    o_stride_batch: int | None = None
    o_stride_row: int | None = None
    o_stride_head: int | None = None
    indices_stride_batch: int | None = None
    indices_stride_row: int | None = None
    device: int = -1
    packed: object = field(init=False, default=None, repr=False, compare=False)  # kept by the launch
    group_size: int = field(init=False)
    num_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        checked = self._sizes()
        launches = checked["num_blocks"] > 0
        for name in ("q_ptr", "k_ptr", "v_ptr", "o_ptr"):
            has_rows = launches and (name in ("q_ptr", "o_ptr") or checked["kv_seq_len"] > 0)
            checked[name] = checks.address(name, getattr(self, name), checks.ALIGNMENT, has_rows)
        for name in ("indices", "context_lengths"):
            checked[name] = checks.address(name, getattr(self, name), 4, launches)
        for name in ("lse_ptr", "query_starts"):
            checked[name] = checks.address(name, getattr(self, name), 4, required=False)
        checked |= self._strides(checked)
        checked["attention_scale"] = checks.scalar("attention_scale", self.attention_scale)
        checked["stream"] = checks.address("stream", self.stream, 1, required=False)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if launches:
            self._check_overlap()

    def _sizes(self) -> dict[str, Any]:
        q_heads, kv_heads = checks.heads(self.num_q_heads, self.num_kv_heads)
        batch = checks.integer("batch_size", self.batch_size, 0)
        rows = checks.integer("seq_len", self.seq_len, 0)
        kv_rows = rows if self.kv_seq_len is None else self.kv_seq_len
        return {
            "batch_size": batch,
            "seq_len": rows,
            "kv_seq_len": checks.integer("kv_seq_len", kv_rows, 0),
            "num_q_heads": q_heads,
            "num_kv_heads": kv_heads,
            "group_size": q_heads // kv_heads,
            "head_dim": checks.head_dim(self.head_dim),
            "top_k": checks.integer("top_k", self.top_k, 1, geometry.MAX_TOP_K),
            "device": checks.integer("device", self.device, -1),
            "num_blocks": checks.grid("batch_size x seq_len x num_kv_heads", batch * rows * kv_heads),
        }

    def _strides(self, sizes: dict[str, Any]) -> dict[str, int]:
        found = {}
        for tensor, rows, heads in (
            ("q", sizes["seq_len"], sizes["num_q_heads"]),
            ("k", sizes["kv_seq_len"], sizes["num_kv_heads"]),
            ("v", sizes["kv_seq_len"], sizes["num_kv_heads"]),
            ("o", sizes["seq_len"], sizes["num_q_heads"]),
        ):
            head = sizes["head_dim"]
            for dim, contiguous in (("head", head), ("row", heads * head), ("batch", rows * heads * head)):
                name = f"{tensor}_stride_{dim}"
                found[name] = checks.stride(name, getattr(self, name), contiguous)
        for dim, contiguous in (("row", sizes["top_k"]), ("batch", sizes["seq_len"] * sizes["top_k"])):
            name = f"indices_stride_{dim}"
            found[name] = checks.stride(name, getattr(self, name), contiguous, step=1)
        return found

    def _check_overlap(self) -> None:
        extents = {}
        for tensor in "qkvo":
            rows, heads = (self.kv_seq_len, self.num_kv_heads) if tensor in "kv" else (self.seq_len, self.num_q_heads)
            steps = [getattr(self, f"{tensor}_stride_{dim}") for dim in ("batch", "row", "head")]
            dims = zip((self.batch_size, rows or 0, heads), steps, strict=True)
            pointer = getattr(self, f"{tensor}_ptr")
            extents[tensor] = checks.extent(tensor, pointer, dims, self.head_dim, checks.ELEM_BYTES)
        lse = checks.extent("lse", self.lse_ptr, (), self.batch_size * self.seq_len * self.num_q_heads, 4)
        list_dims = ((self.batch_size, self.indices_stride_batch or 0), (self.seq_len, self.indices_stride_row or 0))
        lists = checks.extent("indices", self.indices, list_dims, self.top_k, 4)
        checks.disjoint((extents["o"], lse), (extents["q"], extents["k"], extents["v"], lists))

    @classmethod
    def from_tensors(
        cls,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        indices: Any,
        context_lengths: Any,
        *,
        attention_scale: float,
        query_starts: Any = None,
        lse: Any = None,
        stream: int | None = None,
    ) -> SparsePrefillParams:
        """From CUDA tensors of the shapes above: torch's, or what `runners.tensors` takes.

        Args:
            stream: CUstream as an integer; None is torch's current stream on the tensors' device.

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit, or memory overlaps.
        """
        binder = Binder()
        q_ = binder.take("q", q, "batch rows q_heads head_dim", "elem")
        k_ = binder.take("k", k, "batch kv_rows kv_heads head_dim", "elem")
        v_ = binder.take("v", v, "batch kv_rows kv_heads head_dim", "elem")
        o_ = binder.take("o", o, "batch rows q_heads head_dim", "elem")
        ids = binder.take("indices", indices, "batch rows top_k", "i32")
        lengths = binder.take("context_lengths", context_lengths, "batch", "i32", contiguous=True)
        strides = {
            f"{view.name}_stride_{dim}": step
            for view in (q_, k_, v_, o_, ids)
            for dim, step in zip(("batch", "row", "head"), view.strides[:-1], strict=False)
        }
        return cls(
            q_ptr=q_.pointer,
            k_ptr=k_.pointer,
            v_ptr=v_.pointer,
            o_ptr=o_.pointer,
            indices=ids.pointer,
            context_lengths=lengths.pointer,
            batch_size=binder.size("batch"),
            seq_len=binder.size("rows"),
            kv_seq_len=binder.size("kv_rows"),
            num_q_heads=binder.size("q_heads"),
            num_kv_heads=binder.size("kv_heads"),
            head_dim=binder.size("head_dim"),
            top_k=binder.size("top_k"),
            attention_scale=attention_scale,
            query_starts=binder.pointer("query_starts", query_starts, "batch", "i32"),
            lse_ptr=binder.pointer("lse", lse, "batch rows q_heads", "f32"),
            stream=current_stream(binder.device, q) if stream is None else stream,
            device=binder.device,
            **strides,
        )


class SparsePrefillRunner:
    """Sparse prefill attention on every SM of the build. All methods are static; none synchronises."""

    def __new__(cls) -> SparsePrefillRunner:
        raise ArgumentError("SparsePrefillRunner has static methods only; call them on the class")

    @staticmethod
    def can_implement(
        num_q_heads: object, num_kv_heads: object, head_dim: object, sm_version: object, dtype: object
    ) -> Support:
        """Whether the kernels cover this shape, from numbers alone. Never raises.

        Args:
            sm_version: 90, "90" or "sm_90a".
            dtype: "bf16", "fp16" or a torch dtype.

        Returns: a `Support`, true or with its reason.
        """
        return dispatch.attention_support(KERNEL, num_q_heads, num_kv_heads, head_dim, sm_version, dtype)

    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def preflight(
        dtype: object, stream: int | None = None, device: int | None = None, head_dim: int | None = None
    ) -> None:
        """Load what `run` may pick, in the current context or `device`'s. Idempotent; can be tried again.

        Args:
            stream: asked whether it is being captured, when a load is needed.
            device: ordinal; the current context's device when None.
            head_dim: only this one; all that were built when None.

        Raises:
            UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
        """
        dims = geometry.SUPPORTED_HEAD_DIMS if head_dim is None else (checks.head_dim(head_dim),)
        each = [dispatch.wanted(KERNEL, dim, dtype) for dim in dims]
        dispatch.preload(default_loader(), each, device, stream, strict=head_dim is not None)

    @staticmethod
    def run(dtype: object, params: SparsePrefillParams) -> None:
        """Launch on `params.stream`; nothing to do for an empty batch. Allocates nothing, safe under capture.

        Raises:
            UnsupportedError: no kernel for the type.
            CaptureError: the first use in this context is under capture; call `preflight` before.
            ArtifactError, DriverError: loading or launching failed.
        """
        if params.num_blocks:
            wanted = dispatch.wanted(KERNEL, params.head_dim, dtype)
            kernel = default_loader().peek(wanted, params.device, params.stream)
            kernel.launch(params, params.num_blocks, params.stream)
