"""latex.py: reads a formula as people and models write it (LaTeX, plain text, Python), and computes its value.

    tokens(text)        -> list of tokens    without spacing, fonts and delimiter sizes; a word is one token: '"cm'
    parse(tokens)       -> tree              nested tuples; Unreadable if the grammar below does not know it
    exact(tree)         -> Fraction | None   rational arithmetic; None if anything else takes part
    same_value(a, b)    -> bool              all other formulas, compared at points where both are defined

Nothing here simplifies, and nothing takes long. The length and depth of a text, the atoms of a formula, the bits of an
integer and the size of every intermediate value have limits (Unreadable and TooLarge). Formulas are evaluated to 60
digits at a few real and a few whole points. They are the same if they agree to 45 digits at each. Different formulas do
not agree that far by accident, and whoever can construct such a pair knows the answer.

Ambiguous forms: 2^10 is 1024. \\frac12 is a half. 3\\frac12 and 3 1/2 are mixed numbers; other numbers side by side are
unreadable. a/bc is (a/b)c. \\log has an unknown base, so \\log 100 is not 2. 0.1(6) is 1/6. e and i are the constants.
I(0) and f(x) are names, not products. x is not X. \\angle ABC is \\angle CBA, not \\angle BAC.
"""

from __future__ import annotations

import functools
import math
import re
import threading
import zlib
from collections.abc import Iterator
from fractions import Fraction

MAX_LENGTH = 4000  # characters of an answer, long runs of digits aside
MAX_DIGITS = 100_000  # characters with them
MAX_DEPTH = 50  # nested groups
MAX_ATOMS = 500  # numbers and names in a formula
MAX_BITS = 4_000_000  # of an exact integer, for all numbers of a formula together: 10^{300000} still fits
MAX_EXPONENT = 10_000  # decimal exponent of any intermediate value
DIGITS, AGREE = 60, 45  # decimal digits computed, and compared


class Unreadable(ValueError):
    """Not a formula of this grammar."""


class TooLarge(Unreadable):
    """A formula whose value is beyond any answer: a tower of powers, a factorial of a factorial."""


# 1. Tokens


def vocabulary(words: str) -> set[str]:
    return set(words.split())


UNICODE = str.maketrans({
    "−": "-", "–": "-", "﹣": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "∗": "*", "÷": "/", "⁄": "/",
    "π": "\\pi ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ", "μ": "\\mu ",
    "φ": "\\phi ", "ω": "\\omega ", "σ": "\\sigma ", "Δ": "\\Delta ", "√": "\\surd ", "∞": "\\infty ", "°": "\\degree ",
    "ℝ": "\\mathbb{R}", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "∖": "\\setminus ",
    "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "′": "'", "’": "'",
    **dict.fromkeys("\u200b\u200c\u200d\u2060\u2061\ufeff\xad", ""),
    **{chr(code + 0xFEE0): chr(code) for code in range(ord("!"), ord("~") + 1)},  # full width
})  # fmt: skip
RAISED, LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "₀₁₂₃₄₅₆₇₈₉₊₋"

SPELLINGS = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
    "\\leq": "\\le", "\\leqslant": "\\le", "\\geq": "\\ge", "\\geqslant": "\\ge", "\\neq": "\\ne", "\\lt": "<",
    "\\gt": ">", "\\cdot": "*", "\\times": "*", "\\ast": "*", "\\div": "/", "\\lbrace": "\\{", "\\rbrace": "\\}",
    "\\lbrack": "[", "\\rbrack": "]", "\\lvert": "|", "\\rvert": "|", "\\vert": "|", "\\mid": "|",
    "\\varnothing": "\\emptyset",
    "\\%": "%", "\\$": "$", "\\colon": ":", "\\bmod": "\\pmod", "\\mod": "\\pmod",
    "\\dots": "\\ldots", "\\cdots": "\\ldots", "\\degree": "°", "\\prime": "'",
    "\\lparen": "(", "\\rparen": ")", "\\thinspace": "", "\\approxeq": "\\approx", "\\simeq": "\\approx", "\\land": ",",
    "\\lor": ",", "\\wedge": ",", "\\vee": ",", "\\&": ",", "\\tg": "\\tan", "\\ctg": "\\cot", "\\varphi": "\\phi",
    "\\varepsilon": "\\epsilon", "\\hbox": "", "\\boxed": "", "\\fbox": "", "\\#": "", "\\pounds": "£", "\\euro": "€",
    "\\(": "", "\\)": "", "\\[": "", "\\]": "", "\\backslash": "\\setminus", "\\smallsetminus": "\\setminus",
    "\\textdegree": "°", "\\textdollar": "$", "\\AM": '"am', "\\PM": '"pm',
}  # fmt: skip

