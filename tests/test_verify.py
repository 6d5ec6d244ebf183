"""Tests of the verifier: what it takes for the answer, what it takes for equal, and what it survives."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader import worker
from grader.equality import compare
from runtime.problems import Problem
from verify import Verifier, check, extract, grade

ROOT = Path(__file__).parent.parent
GRADER = ROOT.parent / "shared" / "data" / "grader"
DATA = ROOT.parent / "shared" / "data"
LONG = r"\prod_{k=1}^{10^{9}} k"  # math-verify never ends on it
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
needs_material = pytest.mark.skipif(not GRADER.exists(), reason="the labelled answers are not here")


@pytest.fixture(scope="module")
def verifier():
    with Verifier(workers=1, time_limit=2.0) as verifier:
        yield verifier


def same(given: str, reference: str) -> bool:
    verdict = compare(given, reference)
    assert verdict is not None, f"{given!r} against {reference!r} was left to the algebra"
    return verdict


# --- Where the answer is -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"It is \boxed{7}.", "7"),
        (r"\boxed{3} was wrong, \boxed{7} is correct", "7"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}} holds", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"$\fbox{7}$", "7"),
        ("\\boxed{\n7\n}", "\n7\n"),
        (r"text { with an open brace, \boxed{7}", "7"),
        (r"<think>\boxed{3}</think>\boxed{7}", "7"),
        (r"<think>a</think>b<think>\boxed{3}</think> \boxed{7}", "7"),
        (r"</think>\boxed{7}", "7"),
        (r"<think>\boxed{3}</think>\boxed{7}<think>\boxed{4}", "7"),
        (r"<think>a<think>\boxed{3}</think>\boxed{7}", "7"),
        (r"[THINK]\boxed{3}[/THINK]\boxed{7}", "7"),
        (r"The answer is 3. \boxed{7}", "7"),
        (r"\boxed{7} Therefore the final answer is 3.", "7"),
        (r"\boxed{7}, and then the text stops in \boxed{3", "7"),
        ("<answer> 7 </answer>", "7"),
        ("steps\n#### 7", "7"),
        ("**Answer:** 7", "7"),
        ("The answer is 7.", "7"),
        ("the answer is: **7**.", "7"),
    ],
)
def test_the_last_complete_box_is_the_answer_and_without_boxes_a_clear_sentence(response, answer):
    assert extract(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        " \n\t",
        "7",
        "so we get 7",
        r"\boxed",
        r"\boxed{}",
        r"\boxed{ }",
        r"\boxed{7",
        r"\boxed{\frac{7}{2}",
        "\\boxed{} The answer is 7",
        "\\boxed{7 The answer is 7",
        r"<think>\boxed{7}</think> I give up.",
        r"\boxed{7}</think>",
    ],
)
def test_no_answer_without_a_complete_box_or_a_clear_sentence(response):
    assert extract(response) is None
    assert not grade(response, "7")


@pytest.mark.parametrize(
    "opened", ["<think>", "<THINK>", "<thinking>", "<think><think>", "a</think>b<think>", "◁think▷"]
)
def test_a_box_in_thinking_that_never_closes_is_no_answer(opened):
    assert extract(opened + r"so it is \boxed{7}") is None
    assert extract(opened + "so it is\n#### 7") is None
    assert extract(opened + r"\boxed{7}" + " and then 41" * 200_000) is None  # longer than what is searched for a box
    assert extract(opened + r"hm</think>\boxed{7}") == "7"
    assert extract(r"\boxed{7}") == "7"  # the prompt may have opened the thinking, or there is none


def test_boxes_are_not_merged():
    response = r"\boxed{12}. To say it again: \boxed{34}"
    assert grade(response, "34")
    assert not any(grade(response, wrong) for wrong in ("1234", "12", "12,34", "12 34"))


# --- What is equal -----------------------------------------------------------------------------------------

EQUAL = {
    "numbers": r"""
        81 = 81.0 ; 81 = 081 ; 81 = +81 ; 81 = \text{81} ; 81 = \mathbf{81} ; 81 = $81$ ; 81 = 81.
        27.0 = 27 ; 025 = 25 ; -9 = −9 ; -9 = -\,9 ; 0.25 = .25 ; 0.25 = \frac14 ; 0.25 = 25/100
        \frac{3}{8} = \dfrac{3}{8} ; \frac38 = 3/8 ; -\frac{3}{8} = \frac{-3}{8}
        2\frac{1}{3} = \frac{7}{3} ; 2 1/3 = 7/3 ; 65536 = 2^{16} ; 720 = 6! ; 720 = 6!.
        1234567 = 1,234,567 ; 1234567 = 1{,}234{,}567 ; 1234567 = 1\,234\,567 ; 1234567 = 1,\!234,\!567
        9,500.25 = 9500.25 ; 4.5e33 = 4.5 \times 10^{33} ; 4.5\cdot10^{-7} = 4.5e-7
        0.00032 = 3.2\times 10^{-4} ; 5e3 = 5000 ; \frac{1}{9} = 0.\overline{1} ; 0.1\overline{6} = \frac16
        \frac{1}{7} = 0.\overline{142857} ; {19}. = 19""",
    "approximations": r"""
        \frac{2}{3} = 0.666667 ; \sqrt{5} = 2.236068 ; 2\pi = 6.283185307 ; \frac23 = \frac23\approx 0.67
        P=\frac{1}{3}\approx 0.33 = 1/3 ; 0.33 = \frac13\approx 0.33""",
    "formulas": r"""
        \sqrt{18} = 3\sqrt2 ; \frac{1}{\sqrt2} = \frac{\sqrt{2}}{2} ; \sqrt[3]{5} = 5^{1/3} ; 3\sqrt7 = 3√7
        \frac{a}{b} = a/b ; x^2-4 = (x-2)(x+2) ; \sin 2t = 2\sin t\cos t ; \ln 25 = 2\ln 5
        \tan^{-1} 3 = \arctan 3 ; \binom{2n}{n} = \frac{(2n)!}{n!^2} ; \frac{1}{1+i} = \frac{1-i}{2}
        2\mathrm{i} = 2i ; e^{-1} = \frac1e ; V_0 e^{-t/(RC)} = V_0e^{-\frac{t}{RC}} ; m_ec^2 = c^2 m_{e}
        \max(a,b) = \max(b,a) ; \gcd(m,n) = \gcd(n,m)
        \lfloor n/2\rfloor = \left\lfloor\frac{n}{2}\right\rfloor ; f'(x) = f^{\prime}(x)
        3\vec{u}+\vec v = \vec{v}+3\vec{u}""",
    "percent and units": r"""
        40\% = 40\% ; 40% = 40\% ; 40 = 40\% ; 0.4 = 40\% ; \frac{2}{5} = 40\% ; 40\text{ percent} = 40\%
        0.4 = 0.4 ; 8\text{ cm} = 8 ; 8 = 8\text{ cm} ; 8\,\mathrm{cm} = 8\text{ cm} ; 8 cm = 8\text{ cm}
        8\text{ hours} = 8\text{ h} ; 8\text{ square feet} = 8\text{ ft}^2
        8\text{ cm}^2 = 8\ \mathrm{cm^2} ; 8\text{ m/s} = 8\,\mathrm{m}/\mathrm{s} ; 30^\circ = 30
        30° = 30^{\circ} ; 30\text{ degrees} = 30^\circ ; \$7 = 7 ; \$7.50 = 7.5 ; €7 = 7
        7\text{ dollars} = \$7 ; 12\text{ apples} = 12""",
    "lists, sets, tuples": r"""
        2,1 = 1,2 ; 1\text{ and }2 = 1,2 ; 1, 2,\text{ or } 3 = 1,2,3 ; \{2,1\} = \{1,2\} ; \{1,2\} = 1,2
        x=1\text{ or }x=2 = 1,2 ; x_1=1,\ x_2=2 = 1,2 ; n=1,2,3 = 1,2,3 ; \pm4 = 4,-4 ; x=\pm 4 = \pm4
        1\pm\sqrt3 = 1-\sqrt3,1+\sqrt3 ; $41$,$43$ = 41, 43 ; (1,2),(3,4) = (3,4),(1,2)
        \left( 1, \tfrac12 \right) = (1,0.5) ; \{\} = \emptyset ; \{1,2\}\cup\{3\} = \{1,2,3\}
        1,\ldots,n = 1,\ldots,n ; (x,y)=(1,2) = (1,2)""",
    "intervals, equations": r"""
        [0, 5) = [0,5) ; x\ge 3 = [3,\infty) ; 2<x\le5 = (2,5] ; \mathbb{R} = (-\infty,\infty)
        4 \ge x = x\le 4 ; (3,5)\cup(0,1) = (0,1)\cup(3,5) ; x\geqslant 3 = x\ge3 ; x >= 3 = x\ge 3
        k\ne0 = k\neq 0 ; 6 = x=6 ; x=6 = 6 ; AB=6 = 6 ; 2+4=6 = 6 ; m+n=6 = 6 ; y=3+2x = y=2x+3
        2x-y+3=0 = y=2x+3 ; 2x+3 = y=2x+3 ; x^2+y^2-9=0 = x^2+y^2=9 ; y=2,x=1 = x=1,y=2
        \frac{AB}{CD}=\frac12 = 1/2""",
    "matrices, ratios, bases": r"""
        \begin{bmatrix}1&2\\3&4\end{bmatrix} = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \begin{pmatrix}0.5\\2\end{pmatrix} = \begin{pmatrix}\frac12\\2\end{pmatrix} ; 2 : 3 = 2:3
        7:05 = 07:05 ; a:b=2:3 = 2:3 ; 132_{5} = 132_5 ; 5 \pmod{8} = 5\pmod 8""",
    "text and choices": r"""
        \text{Yes} = yes ; \textbf{odd} = \text{odd} ; \text{Tuesday.} = \text{Tuesday}
        obtuse = \text{Obtuse} ; \text{no solution} = no solution ; \infty = +\infty
        \text{infinity} = \infty ; (B) = B ; \textbf{(B)} = B ; \text{(B)} = \text{B} ; \textbf{(B) }12 = B
        \text{B: the mean} = B ; B. = B""",
}
DIFFERENT = {
    "numbers": r"""
        82 = 81 ; -81 = 81 ; 8.1 = 81 ; 811 = 81 ; 300 = 3 ; 0.03 = 3 ; 20251 = 20250 ; 100000000 = 99999999
        9007199254740992 = 9007199254740993 ; 0 = 0.0000003 ; 0.0000004 = 0.0000003 ; 6.62e-34 = 6.63e-34
        0 = 6.63e-34 ; 3 = 1,2 ; 23 = 2,3 ; 8\cdot1 = 81 ; 8\ 1 = 81 ; 8\quad1 = 81 ; \frac{8}{1}1 = 81
        \frac{9}{2} = \frac{2}{9} ; 2\frac13 = \frac23 ; 71/3 = \frac{7}{3} ; 2 = 2\frac13
        4.5e-33 = 4.5e33 ; 4.5 = 4.5e33 ; 4^{5} = 4e5 ; 1000000.4 = 1000000 ; 5,00 = 500 ; 42 = 43
        1.2\times 104 = 1.2\times10^4""",
    "approximations": r"""
        0.67 = \frac23 ; 0.66666 = \frac23 ; 0.666666 = \frac23 ; 3.14 = \pi ; 3.14160 = \pi ; 6.28 = 2\pi
        \frac{22}{7} = \pi ; 1.4142 = \sqrt2 ; 12.50001 = 12.5 ; e^{\pi\sqrt{163}} = 262537412640768744
        \sqrt{4+10^{-20}} = 2 ; \sqrt[4]{\frac{2143}{22}} = \pi""",
    "formulas": r"""
        \sqrt2 = \sqrt[3]{2} ; 3\sqrt2 = \sqrt[3]{2} ; 0.3 = 0.\overline{3} ; 0.16 = 0.1\overline{6}
        x = |x| ; \sqrt{x^2} = x ; \frac{5}{6}x+y = \frac56y+x ; q-p = p-q ; x^2+1 = X^2+1 ; m_pc^2 = m_ec^2
        \cos t = \sin t ; \sin t^2 = \sin^2 t ; a-b = a+b ; \frac{1}{\tan 2} = \arctan 2 ; \log 100 = 2
        \log_3 2 = \log_2 3 ; \ln(-2) = \ln 2 ; V_0e^{t/(RC)} = V_0e^{-t/(RC)} ; I(0) = 0
        \frac{a}{b}+c = \frac{a}{b+c} ; 2k = 2k+1 ; i = 1 ; 3-4i = 3+4i
        \lfloor\sqrt{n-2}\rfloor = \lfloor\sqrt{n-1}\rfloor ; \lceil n/2\rceil = \lfloor n/2\rfloor
        \min(a,b) = \max(a,b) ; \frac{\partial f}{\partial y} = \frac{\partial f}{\partial x} ; f(x) = f'(x)
        2\pi = 2 ; 2 = 2\pi ; x^{1}2 = x^{12} ; \frac{x^2}{2} = \frac{x^2}{2}+C ; 5! = 5 ; 2024! = 2025!
        \frac13A+\frac23B = \frac23A+\frac13B""",
    "percent and units": r"""
        4\% = 40\% ; 4 = 40\% ; 0.04 = 40\% ; 40\% = 40 ; 30\% = 30^\circ ; 30' = 30^\circ
        5\text{ g} = 5\text{ kg} ; 5\text{ m} = 5\text{ ft} ; 5\text{ minutes} = 5\text{ hours}
        5\text{ cm}^3 = 5\text{ cm}^2 ; 5 = 5t ; 2 = 2ab ; 2a = 2ab ; 5t = 5 ; h = \sqrt2h ; \$70 = \$7
        -\$7 = \$7 ; €7 = \$7 ; 12\text{ or so} = 12 ; 12\text{ is wrong} = 12
        12\text{ is wrong, it is } 13 = 12""",
    "lists, sets, tuples": r"""
        1 = 1,2 ; 2 = 1,2 ; 1,2,3 = 1,2 ; 1,3 = 1,2 ; 1,2 = 1 ; 6,7 = 6 ; 1,1 = 1,2 ; 1,2,\ldots = 1,2
        \{1,2\} = \{\{1,2\}\} ; 01 = (0,1) ; 1 = (0,1) ; (1,0) = (0,1) ; [0,1] = (0,1) ; (0,1] = (0,1)
        \{0,1\} = (0,1) ; (0,1,2) = (0,1) ; (1,2),(2,1) = (1,2) ; 1234 = (1,234) ; (1,234) = 1234
        (1234,5) = (1,234,5) ; 1.5 = (1,5) ; 4 = \pm4 ; \pm4 = 4 ; 1+\sqrt3 = 1\pm\sqrt3 ; \{0\} = \emptyset
        0 = \emptyset ; \{1\}\cup\{3\} = \{1,2,3\} ; x=2 = x=2,y=3""",
    "intervals, equations": r"""
        [0,5] = [0,5) ; (0,5) = [0,5) ; [0,6) = [0,5) ; x>3 = x\ge3 ; x<3 = x>3 ; 3 = x>3 ; x>3 = 3
        (-3,\infty) = (3,\infty) ; (0,2) = (0,1)\cup(1,2) ; (0,1)\cap(3,5) = (0,1)\cup(3,5)
        -48105 = [-48,105] ; x\ne6 = 6 ; x\ne6 = x=6 ; 5=6 = 6 ; y=6 = x=6 ; -x=6 = 6 ; 2x=6 = 6 ; 4 = x+y=4
        1 = 2x+z=1 ; x+y=5 = x+y=4 ; y=2x = y=2x+3 ; 0 = a^2+b=0 ; 5x+2y+9=0 = 5x-2y+7=0 ; x=6,x=7 = x=6
        g(n)=n,f(n)=2 = f(n)=n,g(n)=2 ; q=1,2,3 = n=1,2,3""",
    "matrices, ratios, bases": r"""
        \begin{pmatrix}1&3\\2&4\end{pmatrix} = \begin{pmatrix}1&2\\3&4\end{pmatrix} ; 3:2 = 2:3 ; 3.2 = 3:2
        2:3 = 2:3:4 ; \begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}1&2\end{pmatrix} ; \frac23 = 3:2
        2:6:12 = 2:3:4 ; \begin{vmatrix}1&2\\3&4\end{vmatrix} = \begin{pmatrix}1&2\\3&4\end{pmatrix}
        12\ 3 = \begin{pmatrix}1&23\end{pmatrix} ; 204_6 = 204_5 ; 204 = 204_5 ; 5 = 204_5 ; 402_5 = 204_5
        5\pmod{9} = 5\pmod 8""",
    "text and choices": r"""
        \text{No} = \text{Yes} ; \text{Yes or no} = \text{Yes} ; \text{not even} = \text{even}
        \text{stop} = \text{pots} ; \text{irrational} = \text{rational}
        \text{triangle} = \text{right triangle} ; \text{none} = 0 ; x = 12 ; * = 12
        \text{the reference} = 12 ; -\infty = \infty ; \infty-\infty = \infty ; 8 = \infty
        -\text{no} = \text{no} ; C = B ; A,B = A ; \text{A or B} = A ; \text{not A} = A ; \text{All} = A
        \textbf{(C)} 12 = B ; \text{Don't} = D ; (A)(B) = A ; 2.718281828 = E""",
}


