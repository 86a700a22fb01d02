"""Division by a run-time constant: one 64-bit product in place of the twenty instructions of an integer division, and
without its registers.

The host says magic = ceil(2^(31 + l) / d) and shift = 31 + l, l the bits of d - 1; then n // d = (n * magic) >> shift
for every 0 <= n < 2^31 (Granlund and Montgomery, 1994).
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64


@dataclass(frozen=True)
class Divisor:
    value: Int32
    magic: Int64
    shift: Int32

    @cute.jit
    def quotient(self, n: Int32) -> Int32:
        """n // value, of 0 <= n."""
        return Int32((Int64(n) * self.magic) >> Int64(self.shift))

    @cute.jit
    def divide(self, n: Int32):
        """(n // value, n % value), of 0 <= n."""
        quotient = self.quotient(n)
        return quotient, n - quotient * self.value