IGNORED = vocabulary(
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle "
    "textstyle scriptstyle limits nolimits quad qquad mathbf boldsymbol bm mathit mathsf mathtt mathcal mathscr "
    "mathfrak mathnormal bf rm it sf tt bfseries itshape rmfamily tiny scriptsize footnotesize small normalsize large "
    "Large LARGE huge Huge text textbf textit textrm textsf texttt textsc textsl textup textmd textnormal mbox mathrm "
    "mathup mathop mathord mathrel mathbin operatorname operatorname* emph underline ensuremath allowbreak nonumber "
    "hfill enspace enskip space nobreakspace medspace thickspace negthinspace strut mathstrut noindent relax"
)
FUNCTIONS = vocabulary(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth ln log lg exp sqrt max min gcd lcm floor ceil "
    "abs factorial binomial"
)
PYTHON = {
    "log": "\\ln", "log10": "\\lg", "log2": "\\log_2", "acos": "\\arccos", "asin": "\\arcsin", "atan": "\\arctan",
    "inf": "\\infty", "e": "e", "pi": "\\pi", "comb": "\\binomial", "cbrt": "\\sqrt[3]", "float64": "", "float32": "",
    "int64": "", "int32": "",
}  # fmt: skip
GREEK = vocabulary(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi "
    "chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar odot angle triangle partial nabla"
)
ACCENTS = vocabulary("vec hat bar overline dot ddot tilde widehat overrightarrow mathbb")
MATRICES = {"pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix"}  # one thing, bracketed variously
LAYOUTS = {"aligned", "align", "gathered", "gather", "equation", "split", "center", "math", "displaymath"}
WORDS = vocabulary("yes no true false none odd even all undefined")

SPACES = r"(?:[\s~$]|\\[,;:! ]|\\quad)*"
IN_TEXT = r"\\(?:text(?:bf|it|rm|sf|tt|sc|sl|up|md|normal)?|[mh]box|mathrm|operatorname\*?)\s*\{"
HALF_DAY = re.compile(
    rf"(?<![\d.:^])(?<!\d,)(?P<time>\d{{1,2}}(?:{SPACES}:{SPACES}\d\d){{0,2}})(?P<gap>{SPACES})(?P<text>{IN_TEXT}{SPACES})?"
    rf"(?P<half>[AaPp])(?P<dot>\.?)\s?(?P<m>[Mm])(?!\s?[\w^/])\.?(?(text){SPACES}\}})"
)
GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\\!\s{0,3}|\\[, ;!]|~| )\d{3})+(?![\d/])")
LEXER = re.compile(
    r"(?P<repeating>\d*\.\d*\\(?:overline|bar|dot)\s*(?:\{\d+\}|\d)(?:\d*\\dot\s*(?:\{\d\}|\d))?"
    r"|\d*\.\(\d+\)|\d*\.\d+\(\d+\)(?=\s*(?:$|[,;.$}]|\\[\])])))"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<degree>\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z])))"
    r"|(?P<prime>\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![a-zA-Z])))"
    rf"|{IN_TEXT}(?P<words>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}"
    r"|\\(?:(?:text)?color|[hv]space\*?|tag|label|[hv]?phantom)\s*\{[^{}]*\}"
    r"|(?P<environment>\\(?:begin|end)\s*\{[a-zA-Z]+\*?\}(?:\s*\{[clr|]*\})?)"
    r"|(?P<relation>[<>]=|(?<![\d)}])!=|\\\\)"
    r"|\\[,;:!> ]|[\s~$]+|\\(?=\d|\s*$)"
    r"|(?P<command>\\operatorname\*|\\[A-Za-z]+|\\.)"
    r"|(?P<run>[^\W\d_]+)"
    r"|(?P<character>.)",
    re.DOTALL,
)


