"""Sizes that the kernels of the paged union and their launcher share; imports nothing of the DSL."""

from qsa_cute.geometry import BLOCK_TOKENS
from qsa_cute.union_layout import MAX_SMEM_BYTES, MAX_UNION, PAIRS, RECORDS, mask_rows, max_union, tile_rows

__all__ = ["MAX_SMEM_BYTES", "MAX_UNION", "PAIRS", "RECORDS", "mask_rows", "max_union", "tile_rows"]

FIXED_BYTES = 1536  # of the pre-kernel's shared memory, before the parts that depend on the launch
SM_SMEM_BYTES = 228 * 1024  # of an SM; a block takes 1 KiB beside its own
PREPARE_BLOCKS = 3  # of the pre-kernel an SM, at most
PLACE_WORDS = 2048  # blocks of a union that the pre-kernel keeps in shared memory
PLANES = 3  # words a plane beside the rows' bitmaps, for each request of a tile
ENTRY_BITS = 27  # of a block's place in K and V; four more say which of its tokens are wanted


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def max_chunks(union: int, tile: int) -> int:
    """Chunks of `tile` tokens that so many blocks take, exclusive ones in pairs."""
    return -(-union * BLOCK_TOKENS // tile) + 1


def bitmap_words(context: int) -> int:
    """Words of one row's bitmap."""
    return -(-context // 512) * 4


def fixed_smem_bytes(group_size: int) -> int:
    """Of the pre-kernel's shared memory, all but bitmaps and planes."""
    return FIXED_BYTES + RECORDS * 8 + mask_rows(group_size) * 16 + PLACE_WORDS * 4


def prepare_smem_bytes(group_size: int, context: int, blocks_per_sm: int) -> int:
    """Dynamic shared memory of a launch of the pre-kernel, bytes; more than MAX_SMEM_BYTES means not launchable.

    All that so many blocks an SM can have, which also keeps more of them from sharing one while others idle. What does
    not fit takes turns, a row at a time at the least.
    """
    fixed = fixed_smem_bytes(group_size)
    row = 4 * bitmap_words(context)
    return max(fixed + (1 + PLANES) * row, SM_SMEM_BYTES // blocks_per_sm - 1024)


def entry_shift(page_tokens: int) -> int:
    """Bits of an entry that name a block of a page."""
    return (blocks_of(page_tokens) - 1).bit_length()
