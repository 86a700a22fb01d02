"""The registry: every (kernel, head dim, type, SM) that is built, and the only home of tuning numbers.

Imports neither cutlass nor torch, so that dispatch and the build command read the same table. A variant's
name carries every baked constant: two variants that differ in code differ in name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from qsa_cute import geometry
from qsa_cute.errors import UnsupportedError

T = TypeVar("T")

HALF_DTYPES = ("bf16", "fp16")
_FP8 = ("fp8_e4m3",)
DTYPES = (*HALF_DTYPES, *_FP8)

# Targets of the build, and the shared memory one block may opt in to (CUDA C++ programming guide, table
# "technical specifications per compute capability"; KiB).
SMEM_OPTIN_KIB: Mapping[str, int] = MappingProxyType(
    {
        "sm_80": 163,
        "sm_86": 99,
        "sm_87": 163,
        "sm_89": 99,
        "sm_90a": 227,
        "sm_100a": 227,
        "sm_103a": 227,
        "sm_110a": 227,
        "sm_120a": 99,
        "sm_121a": 99,
    }
)
SMS = tuple(SMEM_OPTIN_KIB)
FP8_SMS = tuple(sm for sm in SMS if sm not in ("sm_80", "sm_86", "sm_87"))  # that convert e4m3, and multiply it
_BUT_SM90 = tuple(sm for sm in SMS if sm != "sm_90a")

# Short tags of the baked constants, in the order they appear in a name.
TAGS: Mapping[str, str] = MappingProxyType(
    {
        "tile": "n",
        "rows": "r",
        "groups": "g",
        "threads": "t",
        "pool": "p",
        "held": "h",
        "ranks": "c",
        "warps": "w",
        "stages": "st",
        "k_stages": "k",
        "v_stages": "v",
        "blocks_per_sm": "b",
        "max_splits": "s",
    }
)


@dataclass(frozen=True)
class Tuning:
    """One set of baked constants, and where it is used.

    Attributes:
        baked: the keyword arguments of the kernel's class beside head dim and type.
        sms, head_dims, dtypes: what it is built for.
    """

    baked: Mapping[str, int]
    sms: tuple[str, ...] = SMS
    head_dims: tuple[int, ...] = geometry.SUPPORTED_HEAD_DIMS
    dtypes: tuple[str, ...] = HALF_DTYPES


@dataclass(frozen=True)
class Kernel:
    """One algorithm: where its code is, and what it is built for.

    Attributes:
        name: the first part of every variant's name, and what `--kernels` matches.
        entry: "module:Class" of the CuTe DSL code; a string, because only a build imports it.
        tuning: the baked constants per target; several that overlap make several variants.
        tensor_core: the SASS instruction a correct build must contain; "" for a kernel without matrix products.
        widens: fp8 operands become fp16 before they are multiplied.
    """

    name: str
    entry: str
    tuning: tuple[Tuning, ...]
    tensor_core: str = "HMMA"
    widens: bool = False

    @property
    def sms(self) -> tuple[str, ...]:
        return tuple(sm for sm in SMS if any(sm in tuning.sms for tuning in self.tuning))

    def instructions(self, dtype: str) -> tuple[str, ...]:
        """The SASS instructions of which a correct build of this type has one; none for no matrix products."""
        if dtype != "fp8_e4m3" or not self.tensor_core or self.widens:
            return (self.tensor_core,) if self.tensor_core else ()
        # SM90's mma.sync widens e4m3 to fp16; its wgmma does not.
        return {"HMMA": ("QMMA", "HMMA"), "HGMMA": ("QGMMA",)}[self.tensor_core]

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dtype for dtype in DTYPES if any(dtype in tuning.dtypes for tuning in self.tuning))


@dataclass(frozen=True, order=True)
class Variant:
    """One cubin: a kernel with everything that is baked into it."""

    kernel: str
    head_dim: int
    dtype: str
    sm: str
    baked: tuple[tuple[str, int], ...] = field(default=())

    @property
    def name(self) -> str:
        """File stem, and the symbol but for its end, e.g. `qsa_sparse_decode_d256_bf16_w8_k1_v2_b2_s8_sm90a`."""
        tags = [f"{TAGS[key]}{value}" for key, value in self.baked]
        return "_".join([f"qsa_{self.kernel}", f"d{self.head_dim}", self.dtype, *tags, self.sm.replace("_", "")])


def _sms(kib: int) -> tuple[str, ...]:
    return tuple(sm for sm in SMS if SMEM_OPTIN_KIB[sm] == kib)


def _row_gather(paged: bool, **baked: int) -> tuple[Tuning, ...]:
    """One K tile and two V tiles in flight, two blocks an SM: the best of those measured on the H200.

    One V tile or one block where two such blocks would not fit; one block, too, where the paged kernel would spill at
    the 128 registers of two (256 columns, outside sm_90a).
    """

    def stages(v: int, blocks: int) -> dict[str, int]:
        return {"warps": 8, "k_stages": 1, "v_stages": v, "blocks_per_sm": blocks, **baked}

    blackwell = tuple(sm for sm in _sms(227) if sm != "sm_90a")
    return (
        Tuning(stages(2, 2), ("sm_90a",)),
        Tuning(stages(2, 1 if paged else 2), blackwell, (256,)),
        Tuning(stages(2, 2), (*blackwell, *_sms(163)), (128,)),
        Tuning(stages(2, 1), _sms(163), (256,)),
        Tuning(stages(1, 1), _sms(99), (256,)),
        Tuning(stages(1, 2), _sms(99), (128,)),
    )


# The paged kernels: one cache type each, and more tiles in flight where they are half as large.
_PAGED_SPLITS = 32  # as many blocks as share a row where there are no clusters
_FP8_STAGES = {"warps": 8, "k_stages": 2, "v_stages": 3, "blocks_per_sm": 2, "max_splits": _PAGED_SPLITS}


def _paged() -> tuple[Tuning, ...]:
    halves = _row_gather(paged=True, max_splits=_PAGED_SPLITS)
    roomy = tuple(sm for sm in FP8_SMS if SMEM_OPTIN_KIB[sm] > 99)
    return (
        *(Tuning(one.baked, one.sms, one.head_dims, ("bf16",)) for one in halves),
        Tuning(_FP8_STAGES, roomy, dtypes=_FP8),
        Tuning(
            {**_FP8_STAGES, "k_stages": 1, "v_stages": 2, "blocks_per_sm": 1},
            tuple(sm for sm in FP8_SMS if sm not in roomy),
            dtypes=_FP8,
        ),
    )


# Tokens of a chunk of the union: 80 at 256 columns, where 64 lost every comparison; 128 fit at 128 columns.
_CHUNKS = (Tuning({"tile": 80}, ("sm_90a",), (256,)), Tuning({"tile": 128}, ("sm_90a",), (128,)))
_CHUNKS_BY_THREADS = tuple(
    replace(one, baked={**one.baked, "threads": threads}) for one in _CHUNKS for threads in (256, 512)
)


def _indexer(
    name: str,
    entry: str,
    *tunings: Mapping[str, int],
    sms: tuple[str, ...] = SMS,
    tensor_core: str = "",
    fp8: tuple[Mapping[str, int], ...] = (),
) -> Kernel:
    """A kernel of the indexer, whose head dim is its own.

    Args:
        fp8: the baked constants of its fp8 variants.
    """
    dims = (geometry.INDEX_HEAD_DIM,)
    each = tuple(Tuning(baked, sms, dims) for baked in tunings or ({},))
    each += tuple(Tuning(baked, tuple(sm for sm in sms if sm in FP8_SMS), dims, _FP8) for baked in fp8)
    return Kernel(name, f"qsa_cute.kernels.indexer.{entry}", each, tensor_core)


def _metrale(name: str, entry: str, tensor_core: str = "", dtypes: tuple[str, ...] = HALF_DTYPES) -> Kernel:
    """A kernel of Metrale's operations. Vector lengths are run-time values there; 128, the model's, stands in names."""
    tuning = (Tuning({}, head_dims=(geometry.INDEX_HEAD_DIM,), dtypes=dtypes),)
    return Kernel(name, f"qsa_cute.kernels.metrale.{entry}", tuning, tensor_core)


_KPOOL_SCORES = tuple(
    Tuning({"rows": rows, "groups": groups, "stages": stages}, ("sm_90a",), (geometry.INDEX_HEAD_DIM,), _FP8)
    for rows, groups, stages in ((8, 2, 4), (4, 1, 6), (4, 2, 6))
)
# Tokens of a pool; GLM-5.3-Flash's have 4.
_POOLS = ({"pool": 4}, {"pool": 2}, {"pool": 8})


def _kpool(name: str, entry: str, *tunings: Mapping[str, int], sms: tuple[str, ...] = FP8_SMS) -> Kernel:
    """A kernel of GLM's kpool indexer. Those with a pool have it baked."""
    each = tuple(Tuning(baked, sms, (geometry.INDEX_HEAD_DIM,), ("bf16",)) for baked in tunings or ({},))
    return Kernel(name, f"qsa_cute.kernels.kpool.{entry}", each, tensor_core="")


