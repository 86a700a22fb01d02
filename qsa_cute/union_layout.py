"""Sizes that `union_prepare`, `union_prefill` and their launchers share; imports nothing of the DSL."""

import bisect
import functools

from qsa_cute.geometry import BLOCK_TOKENS

PAIRS = 128  # (row, head) pairs of a full tile
LEAST_PAIRS = 32  # of a tile that is cut small because there are few
PAIR_STEP = 4
RECORDS = 256  # (row, partial block) records a tile has room for
FIXED_BYTES = 1024  # of union_prepare's shared memory, before the parts that depend on the launch
MAX_SMEM_BYTES = 227 * 1024
HALF = PAIRS // 2  # pairs of a warpgroup
MAX_UNION = 2**16 - 1  # blocks: the pre-kernels count them in 16 bits


def most_pairs(group_size: int) -> int:
    """Pairs of a full tile: 128; 64 where a row is one pair, so that a tile's open tails fit one chunk."""
    return PAIRS if group_size > 1 else PAIRS // 2


def fits(group_size: int, blocks_per_row: int, context: int, tile: int, pairs: int) -> bool:
    """Whether `union_prepare` takes tiles of so many pairs: it has shared memory for their bitmaps, and its counts hold
    what they may want. Where it does, it does for shorter contexts and for fewer pairs."""
    chunks = max_chunks(group_size, blocks_per_row, context, tile, pairs)
    few = max_union(group_size, pairs, blocks_per_row, context) <= MAX_UNION
    return few and prepare_smem_bytes(group_size, context, chunks, tile, pairs) <= MAX_SMEM_BYTES


@functools.lru_cache(maxsize=1024)
def fitting_pairs(group_size: int, blocks_per_row: int, context: int, tile: int) -> int:
    """Pairs of the largest tile that `union_prepare` takes; 0 where it takes none."""
    sizes = range(most_pairs(group_size), 0, -PAIR_STEP)
    return next((pairs for pairs in sizes if fits(group_size, blocks_per_row, context, tile, pairs)), 0)


@functools.lru_cache(maxsize=1024)
def largest_cuts(group_size: int, blocks_per_row: int, context: int, tile: int) -> tuple[tuple[int, int], ...]:
    """(pairs, longest context) of the largest tiles that contexts up to this one have: shorter ones have larger."""
    found: list[tuple[int, int]] = []
    for pairs in range(most_pairs(group_size), 0, -PAIR_STEP):
        if fits(group_size, blocks_per_row, context, tile, pairs):
            return (*found, (pairs, context))
        longest = bisect.bisect_left(
            range(context), True, key=lambda tokens: not fits(group_size, blocks_per_row, tokens, tile, pairs)
        )
        if longest > 1:
            found.append((pairs, longest - 1))
    return tuple(found)


def rounds(rows: int, batch: int, group_size: int, num_kv_heads: int, pairs: int, processors: int) -> int:
    """How often each processor's turn comes when a tile has so many pairs."""
    return -(-batch * tiles_per_sequence(rows, group_size, pairs) * num_kv_heads // processors)


@functools.lru_cache(maxsize=1024)
def tile_pairs(rows: int, batch: int, group_size: int, num_kv_heads: int, processors: int, most: int = 0) -> int:
    """Pairs of a tile: the fewest that take no more rounds than tiles of `most` (0: full ones), since fewer rows have
    a smaller union."""
    most = most or most_pairs(group_size)
    enough = rounds(rows, batch, group_size, num_kv_heads, most, processors)
    fewer = range(LEAST_PAIRS, most, PAIR_STEP)
    return next((n for n in fewer if rounds(rows, batch, group_size, num_kv_heads, n, processors) <= enough), most)


def tiles_per_sequence(rows: int, group_size: int, pairs: int) -> int:
    return -(-rows * group_size // pairs)


def tile_rows(group_size: int, pairs: int) -> int:
    """Most rows that so many consecutive pairs touch."""
    return (pairs + group_size - 2) // group_size + 1


def mask_rows(group_size: int, pairs: int = PAIRS) -> int:
    """`tile_rows`, rounded up so that a chunk's words are whole 16 bytes."""
    return (tile_rows(group_size, pairs) + 3) // 4 * 4


def max_union(group_size: int, pairs: int, blocks_per_row: int, context: int) -> int:
    """Blocks that any tile can want whose rows select at most `blocks_per_row` blocks of `context` tokens."""
    return min(tile_rows(group_size, pairs) * blocks_per_row, -(-context // BLOCK_TOKENS))


def max_chunks(group_size: int, blocks_per_row: int, context: int, tile: int, pairs: int = PAIRS) -> int:
    """Chunks that such a union can need."""
    return -(-max_union(group_size, pairs, blocks_per_row, context) // (tile // BLOCK_TOKENS)) + 1


def prepare_smem_bytes(group_size: int, context: int, chunks: int, tile: int, pairs: int = PAIRS) -> int:
    """Dynamic shared memory of a union_prepare launch, bytes; more than MAX_SMEM_BYTES means not launchable."""
    words = ((context + 127) // 128 + 3) // 4 * 4
    rows = mask_rows(group_size, pairs)
    return FIXED_BYTES + (rows + 1) * words * 4 + rows * 16 + RECORDS * 8 + chunks * (tile // BLOCK_TOKENS) * 4