def table(rows: dict[str, str]) -> list[tuple[str, str]]:
    """(given, reference) pairs of a table; "=" with a space on each side separates them, the last one if several do."""
    pairs = [pair.strip() for text in rows.values() for line in text.splitlines() for pair in line.split(" ; ")]
    return [tuple(pair.rsplit(" = ", 1)) for pair in pairs if pair]


@pytest.mark.parametrize(("given", "reference"), table(EQUAL))
def test_equal(given, reference):
    assert same(given, reference)


@pytest.mark.parametrize(("given", "reference"), table(DIFFERENT))
def test_different(given, reference):
    assert not same(given, reference)


def pairs(text: str) -> list[tuple[str, str]]:
    """(reference, given) pairs, one or more a line, separated by a bar within and by two between."""
    return [
        tuple(pair.strip().split(" | ")) for line in text.splitlines() for pair in line.split(" || ") if pair.strip()
    ]


def verdicts(text: str, expected: bool, *, both_ways: bool = True) -> None:
    for reference, answer in pairs(text):
        assert same(answer, reference) is expected, (reference, answer)
        assert not both_ways or same(reference, answer) is expected, (answer, reference)


def test_named_values_match_a_bare_list_in_their_order_alone():
    verdicts(
        r"""x=1,y=2 | 1,2 || x=1;y=2 | 1;2 || x=1 and y=2 | 1,2 || \{x=1,y=2\} | 1,2 || f(1)=2,f(2)=1 | 2,1
        \text{length}=5,\text{width}=3 | 5,3 || length=5, width=3 | 5 and 3 || A=30^\circ,B=60^\circ | 30,60
        x=1,y=2 | y=2,x=1 || x=1,y=2 | 1,y=2 || x=1,y=2 | 1=x,2=y || x=1,y=2 | (1,2) || 5 | 5=x || x=5 | 5=x
        x=1,y=2 | (x,y)=(1,2) || x=1,y=2 | (y,x)=(2,1) || (x,y)=(1,2) | 1,2 || (x,y)=(1,2),(3,4) | (3,4),(1,2)
        x=1,x=2 | 2,1 || n=1,2,3 | 3,2,1 || 5\text{ cm},3\text{ kg} | 5,3 || 3,5\text{ cm} | 5,3
        x\approx1.5,y\approx2.5 | 1.5,2.5 || 1/6, 1/3, 1/2 | 1/2, 1/3, x=1/6""",
        True,
    )
    verdicts(
        r"""x=1,y=2 | 2,1 || x=1;y=2 | 2;1 || x=1 and y=2 | 2,1 || \{x=1,y=2\} | \{2,1\} || f(1)=2,f(2)=1 | 1,2
        \text{length}=5,\text{width}=3 | 3,5 || length=5, width=3 | 3 and 5 || A=30^\circ,B=60^\circ | 60,30
        \angle A=30^\circ,\angle B=60^\circ | 60^\circ,30^\circ || x=1,y=2 | 2,y=1 || x=1,y=2 | 2=x,1=y
        x=1,y=2 | 2,x=1 || x=1,y=2 | (2,1) || x=1,y=2 | (x,y)=(2,1) || (x,y)=(1,2) | 2,1 || 1,y=2 | 2,y=1
        x=1,y=2 | a=1,b=2 || 5\text{ cm},3\text{ kg} | 3,5 || x\approx1.5,y\approx2.5 | 2.5,1.5 || a_1=1,a_2=5 | 5,1
        x\approx1.5,y\approx2.5 | 2.5 || x>3,y<2 | (-\infty,2),(3,\infty) || 6 | 5=x || x=5 | 5=y
        x\in[0,1],y\in[2,3] | [2,3],[0,1] || x=1,y=2,z=3 | 3,2,1""",
        False,
    )