# SM90 selects rows of up to 8192 blocks, and few rows of more, by `select_held`.
_SELECT = tuple(
    Tuning({"threads": threads, "held": held}, sms, (geometry.INDEX_HEAD_DIM,))
    for threads, held, sms in (
        (256, 8, _BUT_SM90),
        (256, 16, SMS),
        (256, 32, _BUT_SM90),
        (512, 8, _BUT_SM90),
        (512, 32, _BUT_SM90),
        (1024, 8, SMS),
    )
)

_PAGED_DECODE = (
    {"rows": 2, "warps": 2, "stages": 2},
    {"rows": 4, "warps": 2, "stages": 2},
    {"rows": 8, "warps": 4, "stages": 2},
)


def _paged_select(stages: int) -> tuple[Mapping[str, int], ...]:
    """Of rows up to 3072 columns, two blocks an SM; of rows up to 18432."""
    return (
        {"rows": 2, "threads": 384, "held": 8, "warps": 12, "stages": stages, "blocks_per_sm": 2},
        {"rows": 2, "threads": 768, "held": 24, "warps": 16, "stages": stages, "blocks_per_sm": 1},
    )


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        kernel.name: kernel
        for kernel in (
            Kernel(
                name="sparse_prefill",
                entry="qsa_cute.kernels.attention.sparse_prefill:SparsePrefill",
                tuning=_row_gather(paged=False),
            ),
            Kernel(
                name="sparse_decode",
                entry="qsa_cute.kernels.attention.sparse_decode:SparseDecode",
                tuning=_row_gather(paged=True, max_splits=geometry.HOST_MAX_SPLITS),
            ),
            Kernel(
                name="sparse_decode_tma",
                entry="qsa_cute.kernels.attention.sparse_decode_tma:SparseDecodeTma",
                tuning=(Tuning({"stages": 10}, ("sm_90a",)),),  # of 16 KB at 256 columns: as many as fit, and must
            ),
            Kernel("paged_attention", "qsa_cute.kernels.attention.paged_attention:PagedAttention", _paged()),
            Kernel(
                name="paged_attention_tma",
                entry="qsa_cute.kernels.attention.paged_attention_tma:PagedAttentionTma",
                tuning=(Tuning({"stages": 10}, ("sm_90a",), dtypes=("bf16", *_FP8)),),
            ),
            Kernel(
                name="union_prepare",
                entry="qsa_cute.kernels.attention.union_prepare:UnionPrepare",
                tuning=_CHUNKS_BY_THREADS,
                tensor_core="",
            ),
            Kernel(
                name="union_prefill",
                entry="qsa_cute.kernels.attention.union_prefill:UnionPrefill",
                tuning=_CHUNKS,
                tensor_core="HGMMA",
            ),
            Kernel(
                name="union_rows",
                entry="qsa_cute.kernels.attention.union_rows:UnionRows",
                tuning=tuple(one for one in _row_gather(paged=False) if "sm_90a" in one.sms),
            ),
            Kernel(
                name="paged_union_prepare",
                entry="qsa_cute.kernels.attention.paged_union.prepare:UnionPrepare",
                tuning=_CHUNKS,
                tensor_core="",
            ),
            Kernel(
                name="paged_union_prefill",
                entry="qsa_cute.kernels.attention.paged_union.prefill:UnionPrefill",
                tuning=_CHUNKS,
                tensor_core="HGMMA",
            ),
            Kernel(
                name="paged_union_prefill_fp8",
                entry="qsa_cute.kernels.attention.paged_union.prefill_fp8:UnionPrefillFp8",
                tuning=tuple(replace(one, dtypes=_FP8) for one in _CHUNKS),
                tensor_core="HGMMA",
                widens=True,
            ),
            Kernel(
                name="paged_union_rows",
                entry="qsa_cute.kernels.attention.paged_union.rows:UnionRowsPaged",
                tuning=tuple(
                    replace(one, dtypes=(*one.dtypes, *_FP8))  # more stages, of fp8, would spill
                    for one in _row_gather(paged=False)
                    if "sm_90a" in one.sms
                ),
            ),
            _indexer("index_prepare", "prepare:Prepare"),
            _indexer("index_compress", "compress:Compress"),
            _indexer("index_tail_write", "tail_write:TailWrite"),
            _indexer("index_ids_fill", "ids_fill:IdsFill"),
            _indexer("index_expand", "expand:Expand"),
            _indexer("index_pre_decode", "pre_decode:PreDecode"),
            _indexer("scores_prefill", "scores_prefill:ScoresPrefill", tensor_core="HMMA"),
            _indexer(
                "scores_prefill_wgmma",
                "scores_prefill_wgmma:ScoresPrefillWgmma",
                {"groups": 2, "stages": 4},
                sms=("sm_90a",),
                tensor_core="HGMMA",
            ),
            _indexer(
                "scores_decode",
                "scores_decode:ScoresDecode",
                {"rows": 4, "warps": 1, "stages": 2},
                {"rows": 4, "warps": 2, "stages": 2},
                {"rows": 8, "warps": 4, "stages": 2},
                tensor_core="HMMA",
            ),
            _indexer(
                "paged_scores_decode",
                "paged_scores_decode:PagedScoresDecode",
                *_PAGED_DECODE,
                tensor_core="HMMA",
                fp8=_PAGED_DECODE,
            ),
            _indexer(
                "paged_select_decode",
                "paged_select_decode:PagedSelectDecode",
                *_paged_select(stages=1),
                sms=("sm_90a",),
                tensor_core="HMMA",
                fp8=_paged_select(stages=2),
            ),
            _indexer("paged_scores_prefill", "paged_scores_prefill:PagedScoresPrefill", tensor_core="HMMA", fp8=({},)),
            _indexer(
                "paged_scores_wgmma",
                "paged_scores_wgmma:PagedScoresWgmma",
                {"groups": 2, "stages": 4},
                sms=("sm_90a",),
                tensor_core="HGMMA",
                fp8=({"groups": 2, "stages": 4},),
            ),
            Kernel(
                "expand_counted",
                "qsa_cute.kernels.indexer.expand_counted:ExpandCounted",
                (Tuning({}, SMS, (geometry.INDEX_HEAD_DIM,), ("bf16",)),),  # ids have no type
                tensor_core="",
            ),
            Kernel("select", "qsa_cute.kernels.indexer.select:Select", _SELECT, tensor_core=""),
            _indexer(
                "select_held",
                "select_held:SelectHeld",
                {"threads": 256, "held": 8, "ranks": 1, "blocks_per_sm": 5},
                {"threads": 256, "held": 16, "ranks": 1, "blocks_per_sm": 5},
                {"threads": 256, "held": 32, "ranks": 1, "blocks_per_sm": 3},
                {"threads": 512, "held": 16, "ranks": 1, "blocks_per_sm": 2},
                {"threads": 512, "held": 32, "ranks": 1, "blocks_per_sm": 1},
                {"threads": 512, "held": 32, "ranks": 2, "blocks_per_sm": 1},
                {"threads": 512, "held": 32, "ranks": 4, "blocks_per_sm": 1},
                sms=("sm_90a",),
            ),
            _metrale("metrale_block_pool", "block_pool:BlockPool"),
            _metrale("metrale_qprep", "qprep:QueryPrep"),
            _metrale("metrale_score", "score:Score"),
            Kernel(
                name="metrale_score_rows",
                entry="qsa_cute.kernels.metrale.score_rows:ScoreRows",
                tuning=(
                    Tuning({"blocks_per_sm": 3}, (*_sms(163), "sm_86", "sm_89", "sm_90a", "sm_110a"), (128,)),
                    Tuning({"blocks_per_sm": 2}, ("sm_100a", "sm_103a", "sm_120a", "sm_121a"), (128,)),  # 3 spill
                ),
                tensor_core="",
            ),
            _metrale("metrale_score_rows_tc", "score_rows_tc:ScoreRowsTc", tensor_core="HMMA"),
            Kernel(
                name="metrale_score_rows_tc_wgmma",
                entry="qsa_cute.kernels.metrale.score_rows_tc_wgmma:ScoreRowsTcWgmma",
                tuning=(Tuning({"groups": 2, "stages": 4}, ("sm_90a",), (geometry.INDEX_HEAD_DIM,)),),
                tensor_core="HGMMA",
            ),
            _metrale("metrale_gather", "gather:Gather", dtypes=("bf16",)),  # moves 16-bit elements of either type
            Kernel(
                name="metrale_prefill_attn",
                entry="qsa_cute.kernels.metrale.prefill_attn:PrefillAttention",
                tuning=_row_gather(paged=True),
            ),
            _indexer("select_cluster", "select_cluster:SelectCluster", {"threads": 512, "held": 8}, sms=("sm_90a",)),
            _kpool("kpool_hadamard", "hadamard_quant:HadamardQuant"),
            _kpool("kpool_compress", "compress_write:CompressWrite", *_POOLS),
            _kpool("kpool_decode", "decode_update:DecodeUpdate", *_POOLS),
            _kpool("kpool_seed_tail", "seed_tail:SeedTail", sms=SMS),
            _kpool("kpool_expand", "expand_tail:ExpandTail", sms=SMS),
            Kernel("kpool_scores", "qsa_cute.kernels.kpool.scores:Scores", _KPOOL_SCORES, tensor_core="HGMMA"),
        )
    }
)


