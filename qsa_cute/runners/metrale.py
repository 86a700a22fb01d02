"""Metrale's operations: each a frozen dataclass of addresses and sizes, checked when it is made, and `run(dtype)`.

What all share: tensors are contiguous; "elem" is bf16 or fp16, the dtype given to `run`; sizes and positions are those
of one sequence; `stream` is a CUstream as an integer, `device` an ordinal or -1 for the current context's. `raw_keys`
and `block_keys` begin at the sequence's token 0 and block 0. Every constructor raises ArgumentError for a value that no
launch could take; `run` launches nothing where there is nothing to do, allocates nothing, and raises as
`SparsePrefillRunner.run` does. The mathematics: `reference/metrale.py`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, ClassVar

from qsa_cute import geometry
from qsa_cute.errors import ArgumentError
from qsa_cute.runners import checks, dispatch, splits
from qsa_cute.runners.indexer_launch import Launch, addresses, place, wanted
from qsa_cute.runners.indexer_select import MMA_ROWS, score_grid
from qsa_cute.runtime import default_loader
from qsa_cute.support import Support, SupportCode
from qsa_cute.variants import KERNELS as KERNEL_TABLE

MAX_VECTOR = 1024  # dims of an index key or query
MAX_GROUPS = 16 * splits.SM_COUNT  # thread blocks of the norms, which take the vectors in turn: what 132 SMs hold
WARPS = 4
SCORE_BLOCKS = 64  # of a thread block of `Score`
TILE_ROWS, TILE_BLOCKS = 16, 128  # of a thread block of `ScoreRows`
GATHER_CHUNKS = 256  # 16-byte chunks of a thread block of `Gather`
KERNELS = ("metrale_block_pool", "metrale_qprep", "metrale_score", "metrale_score_rows")
MMA, WGMMA = "metrale_score_rows_tc", "metrale_score_rows_tc_wgmma"
WGMMA_ROWS = 32 * KERNEL_TABLE[WGMMA].tuning[0].baked["groups"]  # of a tile, by wgmma
GATHER, ATTENTION = "metrale_gather", "metrale_prefill_attn"


def rope_step(theta: object, rot: int) -> int:
    """theta^(-2 / rot), theta an FP32 of at least 1, as a fraction of 2^64: an Int64 of the same bits."""
    base = checks.scalar("theta", theta)
    try:
        base = struct.unpack("<f", struct.pack("<f", base))[0]
    except OverflowError:
        base = 0.0
    if base < 1:
        raise ArgumentError(f"theta is {checks.show(theta)}; it takes an FP32 of at least 1")
    whole = min(int(base ** (-2 / rot) * 2**64), 2**64 - 1) if rot else 0
    return whole - (whole >> 63 << 64)


def divisor(value: int) -> tuple[int, int]:
    """(magic, shift) of `kernels/metrale/division.py`."""
    bits = (value - 1).bit_length()
    return -(-(1 << (31 + bits)) // value), 31 + bits


def vector(launch: Any, step: int) -> int:
    """Dims of a key or query: a multiple of `step`."""
    number = checks.whole(launch.hd)
    if number is None or not step <= number <= MAX_VECTOR or number % step:
        raise ArgumentError(
            f"hd is {checks.show(launch.hd)}; it takes a multiple of {step} from {step} to {MAX_VECTOR}"
        )
    return number


def norm_of(launch: Any) -> dict[str, Any]:
    """Length, rotation, angles and eps of the norms."""
    hd = vector(launch, 4)
    rot = checks.whole(launch.rot)
    if rot is None or not 0 <= rot <= hd or rot % 2:
        raise ArgumentError(f"rot is {checks.show(launch.rot)}; it takes an even number from 0 to hd, {hd}")
    eps = checks.scalar("eps", launch.eps)
    if eps < 0:
        raise ArgumentError(f"eps is {checks.show(launch.eps)}; it takes a number that is not negative")
    return {"hd": hd, "rot": rot, "eps": eps, "rope_step": rope_step(launch.theta, rot)}


def rows_of(launch: Any) -> dict[str, int]:
    """Rows and the position of the first; the last row's is an int32."""
    rows = checks.integer("rows", launch.rows, 0)
    return {"rows": rows, "first_pos": checks.integer("first_pos", launch.first_pos, 0, checks.INT32_MAX - rows)}


