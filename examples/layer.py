"""A whole QSA layer from random projections: prefill in chunks, then decode, checked against the reference and timed.

    python examples/layer.py [--context 16384] [--batch 2] [--steps 16] [--plot blocks.png]

The indexer's projections drift slowly from token to token, as a model's do, so that neighbouring rows choose nearly
the same blocks; --plot draws which blocks each row chose (needs matplotlib). Every step's lists and outputs are
checked against the reference. Without a GPU the script says what is missing and which layers the kernels cover.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qsa_cute import QsaLayer, QsaLayerDecodeParams, QsaLayerPrefillParams
from qsa_cute.geometry import (
    BLOCK_TOKENS,
    HEAD_DIM,
    INDEX_HEAD_DIM,
    INDEX_WIDTH,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    PAGE_TOKENS,
    POOL_HEAD_DIM,
    TOP_BLOCKS,
)
from qsa_cute.reference import attention, indexer

DEVICE, DTYPE = "cuda", torch.bfloat16
SCALE = HEAD_DIM**-0.5
CHUNK = 4096  # rows of a prefill call
DRIFT = 64  # tokens over which the indexer's projections stay alike
CHECKED_ROWS = 32  # of each chunk
TOLERANCE = 2e-2
BAND = 1e-2  # of logits around the 512th, within which another choice is as good: bf16 inputs, FP32 sums


@dataclass
class Sequences:
    """Projections of a batch over its whole life, and the paged pool."""

    index_qk: Tensor  # [batch, tokens, 640]
    q: Tensor  # [batch, tokens, q_heads, 256]
    k: Tensor
    v: Tensor
    w_q: Tensor
    w_k: Tensor
    cos_sin: Tensor
    pool: indexer.Pool

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.cos_sin, self.w_q, self.w_k


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def make(batch: int, tokens: int) -> Sequences:
    noise = torch.randn(batch, 640, tokens + DRIFT, device=DEVICE)
    drifting = torch.nn.functional.avg_pool1d(noise, DRIFT, 1)[..., :tokens] * DRIFT**0.5
    index_qk = (drifting + 0.1 * noise[..., :tokens]).mT.to(DTYPE).contiguous()
    max_pages = -(-tokens // PAGE_TOKENS)
    planes = batch * max_pages
    pages = torch.randperm(planes, device=DEVICE).int().view(batch, max_pages)
    table = torch.stack([pages, pages + planes], 1).contiguous()
    pool = indexer.Pool(normal(2 * planes, PAGE_TOKENS, NUM_KV_HEADS, POOL_HEAD_DIM), table)
    k, v = (normal(batch, tokens, NUM_KV_HEADS, HEAD_DIM) for _ in range(2))
    at = torch.arange(tokens, device=DEVICE)
    for plane, values in enumerate((k, v)):  # what a host's own kernel does
        pool.kv_pool[table[:, plane, at // PAGE_TOKENS].long(), at % PAGE_TOKENS, :, :HEAD_DIM] = values
    w_q, w_k = (0.1 * normal(INDEX_HEAD_DIM) for _ in range(2))
    q = normal(batch, tokens, NUM_Q_HEADS, HEAD_DIM)
    return Sequences(index_qk, q, k, v, w_q, w_k, indexer.rope_table(tokens, DEVICE), pool)


def lengths(batch: int, tokens: int) -> Tensor:
    return torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)


def lists_in(workspace: Tensor, layout: object) -> Tensor:
    """The lists that a call left in its workspace."""
    part = next(part for part in layout.parts if part.name == "indices")
    return workspace[part.offset : part.offset + part.size].view(torch.int32).view(part.shape)


def microseconds(launch: Callable[[], None], repeats: int = 10) -> float:
    """Median time of a call on the device."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def check(all_: Sequences, lists: Tensor, out: Tensor, begin: int, rows: slice) -> tuple[int, float]:
    """(blocks chosen otherwise, outside the tie band; largest error) of some rows of [begin, ...) of every sequence."""
    first, count = begin + rows.start, rows.stop - rows.start
    batch = len(lists)
    ends, starts = lengths(batch, first + count), lengths(batch, first)
    heads = all_.index_qk[:, first : first + count]
    q = indexer.prepare_queries(heads, all_.cos_sin, ends, all_.w_q, query_starts=starts)
    context = all_.index_qk[:, : first + count]
    kbar = indexer.compress_keys(context, all_.cos_sin, ends, all_.w_k, (first + count) // BLOCK_TOKENS)
    logits = indexer.scores(q, kbar, ends, starts, torch.float64).float()
    positions = indexer.positions_of(ends, count, starts)
    want = indexer.select(logits, (positions + 1) // BLOCK_TOKENS)
    wrong = 0
    if want.shape[-1] and int(want[..., -1].max()) >= 0:
        kth = logits.gather(-1, want[..., -1:].clamp(min=0))
        near = (logits - kth).abs() <= BAND * kth.abs().clamp(min=1)
        chosen = [torch.zeros_like(near), torch.zeros_like(near)]
        found = lists[:, rows, : TOP_BLOCKS * BLOCK_TOKENS : BLOCK_TOKENS].long() // BLOCK_TOKENS
        for mask, ids in zip(chosen, (found, want), strict=True):
            mask.scatter_(-1, ids.clamp(min=0, max=mask.shape[-1] - 1), True)
        scored = (positions + 1) // BLOCK_TOKENS > TOP_BLOCKS
        wrong = int(((chosen[0] != chosen[1]) & ~near)[scored].sum())
    picked = all_.q[:, first : first + count]
    expected, _ = attention.sparse_prefill(picked, all_.k, all_.v, lists[:, rows], ends, SCALE, starts)
    return wrong, (out[:, rows].float() - expected).abs().max().item()


def prefill(all_: Sequences, batch: int, begin: int, end: int) -> tuple[str, float, int, float, Tensor]:
    """Rows [begin, end) of every sequence in one call."""
    rows = end - begin
    layout = QsaLayer.prefill_workspace_size(batch, rows, end)
    workspace = torch.empty(layout.size, dtype=torch.uint8, device=DEVICE)
    projections = (all_.index_qk[:, begin:end], *all_.weights, all_.q[:, begin:end])
    out, ends, starts = torch.empty_like(all_.q[:, begin:end]), lengths(batch, end), lengths(batch, begin)
    params = QsaLayerPrefillParams.from_tensors(
        *projections,
        all_.k,
        all_.v,
        out,
        ends,
        workspace,
        attention_scale=SCALE,
        kv_pool=all_.pool.kv_pool,
        page_table=all_.pool.page_table,
        query_starts=starts,
        max_context_len=end,
    )
    time = microseconds(lambda: QsaLayer.prefill(DTYPE, params))
    lists = lists_in(workspace, layout)
    wrong, error = check(all_, lists, out, begin, slice(max(0, rows - CHECKED_ROWS), rows))
    return f"prefill rows {begin}..{end}", time, wrong, error, lists.cpu()


def decode(all_: Sequences, batch: int, context: int, steps: int) -> list[tuple[str, float, int, float]]:
    """A token after the other; one graph, captured at the first, serves all."""
    layout = QsaLayer.decode_workspace_size(batch, NUM_KV_HEADS, HEAD_DIM, context + steps)
    workspace = torch.empty(layout.size, dtype=torch.uint8, device=DEVICE)
    index_qk, q = all_.index_qk[:, :1].clone(), all_.q[:, :1].clone()
    ends, out = lengths(batch, context), torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        params = QsaLayerDecodeParams.from_tensors(
            index_qk,
            *all_.weights,
            q,
            all_.pool.kv_pool,
            all_.pool.page_table,
            out,
            ends,
            workspace,
            attention_scale=SCALE,
            max_context_len=context + steps,
        )
        QsaLayer.decode(DTYPE, params)
    found = []
    for step in range(steps):
        at = context + step
        index_qk.copy_(all_.index_qk[:, at : at + 1])
        q.copy_(all_.q[:, at : at + 1])
        ends.fill_(at + 1)
        time = microseconds(graph.replay)
        wrong, error = check(all_, lists_in(workspace, layout), out, at, slice(0, 1))
        found.append((f"decode token {at}", time, wrong, error))
    return found


def plot(path: str, lists: Tensor) -> None:
    """Rows downward, blocks to the right: a dot where the row chose the block."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    blocks = lists[:, : TOP_BLOCKS * BLOCK_TOKENS : BLOCK_TOKENS].long() // BLOCK_TOKENS
    width = int(blocks.max()) + 1
    chosen = torch.zeros(len(lists), width + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(lists[:, : TOP_BLOCKS * BLOCK_TOKENS : BLOCK_TOKENS] >= 0, blocks, width), True)
    figure, axes = plt.subplots(figsize=(10, 10 * min(1.5, max(0.5, len(lists) / width))))
    axes.imshow(chosen[:, :width], aspect="auto", cmap="Greys", interpolation="nearest")
    axes.set(xlabel="block of 4 tokens", ylabel="query row", title="Blocks that each row chose, sequence 0")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def show_support() -> None:
    """`can_implement` over shapes and targets: it needs no GPU."""
    print(f"{'q/kv heads':>10} {'dim':>4} {'SM':>8} {'type':>5}  layer")
    for q_heads, kv_heads, dim in ((24, 2, 256), (3, 1, 256), (16, 1, 128), (34, 2, 256)):
        for sm in ("sm_80", "sm_90a", "sm_120a", 75):
            support = QsaLayer.can_implement(q_heads, kv_heads, dim, POOL_HEAD_DIM, sm, "bf16")
            answer = "yes" if support else f"no: {support.reason}"
            print(f"{q_heads:>7}/{kv_heads:<2} {dim:>4} {sm!s:>8} {'bf16':>5}  {answer}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16384, help="tokens of prefill")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--steps", type=int, default=16, help="tokens of decode")
    parser.add_argument("--plot", metavar="PATH", help="draw the blocks that the first sequence's rows chose")
    options = parser.parse_args()
    if min(options.context, options.batch, options.steps) < 1:
        parser.error("--context, --batch and --steps take 1 or more")
    if not torch.cuda.is_available():
        print("This example needs a CUDA device and artifacts for it (make build); torch sees no device here.")
        print("What the kernels cover needs neither:\n")
        show_support()
        return 0
    torch.manual_seed(0)
    all_ = make(options.batch, options.context + options.steps)
    QsaLayer.preflight(DTYPE, head_dim=HEAD_DIM)
    results, lists = [], []
    for begin in range(0, options.context, CHUNK):
        *row, chosen = prefill(all_, options.batch, begin, min(begin + CHUNK, options.context))
        results.append(row)
        lists.append(chosen[0].view(-1, INDEX_WIDTH))
    results += decode(all_, options.batch, options.context, options.steps)
    print(f"{'':32} {'us':>9} {'blocks off':>11} {'largest error':>14}")
    for name, time, wrong, error in results:
        print(f"{name:32} {time:9.1f} {wrong:11} {error:14.5f}")
    if options.plot:
        plot(options.plot, torch.cat(lists))
        print(f"wrote {options.plot}")
    failed = [name for name, _, wrong, error in results if wrong or not error <= TOLERANCE]
    if failed:
        print(f"differs from the reference: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
