"""Prefill that shares its gather (SM90): workspace and launches of the three kernels behind `SparsePrefillRunner`.

`union_prepare` turns the lists of up to 128 consecutive (row, head) pairs, a tile, into the ascending union of their
blocks with a bit per (row, block); `union_prefill` attends tile by tile; `union_rows` does the rows of tiles whose
lists a union cannot say. Kernels and tuning: `qsa_cute/kernels/attention/union_*.py`. Paged: `union_paged.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from qsa_cute import geometry, union_layout
from qsa_cute.runners import dispatch, splits
from qsa_cute.runners.workspace import Workspace
from qsa_cute.runtime import Loader
from qsa_cute.variants import KERNELS

PREPARE, MAIN, ROWS = "union_prepare", "union_prefill", "union_rows"
KINDS = {"padded": 0, "counted": 1, "blocks": 2}

# Rows from which on the union is taken: 512 rows take 78 us against the row kernel's 266 on an H200; below about 128
# both take one wave.
LEAST_ROWS = 128
NUM_MAPS = 3  # tensor maps: K, V, and single tokens of V
_MAP_WORDS = 32  # of a tensor map, in int32
_BOX_COLUMNS = 64  # of one copy
_TILES = {
    dim: tuning.baked["tile"] for tuning in KERNELS[MAIN].tuning for dim in tuning.head_dims
}  # tokens a chunk, by head dim


@dataclass(frozen=True, slots=True)
class Shape:
    """What the union's kernels are asked for, whatever K and V look like.

    Attributes:
        rows, batch: rows of a sequence, and sequences that have tiles of their own.
        blocks_per_row: that a row may select.
        context: tokens that ids reach; `known`: whether sequences are about as long.
        requests: whose rows a tile may hold.
        pages, page_tokens: of K and V; dense ones are a page a sequence.
    """

    rows: int
    batch: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    blocks_per_row: int
    context: int
    known: bool
    requests: int
    pages: int
    page_tokens: int

    @property
    def pairs(self) -> int:
        return union_layout.tile_pairs(self.rows, self.batch, self.group_size, self.num_kv_heads, splits.SM_COUNT)

    @property
    def max_union(self) -> int:
        """Blocks that a tile can want, however it is cut."""
        pairs = union_layout.most_pairs(self.group_size)
        return union_layout.max_union(self.group_size, pairs, self.blocks_per_row, self.requests * self.context)

    @property
    def shared_memory(self) -> int:
        """Bytes that `union_prepare` takes a block."""
        tiles = self.batch * union_layout.tiles_per_sequence(self.rows, self.group_size, self.pairs)
        each = min(-(-tiles // splits.SM_COUNT), union_layout.PREPARE_BLOCKS)
        return union_layout.prepare_smem_bytes(self.group_size, self.pairs, self.context, self.known, max(each, 1))

    @property
    def fits(self) -> bool:
        """Whether the kernels take it: contexts of millions of tokens outgrow shared memory, far places an entry."""
        return (
            self.context > 0
            and self.pages > 0
            and self.shared_memory <= union_layout.MAX_SMEM_BYTES
            and self.max_union <= union_layout.MAX_UNION
            and self.pages << union_layout.entry_shift(self.page_tokens) <= 1 << union_layout.ENTRY_BITS
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
        bitmaps = self.shared_memory - union_layout.fixed_smem_bytes(self.group_size)
        return {
            "tile": tile,
            "tile_pairs": pairs,
            "tiles_per_sequence": per_sequence,
            "num_tiles": per_sequence * self.batch,
            "mask_rows": union_layout.mask_rows(self.group_size),
            "max_chunks": union_layout.max_chunks(self.max_union, tile),
            "bitmap_words": bitmaps // 4,
            "num_pages": self.pages,
            "entry_shift": union_layout.entry_shift(self.page_tokens),
        }

    def _make_workspace(self) -> Workspace:
        tiles = self.sizes()["num_tiles"]
        pairs = union_layout.most_pairs(self.group_size)
        rounds = union_layout.rounds(self.rows, self.batch, self.group_size, self.num_kv_heads, pairs, splits.SM_COUNT)
        parts = self._parts(tiles)
        most = self._parts(rounds * splits.SM_COUNT // self.num_kv_heads)  # that many tiles take no more rounds
        return Workspace(max(parts.size, most.size), parts.alignment, parts.parts)

    def _parts(self, tiles: int) -> Workspace:
        sizes = self.sizes()
        chunks, rows = sizes["max_chunks"], sizes["mask_rows"]
        return Workspace.of(
            ("tensor_maps", "i32", (NUM_MAPS, _MAP_WORDS)),
            ("union_counts", "i32", (tiles, 2)),
            ("union_entries", "i32", (tiles, chunks, sizes["tile"] // geometry.BLOCK_TOKENS)),
            ("union_masks", "i32", (tiles, chunks, rows)),
            ("union_first_masks", "i32", (tiles, geometry.BLOCK_TOKENS, rows)),
            ("row_path", "i32", (tiles, self.num_kv_heads)),
        )

    def maps(self, loader: Loader, dtype: str, planes: dict[str, tuple[int, tuple[int, int, int]]]) -> dict[str, int]:
        """The tensor maps' words, by parameter.

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
            address, strides = planes[plane]
            # A dimension of one has no stride of its own, and the driver wants one.
            steps = tuple(
                2 * (step if size > 1 else self.head_dim) for step, size in zip(strides, sizes[1:], strict=True)
            )
            words = loader.driver.encode_map(dtype, address, sizes, steps, (_BOX_COLUMNS, tokens, 1, 1))
            found |= {f"{name}_{i}": word for i, word in enumerate(words)}
        return found


