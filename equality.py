"""equality.py: do two written answers mean the same?"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

MAX_ANSWER = 2000  # characters; a longer answer equals nothing but itself


def compare(given: str, reference: str, algebra: Callable[[str, str], bool] | None = None) -> bool | None:
    """Whether they are equal; None where only algebra could tell and none was given."""
    a, b = (re.sub(r"[\s$]+", "", text).removesuffix(".") for text in (given, reference))
    if a == b:
        return bool(a)
    if max(len(a), len(b)) > MAX_ANSWER:
        return False
    numbers = [number(text.replace(",", "")) for text in (a, b)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    return algebra(a, b) if algebra else None


def number(text: str) -> Fraction | None:
    if re.fullmatch(r"[+-]?\d{1,1000}(\.\d{1,1000})?", text):
        return Fraction(text)
    return None