def test_am_and_pm_are_told_apart_however_they_are_written():
    spellings = r"8:00 AM |8:00 a.m.|8:00am|8:00 A.M.|8:00\text{ a.m.}|8:00~\text{AM}|8:00\,\mathrm{am}|8 a. m."
    spellings += r"|\text{8:00 a.m.}|\text{8:00 AM}"
    for one in spellings.split("|"):
        for other in spellings.split("|"):
            assert same(one, other), (one, other)
            assert not same(one, re.sub(r"[Aa](?=\.?\s?[Mm])", "p", other)), (one, other)
    verdicts(
        """3:00 PM | 3:00 xyz || 3:00 xyz | 3:00 || 3:00^{PM} | 3:00 || 3:00*PM | 3:00 || 3:00 QRS | 3:00 TUV
        8:30 PM | 8:30 MP || 8 AM | 8 PM || 8:00 AM,3:00 PM | 3:00 AM,8:00 PM || 8:00 AM,3:00 PM | 3:00,8:00
        8:00:00 AM | 8:00:00 PM""",
        False,
    )
    verdicts("3:00 PM | 03:00 pm || 8:00 AM,3:00 PM | 3:00 PM,8:00 AM || 3:00 | 3:00 || 2am | 2ma", True)


def test_a_word_is_no_product_of_letters():
    verdicts(
        r"""dog | god || \text{dog} | god || listen | silent || $listen$ | $silent$ || x=listen | x=silent
        (dog) | (god)
        \mathbf{listen} | \mathbf{silent} || cat, dog | tac, god || red cat | cat red || listen=x | silent=x
        кот | ток || \text{кот} | ток || 北京 | 京北 || niño | ñino || cat:dog | act:god || abc | cab || abc | ABC
        \angle ABC | \angle BAC || no | on || x=abc | x=cab""",
        False,
    )
    verdicts(
        r"""dog | \text{dog} || $listen$ | listen || cat, dog | dog, cat || xy | yx || AB | BA || abc | a b c
        abc | a \cdot b*c
        2abc | 2cab || abc+1 | 1+cab || \frac{abc}{2} | \frac12bca || a*b*c | c*b*a || V=abc | abc || xyz=8 | xyz-8=0
        \angle ABC | \angle CBA || кот | кот || \text{Bob} | bob""",
        True,
    )


