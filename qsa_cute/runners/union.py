"""Prefill that shares its gather (SM90): workspace and launches of the three kernels behind `SparsePrefillRunner`.

`union_prepare` turns the lists of 128 consecutive (row, head) pairs, a tile, into the ascending union of their blocks
with a bit per (row, block); `union_prefill` attends tile by tile; `union_rows` does the rows of tiles whose lists
a union cannot say. Kernels and tuning: `qsa_cute/kernels/attention/union_*.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from qsa_cute import geometry, union_layout
from qsa_cute.runners import boxes, dispatch, splits
from qsa_cute.runners.workspace import PartSpec, Workspace
from qsa_cute.runtime import Loader, Wanted
from qsa_cute.variants import KERNELS

PREPARE, MAIN, ROWS = "union_prepare", "union_prefill", "union_rows"
KINDS = {"padded": 0, "counted": 1, "blocks": 2}

# Rows from which on the union is taken: 512 rows take 73 us against the row kernel's 266 on an H200; below about 128
# both take one wave.
LEAST_ROWS = 128
LEAST_TILE_ROWS = 4  # of a tile: a union costs about as much as three rows of the row kernel
MAP_WORDS = 32  # of a tensor map, in int32
# `union_prepare` with 256 threads a block, and with 512 where each has its own SM (512 rows 71.9 us against 75.7).
_PREPARE, _PREPARE_ALONE = ((PREPARE, (("threads", threads),)) for threads in (256, 512))
KERNELS_TAKEN: tuple[tuple[str, dispatch.Baked], ...] = (_PREPARE, _PREPARE_ALONE, (MAIN, ()), (ROWS, ()))
_BOX = (64, 1, geometry.BLOCK_TOKENS)  # columns, heads, tokens of one copy
_TILES = {
    dim: tuning.baked["tile"] for tuning in KERNELS[MAIN].tuning for dim in tuning.head_dims
}  # tokens a chunk, by head dim


def _most_pairs(p: Any) -> int:
    """Pairs of the largest tile that the context leaves room for, however many the rows are; 0 where there is none."""
    return union_layout.fitting_pairs(p.group_size, _blocks_per_row(p), p.kv_seq_len, _TILES[p.head_dim])


def _blocks_per_row(p: Any) -> int:
    return int(p.top_k if p.index_kind == "blocks" else -(-p.top_k // geometry.BLOCK_TOKENS))


def _sizes(p: Any) -> dict[str, int]:
    """How the rows of these parameters are cut in tiles, and a tile's union in chunks."""
    most = _most_pairs(p) or union_layout.LEAST_PAIRS
    pairs = union_layout.tile_pairs(p.seq_len, p.batch_size, p.group_size, p.num_kv_heads, splits.SM_COUNT, most)
    return _cut(p, pairs, p.kv_seq_len)


def _cut(p: Any, pairs: int, context: int) -> dict[str, int]:
    tile = _TILES[p.head_dim]
    per_sequence = union_layout.tiles_per_sequence(p.seq_len, p.group_size, pairs)
    return {
        "tile": tile,
        "tile_pairs": pairs,
        "tiles_per_sequence": per_sequence,
        "num_tiles": per_sequence * p.batch_size,
        "mask_rows": union_layout.mask_rows(p.group_size, pairs),
        "max_chunks": union_layout.max_chunks(p.group_size, _blocks_per_row(p), context, tile, pairs),
    }


def shared_memory(p: Any) -> int:
    """Bytes that `union_prepare` takes a block."""
    sizes = _sizes(p)
    chunks, pairs = sizes["max_chunks"], sizes["tile_pairs"]
    return union_layout.prepare_smem_bytes(p.group_size, p.kv_seq_len, chunks, sizes["tile"], pairs)


def apart(p: Any) -> bool:
    """Whether tokens and heads of K and V lie apart: an expanded tensor has no tensor map."""
    return lie_apart(p, {"row": p.kv_seq_len, "head": p.num_kv_heads})


def lie_apart(p: Any, sizes: Mapping[str, int]) -> bool:
    """The same of K's and V's dimensions of these sizes."""
    return all(getattr(p, f"{plane}_stride_{dim}") or sizes[dim] <= 1 for plane in "kv" for dim in sizes)


def fits(p: Any) -> bool:
    """Whether the kernels take these parameters: contexts of millions of tokens outgrow the bitmaps."""
    return p.kv_seq_len > 0 and apart(p) and _most_pairs(p) > 0


def pays(p: Any) -> bool:
    """Whether sharing is faster than going row by row: many rows, and more than a few of them a tile."""
    many = p.batch_size * p.seq_len >= LEAST_ROWS
    return many and fits(p) and _most_pairs(p) >= min(LEAST_TILE_ROWS * p.group_size, union_layout.LEAST_PAIRS)


def workspace(p: Any) -> Workspace:
    """What the launches need between them; it may hold anything at entry. As much for fewer rows, a shorter context, or
    both, or less."""
    sizes = _sizes(p)
    parts = _parts(p, sizes, sizes["num_tiles"])
    most = _most_bytes(*(getattr(p, name) for name in _SHAPE))
    return Workspace(max(parts.size, most), parts.alignment, parts.parts)


