"""Sizes that `union_prepare`, `union_prefill` and their launchers share; imports nothing of the DSL."""

from qsa_cute.geometry import BLOCK_TOKENS

PAIRS = 128  # (row, head) pairs of a full tile
RECORDS = 256  # (row, partial block) records a tile has room for
FIXED_BYTES = 1024  # of union_prepare's shared memory, before the parts that depend on the launch
MAX_SMEM_BYTES = 227 * 1024


def tile_pairs(group_size: int) -> int:
    """Pairs of a tile: 128; 64 where a row is one pair, so that a tile's open tails fit one chunk."""
    return PAIRS if group_size > 1 else PAIRS // 2


def tiles_per_sequence(rows: int, group_size: int) -> int:
    pairs = tile_pairs(group_size)
    return (rows * group_size + pairs - 1) // pairs


def mask_rows(group_size: int) -> int:
    """Most rows that 128 consecutive pairs touch, rounded up so that a chunk's words are whole 16 bytes."""
    return ((PAIRS + group_size - 2) // group_size + 4) // 4 * 4


def max_chunks(group_size: int, blocks_per_row: int, context: int, tile: int) -> int:
    """Chunks that any tile can need whose rows select at most `blocks_per_row` blocks of a context of tokens."""
    blocks = tile // BLOCK_TOKENS
    union = min(mask_rows(group_size) * blocks_per_row, (context + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
    return (union + blocks - 1) // blocks + 1


def prepare_smem_bytes(group_size: int, context: int, chunks: int, tile: int) -> int:
    """Dynamic shared memory of a union_prepare launch, bytes; more than MAX_SMEM_BYTES means not launchable."""
    words = ((context + 127) // 128 + 3) // 4 * 4
    rows = mask_rows(group_size)
    return FIXED_BYTES + (rows + 1) * words * 4 + rows * 16 + RECORDS * 8 + chunks * (tile // BLOCK_TOKENS) * 4