def test_digits_of_any_script_are_read_or_refused():
    verdicts(
        "12 | １２ || 12 | ١٢ || x^{12} | x¹² || a_{12} | a₁₂ || x^{-1} | x⁻¹ || (1,2) | （１，２） || 3/4 | ¾", True
    )
    verdicts("2 | ② || 2 | ² || 1 | ೧೦ || x^2 | x2 || ① | ②", False)


def test_spaces_delimiters_and_fonts_in_a_box_do_not_count():
    verdicts(
        r"""14 | \(14\) || 14 | \[14\] || 14 | \textnormal{14} || 14 | 14\textnormal{} || 14 | \text{\(14\)}
        14 | \texttt{14}
        14 | {\bfseries 14} || 14 | \ensuremath{14} || 14 | \phantom{0}14 || 14 | \quad 14 \quad || 14 | \space 14\,
        \frac12 | \(\frac{1}{2}\) || \text{cat} | \textnormal{cat} || 8\text{ cm} | 8\textnormal{ cm}""",
        True,
    )
    assert grade("\\boxed{\\ 14\\ }", "14") and grade(r"\boxed{\ 14\  }", "14") and grade(r"\boxed{~14\ }", "14")
    verdicts(r"14 | \(15\) || 14 | 1\ 4", False)


