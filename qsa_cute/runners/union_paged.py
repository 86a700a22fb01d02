"""Prefill that shares its gather over vLLM's paged cache (SM90): workspace and launches, for the paged runner.

As in `union.py`, with kernels of their own (`kernels/attention/paged_union/`): page look-ups, tokens of partly wanted
blocks and the gate cost the dense kernels 4 % of their speed. The rows of all requests are one sequence of tiles; where
a request ends within a tile, the tile's union holds the blocks of both. An fp8 cache has a main kernel of its own,
which gathers without tensor maps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

from qsa_cute import geometry, union_layout
from qsa_cute import paged_union_layout as layout
from qsa_cute.runners import boxes, checks, dispatch, splits, union
from qsa_cute.runners import paged_places as places
from qsa_cute.runners.union import KINDS, LEAST_ROWS, MAP_WORDS
from qsa_cute.runners.workspace import Workspace
from qsa_cute.runtime import Loader
from qsa_cute.variants import KERNELS as REGISTRY

PREPARE, MAIN, MAIN_FP8, ROWS = (
    "paged_union_prepare",
    "paged_union_prefill",
    "paged_union_prefill_fp8",
    "paged_union_rows",
)
FP8 = "fp8_e4m3"
_CELL = ("page", "token")  # what a cell of a head is numbered by
TILE_REQUESTS = 2  # whose rows a tile may hold
NUM_MAPS = 3  # tensor maps: K, V, and single tokens of V
_BOX_COLUMNS = 64  # of one copy
_TILES = {
    dim: tuning.baked["tile"] for tuning in REGISTRY[MAIN].tuning for dim in tuning.head_dims
}  # tokens a chunk, by head dim

DECODE_ROWS = 8  # that a request has at most while it decodes, speculating

__all__ = ["LEAST_ROWS", "PagedLaunches", "PagedParams", "fits", "kernels", "pays", "shape", "workspace"]


class PagedParams(Protocol):
    """What a launch needs, checked by whoever made it.

    Q, O and the gate [rows, num_q_heads, head_dim]; K and V [num_pages, page_size, num_kv_heads, head_dim], all of one
    type, bf16 or fp16, or K and V fp8 e4m3 and the others bf16; strides in elements, rows 16-byte aligned. `indices` is
    int32 [rows, width + 1], counted lists of a request's tokens; `block_table` int32 [num_requests, table_width],
    `token_to_req` int32 [rows].

    Attributes:
        page_size: tokens of a page, a multiple of 4.
        gate_ptr: 0 for no gate.
        k_scale_ptr, v_scale_ptr: FP32 factors of `attention_scale` and `output_scale` on the device, 0 for none; like
            `output_scale`, of an fp8 cache only.
    """

    q_ptr: int
    k_ptr: int
    v_ptr: int
    o_ptr: int
    gate_ptr: int
    k_scale_ptr: int
    v_scale_ptr: int
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
    output_scale: float
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


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels are asked for, without addresses and strides.

    Attributes:
        rows: of all requests; one sequence of tiles.
        blocks_per_row: that a row may select.
        context: tokens that the page table has room for.
        pages, page_tokens: of K and V.
    """

    rows: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    blocks_per_row: int
    context: int
    pages: int
    page_tokens: int

    @property
    def pairs(self) -> int:
        return union_layout.tile_pairs(self.rows, 1, self.group_size, self.num_kv_heads, splits.SM_COUNT)

    @property
    def max_union(self) -> int:
        """Blocks that a tile can want, however it is cut."""
        pairs = union_layout.most_pairs(self.group_size)
        return layout.max_union(self.group_size, pairs, self.blocks_per_row, TILE_REQUESTS * self.context)

    @property
    def shared_memory(self) -> int:
        """Bytes that the pre-kernel takes a block."""
        tiles = union_layout.tiles_per_sequence(self.rows, self.group_size, self.pairs)
        each = min(-(-tiles // splits.SM_COUNT), layout.PREPARE_BLOCKS)
        return layout.prepare_smem_bytes(self.group_size, self.context, max(each, 1))

    @property
    def fits(self) -> bool:
        """Whether the kernels take it: contexts of millions of tokens outgrow shared memory, far places an entry."""
        return (
            self.context > 0
            and self.pages > 0
            and self.shared_memory <= union_layout.MAX_SMEM_BYTES
            and self.max_union <= layout.MAX_UNION
            and self.pages << layout.entry_shift(self.page_tokens) <= 1 << layout.ENTRY_BITS
        )

    def sizes(self) -> dict[str, int]:
        """The kernels' parameters that follow from the shape, by name; not to be changed."""
        return _sizes(self)

    def workspace(self) -> Workspace:
        """What the launches need between them; it may hold anything at entry. As much for fewer rows, or less."""
        return _workspace(self)

    def _make_sizes(self) -> dict[str, int]:
        tile = _TILES[self.head_dim]
        pairs = self.pairs
        per_sequence = union_layout.tiles_per_sequence(self.rows, self.group_size, pairs)
        bitmaps = self.shared_memory - layout.fixed_smem_bytes(self.group_size)
        return {
            "tile": tile,
            "tile_pairs": pairs,
            "tiles_per_sequence": per_sequence,
            "num_tiles": per_sequence,
            "mask_rows": union_layout.mask_rows(self.group_size),
            "max_chunks": layout.max_chunks(self.max_union, tile),
            "bitmap_words": bitmaps // 4,
            "num_pages": self.pages,
            "entry_shift": layout.entry_shift(self.page_tokens),
        }

    def _make_workspace(self) -> Workspace:
        tiles = self.sizes()["num_tiles"]
        pairs = union_layout.most_pairs(self.group_size)
        rounds = union_layout.rounds(self.rows, 1, self.group_size, self.num_kv_heads, pairs, splits.SM_COUNT)
        parts = self._parts(tiles)
        most = self._parts(rounds * splits.SM_COUNT // self.num_kv_heads)  # that many tiles take no more rounds
        return Workspace(max(parts.size, most.size), parts.alignment, parts.parts)

    def _parts(self, tiles: int) -> Workspace:
        return Workspace.of(
            ("tensor_maps", "i32", (NUM_MAPS, MAP_WORDS)),
            *union.tile_parts(self.sizes(), tiles),
            ("row_path", "i32", (tiles, self.num_kv_heads)),
        )

    def maps(
        self, loader: Loader, device: int, dtype: str, planes: dict[str, tuple[int, tuple[int, int, int]]]
    ) -> dict[str, int]:
        """The tensor maps' words, by parameter; zeros for fp8, whose kernel copies without.

        Args:
            planes: of "k" and "v" the address, and the strides of tokens, heads and pages in elements.
        """
        sizes = (self.head_dim, self.page_tokens, self.num_kv_heads, self.pages)
        found: dict[str, int] = {}
        for name, plane, tokens in (
            ("k_map", "k", geometry.BLOCK_TOKENS),
            ("v_map", "v", geometry.BLOCK_TOKENS),
            ("v_token_map", "v", 1),
        ):
            if dtype == FP8:
                found |= boxes.named(name, [0] * (MAP_WORDS // 2))
                continue
            address, strides = planes[plane]
            # A dimension of one has no stride of its own, and the driver wants one.
            steps = tuple(
                2 * (step if size > 1 else self.head_dim) for step, size in zip(strides, sizes[1:], strict=True)
            )
            words = loader.encode_map(device, dtype, address, sizes, steps, (_BOX_COLUMNS, tokens, 1, 1))
            found |= boxes.named(name, words)
        return found


# Calls repeat their shapes.


@functools.lru_cache(maxsize=256)
def _sizes(what: Shape) -> dict[str, int]:
    return what._make_sizes()


@functools.lru_cache(maxsize=256)
def _workspace(what: Shape) -> Workspace:
    return what._make_workspace()


def shape(p: Any) -> Shape:
    """Of the parameters of a paged launch."""
    return Shape(
        rows=p.rows,
        num_kv_heads=p.num_kv_heads,
        group_size=p.group_size,
        head_dim=p.head_dim,
        blocks_per_row=layout.blocks_of(p.width),
        context=min(p.table_width * p.page_size, checks.INT32_MAX),
        pages=p.num_pages,
        page_tokens=p.page_size,
    )


def fits(p: Any) -> bool:
    """Whether the kernels take these parameters; pages, tokens and heads must lie apart for the copies."""
    sizes = {"page": p.num_pages, "token": p.page_size, "head": p.num_kv_heads}
    return union.lie_apart(p, sizes) and p.page_size % geometry.BLOCK_TOKENS == 0 and shape(p).fits


def kernels(cache_dtype: str) -> tuple[tuple[str, str], ...]:
    """(kernel, type) of each launch, in order. Lists have no type: what prepares an fp8 cache's is bf16's."""
    if cache_dtype == FP8:
        return (PREPARE, "bf16"), (MAIN_FP8, FP8), (ROWS, FP8)
    return tuple((name, cache_dtype) for name in (PREPARE, MAIN, ROWS))


def pays(p: Any) -> bool:
    """Whether enough rows can be prefill: where all requests but one decode, their rows share nothing."""
    return bool(p.rows >= LEAST_ROWS + DECODE_ROWS * (p.num_requests - 1))


def workspace(p: Any) -> Workspace:
    """What the launches need between them; it may hold anything at entry. As much for fewer rows, or less."""
    return shape(p).workspace()


class PagedLaunches(union.TileLaunches):
    """The three launches of one params object.

    Args:
        cache_dtype: of K and V.
        memory: address of `workspace(p).size` bytes, 256-byte aligned, which may hold anything.
    """

    def __init__(self, p: Any, cache_dtype: str, loader: Loader, memory: int) -> None:
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
            "token_shift": layout.entry_shift(p.page_size) + 2,
        }
        if cache_dtype == FP8:
            strides = {f"{plane}_stride_{dim}": values[f"{plane}_stride_{dim}"] for plane in "kv" for dim in _CELL}
            values |= places.units(strides, p.num_pages, p.page_size, 1)
            values |= {f"{plane}_head_bytes": values[f"{plane}_stride_head"] for plane in "kv"}
        planes = {
            plane: (
                getattr(p, f"{plane}_ptr"),
                tuple(getattr(p, f"{plane}_stride_{dim}") for dim in ("token", "head", "page")),
            )
            for plane in "kv"
        }
        maps = what.maps(loader, p.device, cache_dtype, planes)
        values |= maps | what.sizes() | what.workspace().addresses(memory)
        self._kernels = [dispatch.wanted(name, p.head_dim, dtype) for name, dtype in kernels(cache_dtype)]
        super().__init__(values, what.shared_memory, what.num_kv_heads, what.rows * what.num_kv_heads)

    def run(self, p: Any, loader: Loader) -> None:
        self.launch(self._kernels, p, loader)