def order_baked(baked: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """A `Variant`'s `baked`: the constants in the order in which its name has them."""
    place = list(TAGS).index  # a constant without a tag is an error: it would not change the name
    return tuple(sorted(baked.items(), key=lambda item: place(item[0])))


def variants(
    sms: Iterable[str] | None = None,
    kernels: str = "*",
    head_dims: Iterable[int] | None = None,
    dtypes: Iterable[str] | None = None,
    max_splits: int | None = None,
) -> list[Variant]:
    """The variants that match every filter, in registry order.

    Args:
        sms: targets such as "sm_90a"; all when None.
        kernels: shell-style pattern over kernel names.
        head_dims, dtypes: keep only these; all when None.
        max_splits: replaces the baked split count of the kernels that have one.

    Returns: without duplicates; empty when the filters exist but do not meet.

    Raises:
        UnsupportedError: a filter names something that does not exist; the message lists what does.
    """
    sms = _known("SM", sms, SMS)
    head_dims = _known("head dim", head_dims, geometry.SUPPORTED_HEAD_DIMS)
    dtypes = _known("type", dtypes, DTYPES)
    matching = fnmatch.filter(KERNELS, kernels)
    if not matching:
        raise UnsupportedError(f"no kernel matches {kernels!r}; there are: {', '.join(KERNELS)}")
    found = []
    for sm in sms:
        for kernel in (KERNELS[name] for name in matching):
            for tuning in kernel.tuning:
                baked = dict(tuning.baked)
                if max_splits is not None and "max_splits" in baked:
                    baked["max_splits"] = max_splits
                for head_dim in tuning.head_dims:
                    for dtype in tuning.dtypes:
                        if sm in tuning.sms and head_dim in head_dims and dtype in dtypes:
                            found.append(Variant(kernel.name, head_dim, dtype, sm, order_baked(baked)))
    return found


def is_registered(variant: Variant) -> bool:
    """Whether the registry has this variant, for its own number of splits or another one."""
    if variant.kernel not in KERNELS or variant.sm not in SMS:
        return False
    return variant in variants([variant.sm], variant.kernel, max_splits=dict(variant.baked).get("max_splits"))


def _known(what: str, asked: Iterable[T] | None, existing: tuple[T, ...]) -> tuple[T, ...]:
    if asked is None:
        return existing
    asked = tuple(asked)
    for value in asked:
        if value not in existing:
            raise UnsupportedError(f"unknown {what} {value!r}; there are: {', '.join(map(str, existing))}")
    return asked