def test_sets_of_reals_are_equal_if_they_have_the_same_members():
    verdicts(
        r"""(0,1)\cup(1,2) | (0,2)\setminus\{1\} || [0,1)\cup(1,2] | [0,2]\setminus\{1\}
        (0,3)\setminus[1,2] | (0,1)\cup(2,3)
        (-\infty,1)\cup(1,\infty) | \mathbb{R}\setminus\{1\} || (-\infty,1)\cup(1,\infty) | \mathbb{R}-\{1\}
        (-\infty,1)\cup(1,\infty) | x\ne1 || (0,1)\cup(1,2) | x\in(0,2)\backslash\{1\} || [0,1]\cup[1,2] | [0,2]
        (-\sqrt2,0)\cup(0,\sqrt2) | (-\sqrt2,\sqrt2)\setminus\{0\} || \emptyset | \{1\}\setminus\{1\}
        ((0,2)\cup(3,4))\setminus\{1\} | (0,1)\cup(1,2)\cup(3,4) || (0,2)\cap(1,3) | (1,2)""",
        True,
    )
    verdicts(
        r"""(0,1)\cup(1,2) | (0,2)\setminus\{1.5\} || (0,1)\cup(1,2) | [0,2]\setminus\{1\} || (0,1)\cup(1,2) | (0,2)
        (0,3)\setminus(1,2) | (0,1)\cup(2,3) || (-\infty,1)\cup(1,\infty) | x\ne2
        (-\infty,1)\cup(1,\infty) | \mathbb{R}
        y\in(0,1)\cup(1,2) | x\in(0,2)\setminus\{1\} || (0,1)\cup(1,2) | (\sqrt{-1},2)\setminus\{1\}
        (-\infty,1)\cup(1,2) | (5-\infty,2)\setminus\{1\} || (0,1)\cup(1,2) | (0,2)\cup\{3\}\setminus\{1\}""",
        False,
    )


def test_numpy_and_math_spellings_are_read():
    verdicts(
        r"""np.arccos(5/12) | \arccos\frac{5}{12} || np.sqrt(2) | \sqrt2 || math.sqrt(2)/2 | \frac{\sqrt2}{2}
        2*np.pi | 2\pi
        np.pi/4 | \frac\pi4 || numpy.exp(2) | e^2 || np.log(2) | \ln2 || np.log10(5) | \log_{10}5
        math.factorial(5) | 120
        math.comb(5,2) | 10 || np.e**2 | e^2 || np.sqrt(2)**3 | 2\sqrt2 || math.acos(0.5) | \arccos(1/2)
        math.inf | \infty
        np.float64(0.5) | 1/2 || np.abs(-3) | 3 || np.pi*2 | 2\pi""",
        True,
    )
    verdicts(
        r"np.arccos(5/12) | \arccos(5/13) || np.arctan2(1,2) | \arctan(1/2) || np.degrees(1) | 1 || np.log(2) | \lg2",
        False,
    )


def test_large_integers_equal_their_digits_and_their_powers():
    digits = "1" + "0" * 5000
    verdicts(
        rf"""10^{{5000}} | {digits} || 2^{{65536}} | {integer(2**65536)} || 2^{{65536}} | 2^{{2^{{16}}}}
        3^{{100000}} | 9^{{50000}}
        10^{{10^{{10}}}} | 10^{{10000000000}} || 7^{{7^{{7^7}}}} | 7^{{7^{{823543}}}} || x^{{100000}} | x^{{10^5}}
        5000! | 5000\cdot4999! || {digits} | {digits}.0""",
        True,
    )
    verdicts(
        rf"""10^{{5000}} | {digits}0 || 10^{{5000}} | {digits[:-1]}1 || 2^{{65536}} | {integer(2**65536 + 2)}
        2^{{65536}} | 2^{{2^{{17}}}} || 10^{{10^{{10}}}} | 10^{{10000000001}} || x^{{100000}} | x^{{10^6}}""",
        False,
    )


