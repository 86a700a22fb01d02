"""The numbers of the models and of the hosts' layouts, each with its source.

Sources: [model] Qwen3.8-Flash-Next's configuration (`qwen4_exp`) and arXiv 2608.30320 section 2.1.2;
[edge] TensorRT-Edge-LLM's QSA runner and indexer pages; [kpool] GLM-5.3-Flash's indexer.
"""

# Attention [model].
HEAD_DIM = 256
NUM_Q_HEADS = 24
NUM_KV_HEADS = 2
MAX_GROUP_SIZE = 16  # query heads a KV head: the M extent of one m16n8k16 tile
SUPPORTED_HEAD_DIMS = (256, 128)

# Selection [model].
BLOCK_TOKENS = 4  # the indexer's compression ratio
TOP_BLOCKS = 512  # 2048-token budget / 4
INDEX_WIDTH = TOP_BLOCKS * BLOCK_TOKENS + BLOCK_TOKENS - 1  # 2051: the blocks and the open tail
MAX_TOP_K = 8192  # widest index list the attention kernels take

# SM90: blocks of the largest (non-portable) thread block cluster.
MAX_CLUSTER = 16

# Indexer [model].
INDEX_HEADS = 4
INDEX_HEAD_DIM = 128
ROPE_DIM = 64
ROPE_THETA = 1.0e7
RMS_EPS = 1.0e-6

# GLM-5.3-Flash's indexer [kpool]: its own number of heads, the rest as above.
KPOOL_HEADS = 32

# Widened paged pool [edge].
PAGE_TOKENS = 128
POOL_HEAD_DIM = 384  # [0, 256) K or V, [256, 384) of head 0 the indexer's state
UNUSED_PAGE = -1

# Split-K workspace [edge]: part of what hosts allocate, so part of the ABI.
HOST_MAX_SPLITS = 8  # kMaxSplits
PARTIAL_ROWS = 16  # kPartialRows