def tokens(text: str) -> list[str]:
    """The tokens of an answer. A word is '"' followed by its spelling, everything else stands for itself.

    Raises Unreadable beyond MAX_LENGTH or MAX_DEPTH."""
    if len(text) > MAX_DIGITS or len(re.sub(r"\d{9,}", "", text)) > MAX_LENGTH:
        raise Unreadable(f"longer than {MAX_LENGTH} characters")
    text = text if text.isascii() else ascii_signs(text)
    if text.isdecimal():
        return [text]
    for pattern, replacement in REWRITTEN:
        text = pattern.sub(replacement, text)
    words = re.fullmatch(r"\s*[A-Za-z][A-Za-z' .()-]*", text)
    if words and any(len(run) > 3 or run.lower() in WORDS for run in re.findall("[A-Za-z]+", text)):
        return word(text)
    result: list[str] = []
    for match in LEXER.finditer(text):
        kind, found = match.lastgroup, match.group()
        if kind == "words":
            result += word(match["words"], roman=found.startswith(("\\mathrm", "\\operator")))
        elif kind == "repeating":
            fixed, _, period = found.replace("(", "\\").partition("\\")
            result.append(f"{fixed}({re.sub(r'[^0-9]', '', period)})")
        elif kind == "degree":
            result.append("°")
        elif kind == "prime":
            result.append("'")
        elif kind == "environment":
            name = re.search(r"\{([a-zA-Z]+)", found)[1]
            name = "matrix" if name in MATRICES else name
            result += [] if name in LAYOUTS else [found[: found.index("{")].strip() + ":" + name]
        elif kind == "relation":
            result.append({"<=": "\\le", ">=": "\\ge", "!=": "\\ne"}.get(found, found))
        elif kind == "command" and found[1:] not in IGNORED:
            result += filter(None, [SPELLINGS.get(found, found)])
        elif kind == "run":
            result += run(found, apart=match.start() == 0 or text[match.start() - 1] in " ~,;:!")
        elif kind in ("number", "character"):
            result.append(found)
    if depth(result) > MAX_DEPTH:
        raise Unreadable(f"more than {MAX_DEPTH} nested groups")
    return result


def ascii_signs(text: str) -> str:
    """The text with ASCII digits for decimal digits of all scripts, and in LaTeX what Unicode has as one character."""
    for sign, digits in (("^", RAISED), ("_", LOWERED)):
        plain = str.maketrans(digits, "0123456789+-")
        text = re.sub(f"[{digits}]+", lambda run: f"{sign}{{{run.group().translate(plain)}}} ", text)  # noqa: B023
    return re.sub(r"\d", lambda digit: str(int(digit.group())), text.translate(UNICODE))


def python_name(match: re.Match) -> str:
    """The LaTeX for a name of numpy or math; the text itself for one that is not known here."""
    name = match[1]
    return PYTHON.get(name, "\\" + name if name in FUNCTIONS else match[0])


def half_day(match: re.Match) -> str:
    """A clock time with its a.m. or p.m. as one command, however that is written. 2AM and 2am may be products."""
    time = match["time"]
    if ":" not in time and not (match["gap"] or match["text"] or match["dot"]):
        return match[0]
    hour = ":00" if ":" not in time and (match["dot"] or match["m"] == "M") else ""
    return f"{time}{hour}\\{match['half'].upper()}M "


REWRITTEN = [
    (GROUPED, lambda number: re.sub(r"\D", "", number.group())),
    (re.compile(r"(\d)\s*x\s*(10\s*\^)"), r"\1*\2"),
    (
        re.compile(r"(?<=\d)\s*(?:\\[ ,;]\s?)?((?:k?m|cm|ft|mi)/(?:s|h|hr|min)(?:\^\{?2\}?)?)\s*$"),
        r"\\text{ \1}",
    ),
    (re.compile(r"\b(?:np|numpy|math|sp|scipy|sympy)\.([a-z]+\d*)"), python_name),
    (re.compile(r"(?<=[\w)}])\s?\*\*\s?(?=[\w(-])"), "^"),
    (re.compile(r"([\])}]\s?)-(?=\s?\\\{)"), r"\1\\setminus"),
    (re.compile(r"\\(?:mathbb\s*)?R\b"), r"\\mathbb{R}"),
    (re.compile(rf"{IN_TEXT}\s*(\d\d?:\d\d[^{{}}]*)\}}"), r"\1"),
    (HALF_DAY, half_day),
]


