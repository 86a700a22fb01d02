"""Sparse attention through the runners: one prefill, then a decode loop over a paged cache.

    python examples/attention.py [--context 8192] [--batch 4] [--steps 8]

Keys, values and queries are random; the selection is what an indexer would make of random block scores: 512 blocks
of 4 tokens and the open block's tokens. Every output is checked against the reference. Without a GPU the script says
what is missing and which shapes the built kernels cover.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable

import torch

from qsa_cute import SparseDecodeParams, SparseDecodeRunner, SparsePrefillParams, SparsePrefillRunner
from qsa_cute.geometry import (
    BLOCK_TOKENS,
    HEAD_DIM,
    INDEX_WIDTH,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    PAGE_TOKENS,
    POOL_HEAD_DIM,
    TOP_BLOCKS,
)
from qsa_cute.reference import attention as reference

SCALE = HEAD_DIM**-0.5
PREFILL_ROWS = 512  # the last rows of the context
CHECKED_ROWS = 32
TOLERANCE = 2e-2


def select(scores: torch.Tensor, position: int) -> torch.Tensor:
    """A row's list at `position`: the best visible blocks' tokens, then the open block's; -1 to the full width."""
    visible = (position + 1) // BLOCK_TOKENS
    blocks = scores[:visible].topk(min(TOP_BLOCKS, visible)).indices
    tokens = (blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=blocks.device)).flatten()
    tail = torch.arange(visible * BLOCK_TOKENS, position + 1, device=blocks.device)
    ids = torch.full((INDEX_WIDTH,), -1, dtype=torch.int32, device=blocks.device)
    ids[: len(tokens) + len(tail)] = torch.cat([tokens, tail]).int()
    return ids


def lists(positions: list[int]) -> torch.Tensor:
    """[rows, width], scores of its own for each row."""
    width = max(positions) // BLOCK_TOKENS + 1
    return torch.stack([select(torch.rand(width, device="cuda"), position) for position in positions])


def microseconds(launch: Callable[[], None], repeats: int = 20) -> float:
    """Median time of a launch on the device."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def prefill(context: int) -> tuple[str, str, float, float]:
    """The last rows of one sequence of `context` tokens, K and V dense; on SM90 they share their gather."""
    rows = min(PREFILL_ROWS, context)
    start = context - rows
    q, k, v = normal(1, rows, NUM_Q_HEADS, HEAD_DIM), *(normal(1, context, NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
    out = torch.empty_like(q)
    ids = lists(list(range(start, context)))[None]
    lengths, starts = (torch.tensor([n], dtype=torch.int32, device="cuda") for n in (context, start))
    SparsePrefillRunner.preflight(q.dtype)
    sizes = 1, rows, context, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, INDEX_WIDTH
    workspace = torch.empty(SparsePrefillRunner.workspace_size(*sizes).size, dtype=torch.uint8, device="cuda")
    params = SparsePrefillParams.from_tensors(
        q, k, v, out, ids, lengths, attention_scale=SCALE, query_starts=starts, workspace=workspace
    )
    time = microseconds(lambda: SparsePrefillRunner.run(q.dtype, params))
    part = slice(rows - min(CHECKED_ROWS, rows), rows)
    want, _ = reference.sparse_prefill(q[:, part], k, v, ids[:, part], lengths, SCALE, starts + part.start)
    error = (out[:, part].float() - want).abs().max().item()
    return "prefill", f"{rows} rows of {context} tokens", time, error


def decode(context: int, batch: int, steps: int) -> list[tuple[str, str, float, float]]:
    """`steps` new tokens for each of `batch` sequences of unequal length, K and V in a permuted paged pool."""
    lengths = [max(1, context - 37 * b) for b in range(batch)]
    max_pages = (context + steps) // PAGE_TOKENS + 1
    planes = batch * max_pages
    pool = normal(2 * planes, PAGE_TOKENS, NUM_KV_HEADS, POOL_HEAD_DIM)
    pages = torch.randperm(planes, device="cuda").int().view(batch, max_pages)
    table = torch.stack([pages, pages + planes], 1).contiguous()
    layout = SparseDecodeRunner.workspace_size(batch, NUM_KV_HEADS, HEAD_DIM)
    memory = torch.empty(layout.size, dtype=torch.uint8, device="cuda")
    kinds = {"f32": torch.float32, "i32": torch.int32}
    workspace = {
        part.name: memory[part.offset : part.offset + part.size].view(kinds[part.dtype]).view(part.shape)
        for part in layout.parts
    }
    SparseDecodeRunner.preflight(pool.dtype)
    found = []
    for step in range(steps):
        lengths = [length + 1 for length in lengths]
        q, ids = normal(batch, 1, NUM_Q_HEADS, HEAD_DIM), lists([length - 1 for length in lengths])[:, None]
        context_lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        out = torch.empty_like(q)
        params = SparseDecodeParams.from_tensors(
            q, pool, table, ids, context_lengths, out, attention_scale=SCALE, max_context_len=max(lengths), **workspace
        )
        time = microseconds(lambda params=params: SparseDecodeRunner.run(pool.dtype, params))
        want, _ = reference.sparse_decode(q, pool, table, ids, context_lengths, SCALE)
        error = (out.float() - want).abs().max().item()
        found.append(("decode", f"step {step + 1}, {batch} x about {context} tokens", time, error))
    return found


def show_support() -> None:
    """`can_implement` over shapes and targets: it needs no GPU."""
    shapes = ((24, 2, 256), (12, 1, 256), (16, 1, 128), (32, 1, 256), (24, 2, 192))
    sms = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", 75)
    print(f"{'q/kv heads':>10} {'dim':>4} {'SM':>8} {'type':>5}  decode runner")
    for (q_heads, kv_heads, dim), sm, dtype in itertools.product(shapes, sms, ("bf16", "fp16")):
        support = SparseDecodeRunner.can_implement(q_heads, kv_heads, dim, POOL_HEAD_DIM, sm, dtype)
        answer = "yes" if support else f"no: {support.reason}"
        print(f"{q_heads:>7}/{kv_heads:<2} {dim:>4} {sm!s:>8} {dtype:>5}  {answer}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192, help="tokens of the longest sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of the decode loop")
    parser.add_argument("--steps", type=int, default=8, help="new tokens a sequence")
    options = parser.parse_args()
    if min(options.context, options.batch, options.steps) < 1:
        parser.error("--context, --batch and --steps take 1 or more")
    if not torch.cuda.is_available():
        print("No GPU here: running needs a CUDA device, its driver, and artifacts built for its SM")
        print("(python build_cutedsl.py build --gpu-arch sm_90a). What the kernels cover:\n")
        show_support()
        return 0
    torch.manual_seed(0)
    with torch.inference_mode():
        table = [prefill(options.context), *decode(options.context, options.batch, options.steps)]
    print(f"{'phase':8} {'what':36} {'us':>8} {'max error':>10}")
    for phase, what, time, error in table:
        print(f"{phase:8} {what:36} {time:8.1f} {error:10.1e}")
    if not all(error <= TOLERANCE for *_, error in table):
        print(f"an output differs from the reference by more than {TOLERANCE}", file=sys.stderr)
        return 1
    print(f"every output within {TOLERANCE} of the reference")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
