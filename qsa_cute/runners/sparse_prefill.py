"""Sparse prefill attention: parameters of a launch, and the runner. The mathematics: `reference/attention.py`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError, UnsupportedError
from qsa_cute.runners import checks, dispatch, union
from qsa_cute.runners.tensors import Binder, current_stream
from qsa_cute.runners.workspace import ALIGNMENT, Workspace
from qsa_cute.runtime import Loader, default_loader
from qsa_cute.support import Support, SupportCode
from qsa_cute.variants import KERNELS

KERNEL = "sparse_prefill"
ROWS, UNION = "rows", "union"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePrefillParams:
    """One launch of sparse prefill: addresses, sizes, and what the kernel takes, checked when it is made.

    Q and O are [batch_size, seq_len, num_q_heads, head_dim], K and V [batch_size, kv_seq_len, num_kv_heads, head_dim],
    bf16 or fp16, unit inner stride, every row 16-byte aligned; the other strides, in elements, are contiguous where
    None. `indices` is int32 [batch_size, seq_len, top_k], `context_lengths` int32 [batch_size].

    Row r of sequence b has position query_starts[b] + r. Rows at or past the context length are exact zeros and read
    nothing; an id counts where 0 <= id < min(context length, kv_seq_len). There is no positional mask.

    On SM90, with a workspace, many rows share one gather (`union.py`): their lists' blocks are read once for 128
    (row, head) pairs. Same results up to the order of sums; rows that share little are done one by one all the same.

    Attributes:
        kv_seq_len: rows of K and V; seq_len when None.
        index_kind: what `indices` holds: "padded" lists; "counted" lists int32 [.., top_k + 1] whose last column is
            the number of entries, those past it stale; "blocks" of 4 tokens, [.., top_k] padded with -1, to which the
            row's open block is added (tokens 4 ((p + 1) // 4) to p of a row at p). The last two take the union.
        workspace: address of `SparsePrefillRunner.workspace_size` bytes, 256-byte aligned, which may hold anything; 0
            for none.
        algorithm: "rows", "union" or None, which takes the union where it pays.
        lse_ptr: FP32 [batch_size, seq_len, num_q_heads] for the natural-log LSE (-inf: no valid entry); 0 for none.
        query_starts: int32 [batch_size]; 0 for none, all zero.
        attention_scale: factor of the scores, such as head_dim ** -0.5.
        stream: CUstream as an integer.
        device: ordinal; -1 is the current context's.
        dtype: of Q, K, V and O, which `run` must then be given; "" where it is not known, of raw addresses.
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
    index_kind: str = "padded"
    workspace: int = 0
    algorithm: str | None = None
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
    dtype: str = ""
    packed: object = field(init=False, default=None, repr=False, compare=False)  # kept by the launch
    group_size: int = field(init=False)
    num_blocks: int = field(init=False)
    shares: bool = field(init=False)  # whether it takes the union, on SM90
    launches: Any = field(init=False, default=None, repr=False, compare=False)  # the union's, made at the first run

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
        checked["workspace"] = checks.address("workspace", self.workspace, ALIGNMENT, required=False)
        checked |= self._strides(checked)
        checked["attention_scale"] = checks.scalar("attention_scale", self.attention_scale)
        checked["stream"] = checks.address("stream", self.stream, 1, required=False)
        checks.settle(self, checked)
        object.__setattr__(self, "shares", launches and self._choose())
        if launches:
            self._check_overlap()

    def _choose(self) -> bool:
        """Whether the union is asked for, or pays; what it needs must be there."""
        if self.algorithm not in (None, ROWS, UNION):
            raise ArgumentError(f"algorithm is {checks.show(self.algorithm)}; it takes {ROWS!r}, {UNION!r} or None")
        needed = self.algorithm == UNION or self.index_kind != "padded"
        if needed and self.algorithm == ROWS:
            raise ArgumentError(f"index_kind is {self.index_kind!r} with algorithm {ROWS!r}; that takes 'padded' lists")
        if needed and not self.workspace:
            raise ArgumentError("workspace is null; the union needs the bytes that workspace_size says")
        if needed and not union.apart(self):
            raise ArgumentError(
                "k or v has stride 0 between its tokens or heads; the union copies by tensor maps, which take a tensor "
                f"that is not expanded; use padded lists and algorithm {ROWS!r}"
            )
        if needed and not union.fits(self):
            raise ArgumentError(
                f"kv_seq_len is {self.kv_seq_len} and top_k {self.top_k}; the union's bitmaps of so many tokens, or "
                f"the blocks of such lists, do not fit in shared memory; use padded lists and algorithm {ROWS!r}"
            )
        return needed or (self.algorithm is None and self.workspace > 0 and union.pays(self))

    def _sizes(self) -> dict[str, Any]:
        q_heads, kv_heads = checks.heads(self.num_q_heads, self.num_kv_heads)
        batch = checks.integer("batch_size", self.batch_size, 0)
        rows = checks.integer("seq_len", self.seq_len, 0)
        if self.index_kind not in union.KINDS:
            kinds = ", ".join(map(repr, union.KINDS))
            raise ArgumentError(f"index_kind is {checks.show(self.index_kind)}; it takes {kinds}")
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
            "dtype": checks.element("dtype", self.dtype),
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
        width = sizes["top_k"] + (self.index_kind == "counted")
        for dim, contiguous in (("row", width), ("batch", sizes["seq_len"] * width)):
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
        work = checks.Extent("workspace", 0, 0)
        if self.shares:
            work = checks.Extent("workspace", self.workspace, self.workspace + union.workspace(self).size)
        checks.disjoint((extents["o"], lse, work), (extents["q"], extents["k"], extents["v"], lists))

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
        index_kind: str = "padded",
        workspace: Any = None,
        algorithm: str | None = None,
        stream: int | None = None,
    ) -> SparsePrefillParams:
        """From CUDA tensors of the shapes above: torch's, or what `runners.tensors` takes.

        Args:
            workspace: uint8 [bytes], at least `SparsePrefillRunner.workspace_size` of this call.
            stream: CUstream as an integer; None is torch's current stream on the tensors' device.

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit, or memory overlaps.
        """
        binder = Binder()
        q_ = binder.take("q", q, "batch rows q_heads head_dim", "elem")
        k_ = binder.take("k", k, "batch kv_rows kv_heads head_dim", "elem")
        v_ = binder.take("v", v, "batch kv_rows kv_heads head_dim", "elem")
        o_ = binder.take("o", o, "batch rows q_heads head_dim", "elem")
        ids = binder.take("indices", indices, "batch rows width", "i32")
        lengths = binder.take("context_lengths", context_lengths, "batch", "i32", contiguous=True)
        strides = {
            f"{view.name}_stride_{dim}": step
            for view in (q_, k_, v_, o_, ids)
            for dim, step in zip(("batch", "row", "head"), view.strides[:-1], strict=False)
        }
        params = cls(
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
            top_k=binder.size("width") - (index_kind == "counted"),
            index_kind=index_kind,
            workspace=binder.pointer("workspace", workspace, "bytes", "u8"),
            algorithm=algorithm,
            attention_scale=attention_scale,
            query_starts=binder.pointer("query_starts", query_starts, "batch", "i32"),
            lse_ptr=binder.pointer("lse", lse, "batch rows q_heads", "f32"),
            stream=current_stream(binder.device, q) if stream is None else stream,
            device=binder.device,
            dtype=binder.dtype,
            **strides,
        )
        if params.shares and binder.size("bytes") < union.workspace(params).size:
            raise ArgumentError(
                f"workspace has {binder.size('bytes')} bytes; this call takes {union.workspace(params).size}, as "
                "SparsePrefillRunner.workspace_size says"
            )
        return params