def word(text: str, roman: bool = False) -> list[str]:
    """Tokens of what stands in \\text{...}: formulas stay formulas, conjunctions are commas, words are one token."""
    text = " ".join(re.sub(r"~|\\[,;:! ]", " ", text).split())
    if re.fullmatch(r"[,;]?\s?(and|or|AND|OR)?[,;]?", text):
        return [","] if text else []
    if not re.search(r"\w", text):
        return tokens(text)
    if text == "to":
        return [":"]
    if roman and text in FUNCTIONS:
        return ["\\" + text]
    if roman and text in ("e", "i", "d", "x", "y", "z"):
        return [text]
    counted = re.fullmatch(r"(-?[\d.,]+)\s?([A-Za-z][^\d]*)", text)
    if counted:
        return [*tokens(counted[1]), '"' + counted[2]]
    if re.search(r"\d", text) or "\\" in text or "$" in text:
        return tokens(text) if re.fullmatch(r"[^A-Za-z]*", text) else ['"' + text]
    if text.lower() in ("infinity", "inf"):
        return ["\\infty"]
    return ['"' + text]


def run(letters: str, apart: bool) -> list[str]:
    """Tokens of letters that stand together outside \\text: a function, a conjunction, a word, or a product."""
    if letters in FUNCTIONS or letters == "pi":
        return ["\\" + letters]
    if letters in ("and", "or"):
        return [","]
    if letters == "infinity":
        return ["\\infty"]
    if apart and (len(letters) > 3 or letters.lower() in WORDS or letters in UNITS) and letters.isascii():
        return ['"' + letters]
    return [letters] if len(letters) > 2 or not letters.isascii() else list(letters)


def is_run(token: str) -> bool:
    """Whether it is letters that stand together: a word or a product, which only what surrounds them can tell."""
    return len(token) > 1 and token.isalpha()


def apart(found: list[str]) -> list[str]:
    """The tokens with each run of letters as a product."""
    return [part for token in found for part in (token if is_run(token) else (token,))]


UNITS = vocabulary("cm mm km kg mL min sec hr hrs deg mph ft lb oz")
OPENERS, CLOSERS = (
    {"(", "[", "{", "\\{", "\\lfloor", "\\lceil", "\\langle"},
    {")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle"},
)


def depth(found: list[str]) -> int:
    """How deep the groups nest; -1 if they do not balance."""
    now = most = 0
    for token in found:
        now += (token in OPENERS or token.startswith("\\begin:")) - (token in CLOSERS or token.startswith("\\end:"))
        most = max(most, now)
        if now < 0:
            return -1
    return most if now == 0 else -1


# 2. Grammar


def parse(found: list[str]) -> tuple:
    """The tree of a formula: ("number", Fraction), ("name", str), ("sum" | "product", tree, ...),
    ("power", tree, tree), ("call", function, tree, ...)."""
    parser = Parser(found)
    tree = parser.whole()
    if parser.at != len(parser.found):
        raise Unreadable(f"{parser.peek()!r} after the end of a formula")
    return tree


def is_number(token: str) -> bool:
    return token[:1].isdecimal() or (token[:1] == "." and len(token) > 1)


MINUS_ONE = ("number", Fraction(-1))