# Calls repeat their shapes.


@functools.lru_cache(maxsize=256)
def _sizes(what: Shape) -> dict[str, int]:
    return what._make_sizes()


@functools.lru_cache(maxsize=256)
def _workspace(what: Shape) -> Workspace:
    return what._make_workspace()


def shape(p: Any) -> Shape:
    """Of the parameters of `SparsePrefillRunner`."""
    return Shape(
        rows=p.seq_len,
        batch=p.batch_size,
        num_kv_heads=p.num_kv_heads,
        group_size=p.group_size,
        head_dim=p.head_dim,
        blocks_per_row=p.top_k if p.index_kind == "blocks" else union_layout.blocks_of(p.top_k),
        context=p.kv_seq_len,
        known=True,
        requests=1,
        pages=p.batch_size,
        page_tokens=max(1, p.kv_seq_len),
    )


def fits(p: Any) -> bool:
    """Whether the kernels take these parameters; rows and sequences must lie apart for the copies."""
    sizes = {"row": p.kv_seq_len, "head": p.num_kv_heads, "batch": p.batch_size}
    apart = all(getattr(p, f"{plane}_stride_{dim}") or sizes[dim] <= 1 for plane in "kv" for dim in sizes)
    return apart and shape(p).fits


def workspace(p: Any) -> Workspace:
    return shape(p).workspace()


class Launches:
    """The three launches of one params object: what the kernels take, by name. Made at its first run."""

    rows_kernel = ROWS

    def __init__(self, p: Any, dtype: str, loader: Loader, names: tuple[str, ...]) -> None:
        what = shape(p)
        values = {name: getattr(p, name) for name in names} | {"index_kind": KINDS[p.index_kind]}
        values |= dict.fromkeys(("gate_ptr", "gate_stride_batch", "gate_stride_row", "gate_stride_head"), 0)
        values |= dict.fromkeys(("block_table", "token_to_req", "table_stride", "num_requests", "page_blocks"), 0)
        planes = {
            plane: (
                getattr(p, f"{plane}_ptr"),
                tuple(getattr(p, f"{plane}_stride_{dim}") for dim in ("row", "head", "batch")),
            )
            for plane in "kv"
        }
        self._make(what, values, what.maps(loader, dtype, planes), p.workspace)

    def _make(self, what: Shape, values: dict[str, Any], maps: dict[str, int], memory: int) -> None:
        values |= maps | what.sizes() | what.workspace().addresses(memory)
        # One object a kernel: each keeps its own packed image.
        self._prepare, self._main, self._rows = (SimpleNamespace(**values, packed=None) for _ in range(3))
        self._smem = what.shared_memory
        self._tiles = values["num_tiles"]
        self._main_grid = min(splits.SM_COUNT, self._tiles * what.num_kv_heads)
        self._rows_grid = min(2 * splits.SM_COUNT, what.batch * what.rows * what.num_kv_heads)

    def run(self, dtype: object, p: Any, loader: Loader) -> None:
        """In this order on one stream; each kernel waits for the one before by itself."""
        for name, params, grid, smem in (
            (PREPARE, self._prepare, self._tiles, self._smem),
            (MAIN, self._main, self._main_grid, None),
            (self.rows_kernel, self._rows, self._rows_grid, None),
        ):
            kernel = loader.peek(dispatch.wanted(name, p.head_dim, dtype), p.device, p.stream)
            kernel.launch(params, grid, p.stream, smem=smem)
