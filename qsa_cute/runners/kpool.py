"""GLM-5.3-Flash's kpool indexer, launch by launch: each a frozen dataclass of addresses and sizes, checked when it is
made, and `run()`, which launches it and allocates nothing.

What all share: keys and gate scores bf16 with unit inner stride, other strides in elements; head dim 128; `stream` a
CUstream as an integer, `device` an ordinal or -1 for the current context's. Index tensors are int32 or int64
(`*_words` 1 or 2). A cache page is `page_size` keys of 128 e4m3 bytes, then `page_size` FP32 scales; `page_stride` is
in bytes. Every constructor raises ArgumentError for a value that no launch could take; nothing was launched then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks, dispatch
from qsa_cute.runners.dispatch import Baked
from qsa_cute.runners.indexer_launch import Grid, addresses, place
from qsa_cute.runners.tensors import Binder, TensorView, current_stream, view
from qsa_cute.runtime import default_loader
from qsa_cute.support import Support, SupportCode
from qsa_cute.variants import KERNELS

HEAD_DIM = geometry.INDEX_HEAD_DIM
ENTRY_BYTES = HEAD_DIM + 4  # of the cache: a key and its scale
POOL_SIZES = tuple(sorted(tuning.baked["pool"] for tuning in KERNELS["kpool_compress"].tuning))
# Operation -> its kernel: what `KpoolRunner` is asked about.
OPERATIONS = {
    "hadamard": "kpool_hadamard",
    "compress": "kpool_compress",
    "decode": "kpool_decode",
    "seed_tail": "kpool_seed_tail",
    "expand": "kpool_expand",
    "scores": "kpool_scores",
}
_POOLED = ("compress", "decode")  # operations whose kernels have the pool's size baked
_ROWS_A_BLOCK, _POOLS_A_BLOCK, _TOKENS_A_BLOCK = 32, 8, 8


def pool_size_of(value: object) -> int:
    """A pool size that is built. Raises ArgumentError."""
    number = checks.whole(value)
    if number not in POOL_SIZES:
        raise ArgumentError(f"pool_size is {checks.show(value)}; built are {', '.join(map(str, POOL_SIZES))}")
    return number


def index_of(binder: Binder, name: str, tensor: Any, dims: str) -> tuple[TensorView, int]:
    """A contiguous index tensor, int32 or int64, and its words an element. Raises ArgumentError."""
    kind = view(name, tensor).dtype
    if kind not in ("i32", "i64"):
        raise ArgumentError(f"{name} has type {kind}; it takes i32 or i64")
    return binder.take(name, tensor, dims, kind, contiguous=True), 1 + (kind == "i64")


def cache_of(binder: Binder, kv_cache: Any) -> dict[str, int]:
    """The cache's fields, of uint8 [num_pages, page_size, 132], pages any stride apart. Raises ArgumentError."""
    cache = binder.take("kv_cache", kv_cache, f"pages page_size {ENTRY_BYTES}", "u8")
    page_size = binder.size("page_size")
    if page_size > 1 and cache.strides[1] != ENTRY_BYTES:
        raise ArgumentError(f"kv_cache has strides {cache.strides}; a page is contiguous, {ENTRY_BYTES} bytes an entry")
    return {
        "cache_ptr": cache.pointer,
        "page_size": page_size,
        "num_pages": binder.size("pages"),
        "page_stride": cache.strides[0],
    }


def tail_of(binder: Binder, tail_kv_cache: Any) -> dict[str, int]:
    """The tail cache's launch fields from bf16 [blocks, 2, ring, 128], blocks and halves any strides apart."""
    tail = binder.take("tail_kv_cache", tail_kv_cache, f"tail_blocks 2 ring {HEAD_DIM}", "bf16")
    if binder.size("ring") > 1 and tail.strides[2] != HEAD_DIM:
        raise ArgumentError(f"tail_kv_cache has strides {tail.strides}; the places of a ring take stride {HEAD_DIM}")
    return {
        "tail_ptr": tail.pointer,
        "ring": binder.size("ring"),
        "num_tail_blocks": binder.size("tail_blocks"),
        "tail_stride_block": tail.strides[0],
        "tail_stride_half": tail.strides[1],
    }


