"""Who can compute a case: ours first, then the peers. A maker takes (case, inputs) and gives a `Work`, or raises
`UnavailableError` with the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from bench import inputs, kpool, metrale, ours, peers, vllm_attention, vllm_select
from bench.cases import Case
from bench.work import Work

Maker = Callable[[Any, Any], Work]

# Inputs of each family.
MAKERS: Mapping[str, Callable[[Case], Any]] = {
    **inputs.MAKERS,
    **metrale.MAKERS,
    "kpool_hadamard": kpool.hadamard,
    "kpool_compress": kpool.compress,
    "kpool_decode": kpool.decode,
    "kpool_expand": kpool.expand,
    "kpool_scores": kpool.scores,
    "kpool_scores_decode": kpool.scores,
}

PROVIDERS: Mapping[str, Mapping[str, Maker]] = {
    "prefill": {
        "ours": ours.prefill,
        "ours_lists": functools.partial(ours.prefill, index_kind="padded", algorithm="union"),
        "ours_rows": functools.partial(ours.prefill, index_kind="padded", algorithm="rows"),
        "vllm": peers.vllm_prefill,
        "sglang": peers.sglang_prefill,
    },
    "prefill_full": {
        "ours": ours.prefill,
        "ours_rows": functools.partial(ours.prefill, index_kind="padded", algorithm="rows"),
        "vllm": peers.vllm_prefill,
        "torch": peers.torch_dense,
        "fa4": peers.fa4_dense,
    },
    "decode": {"ours": ours.decode, "vllm": peers.vllm_decode},
    "scores_prefill": {"ours": ours.scores_prefill, "vllm": peers.vllm_scores_prefill},
    "scores_decode": {"ours": ours.scores_decode, "vllm": peers.vllm_scores_decode},
    "vllm_select": {
        "ours": vllm_select.ours,
        "vllm": vllm_select.vllm,
        "ours_scores": vllm_select.ours_scores,
        "vllm_scores": vllm_select.vllm_scores,
    },
    "vllm_attention": {"ours": vllm_attention.ours, "vllm": vllm_attention.vllm},
    "kpool_hadamard": {"ours": kpool.ours_hadamard, "vllm": kpool.vllm_hadamard},
    "kpool_compress": {"ours": kpool.ours_compress, "vllm": kpool.vllm_compress},
    "kpool_decode": {"ours": kpool.ours_decode, "vllm": kpool.vllm_decode},
    "kpool_expand": {"ours": kpool.ours_expand, "vllm": kpool.vllm_expand},
    "kpool_scores": {"ours": kpool.ours_scores},
    "kpool_scores_decode": {"ours": kpool.ours_scores},
    "topk": {"ours": ours.topk, "vllm": peers.vllm_topk, "torch": peers.torch_topk},
    "layer_prefill": {
        "ours": ours.layer_prefill,
        "ours_indexer": functools.partial(ours.layer_prefill, half="indexer"),
        "ours_attention": functools.partial(ours.layer_prefill, half="attention"),
    },
    "layer_decode": {
        "ours": ours.layer_decode,
        "ours_indexer": functools.partial(ours.layer_decode, half="indexer"),
        "ours_attention": functools.partial(ours.layer_decode, half="attention"),
    },
    "metrale_pool": {"ours": metrale.pool},
    "metrale_qprep": {"ours": metrale.qprep},
    "metrale_score": {"ours": metrale.score},
    "metrale_score_rows": {"ours": metrale.score_rows},
    "metrale_score_rows_tc": {
        "ours": functools.partial(metrale.score_rows, algorithm="wgmma"),
        "ours_mma": functools.partial(metrale.score_rows, algorithm="mma"),
    },
    "metrale_gather": {"ours": metrale.gather},
    "metrale_prefill": {
        "ours": metrale.prefill,
        "ours_rows": functools.partial(ours.prefill, index_kind="padded", algorithm="rows"),
        "vllm": peers.vllm_prefill,
    },
}