_SHAPE = ("seq_len", "batch_size", "group_size", "num_kv_heads", "head_dim", "index_kind", "top_k", "kv_seq_len")


@functools.lru_cache(maxsize=1024)
def _most_bytes(*shape: Any) -> int:
    """Of the parts, whatever the number of rows and the context up to these."""
    p = SimpleNamespace(**dict(zip(_SHAPE, shape, strict=True)))
    most = 0
    for pairs, context in union_layout.largest_cuts(p.group_size, _blocks_per_row(p), p.kv_seq_len, _TILES[p.head_dim]):
        rounds = union_layout.rounds(p.seq_len, p.batch_size, p.group_size, p.num_kv_heads, pairs, splits.SM_COUNT)
        tiles = rounds * splits.SM_COUNT // p.num_kv_heads  # so many take no more rounds
        most = max(most, _parts(p, _cut(p, pairs, context), tiles).size)
    return most


def _parts(p: Any, sizes: dict[str, int], tiles: int) -> Workspace:
    return Workspace.of(
        ("tensor_maps", "i32", (p.batch_size, 2, MAP_WORDS)),
        *tile_parts(sizes, tiles),
        ("row_path", "i32", (tiles, p.num_kv_heads)),
    )


def tile_parts(sizes: Mapping[str, int], tiles: int) -> tuple[PartSpec, ...]:
    """What a pre-kernel leaves of so many tiles."""
    chunks, rows = sizes["max_chunks"], sizes["mask_rows"]
    return (
        ("union_counts", "i32", (tiles, 2)),
        ("union_entries", "i32", (tiles, chunks, sizes["tile"] // geometry.BLOCK_TOKENS)),
        ("union_masks", "i32", (tiles, chunks, rows)),
        ("union_first_masks", "i32", (tiles, geometry.BLOCK_TOKENS, rows)),
    )


def wanted(head_dim: int, dtype: object) -> list[Wanted]:
    """All variants that a launch may take."""
    return [dispatch.wanted(name, head_dim, dtype, baked) for name, baked in KERNELS_TAKEN]


def _strides(p: Any, plane: str) -> tuple[int, int]:
    """Bytes between heads and between tokens; a dimension of one has none of its own, and the driver wants one."""
    head = 2 * (getattr(p, f"{plane}_stride_head") if p.num_kv_heads > 1 else p.head_dim)
    return head, 2 * getattr(p, f"{plane}_stride_row") if p.kv_seq_len > 1 else head * p.num_kv_heads


class TileLaunches:
    """A pre-kernel, a main kernel over (tile, KV head) and one for what they leave to the rows, of one params object.

    Args:
        values: what the kernels take, by name.
        shared_memory: bytes a block of the pre-kernel.
        row_units: (row, KV head) pairs.
    """

    def __init__(self, values: Mapping[str, Any], shared_memory: int, num_kv_heads: int, row_units: int) -> None:
        tiles = values["num_tiles"]
        main_grid, rows_grid = min(splits.SM_COUNT, tiles * num_kv_heads), min(2 * splits.SM_COUNT, row_units)
        # One object a kernel: each keeps its own packed image.
        self._each = [
            (SimpleNamespace(**values, packed=None), grid, smem)
            for grid, smem in ((tiles, shared_memory), (main_grid, None), (rows_grid, None))
        ]

    def launch(self, kernels: Iterable[Wanted], p: Any, loader: Loader) -> None:
        """In this order on one stream; each kernel waits for the one before by itself."""
        for wanted, (params, grid, smem) in zip(kernels, self._each, strict=True):
            loader.peek(wanted, p.device, p.stream).launch(params, grid, p.stream, smem=smem)


class Launches(TileLaunches):
    """Of dense K and V; made at the first run."""

    def __init__(self, p: Any, dtype: str, loader: Loader, names: tuple[str, ...]) -> None:
        values = {name: getattr(p, name) for name in names} | _sizes(p)
        values |= workspace(p).addresses(p.workspace) | {"index_kind": KINDS[p.index_kind]}
        for plane in "kv":
            words = loader.encode_map(
                p.device,
                dtype,
                getattr(p, f"{plane}_ptr"),
                (p.head_dim, p.num_kv_heads, p.kv_seq_len),
                _strides(p, plane),
                _BOX,
            )
            values |= boxes.named(f"{plane}_map", words)
        super().__init__(values, shared_memory(p), p.num_kv_heads, p.num_blocks)
        prepare = _PREPARE_ALONE if values["num_tiles"] <= splits.SM_COUNT else _PREPARE
        self._kernels = (prepare, (MAIN, ()), (ROWS, ()))

    def run(self, dtype: object, p: Any, loader: Loader) -> None:
        self.launch((dispatch.wanted(name, p.head_dim, dtype, baked) for name, baked in self._kernels), p, loader)