def cache_fields(launch: Any, required: bool, align: int = 4) -> dict[str, int]:
    """The cache's fields, checked; pages a multiple of `align` bytes apart."""
    size = checks.integer("page_size", launch.page_size, 1 if required else 0)
    pages = checks.integer("num_pages", launch.num_pages, 0)
    if size * pages > checks.INT32_MAX:
        most = checks.INT32_MAX
        raise ArgumentError(f"the cache has {pages} pages of {size} entries; it takes {most} entries at most")
    stride = checks.whole(launch.page_stride)
    least = size * ENTRY_BYTES if pages > 1 else 0
    if stride is None or stride % align or not least <= stride < 2**62:
        shown = checks.show(launch.page_stride)
        raise ArgumentError(f"page_stride is {shown} bytes; it takes a multiple of {align}, at least {least}")
    pointer = checks.address("cache_ptr", launch.cache_ptr, align, required and pages > 0)
    return {"cache_ptr": pointer, "page_size": max(size, 1), "num_pages": pages, "page_stride": stride}


def _tail(launch: Any, pool: int) -> dict[str, int]:
    """The tail cache's fields, checked."""
    ring = checks.integer("ring", launch.ring, 1)
    if ring < pool:
        raise ArgumentError(f"ring is {ring} for pools of {pool}; it takes at least the pool")
    blocks = checks.integer("num_tail_blocks", launch.num_tail_blocks, 0, checks.INT32_MAX // ring)
    return {
        "tail_ptr": checks.address("tail_ptr", launch.tail_ptr, 8, blocks > 0),
        "ring": ring,
        "num_tail_blocks": blocks,
        "tail_stride_block": checks.stride("tail_stride_block", launch.tail_stride_block, 2 * ring * HEAD_DIM, 4),
        "tail_stride_half": checks.stride("tail_stride_half", launch.tail_stride_half, ring * HEAD_DIM, 4),
    }


def _words(launch: Any, *names: str) -> dict[str, int]:
    return {name: checks.integer(name, getattr(launch, name), 1, 2) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class KpoolLaunch:
    """What every launch has. An empty grid launches nothing."""

    KERNEL: ClassVar[str] = ""
    DTYPE: ClassVar[str] = "bf16"

    stream: int = 0
    device: int = -1
    packed: object = field(init=False, default=None, repr=False, compare=False)  # kept by the runtime's launch
    grid: Grid = field(init=False, default=0)
    baked: Baked = field(init=False, default=())

    def run(self) -> None:
        """Launch on `stream`. Allocates nothing, safe under capture once `KpoolRunner.preflight` was called.

        Raises:
            CaptureError: the first use in this context is under capture.
            ArtifactError, DriverError: loading or launching failed; on SMs without the kernel, which.
        """
        if self.grid:
            wanted = dispatch.wanted(self.KERNEL, HEAD_DIM, self.DTYPE, self.baked)
            kernel: Any = default_loader().peek(wanted, self.device, self.stream)
            kernel.launch(self, self.grid, self.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class HadamardQuant(KpoolLaunch):
    """q bf16 [num_rows, 128], contiguous, rotated by Hadamard-128 / sqrt(128), rounded to bf16 and quantised: out e4m3
    [num_rows, 128], scale FP32 [num_rows], 2^ceil(log2(max(absmax, 1e-4) / 448))."""

    KERNEL: ClassVar[str] = "kpool_hadamard"

    q_ptr: int
    out_ptr: int
    scale_ptr: int
    num_rows: int

    def __post_init__(self) -> None:
        rows = checks.integer("num_rows", self.num_rows, 0)
        checked = place(self) | addresses(self, rows > 0, q_ptr=16, out_ptr=8, scale_ptr=4)
        checks.settle(self, checked | {"grid": -(-rows // _ROWS_A_BLOCK)})
        q = checks.extent("q", self.q_ptr, (), rows * HEAD_DIM, 2)
        out = checks.extent("out", self.out_ptr, (), rows * HEAD_DIM, 1)
        checks.disjoint([out, checks.extent("scale", self.scale_ptr, (), rows, 4)], [q])

    @classmethod
    def from_tensors(cls, q: Any, out: Any, scale: Any, *, stream: int | None = None) -> HadamardQuant:
        """From CUDA tensors: q bf16 [rows, 128], out float8_e4m3fn [rows, 128], scale FP32 [rows, 1].

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit.
        """
        binder = Binder()
        source = binder.take("q", q, f"rows {HEAD_DIM}", "bf16", contiguous=True)
        return cls(
            q_ptr=source.pointer,
            out_ptr=binder.pointer("out", out, f"rows {HEAD_DIM}", "fp8_e4m3"),
            scale_ptr=binder.pointer("scale", scale, "rows 1", "f32"),
            num_rows=binder.size("rows"),
            stream=current_stream(binder.device, q) if stream is None else stream,
            device=binder.device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressWrite(KpoolLaunch):
    """Pools of `pool_size` tokens into e4m3 keys and FP32 scales: to slot loc[i] of the cache, to the dense outputs
    ([num_pools, 128] and [num_pools]), or both; 0 for the one that is not wanted.

    Attributes:
        slot_k_ptr: bf16 [num_pools, pool_size, 128].
        slot_score_ptr: gate scores of the same shape, bf16 (`score_words` 1) or FP32 (2).
        ape_ptr: FP32 [pool_size, 128], contiguous.
        loc_ptr: a slot a pool, page * page_size + place; one outside the cache is not written.
        write_mask_ptr: a byte a pool, or 0 for none: pools whose byte is 0 are neither read nor written.
        round_scale: scales are powers of two.
    """

    KERNEL: ClassVar[str] = "kpool_compress"

    slot_k_ptr: int
    slot_score_ptr: int
    ape_ptr: int
    loc_ptr: int
    num_pools: int
    pool_size: int
    cache_ptr: int = 0
    page_size: int = 0
    num_pages: int = 0
    page_stride: int = 0
    write_mask_ptr: int = 0
    dense_k_ptr: int = 0
    dense_scale_ptr: int = 0
    loc_words: int = 2
    score_words: int = 1
    round_scale: bool = True
    k_stride_pool: int | None = None
    k_stride_token: int | None = None
    score_stride_pool: int | None = None
    score_stride_token: int | None = None

    def __post_init__(self) -> None:
        pools, size = checks.integer("num_pools", self.num_pools, 0), pool_size_of(self.pool_size)
        if pools and not self.cache_ptr and not self.dense_k_ptr:  # empty tensors have no address
            raise ArgumentError("neither cache_ptr nor dense_k_ptr is given; a compressed pool goes somewhere")
        if bool(self.dense_k_ptr) != bool(self.dense_scale_ptr):
            raise ArgumentError("dense_k_ptr and dense_scale_ptr go together; one of them is null")
        checked: dict[str, Any] = place(self) | _words(self, "loc_words", "score_words")
        checked |= addresses(self, pools > 0, slot_k_ptr=16, slot_score_ptr=16, ape_ptr=16)
        checked |= addresses(self, pools > 0 and self.cache_ptr != 0, loc_ptr=4)
        checked |= addresses(self, False, write_mask_ptr=1, dense_k_ptr=8, dense_scale_ptr=4)
        checked |= cache_fields(self, self.cache_ptr != 0)
        token = checks.stride("k_stride_token", self.k_stride_token, HEAD_DIM)
        score_step = 8 // checked["score_words"]
        gate = checks.stride("score_stride_token", self.score_stride_token, HEAD_DIM, score_step)
        checked |= {
            "k_stride_token": token,
            "k_stride_pool": checks.stride("k_stride_pool", self.k_stride_pool, size * token),
            "score_stride_token": gate,
            "score_stride_pool": checks.stride("score_stride_pool", self.score_stride_pool, size * gate, score_step),
            "round_scale": int(bool(self.round_scale)),
            "baked": (("pool", size),),
            "grid": -(-pools // _POOLS_A_BLOCK),
        }
        checks.settle(self, checked)
        k = checks.extent("slot_k", self.slot_k_ptr, ((pools, self.k_stride_pool or 0), (size, token)), HEAD_DIM, 2)
        dense = checks.extent("compressed_k", self.dense_k_ptr, (), pools * HEAD_DIM, 1)
        checks.disjoint([dense, checks.extent("compressed_scale", self.dense_scale_ptr, (), pools, 4)], [k])

    @classmethod
    def from_tensors(
        cls,
        kv_cache: Any,
        slot_k: Any,
        slot_score: Any,
        ape: Any,
        loc: Any,
        *,
        write_mask: Any = None,
        dense_k: Any = None,
        dense_scale: Any = None,
        round_scale: bool = True,
        stream: int | None = None,
    ) -> CompressWrite:
        """From CUDA tensors: kv_cache uint8 [pages, page_size, 132] or None, slot_k bf16 [pools, pool_size, 128],
        slot_score bf16 or FP32 of that shape, ape FP32 [pool_size, 128], loc int32 or int64 [pools], write_mask bool
        [pools], dense_k float8_e4m3fn [pools, 128] and dense_scale FP32 [pools], or None.

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit.
        """
        binder = Binder()
        k = binder.take("slot_k", slot_k, f"pools pool_size {HEAD_DIM}", "bf16")
        kind = view("slot_score", slot_score).dtype
        if kind not in ("bf16", "f32"):
            raise ArgumentError(f"slot_score has type {kind}; it takes bf16 or f32")
        score = binder.take("slot_score", slot_score, f"pools pool_size {HEAD_DIM}", kind)
        slots, words = index_of(binder, "loc", loc, "pools")
        return cls(
            slot_k_ptr=k.pointer,
            slot_score_ptr=score.pointer,
            ape_ptr=binder.pointer("ape", ape, f"pool_size {HEAD_DIM}", "f32"),
            loc_ptr=slots.pointer,
            num_pools=binder.size("pools"),
            pool_size=binder.size("pool_size"),
            write_mask_ptr=binder.pointer("write_mask", write_mask, "pools", "bool"),
            dense_k_ptr=binder.pointer("compressed_k", dense_k, f"pools {HEAD_DIM}", "fp8_e4m3"),
            dense_scale_ptr=binder.pointer("compressed_scale", dense_scale, "pools", "f32"),
            loc_words=words,
            score_words=1 + (kind == "f32"),
            round_scale=round_scale,
            k_stride_pool=k.strides[0],
            k_stride_token=k.strides[1],
            score_stride_pool=score.strides[0],
            score_stride_token=score.strides[1],
            stream=current_stream(binder.device, slot_k) if stream is None else stream,
            device=binder.device,
            **({} if kv_cache is None else cache_of(binder, kv_cache)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedTail(KpoolLaunch):
    """Each request's last `pool_size` tokens of a prefill batch to its ring: token i to place t % ring of block
    t // ring of the tail cache bf16 [num_tail_blocks, 2, ring, 128] (keys, then gate scores), t = tail_slots[i]; t < 0
    is padding, and so is a block past the cache. key and gate_score bf16 [num_tokens, 128]."""

    KERNEL: ClassVar[str] = "kpool_seed_tail"

    tail_ptr: int
    key_ptr: int
    gate_score_ptr: int
    tail_slots_ptr: int
    num_tokens: int
    pool_size: int
    ring: int
    num_tail_blocks: int
    slot_words: int = 1
    tail_stride_block: int | None = None
    tail_stride_half: int | None = None
    key_stride_token: int | None = None
    score_stride_token: int | None = None

    def __post_init__(self) -> None:
        tokens, pool = checks.integer("num_tokens", self.num_tokens, 0), checks.integer("pool_size", self.pool_size, 1)
        checked: dict[str, Any] = place(self) | _words(self, "slot_words") | _tail(self, pool)
        checked |= addresses(self, tokens > 0, key_ptr=8, gate_score_ptr=8, tail_slots_ptr=4)
        checked |= {
            "key_stride_token": checks.stride("key_stride_token", self.key_stride_token, HEAD_DIM, 4),
            "score_stride_token": checks.stride("score_stride_token", self.score_stride_token, HEAD_DIM, 4),
            "grid": -(-tokens // _TOKENS_A_BLOCK),
        }
        checks.settle(self, checked)

    @classmethod
    def from_tensors(
        cls, tail_kv_cache: Any, key: Any, gate_score: Any, tslot: Any, pool_size: int, *, stream: int | None = None
    ) -> SeedTail:
        """From CUDA tensors: tail_kv_cache bf16 [blocks, 2, ring, 128], key and gate_score bf16 [tokens, 128], tslot
        int32 or int64 [tokens].

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit.
        """
        binder = Binder()
        tail = tail_of(binder, tail_kv_cache)
        slots, words = index_of(binder, "tslot", tslot, "tokens")
        keys = binder.take("key", key, f"tokens {HEAD_DIM}", "bf16")
        scores = binder.take("gate_score", gate_score, f"tokens {HEAD_DIM}", "bf16")
        return cls(
            key_ptr=keys.pointer,
            gate_score_ptr=scores.pointer,
            tail_slots_ptr=slots.pointer,
            num_tokens=binder.size("tokens"),
            pool_size=pool_size,
            slot_words=words,
            key_stride_token=keys.strides[0],
            score_stride_token=scores.strides[0],
            stream=current_stream(binder.device, key) if stream is None else stream,
            device=binder.device,
            **tail,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeUpdate(KpoolLaunch):
    """The new tokens of each request, in order: a pool that one completes goes to its slot of the cache, read from the
    ring before the token itself is stashed there; every real token (position and tail slot >= 0) is stashed.

    key and slot_score bf16 [num_requests, next_n, 128]; tail_slots, slots (of the cache; < 0 for none) and positions
    [num_requests, next_n], contiguous; ape FP32 [pool_size, 128]. No two requests share a tail block.
    """

    KERNEL: ClassVar[str] = "kpool_decode"

    cache_ptr: int
    tail_ptr: int
    tail_slots_ptr: int
    key_ptr: int
    slot_score_ptr: int
    ape_ptr: int
    slots_ptr: int
    positions_ptr: int
    num_requests: int
    next_n: int
    pool_size: int
    ring: int
    num_tail_blocks: int
    page_size: int
    num_pages: int
    page_stride: int
    tail_slot_words: int = 1
    slot_words: int = 1
    position_words: int = 1
    round_scale: bool = True
    tail_stride_block: int | None = None
    tail_stride_half: int | None = None
    key_stride_request: int | None = None
    key_stride_token: int | None = None
    score_stride_request: int | None = None
    score_stride_token: int | None = None

    def __post_init__(self) -> None:
        requests, count = checks.integer("num_requests", self.num_requests, 0), checks.integer("next_n", self.next_n, 0)
        size, work = pool_size_of(self.pool_size), requests * count > 0
        checked: dict[str, Any] = place(self) | cache_fields(self, True) | _tail(self, size)
        if self.ring % size:
            raise ArgumentError(f"ring is {self.ring} for pools of {size}; it takes a multiple of the pool")
        checked |= _words(self, "tail_slot_words", "slot_words", "position_words")
        checked |= addresses(self, work, key_ptr=8, slot_score_ptr=8, ape_ptr=16)
        checked |= addresses(self, work, tail_slots_ptr=4, slots_ptr=4, positions_ptr=4)
        for name in ("key", "score"):
            token = checks.stride(f"{name}_stride_token", getattr(self, f"{name}_stride_token"), HEAD_DIM, 4)
            request = f"{name}_stride_request"
            checked |= {
                f"{name}_stride_token": token,
                request: checks.stride(request, getattr(self, request), count * token, 4),
            }
        checked |= {"round_scale": int(bool(self.round_scale)), "baked": (("pool", size),)}
        checks.settle(self, checked | {"grid": requests if work else 0})

    @classmethod
    def from_tensors(
        cls,
        kv_cache: Any,
        tail_kv_cache: Any,
        tail_slot_mapping: Any,
        key: Any,
        slot_score: Any,
        ape: Any,
        slot_mapping: Any,
        positions: Any,
        *,
        round_scale: bool = True,
        stream: int | None = None,
    ) -> DecodeUpdate:
        """From CUDA tensors of the shapes above; kv_cache uint8 [pages, page_size, 132], tail_kv_cache bf16 [blocks, 2,
        ring, 128].

        Raises:
            ArgumentError: rank, shape, type, device, stride or alignment does not fit.
        """
        binder = Binder()
        cache, tail = cache_of(binder, kv_cache), tail_of(binder, tail_kv_cache)
        keys = binder.take("key", key, f"requests next_n {HEAD_DIM}", "bf16")
        scores = binder.take("slot_score", slot_score, f"requests next_n {HEAD_DIM}", "bf16")
        tail_slots, tail_slot_words = index_of(binder, "tail_slot_mapping", tail_slot_mapping, "requests next_n")
        slots, slot_words = index_of(binder, "slot_mapping", slot_mapping, "requests next_n")
        places, position_words = index_of(binder, "positions", positions, "requests next_n")
        return cls(
            tail_slots_ptr=tail_slots.pointer,
            key_ptr=keys.pointer,
            slot_score_ptr=scores.pointer,
            ape_ptr=binder.pointer("ape", ape, f"pool_size {HEAD_DIM}", "f32"),
            slots_ptr=slots.pointer,
            positions_ptr=places.pointer,
            num_requests=binder.size("requests"),
            next_n=binder.size("next_n"),
            pool_size=binder.size("pool_size"),
            tail_slot_words=tail_slot_words,
            slot_words=slot_words,
            position_words=position_words,
            round_scale=round_scale,
            key_stride_request=keys.strides[0],
            key_stride_token=keys.strides[1],
            score_stride_request=scores.strides[0],
            score_stride_token=scores.strides[1],
            stream=current_stream(binder.device, key) if stream is None else stream,
            device=binder.device,
            **cache,
            **tail,
        )


class KpoolRunner:
    """The kpool operations. All methods are static; none synchronises."""

    def __new__(cls) -> KpoolRunner:
        raise ArgumentError("KpoolRunner has static methods only; call them on the class")

    @staticmethod
    def can_implement(
        operation: object, head_dim: object, pool_size: object, sm_version: object, dtype: object = "bf16"
    ) -> Support:
        """Whether an operation of `OPERATIONS` is built for these numbers. Never raises.

        Args:
            dtype: of keys and queries as they come; the `scores` take fp8_e4m3.

        Returns: a truthy `Support`, or one that says what does not fit: e4m3 is converted on SM89 and newer only.
        """
        kernel = OPERATIONS.get(operation) if isinstance(operation, str) else None
        if kernel is None:
            reason = f"operation {checks.show(operation)}; there are {', '.join(OPERATIONS)}"
            return Support.no(SupportCode.OPERATION, reason)
        if checks.whole(head_dim) != HEAD_DIM:
            return Support.no(SupportCode.HEAD_DIM, f"head dim {checks.show(head_dim)}; kpool's is {HEAD_DIM}")
        size = checks.whole(pool_size)
        if size is None or size < 1 or (operation in _POOLED and size not in POOL_SIZES):
            built = f"pools of {checks.show(pool_size)} tokens; built are {', '.join(map(str, POOL_SIZES))}"
            return Support.no(SupportCode.GROUP_SIZE, built)
        sm = checks.build_target(sm_version)
        if sm is not None and sm not in KERNELS[kernel].sms:
            needed = "SM90's fp8 tensor cores" if operation == "scores" else "the e4m3 conversion of SM89 or newer"
            built = ", ".join(KERNELS[kernel].sms)
            reason = f"SM {checks.show(sm_version)}: {operation} needs {needed}; built are {built}"
            return Support.no(SupportCode.SM, reason)
        return dispatch.target_support(kernel, HEAD_DIM, sm_version, dtype)

    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def preflight(pool_size: int = 4, stream: int | None = None, device: int | None = None) -> None:
        """Load what the launches with such pools may run on this device. Idempotent; can be tried again.

        Args:
            stream: asked whether it is being captured, when a load is needed.
            device: ordinal; the current context's device when None.

        Raises:
            ArgumentError: a pool size that is not built.
            UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
        """
        baked: dict[str, Baked] = dict.fromkeys(_POOLED, (("pool", pool_size_of(pool_size)),))
        each = [
            dispatch.wanted(kernel, HEAD_DIM, KERNELS[kernel].dtypes[0], baked.get(name, ()))
            for name, kernel in OPERATIONS.items()
            if name != "scores"
        ]
        dispatch.preload(default_loader(), each, device, stream, strict=False)