def integer(number: int) -> str:
    """str(number), which Python refuses beyond 4300 digits."""
    return str(number) if number < 10**4000 else integer(number // 10**4000) + str(number % 10**4000).zfill(4000)


def test_digits_in_parentheses_after_decimals_repeat():
    verdicts(
        """1/6 | 0.1(6) || 7/6 | 1.1(6) || -1/6 | -0.1(6) || x=1/6 | x=0.1(6) || 1/6,1/3 | 0.1(6), 0.(3)
        1/12 | 0.08(3)""",
        True,
    )
    verdicts("0.6 | 0.1(6) || 0.16 | 0.1(6) || 1/6 | 0.1(5)", False)
    verdicts("20 | 0.5(40)=20 || 2 | 0.5(3+1)", True, both_ways=False)


@pytest.mark.parametrize("reference", [pair[1] for pair in table(EQUAL)])
def test_a_trailing_full_stop_does_not_count(reference):
    assert same(reference + ".", reference)


def test_a_reference_may_be_a_list_of_which_any_is_correct():
    assert grade(r"\boxed{3}", ["5", "3"])
    assert not grade(r"\boxed{4}", ["5", "3"])
    assert not grade(r"\boxed{4}", [])


def test_nothing_equals_an_empty_reference():
    assert not any(same(given, reference) for given in ("", "0", "$$", "x") for reference in ("", " ", "$$", "."))


# --- What needs algebra ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reference", "equal"),
    [
        (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^{n} k", True),
        (r"\sum_{j=1}^{n} j", r"\sum_{k=1}^{n} k", True),
        (r"\frac12", r"\int_0^1 x\,dx", True),
        (r"\sum_{k=1}^{n} k^2", r"\sum_{k=1}^{n} k", False),
        (r"\sum_{k=1}^{n} M", r"\sum_{k=1}^{n} m", False),
        (r"\int_0^2 x\,dx", r"\int_0^1 x\,dx", False),
    ],
)
def test_sums_and_integrals_go_to_the_worker(verifier, given, reference, equal):
    assert verifier.submit(f"\\boxed{{{given}}}", reference).result() is equal


def test_easy_answers_start_no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with Verifier() as verifier:
        assert verifier.submit(r"\boxed{2\sqrt2}", r"\sqrt8").result()
        assert not verifier.submit(r"\boxed{41}", "42").result()


def test_a_slow_answer_does_not_hold_up_the_caller(monkeypatch):
    monkeypatch.setattr("verify.compare", lambda *_: time.sleep(0.5) or True)
    with Verifier() as verifier:
        begun = time.perf_counter()
        verdicts = [verifier.submit(r"\boxed{1}", "1") for _ in range(3)]
        assert time.perf_counter() - begun < 0.4
        assert all(verdict.result() for verdict in verdicts)


def test_a_fault_in_the_comparison_reaches_the_caller(monkeypatch):
    monkeypatch.setattr("verify.compare", lambda *_: 1 // 0)
    with Verifier() as verifier, pytest.raises(ZeroDivisionError):
        verifier.submit(r"\boxed{1}", "1").result()


# --- What it survives --------------------------------------------------------------------------------------

HOSTILE = {
    "tower": r"7^{7^{7^{7}}}",
    "tower of e": "e^{e^{e^{e^{9}}}}",
    "tower in a fraction": r"\frac{3^{3^{3^{3^3}}}}{2}",
    "huge power": "10^{10^{10}}",
    "power of a decimal": "0.1^{100000000}",
    "rational power": "(1+10^{-9})^{10^{18}}",
    "factorials of factorials": "((50!)!)!",
    "factorial of a billion": "(10^9)!",
    "binomial": r"\binom{10^9}{5\cdot 10^8}",
    "postfix factorials": "5" + "!" * 3000,
    "digits": "1" * 100_000,
    "e-notation": "1e999999999",
    "long sum": "+".join(["1"] * 50_000),
    "parentheses": "(" * 20_000 + "1" + ")" * 20_000,
    "braces": "{" * 1900 + "1" + "}" * 1900,
    "fractions": r"\frac{1}{" * 900 + "2" + "}" * 900,
    "roots": r"\sqrt" * 700 + "2",
    "minus signs": "-" * 3999 + "1",
    "full stops": "." * 3999,
    "openers": r"\text{" * 600,
    "bars": "|" * 3999,
    "expansion": "(a+b+c+d+e+f)^{40}-(a+b+c+d+e-f)^{40}",
    "polynomial": "(x+1)^{3001}",
    "gamma functions": "+".join(["(xy)!"] * 150),
    "members": ",".join(f"{k}x+y" for k in range(300)),
    "plus minus": ",".join([r"\pm 1"] * 500),
    "denominators": "+".join(f"1/(10^{{{3000 + k}}}+{k})" for k in range(150)),
    "division by zero": r"\frac{1}{x-x}",
    "logarithm to base one": r"\log_{1} 2",
    "zero to minus one": "0^{-1}",
    "large powers": "+".join(["9^{90000}"] * 150),
    "small fractions": "+".join(f"1/{k}^{{6000}}" for k in range(3, 150)),
    "long products": ("1234" * 1000 + "*") * 24 + "2",
    "long fraction": r"\frac{" + "7" * 40_000 + "}{" + "3" * 40_000 + "}",
    "long mixed number": "7" * 30_000 + " " + "3" * 30_000 + "/" + "7" * 30_001,
    "e-notations": "+".join(["1e9999"] * 400),
    "digits of another script": "\u0661" * 99_000,
    "unions": r"\cup".join(f"({k},{k + 1})" for k in range(300)),
    "points": r"(9,12)\setminus\{" + ",".join(map(str, range(900))) + r"\}",
    "names": ",".join(f"x_{{{k}}}={k}" for k in range(400)),
    "clock": "3" + ":00" * 1300,
    "spaces": "7" + " " * 3900 + "x",
    "nan": r"\text{nan}",
    "NUL": "\0",
    "surrogate": "\ud835",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_answers_are_refused_in_the_calling_process_within_a_second_each(answer):
    start = time.perf_counter()
    for reference in ("3", "x+1", r"\sqrt{2}", "1,2", "(0,1)", "x=3", r"\text{Yes}", "(x+1)^{3000}"):
        assert not same(answer, reference)
    assert time.perf_counter() - start < 8


def test_what_cannot_be_evaluated_still_equals_its_own_spelling():
    for answer in (r"7^{7^{7^{7}}}", "((50!)!)!", "(" * 3000 + "1" + ")" * 3000, "1" * 100_000):
        assert same(answer + " ", answer)


@pytest.mark.parametrize(
    "response",
    [
        "lorem $x$ ipsum " * 600_000 + r"\boxed{7}",
        r"\boxed{7}" + " and then 41" * 50_000,
        r"\boxed{1} " * 100_000 + r"\boxed{7}",
        "{" * 500_000 + r"\boxed{7}",
        "\\" * 400_000 + r" \boxed{7}",
        "the answer is " * 60_000 + r"\boxed{7}",
    ],
)
def test_long_responses_are_read_in_linear_time(response):
    start = time.perf_counter()
    assert grade(response, "7")
    assert time.perf_counter() - start < 5


def test_openers_without_end_hold_no_answer():
    assert extract(r"\boxed{" * 100_000 + "7") is None
    assert extract("<answer>" * 100_000 + "7") is None


CODE = [
    "__import__('os').system('touch {}')",
    "open('{}', 'w')",
    "exec(\"open('{}', 'w')\")",
    "().__class__.__base__.__subclasses__()",
    r"\operatorname{{exec}}(open('{}','w'))",
    r"\sum_{{k=1}}^{{2}} open('{}','w')",
    r"\int_0^1 \operatorname{{__import__}}('os').system('touch {}') dx",
    r"\lim_{{x\to 0}} x.__class__",
    r"\write18{{touch {}}} \sum_{{k=1}}^2 k",
]


@pytest.mark.parametrize("code", CODE)
def test_text_is_never_run_as_code(verifier, tmp_path, code):
    target = tmp_path / "created"
    answer = code.format(target) if "{}" in code or "{{" in code else code
    for reference in ("1", r"\sum_{k=1}^{n} k"):
        assert not verifier.submit(f"\\boxed{{{answer}}}", reference).result()
    with contextlib.suppress(Exception):  # whatever the grammar makes of it
        worker.algebra(answer, "1")
    assert not target.exists()


@pytest.mark.parametrize(
    "code", ["quit(1)", "raise SystemExit", "input()", "breakpoint()", "len('hello')", "print(5) or 5"]
)
def test_python_is_not_an_answer(code):
    assert not same(code, "5")


def test_an_answer_beyond_the_time_limit_is_wrong_counted_logged_and_the_worker_replaced(caplog):
    with Verifier(time_limit=2.0) as verifier, caplog.at_level(logging.WARNING, "verify"):
        assert verifier.submit(r"\boxed{\int_0^1 x\,dx}", r"\frac12", "easy").result()
        start = time.perf_counter()
        assert not verifier.submit(f"\\boxed{{{LONG}}}", "1", "problem-17").result()
        assert 2 <= time.perf_counter() - start < 5
        assert verifier.killed == 1
        assert "problem-17" in caplog.text
        assert verifier.submit(r"\boxed{\int_0^1 x\,dx}", r"\frac12", "easy").result()


@needs_proc
def test_an_answer_beyond_the_memory_limit_is_wrong():
    others = children(os.getpid())
    with Verifier(time_limit=20.0, memory_mb=256) as verifier:
        assert verifier.submit(r"\boxed{\int_0^1 x\,dx}", r"\frac12").result()
        (pid,) = set(children(os.getpid())) - set(others)
        before = status(pid, "VmPeak")
        assert not verifier.submit(r"\boxed{\sum_{k=1}^{1} 2^{10^{11}}}", "1").result()
        if pid in children(os.getpid()):  # it may also have died of it
            assert status(pid, "VmPeak") - before < 300 * 1024


@needs_proc
def test_a_worker_that_is_killed_from_outside_is_replaced():
    others = children(os.getpid())
    with Verifier() as verifier:
        assert verifier.submit(r"\boxed{\int_0^1 x\,dx}", r"\frac12").result()
        (pid,) = set(children(os.getpid())) - set(others)
        os.kill(pid, signal.SIGKILL)
        verdicts = [verifier.submit(r"\boxed{\int_0^1 x\,dx}", r"\frac12").result() for _ in range(2)]
        assert verdicts[-1]
        assert verifier.killed <= 1


def test_it_grades_from_threads_in_any_number():
    verdicts = {}

    def run(number: int) -> None:
        verdicts[number] = (grade(r"\boxed{\int_0^1 x\,dx}", r"\frac12"), grade(r"\boxed{\sqrt{8}}", r"2\sqrt{3}"))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == dict.fromkeys(range(8), (True, False))


def grade_elsewhere(queue) -> None:
    queue.put(grade(r"\boxed{\int_0^1 x\,dx}", r"\frac12"))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_it_grades_in_child_processes(method):
    assert grade(r"\boxed{\int_0^1 x\,dx}", r"\frac12")  # so that a forked child inherits a verifier at work
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=grade_elsewhere, args=(queue,))
    child.start()
    assert queue.get(timeout=60)
    child.join(timeout=20)
    assert child.exitcode == 0


def test_grading_needs_no_torch():
    code = "import sys, verify; verify.grade(r'\\boxed{1}', '1'); print('torch' in sys.modules, 'sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]


@needs_proc
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(end):
    code = f"import verify; print(verify.grade(r'\\boxed{{{LONG}}}', '1'))"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    workers = wait_for(lambda: children(parent.pid))
    time.sleep(1.0)  # into the middle of an answer
    if end == signal.SIGINT:
        os.killpg(parent.pid, end)  # as a terminal does: to the workers too
    else:
        os.kill(parent.pid, end)
    parent.wait(timeout=10)
    parent.stdout.close(), parent.stderr.close()
    wait_for(lambda: not any(alive(pid) for pid in workers))


def test_closing_cancels_what_waits_and_ends_the_workers():
    verifier = Verifier(time_limit=60)
    futures = [verifier.submit(f"\\boxed{{{LONG}}}", "1", str(number)) for number in range(3)]
    wait_for(lambda: futures[0].running())
    start = time.perf_counter()
    verifier.close()
    assert time.perf_counter() - start < 5
    assert not futures[0].result() and futures[1].cancelled() and futures[2].cancelled()
    assert verifier.killed == 0
    with pytest.raises(RuntimeError, match="closed"):
        verifier.submit(f"\\boxed{{{LONG}}}", "1")


@needs_proc
def test_memory_is_steady_over_ten_thousand_gradings():
    pairs = [(given, reference) for rows in (EQUAL, DIFFERENT) for given, reference in table(rows)]

    def run(times: int) -> None:
        for number in range(times):
            given, reference = pairs[number % len(pairs)]
            grade(f"so it is \\boxed{{{given}}}", f"{reference}+{number}" if number % 3 else reference)

    run(2_000)
    before = status(os.getpid(), "VmRSS")
    run(10_000)
    assert status(os.getpid(), "VmRSS") - before < 8 * 1024  # kB


FRAGMENTS = [*r"0123456789abcxyzeiA+-*/^_(){}[],.;:|!%='<> $&~\"", *HOSTILE.keys()] + [
    "\\frac", "\\sqrt", "\\pi", "\\text{", "\\text{cm}", "\\{", "\\}", "\\cup", "\\pm", "\\sum", "\\le", "\\infty",
    "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "\\sin", "\\log", "\\binom", "\\approx", "°", "−", "\\overline{3}",
    "0.", "\\boxed{", "\\pmod", "\\lfloor",
]  # fmt: skip


ANY = st.characters(codec=None, categories=["L", "M", "N", "P", "S", "Z", "C"])  # also half surrogate pairs
PIECES = st.one_of(ANY, st.characters(categories=["N"]), st.sampled_from(FRAGMENTS))


@settings(max_examples=400, deadline=2000, derandomize=True)
@given(st.lists(PIECES, max_size=12).map("".join), st.lists(PIECES, max_size=12).map("".join))
def test_no_text_of_any_script_raises(left, right):
    assert compare(left, right) in (True, False, None)
    assert isinstance(grade(left + "\\boxed{" + right + "}", left), bool)
    assert extract(left + right) is None or isinstance(extract(left + right), str)
    check([problem("1", left), problem("2", right, "problem 1")])


@settings(max_examples=1500, deadline=2000, derandomize=True)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
    st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
)
def test_any_two_texts_can_be_compared(left, right):
    assert compare(left, right) in (True, False, None)
    assert extract(left + right) is None or compare(extract(left + right), right) in (True, False, None)
    if any(character.isdigit() for character in left):
        assert compare(left, left)


# --- Reference answers -------------------------------------------------------------------------------------


def problem(uid: str, answer: str | list[str], text: str | None = None) -> Problem:
    return Problem(uid=uid, problem=text or f"problem {uid}", answer=answer, where=f"set.jsonl:{uid}")


def test_check_names_the_place_and_the_reason():
    faults = check(
        [
            problem("1", "12"),
            problem("2", "$$"),
            problem("3", r"\frac{1}{2"),
            problem("4", ["", "7"]),
            problem("5", "105263157894736848"),
            problem("6", "-1"),
            problem("7", "1/2", "How likely is it?"),
            problem("8", r"\frac{1}{2}", "How  likely is it?"),
            problem("9", "5", "How many?"),
            problem("10", "6", "How many?"),
            problem("11", "1000000000000000000000"),
            problem("12", "$27.0$."),
        ]
    )
    found = {(fault.where, fault.bad) for fault in faults}
    bad = {f"set.jsonl:{line}" for line in (2, 3, 9, 10)}
    assert found == {(where, True) for where in bad} | {(f"set.jsonl:{line}", False) for line in (4, 5, 6)}
    assert "set.jsonl:10" in next(fault.reason for fault in faults if fault.uid == "9")


def test_the_marked_part_of_a_reference_is_the_reference():
    for answer in (
        "long solution #### 72",
        "48/2 = 24\n48+24 = 72\n#### 72",
        "<answer>72</answer>",
        r"so it is \boxed{72}.",
    ):
        assert grade(r"\boxed{72}", answer) and grade(r"\boxed{72.0}", ["5", answer])
        assert not grade(r"\boxed{24}", answer) and not grade(r"\boxed{48}", answer)
        assert not check([problem("1", answer), problem("2", "72", "problem 1")])
    assert grade(r"\boxed{1000}", "x\n#### 1,000") and check(
        [problem("1", "#### 5"), problem("2", "#### 6", "problem 1")]
    )
    assert not grade(r"\boxed{5}", r"\boxed{3}, \boxed{5}")


@pytest.mark.parametrize(
    "answer",
    [
        "A) 72",
        "(A) 72",
        r"\textbf{(A) }72",
        "A. 72",
        "A: 72",
        "a) 72",
        "see proof",
        "See the solution.",
        r"\text{Proof.}",
    ]
    + [
        "?",
        "...",
        "-",
        "N/A",
        "TBD",
        "answers may vary",
        "5\n6",
        "x = 5\nso 6",
        "#### 1 #### 2",
        "72 ####",
        "['72']",
        "**72**",
        "## 72",
    ]
    + ["#### see proof", "<answer>1</answer> <answer>2</answer>", "Natalia sold in April twice as many clips " * 3, ""],
)
def test_check_reports_references_that_no_answer_can_meet(answer):
    (fault,) = check([problem("1", answer)])
    assert fault.bad and fault.where == "set.jsonl:1"
    assert not any(fault.bad for fault in check([problem("1", [answer, "5"])]))  # another one can be met


@pytest.mark.parametrize(
    "answer",
    ["C", "(C)", "no solution", r"\{\}", "∅", "A=5", "P(A)", "A:B", r"\text{(E)},", "9.6\n", "cannot be determined"],
)
def test_check_leaves_what_an_answer_can_meet(answer):
    assert not check([problem("1", answer)])


@pytest.mark.parametrize(
    ("lines", "code", "output"),
    [
        (['{"uid": "a", "problem": "1+1", "answer": "2"}'], 0, "1 problems: 0 bad"),
        (['{"uid": "a", "problem": "1+1", "answer": "$$"}'], 1, "set.jsonl:1: bad:"),
        (['{"uid": "a", "problem": "1+1"'], 2, "error: set.jsonl:1"),
    ],
)
def test_check_on_the_command_line(tmp_path, lines, code, output):
    file = tmp_path / "set.jsonl"
    file.write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(ROOT / "verify.py"), "--check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert output in done.stdout + done.stderr


def test_check_takes_the_fields_of_a_run(tmp_path):
    (tmp_path / "set.jsonl").write_text('{"q": "1+1", "gold": {"value": "#### 2"}, "id": 7}\n')
    command = [sys.executable, str(ROOT / "verify.py"), "--check", str(tmp_path / "set.jsonl"), "--split", "test"]
    fields = ["--problem-field", "q", "--answer-field", "gold.value", "--uid-field", "id"]
    done = subprocess.run(command + fields, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1 problems: 0 bad, 0 doubtful\n")
    done = subprocess.run([*command, "--answer_feild", "gold"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: command line: ") and done.stderr.count("\n") == 1


def test_a_worker_starts_from_any_directory(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import verify\n"
    code += r"print(verify.grade(r'\boxed{\int_0^1 x\,dx}', '1/2'))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "True\n"


@needs_material
def test_every_benchmark_answer_grades_itself():
    for file in sorted((DATA / "benchmarks").glob("*.jsonl")):
        answers = [json.loads(line)["answer"] for line in file.open()]
        answers = [answer for entry in answers for answer in ([entry] if isinstance(entry, str) else entry)]
        wrong = [answer for answer in answers if not grade(f"so \\boxed{{{answer}}}", answer)]
        assert len(wrong) <= 0.001 * len(answers), wrong


# --- Labelled answers --------------------------------------------------------------------------------------


def labelled(name: str, share: int) -> list[dict]:
    rows = [json.loads(line) for line in (GRADER / f"{name}.jsonl").open()]
    rows = [row for row in rows if row["kind"] != "debatable"]
    return random.Random(0).sample(rows, len(rows) // share)


def share_correct(verifier: Verifier, rows: list[dict]) -> float:
    verdicts = [verifier.submit(row["response"], row["answer"], row.get("id", "")) for row in rows]
    return sum(verdict.result() == row["expected"] for verdict, row in zip(verdicts, rows, strict=True)) / len(rows)


@needs_material
@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(("name", "least"), [("cases", 0.97), ("must_reject", 0.995), ("must_accept", 0.98)])
def test_labelled_answers(verifier, name, least, share):
    assert share_correct(verifier, labelled(name, share)) >= least


@needs_material
@pytest.mark.slow
def test_hostile_cases_stay_within_their_limit(verifier):
    for row in labelled("cases", 1):
        if "limit_s" in row:
            start = time.perf_counter()
            grade(row["response"], row["answer"])
            assert time.perf_counter() - start < row["limit_s"], row["id"]
    assert not list(Path("/tmp").glob("graderpwned*"))


# --- Processes ---------------------------------------------------------------------------------------------


def status(pid: int, field: str) -> int:
    """A field of /proc/PID/status in kB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The grading workers that a process started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"grader.worker" in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [worker for worker in found if alive(worker)]


def wait_for(condition, seconds: float = 20.0):
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
    return result