class SparsePrefillRunner:
    """Sparse prefill attention on every SM of the build. All methods are static; none synchronises."""

    def __new__(cls) -> SparsePrefillRunner:
        raise ArgumentError("SparsePrefillRunner has static methods only; call them on the class")

    @staticmethod
    def can_implement(
        num_q_heads: object,
        num_kv_heads: object,
        head_dim: object,
        sm_version: object,
        dtype: object,
        *,
        index_kind: object = "padded",
    ) -> Support:
        """Whether the kernels cover this shape, from numbers alone. Never raises.

        Args:
            sm_version: 90, "90", "9.0", "sm_90a" or (9, 0), torch's get_device_capability().
            dtype: "bf16", "fp16" or a torch dtype.
            index_kind: as in the parameters.

        Returns: a `Support`, true or with its reason.
        """
        found = dispatch.attention_support(KERNEL, num_q_heads, num_kv_heads, head_dim, sm_version, dtype)
        if not isinstance(index_kind, str) or index_kind not in union.KINDS:
            reason = f"index_kind {checks.show(index_kind)}; it takes {', '.join(map(repr, union.KINDS))}"
            return Support.no(SupportCode.INDEX_KIND, reason)
        targets = KERNELS[union.MAIN].sms
        if found and index_kind != "padded" and checks.build_target(sm_version) not in targets:
            reason = f"index_kind {index_kind!r} on SM {checks.show(sm_version)}; the union, which alone takes such "
            return Support.no(SupportCode.SM, f"{reason}lists, is built for {', '.join(targets)}; use 'padded' lists")
        return found

    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def workspace_size(
        batch_size: int,
        seq_len: int,
        kv_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        top_k: int,
        index_kind: str = "padded",
    ) -> Workspace:
        """Memory that lets rows share their gather. Sizes as in the parameters.

        Raises:
            ArgumentError: a size is out of range.
        """
        return union.workspace(
            _somewhere(batch_size, seq_len, kv_seq_len, num_q_heads, num_kv_heads, head_dim, top_k, index_kind)
        )

    @staticmethod
    def shared_workspace(
        batch_size: int,
        seq_len: int,
        kv_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        top_k: int,
    ) -> int:
        """Bytes of `workspace_size` where `run` would share the gather of padded lists by itself, were the memory
        given and the device an SM90; else 0.

        Raises:
            ArgumentError: a size is out of range.
        """
        sizes = (batch_size, seq_len, kv_seq_len, num_q_heads, num_kv_heads, head_dim, top_k)
        params = _somewhere(*sizes, index_kind="padded")
        return union.workspace(params).size if params.shares else 0

    @staticmethod
    def preflight(
        dtype: object, stream: int | None = None, device: int | None = None, head_dim: int | None = None
    ) -> None:
        """Load what `run` may pick, in the current context or `device`'s. Idempotent; can be tried again. The union's
        kernels where the artifacts have them: `run` does padded lists without.

        Args:
            stream: asked whether it is being captured, when a load is needed.
            device: ordinal; the current context's device when None.
            head_dim: only this one; all that were built when None.

        Raises:
            UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
        """
        dims = geometry.SUPPORTED_HEAD_DIMS if head_dim is None else (checks.head_dim(head_dim),)
        loader = default_loader()
        union_for.cache_clear()  # what was built since is there now
        place = dispatch.ordinal(loader, device)
        each = [dispatch.wanted(KERNEL, dim, dtype) for dim in dims]
        each += [one for dim in dims if union_for(dtype, dim, place) for one in union.wanted(dim, dtype)]
        dispatch.preload(loader, each, device, stream, strict=head_dim is not None)

    @staticmethod
    def run(dtype: object, params: SparsePrefillParams) -> None:
        """Launch on `params.stream`; nothing to do for an empty batch. Allocates nothing, safe under capture.

        Raises:
            UnsupportedError: no kernel for the type.
            CaptureError: the first use in this context is under capture; call `preflight` before.
            ArtifactError, DriverError: loading or launching failed.
            ArgumentError: params of another class, or of tensors of another type.
        """
        checks.instance("params", params, SparsePrefillParams)
        if not params.num_blocks:
            return
        loader = default_loader()
        wanted = dispatch.wanted(KERNEL, params.head_dim, dtype)
        if params.dtype and params.dtype != wanted.dtype:
            raise checks.other_dtype(dtype, params.dtype)
        if params.shares and _shared(loader, dtype, params):
            return
        kernel = loader.peek(wanted, params.device, params.stream)
        kernel.launch(params, params.num_blocks, params.stream)