class Parser:
    """Recursive descent: sum > product > signed > power > atom."""

    def __init__(self, found: list[str]):
        self.found, self.at, self.in_bars = apart(found), 0, False
        if sum(map(self.starts_atom, self.found)) > MAX_ATOMS:
            raise TooLarge(f"more than {MAX_ATOMS} numbers and names")

    def peek(self, ahead: int = 0) -> str:
        return self.found[self.at + ahead] if self.at + ahead < len(self.found) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or expected not in (None, token):
            raise Unreadable(f"{token!r} where {expected or 'more'} should be")
        self.at += 1
        return token

    def whole(self) -> tuple:
        """A sum, or two of them as in `a \\over b`."""
        above = self.sum()
        if self.peek() not in ("\\over", "\\choose"):
            return above
        over = self.take() == "\\over"
        below = self.sum()
        return ("product", above, ("power", below, MINUS_ONE)) if over else ("call", "binomial", above, below)

    def sum(self) -> tuple:
        terms = [self.product()]
        while self.peek() in ("+", "-"):
            negative = self.take() == "-"
            term = self.product()
            terms.append(("product", MINUS_ONE, term) if negative else term)
        return terms[0] if len(terms) == 1 else ("sum", *terms)

    def product(self) -> tuple:
        factors = [self.signed()]
        while True:
            token = self.peek()
            if token == "*":
                self.take()
                factors.append(self.signed())
            elif token == "/":
                self.take()
                factors.append(("power", self.signed(), MINUS_ONE))
            elif self.starts_atom(token):
                if is_number(token) and is_number(self.found[self.at - 1]):
                    raise Unreadable("two numbers side by side")
                factors.append(self.power())
            else:
                return factors[0] if len(factors) == 1 else ("product", *factors)

    def signed(self) -> tuple:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        return ("product", MINUS_ONE, self.power()) if negative else self.power()

    def power(self) -> tuple:
        base = self.atom()
        while (token := self.peek()) in ("!", "%", "°", "^"):
            self.take()
            if token == "!":
                base = ("call", "factorial", base)
            elif token == "%":
                base = ("product", base, ("number", Fraction(1, 100)))
            elif token == "°":
                base = ("product", base, ("name", "\\pi"), ("number", Fraction(1, 180)))
            else:
                base = ("power", base, self.argument(digit=False))
        return base

    def starts_atom(self, token: str) -> bool:
        return bool(token) and (
            is_number(token)
            or token.isalpha()
            or token in ("(", "[", "{", "\\frac", "\\binom", "\\surd", "\\lfloor", "\\lceil")
            or (token == "|" and not self.in_bars)
            or (token[0] == "\\" and token[1:] in FUNCTIONS | GREEK | ACCENTS | {"pi"})
            or (token[0] == '"' and len(token) == 2)
        )

    def argument(self, digit: bool = True) -> tuple:
        """What a command or ^ applies to: a group, or one token, of which a number gives one digit as in TeX."""
        token = self.peek()
        if token == "{":
            return self.group("{", "}")
        if digit and token.isdecimal() and len(token) > 1:
            self.found[self.at : self.at + 1] = [token[0], token[1:]]
        if token in ("+", "-"):
            return self.signed()
        return self.atom()

    def group(self, opener: str, closer: str) -> tuple:
        self.take(opener)
        bars, self.in_bars = self.in_bars, opener == "|"
        inside = self.whole()
        self.in_bars = bars
        self.take(closer)
        return inside

    def atom(self) -> tuple:
        token = self.peek()
        if not self.starts_atom(token):
            raise Unreadable(f"{token!r}")
        if is_number(token):
            return self.number()
        if token == "(" and is_number(self.peek(1)) and self.peek(2) == ")" and self.peek(3) == "_":
            self.found[self.at : self.at + 3] = [self.peek(1)]  # (204)_5
            return self.number()
        if token in ("(", "[", "{", "|", "\\lfloor", "\\lceil"):
            closers = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
            inside = self.group(token, closers[token])
            calls = {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
            return ("call", calls[token], inside) if token in calls else inside
        if token in ("\\frac", "\\binom"):
            self.take()
            above, below = self.argument(), self.argument()
            if token == "\\binom":
                return ("call", "binomial", above, below)
            return ("product", above, ("power", below, MINUS_ONE))
        if token in ("\\sqrt", "\\surd"):
            self.take()
            index = self.group("[", "]") if self.peek() == "[" else ("number", Fraction(2))
            return ("power", self.argument(digit=token == "\\sqrt"), ("power", index, MINUS_ONE))
        if token[1:] in FUNCTIONS and token[0] == "\\":
            return self.call()
        return self.name()

    def number(self) -> tuple:
        """A literal, a mixed number, or digits with a base."""
        token = self.take()
        if self.peek() == "_":
            self.take()
            base = self.raw()
            return ("number", literal(token)) if base == "10" else ("name", f"{token}_{base}")
        value = literal(token)
        if token.isdecimal():
            if self.peek() == "\\frac":
                start = self.at
                above, below = self.found_fraction()
                if above is not None:
                    return ("number", value + Fraction(above, below))
                self.at = start
            elif self.peek().isdecimal() and self.peek(1) == "/" and self.peek(2).strip("0").isdecimal():
                above, _, below = self.take(), self.take(), self.take()
                return ("number", value + literal(above) / literal(below))
        return ("number", value)

    def found_fraction(self) -> tuple[int, int] | tuple[None, None]:
        self.take("\\frac")
        parts = self.argument(), self.argument()
        whole = all(part[0] == "number" and part[1].denominator == 1 for part in parts)
        return (int(parts[0][1]), int(parts[1][1])) if whole and parts[1][1] else (None, None)

    def raw(self) -> str:
        """The spelling of a group or token that is part of a name."""
        if self.peek() != "{":
            return self.take()
        self.take()
        inside, level = [], 1
        while True:
            token = self.take()
            level += (token == "{") - (token == "}")
            if level == 0:
                return " ".join(inside)
            inside.append(token)

    def name(self) -> tuple:
        """A letter with all that makes it another name: accent, index, primes, and an argument that is one token."""
        name = self.take()
        if name[1:] in ACCENTS and name[0] == "\\":
            name += " " + self.raw()
        if name == "\\angle":
            while self.peek().isalpha():
                name += self.take()
            name = "\\angle" + min(name[6:], name[:5:-1])  # ABC is CBA, not BAC
        name = name.lstrip('"')
        while self.peek() in ("_", "'"):
            name += self.take()
            if name[-1] == "_":
                name += self.raw()
        if name == "C" and self.peek() == "(" and self.peek(2) == "," and self.peek(4) == ")":
            above, below = self.peek(1), self.peek(3)
            self.at += 5
            return ("call", "binomial", parse([above]), parse([below]))
        if self.peek() == "(" and self.peek(2) == ")" and (self.peek(1).isalpha() or is_number(self.peek(1))):
            name += self.take() + self.take() + self.take()
        return ("name", name)

    def call(self) -> tuple:
        function, exponent, base = self.take()[1:], None, None
        while self.peek() in ("^", "_"):
            if self.take() == "^":
                exponent = self.argument(digit=False)
            else:
                base = self.argument()
        if function in ("max", "min", "gcd", "lcm", "binomial"):
            self.take("(")
            arguments = [self.sum()]
            while self.peek() == ",":
                self.take()
                arguments.append(self.sum())
            self.take(")")
        elif self.peek() in ("(", "{", "["):
            arguments = [self.atom()]
        else:
            factors = [self.signed()]
            while self.starts_atom(self.peek()) and self.peek()[1:] not in FUNCTIONS:
                factors.append(self.power())
            arguments = [("product", *factors)]
        if function == "exp":
            result = ("power", ("name", "e"), arguments[0])
        elif function in ("log", "lg", "ln"):
            base = base or {"log": ("name", "\\log"), "lg": ("number", Fraction(10)), "ln": ("name", "e")}[function]
            result = ("product", ("call", "ln", *arguments), ("power", ("call", "ln", base), MINUS_ONE))
        elif exponent == MINUS_ONE or exponent == ("product", MINUS_ONE, ("number", Fraction(1))):
            return ("call", "arc" + function, *arguments)
        else:
            result = ("call", function, *arguments)
        return ("power", result, exponent) if exponent else result


def literal(token: str) -> Fraction:
    """The value of a number as it is written: 12, 0.5, .5, 4.5e33, 0.1(6)."""
    mantissa, _, exponent = token.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    decimals, _, period = decimals.rstrip(")").partition("(")
    if len(exponent) > 6 or abs(int(exponent or 0)) > MAX_EXPONENT or len(decimals + period) > 4000:
        raise TooLarge(token[:40])
    value = Fraction(integer((whole + decimals) or "0"), 10 ** len(decimals))
    if period:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))
    return value * Fraction(10) ** int(exponent or 0)


