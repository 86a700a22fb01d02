"""`Support`: what `can_implement` answers. Truthy when a kernel covers the question, else it says why not."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SupportCode(enum.Enum):
    """Machine-readable reason, stable across releases."""

    OK = "ok"
    HEAD_DIM = "head_dim"
    GROUP_SIZE = "group_size"
    HEADS = "heads"
    TOP_K = "top_k"
    QUERY_LEN = "query_len"
    DTYPE = "dtype"
    SM = "sm"
    POOL_HEAD_DIM = "pool_head_dim"
    PAGE_SIZE = "page_size"
    INDEX_KIND = "index_kind"
    OPERATION = "operation"


@dataclass(frozen=True, slots=True)
class Support:
    """A yes, or a no with its reason.

    Attributes:
        code: `SupportCode.OK`, or the first thing that does not fit.
        reason: a sentence for a log line; empty when the answer is yes.
    """

    code: SupportCode
    reason: str = ""

    def __bool__(self) -> bool:
        return self.code is SupportCode.OK

    @staticmethod
    def yes() -> Support:
        return Support(SupportCode.OK)

    @staticmethod
    def no(code: SupportCode, reason: str) -> Support:
        return Support(code, reason)