def norm_launch(vectors: int, hd: int, rot: int) -> dict[str, int]:
    """Grid and shared memory, as `kernels/metrale/vectors.py` lays it out."""
    return {"grid": min(-(-vectors // WARPS), MAX_GROUPS), "smem": -(-rot * 4 // 16) * 16 + WARPS * hd * 4}


def flat(name: str, pointer: int, count: int, itemsize: int) -> checks.Extent:
    return checks.extent(name, pointer, (), count, itemsize) if count else checks.Extent(name, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Launch):
    """A launch whose shared memory depends on its vectors' length."""

    rope_step: int = field(init=False, repr=False)
    smem: int = field(init=False, repr=False)

    def run(self, dtype: object) -> None:
        if self.grid:
            kernel: Any = default_loader().peek(wanted(self.KERNEL, dtype), self.device, self.stream)
            kernel.launch(self, self.grid, self.stream, smem=self.smem)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPool(Norm):
    """Keys of the blocks [first_block, first_block + n_new): raw_keys elem [tokens, hd], k_norm_w elem [hd] as stored,
    block_keys elem [blocks, hd]; only the new blocks' tokens are read and only their keys written.

    Attributes:
        ratio: tokens of a block.
        hd, rot: dims of a key, and how many of them rotate (NeoX pairs).
        theta, eps: of the angles and of the norm.
    """

    KERNEL: ClassVar[str] = "metrale_block_pool"

    raw_keys: int
    k_norm_w: int
    block_keys: int
    first_block: int
    n_new: int
    ratio: int = geometry.BLOCK_TOKENS
    hd: int = geometry.INDEX_HEAD_DIM
    rot: int = geometry.ROPE_DIM
    theta: float = geometry.ROPE_THETA
    eps: float = geometry.RMS_EPS

    def __post_init__(self) -> None:
        new = checks.integer("n_new", self.n_new, 0)
        ratio = checks.integer("ratio", self.ratio, 1)
        first = checks.integer("first_block", self.first_block, 0)
        if (first + new) * ratio > checks.INT32_MAX:
            raise ArgumentError(
                f"blocks {first} to {first + new} of {ratio} tokens reach past position {checks.INT32_MAX}; "
                "first_block, n_new and ratio take less"
            )
        checked = place(self) | norm_of(self) | {"n_new": new, "ratio": ratio, "first_block": first}
        checked |= addresses(self, new > 0, raw_keys=8, k_norm_w=8, block_keys=8)
        checks.settle(self, checked | norm_launch(new, checked["hd"], checked["rot"]))
        row = self.hd * checks.ELEM_BYTES
        out = flat("block_keys", self.block_keys + first * row, new * self.hd, 2)
        raw = flat("raw_keys", self.raw_keys + first * ratio * row, new * ratio * self.hd, 2)
        checks.disjoint([out], [raw, flat("k_norm_w", self.k_norm_w, self.hd, 2)])


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPrep(Norm):
    """Prepared queries of `rows` rows at positions first_pos + row: q_in elem [rows, pitch], of which the first
    n_heads * hd columns are read, q_norm_w elem [hd] as stored, q_out FP32 [rows, n_heads, hd].

    Attributes:
        pitch: elements between rows of q_in; n_heads * hd where None.
        n_heads, hd, rot, theta, eps: as for `BlockPool`.
    """

    KERNEL: ClassVar[str] = "metrale_qprep"

    q_in: int
    q_norm_w: int
    q_out: int
    rows: int
    first_pos: int
    pitch: int | None = None
    n_heads: int = geometry.INDEX_HEADS
    hd: int = geometry.INDEX_HEAD_DIM
    rot: int = geometry.ROPE_DIM
    theta: float = geometry.ROPE_THETA
    eps: float = geometry.RMS_EPS

    def __post_init__(self) -> None:
        checked = place(self) | norm_of(self) | rows_of(self)
        heads = checks.integer("n_heads", self.n_heads, 0)
        width = heads * checked["hd"]
        pitch = checks.stride("qkw", self.pitch, width, 4)
        if pitch < width:
            raise ArgumentError(f"qkw is {pitch}; it takes at least n_heads * hd, {width}")
        vectors = checks.grid("rows x n_heads", checked["rows"] * heads)
        checked |= addresses(self, vectors > 0, q_in=8, q_norm_w=8, q_out=16)
        checked |= norm_launch(vectors, checked["hd"], checked["rot"])
        checks.settle(self, checked | {"n_heads": heads, "pitch": pitch})
        out = flat("q_out", self.q_out, vectors * self.hd, 4)
        q_in = checks.extent("q_in", self.q_in, ((self.rows, pitch),), width, 2)
        checks.disjoint([out], [q_in, flat("q_norm_w", self.q_norm_w, self.hd, 2)])


def _heads_of(launch: Any) -> dict[str, Any]:
    """Heads, length and scale of the scores."""
    hd = vector(launch, 8)
    return {"n_heads": checks.integer("n_heads", launch.n_heads, 1), "hd": hd, "scale": hd**-0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Launch):
    """Scores FP32 [n_blocks] of one query: q FP32 [n_heads, hd], block_keys elem [n_blocks, hd]."""

    KERNEL: ClassVar[str] = "metrale_score"

    q: int
    block_keys: int
    scores: int
    n_blocks: int
    n_heads: int = geometry.INDEX_HEADS
    hd: int = geometry.INDEX_HEAD_DIM
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        blocks = checks.integer("n_blocks", self.n_blocks, 0, checks.INT32_MAX - SCORE_BLOCKS)
        checked = place(self) | _heads_of(self) | addresses(self, blocks > 0, q=16, block_keys=16, scores=4)
        checks.settle(self, checked | {"n_blocks": blocks, "grid": -(-blocks // SCORE_BLOCKS)})
        keys = flat("block_keys", self.block_keys, blocks * self.hd, 2)
        checks.disjoint([flat("scores", self.scores, blocks, 4)], [keys, flat("q", self.q, self.n_heads * self.hd, 4)])


def _score_rows(launch: Any) -> dict[str, Any]:
    """What the two kernels of rows have in common."""
    checked: dict[str, Any] = place(launch) | rows_of(launch)
    rows = checked["rows"]
    blocks = checks.integer("n_blocks_max", launch.n_blocks_max, 0, checks.INT32_MAX - TILE_BLOCKS)
    stride = checks.integer("score_stride", launch.score_stride, blocks)
    ratio = checks.integer("ratio", launch.ratio, 1)
    checked |= addresses(launch, rows > 0 and blocks > 0, q=16, block_keys=16, scores=4)
    return checked | {"n_blocks_max": blocks, "score_stride": stride, "ratio": ratio}


def _score_rows_apart(launch: Any, width: int, hd: int) -> None:
    rows, blocks = launch.rows, launch.n_blocks_max
    out = checks.extent("scores", launch.scores, ((rows, launch.score_stride),), blocks, 4)
    if rows and blocks:
        keys = flat("block_keys", launch.block_keys, min(blocks, (launch.first_pos + rows) // launch.ratio) * hd, 2)
        checks.disjoint([out], [flat("q", launch.q, rows * width, 4), keys])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRows(Launch):
    """Exact scores FP32 [rows, score_stride] of q FP32 [rows, n_heads, hd] at positions first_pos + row against
    block_keys elem [.., hd]: columns [0, n_blocks_max), -inf from (first_pos + row + 1) // ratio on. Keys that no row
    sees are not read. A row's scores have the bits that `Score` gives it."""

    KERNEL: ClassVar[str] = "metrale_score_rows"

    q: int
    block_keys: int
    scores: int
    rows: int
    n_blocks_max: int
    first_pos: int
    score_stride: int
    ratio: int = geometry.BLOCK_TOKENS
    n_heads: int = geometry.INDEX_HEADS
    hd: int = geometry.INDEX_HEAD_DIM
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        checks.settle(self, _score_rows(self) | _heads_of(self))
        tiles = -(-self.rows // TILE_ROWS) * -(-self.n_blocks_max // TILE_BLOCKS)
        checks.settle(self, {"grid": checks.grid("tiles of rows x n_blocks_max", tiles)})
        _score_rows_apart(self, self.n_heads * self.hd, self.hd)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRowsTc(Launch):
    """As `ScoreRows`, of 4 heads of 128 dims, on the tensor cores: queries as two terms of the keys' type.

    Attributes:
        algorithm: "wgmma" (SM90) or "mma" (every SM); None picks what suits the device.
    """

    KERNEL: ClassVar[str] = MMA
    TILES: ClassVar[dict[str, tuple[str, int]]] = {"mma": (MMA, MMA_ROWS), "wgmma": (WGMMA, WGMMA_ROWS)}

    q: int
    block_keys: int
    scores: int
    rows: int
    n_blocks_max: int
    first_pos: int
    score_stride: int
    ratio: int = geometry.BLOCK_TOKENS
    algorithm: str | None = None

    def __post_init__(self) -> None:
        if self.algorithm is not None and self.algorithm not in self.TILES:
            raise ArgumentError(f"algorithm is {checks.show(self.algorithm)}; it takes 'wgmma', 'mma' or None")
        checks.settle(self, _score_rows(self))
        checks.settle(self, {"grid": self.rows if self.n_blocks_max else 0})
        _score_rows_apart(self, geometry.INDEX_HEADS * geometry.INDEX_HEAD_DIM, geometry.INDEX_HEAD_DIM)

    def run(self, dtype: object) -> None:
        if self.grid:
            loader = default_loader()
            is_sm90 = dispatch.capability(loader, self.device) == dispatch.SM90
            name, tile = self.TILES[self.algorithm or ("wgmma" if is_sm90 else "mma")]
            kernel: Any = loader.peek(wanted(name, dtype), self.device, self.stream)
            kernel.launch(self, score_grid(tile, self.rows, 0, self.rows, self.n_blocks_max), self.stream)


def _pages(launch: Any) -> dict[str, int]:
    size = checks.integer("block_size", launch.block_size, 1)
    magic, shift = divisor(size)
    return {"block_size": size, "page_magic": magic, "page_shift": shift}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(Launch):
    """k_out and v_out elem [n_sel, nkv, hd]: the rows of the tokens sel int32 [n_sel], from caches elem [pages,
    block_size, nkv, hd] by block_table int32. A negative token or page leaves its slot as it is and reads nothing."""

    KERNEL: ClassVar[str] = GATHER

    k_cache: int
    v_cache: int
    block_table: int
    sel: int
    k_out: int
    v_out: int
    n_sel: int
    block_size: int
    nkv: int = geometry.NUM_KV_HEADS
    hd: int = geometry.HEAD_DIM
    page_magic: int = field(init=False, repr=False)
    page_shift: int = field(init=False, repr=False)
    row_chunks: int = field(init=False, repr=False)
    row_magic: int = field(init=False, repr=False)
    row_shift: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        count = checks.integer("n_sel", self.n_sel, 0)
        heads, hd = checks.integer("nkv", self.nkv, 1), checks.integer("hd", self.hd, 1)
        width = heads * hd
        if width % 8:
            raise ArgumentError(
                f"hd is {hd} with nkv {heads}; a token's row takes a multiple of 8 elements, here {width}"
            )
        chunks = width // 8
        if count * chunks > checks.INT32_MAX - GATHER_CHUNKS:
            raise ArgumentError(f"n_sel is {count} of {width} elements each; it takes less than 2^31 chunks of 8")
        checked = place(self) | _pages(self) | {"n_sel": count, "nkv": heads, "hd": hd, "row_chunks": chunks}
        checked |= addresses(self, count > 0, k_cache=16, v_cache=16, k_out=16, v_out=16, block_table=4, sel=4)
        magic, shift = divisor(chunks)
        checked |= {"row_magic": magic, "row_shift": shift, "grid": -(-count * chunks // GATHER_CHUNKS)}
        checks.settle(self, checked)
        outs = [flat(name, getattr(self, name), count * width, 2) for name in ("k_out", "v_out")]
        page = [flat(name, getattr(self, name), self.block_size * width, 2) for name in ("k_cache", "v_cache")]
        checks.disjoint(outs, [*page, flat("sel", self.sel, count, 4)])

    def run(self, dtype: object) -> None:
        if checks.dtype_name(dtype) == "fp16":
            dtype = "bf16"  # it moves 16 bits, whatever they mean
        super(Gather, self).run(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttention(Launch):
    """attn_out elem [rows, nq, hd] of q elem [rows, nq, hd] at positions first_pos + row, over the tokens of the blocks
    lists int32 [rows, topk] and of the row's open block, from caches elem [pages, block_size, nkv, hd] by block_table.

    A listed id counts where 0 <= id < (first_pos + row + 1) // ratio, once for each time that it stands there; others
    are passed over. A row without a token is zeros, and a token whose page is negative counts as none.

    Attributes:
        inv_sqrt_d: factor of the scores.
        group_size: query heads a KV head, 1 to 16.
    """

    KERNEL: ClassVar[str] = ATTENTION

    q: int
    k_cache: int
    v_cache: int
    block_table: int
    lists: int
    attn_out: int
    rows: int
    first_pos: int
    topk: int
    inv_sqrt_d: float
    ratio: int = geometry.BLOCK_TOKENS
    block_size: int
    nq: int
    nkv: int
    hd: int = geometry.HEAD_DIM
    group_size: int = field(init=False)
    ratio_magic: int = field(init=False, repr=False)
    ratio_shift: int = field(init=False, repr=False)
    page_magic: int = field(init=False, repr=False)
    page_shift: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        q_heads, kv_heads = checks.heads(self.nq, self.nkv)
        ratio = checks.integer("ratio", self.ratio, 1)
        topk = checks.integer("topk", self.topk, 0)
        if (topk + 1) * ratio > checks.INT32_MAX // 2:
            raise ArgumentError(f"topk is {topk} blocks of {ratio} tokens; it takes less than 2^30 tokens")
        checked: dict[str, Any] = place(self) | rows_of(self) | _pages(self)
        rows = checked["rows"]
        checked |= addresses(self, rows > 0, q=16, k_cache=16, v_cache=16, attn_out=16, block_table=4)
        checked |= addresses(self, rows > 0 and topk > 0, lists=4)
        magic, shift = divisor(ratio)
        checked |= {"ratio": ratio, "ratio_magic": magic, "ratio_shift": shift, "topk": topk}
        checked |= {
            "nq": q_heads,
            "nkv": kv_heads,
            "group_size": q_heads // kv_heads,
            "hd": checks.head_dim(self.hd),
            "inv_sqrt_d": checks.scalar("inv_sqrt_d", self.inv_sqrt_d),
            "grid": checks.grid("rows x nkv", rows * kv_heads),
        }
        checks.settle(self, checked)
        width = q_heads * self.hd
        out, q = (flat(name, getattr(self, name), rows * width, 2) for name in ("attn_out", "q"))
        page = self.block_size * kv_heads * self.hd if rows else 0
        caches = [flat(name, getattr(self, name), page, 2) for name in ("k_cache", "v_cache")]
        checks.disjoint([out], [q, *caches, flat("lists", self.lists, rows * topk, 4)])

    def run(self, dtype: object) -> None:
        if self.grid:
            variant = dispatch.wanted(ATTENTION, self.hd, dtype)
            kernel: Any = default_loader().peek(variant, self.device, self.stream)
            kernel.launch(self, self.grid, self.stream)


class MetraleRunner:
    """What all the operations ask beforehand. All methods are static."""

    def __new__(cls) -> MetraleRunner:
        raise ArgumentError("MetraleRunner has static methods only; call them on the class")

    @staticmethod
    def can_implement(
        nq: object,
        nkv: object,
        hd: object,
        sm_version: object,
        dtype: object,
        n_heads: object = geometry.INDEX_HEADS,
        index_hd: object = geometry.INDEX_HEAD_DIM,
        tensor_cores: bool = True,
    ) -> Support:
        """Whether the kernels cover a model, from numbers alone. Never raises.

        Args:
            nq, nkv, hd: of the attention.
            sm_version: as for `SparsePrefillRunner.can_implement`.
            dtype: "bf16", "fp16" or a torch dtype: of keys, queries and caches.
            n_heads, index_hd: of the indexer.
            tensor_cores: whether `ScoreRowsTc` is asked for, too, which takes 4 heads of 128.

        Returns: a `Support`, true or with its reason.
        """
        heads, dim = checks.whole(n_heads), checks.whole(index_hd)
        if heads is None or heads < 1:
            return Support.no(SupportCode.HEADS, f"{checks.show(n_heads)} index heads; the kernels take 1 or more")
        if dim is None or not 8 <= dim <= MAX_VECTOR or dim % 8:
            reason = f"index head dim {checks.show(index_hd)}; the kernels take a multiple of 8 up to {MAX_VECTOR}"
            return Support.no(SupportCode.HEAD_DIM, reason)
        if tensor_cores and (heads, dim) != (geometry.INDEX_HEADS, geometry.INDEX_HEAD_DIM):
            reason = f"{checks.show(heads)} index heads of {dim} on the tensor cores; qsa_score_rows_tc takes 4 of 128"
            return Support.no(SupportCode.HEAD_DIM, reason)
        return dispatch.attention_support(ATTENTION, nq, nkv, hd, sm_version, dtype)

    canImplement = can_implement  # noqa: N815 - the hosts' name

    @staticmethod
    def preflight(
        dtype: object, stream: int | None = None, device: int | None = None, head_dim: int | None = None
    ) -> None:
        """Load what the operations use, in the current context or `device`'s. Idempotent; can be tried again.

        Args:
            stream: asked whether it is being captured, when a load is needed.
            device: ordinal; the current context's device when None.
            head_dim: of the attention; all that were built when None.

        Raises:
            UnsupportedError, ArtifactError, CaptureError, DriverError: see `errors`.
        """
        dims = geometry.SUPPORTED_HEAD_DIMS if head_dim is None else (checks.head_dim(head_dim),)
        each = [dispatch.wanted(name, geometry.INDEX_HEAD_DIM, dtype) for name in KERNELS]
        attention = [dispatch.wanted(ATTENTION, dim, dtype) for dim in dims]
        loader = default_loader()
        is_sm90 = dispatch.capability(loader, -1 if device is None else device) == dispatch.SM90
        each.append(dispatch.wanted(WGMMA if is_sm90 else MMA, geometry.INDEX_HEAD_DIM, dtype))
        each.append(dispatch.wanted(GATHER, geometry.INDEX_HEAD_DIM, "bf16"))
        dispatch.preload(loader, each, device, stream, strict=True)
        dispatch.preload(loader, attention, device, stream, strict=head_dim is not None)