def _somewhere(
    batch_size: int,
    seq_len: int,
    kv_seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    top_k: int,
    index_kind: str,
) -> SparsePrefillParams:
    """Parameters of these sizes, with a workspace, at addresses where nothing is read."""
    somewhere = 1 << 40
    return SparsePrefillParams(
        q_ptr=somewhere,
        k_ptr=somewhere,
        v_ptr=somewhere,
        indices=somewhere,
        context_lengths=somewhere,
        o_ptr=somewhere << 10,
        batch_size=batch_size,
        seq_len=seq_len,
        kv_seq_len=kv_seq_len,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        top_k=top_k,
        attention_scale=1.0,
        index_kind=index_kind,
        workspace=somewhere << 15,
    )


@functools.cache
def union_for(dtype: object, head_dim: int, device: int) -> bool:
    """Whether a device has the union's kernels for this type and head dim: an SM90, and artifacts with them.

    Raises:
        DriverError, ArtifactError: there is no driver, or no artifacts.
    """
    loader = default_loader()
    if dispatch.capability(loader, device) != dispatch.SM90:
        return False
    return all(loader.missing_reason(one, device) is None for one in union.wanted(head_dim, dtype))


def _shared(loader: Loader, dtype: object, params: SparsePrefillParams) -> bool:
    """Launch the union's kernels; false where the device has none and the row kernel will do."""
    if params.launches is None:
        needed = params.algorithm == UNION or params.index_kind != "padded"
        found = dispatch.capability(loader, params.device)
        if found != dispatch.SM90:
            if needed:
                raise UnsupportedError(
                    f"the union's kernels are built for sm_90a, the device has compute capability {found}; use padded "
                    f"lists and algorithm {ROWS!r} or None"
                )
            return False
        if not needed and not union_for(dtype, params.head_dim, dispatch.ordinal(loader, params.device)):
            return False
        names = tuple(one.name for one in dataclasses.fields(params) if one.name not in ("packed", "launches"))
        made = union.Launches(params, checks.dtype_name(dtype) or "", loader, names)
        object.__setattr__(params, "launches", made)
    params.launches.run(dtype, params, loader)
    return True