def integer(digits: str) -> int:
    """int(digits) without Python's limit on their number, nor its quadratic time."""
    half = len(digits) // 2
    return int(digits) if half < 2000 else integer(digits[:-half]) * 10**half + integer(digits[-half:])


# 3. Values


def exact(tree: tuple, most: int = 0) -> Fraction | None:
    """The value of rational arithmetic (factorials, binomials, floors included); None if anything else takes part.

    most: bits of an integer; the more numbers a formula has, the fewer, so that none takes long."""
    most = most or max(MAX_BITS // atoms(tree), 20_000)
    kind, *parts = tree
    if kind == "number":
        return bounded(parts[0], most)
    if kind == "name":
        return None
    function = parts.pop(0) if kind == "call" else ""
    values = []
    for part in parts:
        value = exact(part, most)
        if value is None:
            return None
        values.append(value)
    if kind == "sum":
        return functools.reduce(lambda x, y: bounded(x + y, most), values)
    if kind == "product":
        return functools.reduce(lambda x, y: bounded(x * y, most), values)
    if kind == "power":
        return exact_power(*values, most)
    return exact_call(function, values, most)


def atoms(tree: tuple) -> int:
    return 1 if tree[0] in ("number", "name") else sum(atoms(part) for part in tree[1:] if isinstance(part, tuple))


def bounded(value: Fraction, most: int) -> Fraction:
    if value.numerator.bit_length() > most or value.denominator.bit_length() > 20_000:
        raise TooLarge("an integer of too many digits")
    return value


def exact_power(base: Fraction, exponent: Fraction, most: int) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    if base == 0 and exponent <= 0:
        raise Unreadable("a power of zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and (bits - 1) * abs(exponent) > (most if base.denominator == 1 and exponent > 0 else 20_000):
        raise TooLarge("a tower of powers")
    return base ** int(exponent) if abs(base) != 1 else base ** int(exponent % 2)


def reduced(tree: tuple, most: int = 0) -> tuple:
    """The tree with all rational arithmetic done that does not become too large: two towers of powers are equal if they
    have equal parts."""
    if tree[0] in ("number", "name"):
        return tree
    most = most or max(MAX_BITS // atoms(tree), 20_000)
    tree = tuple(reduced(part, most) if isinstance(part, tuple) else part for part in tree)
    try:
        value = exact(tree, most) if all(part[0] == "number" for part in tree if isinstance(part, tuple)) else None
    except Unreadable:
        value = None
    return tree if value is None else ("number", value)


def exact_call(function: str, values: list[Fraction], most: int) -> Fraction | None:
    if function in ("floor", "ceil", "abs"):
        return Fraction({"floor": math.floor, "ceil": math.ceil, "abs": abs}[function](values[0]))
    if function in ("max", "min"):
        return (max if function == "max" else min)(values)
    whole = [int(value) for value in values]
    if function in ("factorial", "binomial", "gcd", "lcm"):
        if whole != values or min(whole) < 0:
            raise Unreadable(f"{function} of a number that is not whole")
        if max(whole) > most // 16 and function in ("factorial", "binomial"):
            raise TooLarge(function)
        operation = {"factorial": math.factorial, "binomial": math.comb, "gcd": math.gcd, "lcm": math.lcm}[function]
        return bounded(Fraction(operation(*whole)), most)
    return None


def names(tree: tuple) -> set[str]:
    """The unknowns of a formula."""
    if tree[0] == "name":
        return {tree[1]} - {"e", "i", "\\pi"}
    return set().union(*(names(part) for part in tree[1:] if isinstance(part, tuple)))


def calls(tree: tuple) -> set[str]:
    """The functions of a formula."""
    found = {tree[1]} if tree[0] == "call" else set()
    return found.union(*(calls(part) for part in tree[1:] if isinstance(part, tuple)))


_local = threading.local()


def arithmetic():
    """This thread's arithmetic of DIGITS digits (a context of mpmath is not safe to share)."""
    if not hasattr(_local, "context"):
        import mpmath

        _local.context = mpmath.ctx_mp.MPContext()
        _local.context.dps = DIGITS
    return _local.context


def point(name: str, number: int):
    """What an unknown is worth at that point: 0-2 are positive, 3 negative, 4-5 of either sign, the others whole."""
    draw = zlib.crc32(f"{number} {name} {number}".encode(errors="surrogatepass"))
    if number >= 6:
        return arithmetic().mpf(1 + (draw >> 9) % (12 if number < 9 else 60))
    size = arithmetic().mpf(3 + draw % 99991) / 50021 + arithmetic().mpf(1) / 7
    return -size if number == 3 or (number > 3 and draw >> 20 & 1) else size


def pairs(a: tuple, b: tuple) -> Iterator[tuple]:
    """The values of two formulas at the points where both are real (at all, if i or no unknown occurs)."""
    unknowns = names(a) | names(b)
    imaginary = not unknowns or uses_i(a) or uses_i(b)
    steps = (calls(a) | calls(b)) & {"floor", "ceil", "gcd", "lcm"}
    for number in range((60 if steps else 9) if unknowns else 1):
        where = {name: point(name, number) for name in unknowns}
        try:
            x, y = value(a, where), value(b, where)
        except Unreadable:
            raise
        except (ZeroDivisionError, ValueError):
            continue  # not defined there
        if imaginary or x.imag == y.imag == 0:
            yield x, y


def same_value(a: tuple, b: tuple) -> bool:
    """Whether two formulas have the same value wherever both are defined, which must be at three points or more."""
    agreed = 0
    for x, y in pairs(a, b):
        if not close(x, y):
            return False
        agreed += 1
    return agreed >= (3 if names(a) | names(b) else 1)


def constant_ratio(a: tuple, b: tuple, positive: bool) -> bool:
    """Whether a is b times a constant that is not zero (and positive, where asked)."""
    ratios = []
    for x, y in pairs(a, b):
        if (x == 0) != (y == 0):
            return False
        if x != 0:
            ratios.append(x / y)
    if len(ratios) < 3 or positive and not (ratios[0].imag == 0 and ratios[0].real > 0):
        return False
    return all(close(ratio, ratios[0]) for ratio in ratios)


def uses_i(tree: tuple) -> bool:
    return tree == ("name", "i") or any(uses_i(part) for part in tree[1:] if isinstance(part, tuple))


def close(x, y) -> bool:
    return abs(x - y) * 10**AGREE <= max(abs(x), abs(y))


def value(tree: tuple, where: dict):
    """A formula's value at a point. Raises ZeroDivisionError or ValueError where it has none, TooLarge."""
    mp = arithmetic()
    kind, *parts = tree
    if kind == "number":
        return mp.mpf(parts[0].numerator) / parts[0].denominator
    if kind == "name":
        constants = {"e": mp.e, "\\pi": mp.pi, "i": mp.j}
        return +constants[parts[0]] if parts[0] in constants else where[parts[0]]
    function = parts.pop(0) if kind == "call" else ""
    values = [value(part, where) for part in parts]
    if kind == "sum":
        result = functools.reduce(add, values)
    elif kind == "product":
        result = functools.reduce(lambda x, y: x * y, values)
    elif kind == "power":
        result = power(*values)
    else:
        result = call(function, values)
    if result != 0 and abs(mp.mag(result)) > 3.33 * MAX_EXPONENT:
        raise TooLarge("a value beyond any answer")
    return chop(result)


def add(x, y):
    """x + y; exactly zero where the two cancel as far as digits are compared."""
    total = x + y
    return total * 0 if abs(total) < arithmetic().mpf(10) ** -(AGREE + 5) * abs(x) else total


def chop(x):
    """A complex value whose imaginary part is rounding is real."""
    small = arithmetic().mpf(10) ** -(AGREE + 5)
    return x.real if x.imag != 0 and abs(x.imag) < small * abs(x.real) else x


def power(base, exponent):
    mp = arithmetic()
    if base == 0:
        if exponent.real <= 0:
            raise ZeroDivisionError
        return base
    if abs(exponent) * (abs(mp.mag(base)) + 1) > 3.33 * MAX_EXPONENT and base not in (1, -1):
        raise TooLarge("a tower of powers")
    odd_root = 1 / exponent if exponent.imag == 0 and exponent != 0 else mp.mpf(0)
    if base.imag == 0 and base.real < 0 and mp.nint(odd_root.real) % 2 == 1 and close(odd_root, mp.nint(odd_root.real)):
        return -((-base) ** exponent)  # the real cube root of -8 is -2
    return base**exponent


def call(function: str, values: list):
    mp = arithmetic()
    x = values[0]
    if abs(x) > 10**6 and function not in ("abs", "ln", "floor", "ceil", "max", "min", "arctan"):
        raise TooLarge(function)
    if function in ("factorial", "binomial"):
        if any(v.imag != 0 for v in values):
            raise ValueError(function)
        return mp.factorial(x) if function == "factorial" else mp.binomial(*values)
    if function in ("gcd", "lcm"):
        if any(v.imag != 0 or v != mp.nint(v) or abs(v) > 10**50 for v in values):
            raise ValueError(function)
        return mp.mpf((math.gcd if function == "gcd" else math.lcm)(*(int(v) for v in values)))
    if function in ("max", "min", "floor", "ceil"):
        if any(v.imag != 0 for v in values):
            raise ValueError(function)
        real = [v.real for v in values]
        return {"max": max, "min": min}[function](real) if function[0] == "m" else getattr(mp, function)(real[0])
    if function == "ln" and x == 0:
        raise ValueError(function)
    result = {
        "abs": abs, "ln": mp.ln, "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec,
        "csc": mp.csc, "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot, "arcsec": mp.asec,
        "arccsc": mp.acsc, "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "coth": mp.coth,
    }.get(function)  # fmt: skip
    if result is None:
        raise Unreadable(function)
    return round_zero(result(x)) if function in ("sin", "cos", "tan", "cot") else result(x)


def round_zero(x):
    """sin(pi) is zero, not the rounding of pi."""
    return x * 0 if abs(x) < arithmetic().mpf(10) ** -(AGREE + 5) else x
