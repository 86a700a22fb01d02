"""Sizes that `union_prepare`, `union_prefill` and their launchers share; imports nothing of the DSL."""

import functools

from qsa_cute.geometry import BLOCK_TOKENS

PAIRS = 128  # (row, head) pairs of a full tile
LEAST_PAIRS = 32  # of a tile that is cut small because there are few
PAIR_STEP = 4
RECORDS = 256  # (row, partial block) records a tile has room for
FIXED_BYTES = 1536  # of union_prepare's shared memory, before the parts that depend on the launch
MAX_SMEM_BYTES = 227 * 1024
SM_SMEM_BYTES = 228 * 1024  # of an SM; a block takes 1 KiB beside its own
PREPARE_BLOCKS = 3  # of union_prepare an SM, at most
PLACE_WORDS = 2048  # blocks of a union that union_prepare keeps in shared memory
PLANES = 3  # words a plane beside the rows' bitmaps, for each request of a tile
MAX_UNION = 65535  # blocks: union_prepare counts them in 16 bits
ENTRY_BITS = 27  # of a block's place in K and V; four more say which of its tokens are wanted


def most_pairs(group_size: int) -> int:
    """Pairs of a full tile: 128; 64 where a row is one pair, so that a tile's open tails fit one chunk."""
    return PAIRS if group_size > 1 else PAIRS // 2


def rounds(rows: int, batch: int, group_size: int, num_kv_heads: int, pairs: int, processors: int) -> int:
    """How often each processor's turn comes when a tile has so many pairs."""
    return -(-batch * tiles_per_sequence(rows, group_size, pairs) * num_kv_heads // processors)


@functools.lru_cache(maxsize=1024)
def tile_pairs(rows: int, batch: int, group_size: int, num_kv_heads: int, processors: int) -> int:
    """Pairs of a tile: the fewest that take no more rounds than full tiles, since fewer rows have a smaller union."""
    most = most_pairs(group_size)
    enough = rounds(rows, batch, group_size, num_kv_heads, most, processors)
    fewer = (pairs for pairs in range(LEAST_PAIRS, most, PAIR_STEP))
    return next((n for n in fewer if rounds(rows, batch, group_size, num_kv_heads, n, processors) <= enough), most)


def tiles_per_sequence(rows: int, group_size: int, pairs: int) -> int:
    return -(-rows * group_size // pairs)


def mask_rows(group_size: int) -> int:
    """Most rows that 128 consecutive pairs touch, rounded up so that a chunk's words are whole 16 bytes."""
    return ((PAIRS + group_size - 2) // group_size + 4) // 4 * 4


def tile_rows(group_size: int, pairs: int) -> int:
    """Most rows that a tile touches."""
    return (pairs + group_size - 2) // group_size + 1


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def max_union(group_size: int, pairs: int, blocks_per_row: int, context: int) -> int:
    """Blocks that any tile can want whose rows select at most `blocks_per_row` blocks of `context` tokens."""
    return min(tile_rows(group_size, pairs) * blocks_per_row, blocks_of(context))


def max_chunks(union: int, tile: int) -> int:
    """Chunks of `tile` tokens that so many blocks take, exclusive ones in pairs."""
    return -(-union * BLOCK_TOKENS // tile) + 1


def bitmap_words(context: int) -> int:
    """Words of one row's bitmap."""
    return -(-context // 512) * 4


def fixed_smem_bytes(group_size: int) -> int:
    """Of union_prepare's shared memory, all but bitmaps and planes."""
    return FIXED_BYTES + RECORDS * 8 + mask_rows(group_size) * 16 + PLACE_WORDS * 4


def prepare_smem_bytes(group_size: int, pairs: int, context: int, known: bool, blocks_per_sm: int) -> int:
    """Dynamic shared memory of a union_prepare launch, bytes; more than MAX_SMEM_BYTES means not launchable.

    All that so many blocks an SM can have, which also keeps more of them from sharing one while others idle. What does
    not fit takes turns, a row at a time at the least.

    Args:
        known: whether sequences are about as long as `context`, or that is only what the page table has room for.
    """
    fixed = fixed_smem_bytes(group_size)
    row = 4 * bitmap_words(context)
    share = SM_SMEM_BYTES // blocks_per_sm - 1024
    if known:  # one turn, if need be with fewer blocks an SM
        share = min(MAX_SMEM_BYTES, max(share, fixed + (tile_rows(group_size, pairs) + PLANES) * row))
    return max(fixed + (1 + PLANES) * row, share)


def entry_shift(page_tokens: int) -> int:
    """Bits of an entry that name a block of a page."""
    return (blocks_of(page_tokens) - 1).bit_length()
