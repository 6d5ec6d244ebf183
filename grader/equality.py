"""equality.py: whether two written answers are equal, by kind of answer:

numbers       Exactly the same rational: 1/2 = 0.5 = \\frac{2}{4}, 033 = 33 = 33.0, 1,234 = 1{,}234 = 1\\,234,
              4.5e33 = 4.5 \\times 10^{33}, 3\\frac12 = 7/2, 0.\\overline{3} = 1/3. No tolerance of any sort.
approximate   A decimal equals a value that no decimal writes out (1/3, \\sqrt2, \\pi) if it is its rounding to six
              significant digits or more. Of `a \\approx b` in a response a counts; in a reference, either does.
formulas      The same value at every point (latex.py). Letters are unknowns, case matters, each is its own.
percent       A reference of 50\\% takes 50\\%, 50, 0.5 and 1/2. A percent sign that the reference lacks divides
              by 100.
units         Left out on either side they do not count; on both sides they must be the same, without conversion.
              Only words and roman letters are units: in 5t, 2ab, 7c the letters are unknowns. Dollars and degrees
              are units too.
lists         As many members, each equal to another, in any order. Commas, semicolons, "and", "or", the braces of a
              set and \\pm make lists; the members of a union of sets are those of its parts. Where members differ in
              name or unit and some lack it, the order counts: x=1, y=2 is 1, 2 and (x,y)=(1,2) but not 2, 1.
tuples        The same brackets and length, and the same order: (0,1), [0,1), (1,0) and 01 all differ. Around one
              tuple or list parentheses may be missing, or added. A set is no tuple.
intervals     As tuples: both ends and both brackets. x > 3 and 2 \\le x < 5 equal their intervals. Sets of reals with
              \\cup, \\cap, \\setminus or x \\ne 1 are equal if they have the same members.
equations     `name = value` equals the value, or the same name with that value; x = 5 is not y = 5. A chain counts
              as its last value, if it holds. Other equations may differ by a constant factor (y = 2x+1 is
              2x-y+1 = 0), and one side of them is not the equation. Inequalities are equal side by side, read in
              either direction.
matrices      The same shape, entry by entry. Ratios and residues: part by part. Numerals with a base: as written.
times         Hours and minutes as a ratio, a.m. and p.m. as units, however they are written.
text          The same words, whatever their case, font and punctuation; no synonyms, no part of the words. Three
              letters or more that stand together and are a whole answer, member or side are a word, whose order counts:
              dog is not god, nor abc cab (an order may be the answer). abc is a \\cdot b \\cdot c. Two letters, and
              letters in a formula (2abc, abc+1), are a product: xy is yx.
choices       A reference that is one capital letter takes that letter, in parentheses or before the text of its
              option: (C) 12, C: the median. Two letters are none.

A full stop or comma at the end, math delimiters, fonts, spacing and sizes do not count. Nothing equals an empty answer.
In doubt two answers differ, because training would exploit a wrong accept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from grader.latex import (
    CLOSERS,
    OPENERS,
    TooLarge,
    Unreadable,
    apart,
    close,
    constant_ratio,
    depth,
    exact,
    is_number,
    is_run,
    literal,
    names,
    parse,
    reduced,
    same_value,
    tokens,
    uses_i,
    value,
    vocabulary,
)

Algebra = Callable[[str, str], bool]
Tokens = list[str]

MAX_PAIRED = 50  # members of a list that are compared by value; more must be spelled alike

RELATIONS = {"=", "<", ">", "\\le", "\\ge", "\\ne", "\\approx", "\\in", "\\equiv", "\\sim"}
MIRRORED = {">": "<", "\\ge": "\\le"}
NOT_IN_NAMES = RELATIONS | {"+", "-", "*", "^", "!", "%", "\\sqrt", "\\pi", "\\infty", "\\pm", "\\pmod"}
FOR_ALGEBRA = {"\\begin:matrix", "\\sum", "\\prod", "\\int", "\\lim", "\\setminus", "\\cap", "\\det"}
CURRENCY = {"$", "€", "£", "¥"}
UNIT_NAMES = {
    "degree": "°", "degrees": "°", "deg": "°", "percent": "%", "per cent": "%", "percentage": "%",
    "dollar": "$", "dollars": "$", "hour": "h", "hours": "h", "hr": "h", "hrs": "h", "minute": "min", "minutes": "min",
    "mins": "min", "second": "s", "seconds": "s", "sec": "s", "secs": "s", "meter": "m", "meters": "m", "metre": "m",
    "metres": "m", "centimeter": "cm", "centimeters": "cm", "centimetres": "cm", "kilometers": "km", "kilometres": "km",
    "gram": "g", "grams": "g", "kilogram": "kg", "kilograms": "kg", "inch": "in", "inches": "in", "foot": "ft",
    "feet": "ft", "miles per hour": "mph", "usd": "$", "euros": "€", "euro": "€",
}  # fmt: skip
ANNOUNCEMENT = r'"?(the )?(final )?answer( is)?:?'
NO_UNIT = vocabulary(
    "not no wrong or and is are if than least most less more about between of answer except either the "
    "approximately maybe perhaps probably possibly"
)
CHOICE = re.compile(r"(?:[Oo]ption |[Cc]hoice )?\(?\s?([A-Z])\s?(?:\)|(?=$|[:.]))[:.)]?\s*(.*)", re.DOTALL)


def compare(given: str, reference: str, algebra: Algebra | None = None) -> bool | None:
    """Whether a given answer equals the reference answer; None if only algebra can tell and none is passed in."""
    try:
        readings = [read(text) for text in (given, reference)]
    except Unreadable:  # too long or too deep
        plain = ["".join(text.split()) for text in (given, reference)]
        return plain[0] == plain[1] != ""
    try:
        return any_of(same(left, right, algebra) for left in readings[0] for right in readings[1])
    except RecursionError:  # thousands of nested factorials or roots
        return False


def read(text: str) -> list[Tokens]:
    """The possible readings of an answer: as written and, where commas may group thousands, as that number."""
    text = re.sub(r"^\s{0,9}(the )?(final )?answer is:?\s", " ", text, flags=re.IGNORECASE)
    readings = [strip(tokens(text))]
    if not any(bracket in text for bracket in "([") and re.search(r"(?<!\d)[1-9]\d{0,2}(,\d{3})+(?!\d)", text):
        fused = re.sub(r"(?<!\d)[1-9]\d{0,2}(,\d{3})+(?!\d)", lambda number: number.group().replace(",", ""), text)
        readings.append(strip(tokens(fused)))
    return readings


def strip(found: Tokens) -> Tokens:
    """The answer without what surrounds it: full stops, braces, "the answer is"."""
    while found:
        if found[-1] in (".", ",", ";", ":", "\\\\"):
            found = found[:-1]
        elif found[0] in (".", ",", ":", "=", "\\approx") or re.fullmatch(ANNOUNCEMENT, found[0].lower()):
            found = found[1:]
        elif is_number(found[-1]) and found[-1].endswith("."):
            found = [*found[:-1], found[-1].removesuffix(".")]
        elif found[0] == "{" and found[-1] == "}" and enclosed(found):
            found = found[1:-1]
        elif found[-1][0] == '"' and found[-1].endswith((".", ",")) and len(found[-1]) > 2:
            found = [*found[:-1], found[-1][:-1]]
        elif found[0] in ("(", "[") and found[1:2] == ["\\begin:matrix"] and found[-2] == "\\end:matrix":
            found = found[1:-1]
        else:
            break
    return found


def enclosed(found: Tokens) -> bool:
    """Whether the first and the last token are the brackets of one group around everything."""
    if len(found) < 2 or found[0] not in OPENERS or found[-1] not in CLOSERS:
        return False
    level = 0
    for position, token in enumerate(found):
        level += (token in OPENERS) - (token in CLOSERS)
        if level == 0:
            return position == len(found) - 1
    return False


def split(found: Tokens, *separators: str) -> list[Tokens]:
    """The parts between separators that are in no group."""
    parts: list[Tokens] = [[]]
    level = 0
    for token in found:
        level += (token in OPENERS or token.startswith("\\begin:")) - (token in CLOSERS or token.startswith("\\end:"))
        if level == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def spelled(found: Tokens) -> str:
    """One spelling for answers that differ only in braces around single tokens and in \\text."""
    kept: Tokens = []
    for token in found:
        if token == "}" and len(kept) > 1 and kept[-2] == "{":
            kept[-2:] = kept[-1:]
        else:
            kept.append(" ".join(token[1:]) if token[0] == '"' else token)
    return " ".join(kept)


# 1. Kind by kind


def same(given: Tokens, reference: Tokens, algebra: Algebra | None) -> bool | None:
    """Whether two answers are equal: the first kind that either of them is decides."""
    if not given or not reference:
        return False
    if spelled(given) == spelled(reference):
        return True
    if is_choice(reference):
        return chosen(given) == chosen(reference)
    if is_text(given) or is_text(reference):
        return same_words(given, reference)
    if depth(given) < 0 or depth(reference) < 0:
        return False
    kinds = (same_sets, same_lists, same_approximations, same_chains, same_tuples, same_matrices, same_ratios)
    for kind in kinds:
        verdict = kind(given, reference, algebra)
        if verdict is not NotThisKind:
            return verdict
    if is_word(given) or is_word(reference):
        return same_words(given, reference)
    return same_quantities(given, reference, algebra)


class NotThisKind:
    """What a comparison returns if neither answer is of its kind."""


def is_choice(found: Tokens) -> bool:
    word = "".join(found).replace('"', "")
    return bool(re.fullmatch(r"\([A-Z]\)|[A-Z]", word)) and (word[0] == "(" or found[0][0] == '"' or word in "ABCDEFGH")


def chosen(found: Tokens) -> str | None:
    """The letter of the option that is named, if exactly one is."""
    match = CHOICE.fullmatch(" ".join(token.lstrip('"') for token in found).replace("( ", "(").replace(" )", ")"))
    if not match or re.search(r"\b(or|and|not)\b|\b[A-H]\b\s*$|^,|\([A-H]\)", match[2]):
        return None
    return match[1]


def is_text(found: Tokens) -> bool:
    words = [token for token in found if token[0] == '"']
    return bool(words) and set(found) - set(words) <= {".", ",", "-", "'", "(", ")", "!", "?"}


def is_word(found: Tokens) -> bool:
    """Whether it is letters alone, three or more of them together: dog, my cat, abc."""
    return any(map(is_run, found)) and all(token.isalpha() or token in "(){}.'!?" for token in found)


def same_words(given: Tokens, reference: Tokens) -> bool:
    """The same words in the same order. Case counts if both are letters that could be a product."""
    left, right = plain_words(given), plain_words(reference)
    if any(token[0] == '"' for token in (*given, *reference)):
        return left.casefold() == right.casefold()
    return left == right


def plain_words(found: Tokens) -> str:
    text = "".join(token if len(token) == 1 else f" {token.lstrip(chr(34))} " for token in found if token not in "*{}")
    return " ".join(re.findall(r"\w+|-", text))


def same_approximations(given: Tokens, reference: Tokens, algebra: Algebra | None):
    """`a \\approx b` is a, or b where a is a name; of a reference either will do."""
    left, right = split(given, "\\approx"), split(reference, "\\approx")
    if len(left) == len(right) == 1:
        return NotThisKind
    value = left[0] if len(left) == 1 or not is_name(left[0]) else left[1]
    return any_of(same(strip(value), strip(part), algebra) for part in right if part)


def any_of(verdicts) -> bool | None:
    result: bool | None = False
    for verdict in verdicts:
        if verdict:
            return True
        result = None if verdict is None else result
    return result


def all_of(verdicts) -> bool | None:
    result: bool | None = True
    for verdict in verdicts:
        if verdict is False:
            return False
        result = None if verdict is None else result
    return result


# 2. Lists, sets, tuples, intervals, matrices, ratios


def members(found: Tokens) -> list[Tokens]:
    """The members of a list, a set or a union; an answer that is none of these is its own only member."""
    found = strip(found)
    if not found:
        return []
    parts = split(found, "\\cup")
    if len(parts) > 1:
        return [member for part in parts for member in (members(part) if part[:1] == ["\\{"] else [strip(part)])]
    parts = [part for part in map(strip, split(found, ",", ";")) if part]
    if len(parts) > 1:
        (name, *value), *others = (split(part, "=", "\\in") for part in parts)
        if len(value) == 1 and is_name(name) and all(len(other) == 1 for other in others):
            parts[1:] = [[*name, "=", *part] for part in parts[1:]]  # n = 2, 3, 4
        return [member for part in parts for member in signs(part)]
    name, *value = split(found, "=", "\\in")
    if len(value) == 1 and enclosed(name) and enclosed(value[0]) and name[0] == value[0][0] == "(":  # (x,y) = (1,2)
        left, right = split(name[1:-1], ","), split(value[0][1:-1], ",")
        if len(left) == len(right) > 1 and all(map(is_name, left)):
            return [[*a, "=", *b] for a, b in zip(left, right, strict=True)]
    if len(value) == 1 and is_name(name) and is_list(strip(value[0])):
        return [[*name, "=", *member] for member in members(value[0])]
    if found[0] == "\\{" and enclosed(found):
        inside = strip(found[1:-1])
        return [inside] if enclosed(inside) and inside[0] == "\\{" or inside == ["\\emptyset"] else members(inside)
    return [] if found == ["\\emptyset"] else signs(found)


def region(found: Tokens) -> tuple[list, Callable]:
    """(ends, whether it contains a number) of a set of reals: intervals, finite sets, x \\ne 1, and \\cup, \\cap and
    \\setminus of them. Raises Unreadable for any other set."""
    found = strip(found)
    sides, relations = chain(found)
    if relations == ["\\in"] and is_name(sides[0]):
        return region(sides[1])
    if relations == ["\\ne"] and is_name(sides[0]):
        return region([*REALS, "\\setminus", "\\{", *sides[1], "\\}"])
    operator = next((operator for operator in SET_OPERATIONS if len(split(found, operator)) > 1), None)
    if not found or operator == "\\setminus" and len(split(found, "\\cup", "\\cap")) > 1:
        raise Unreadable("nothing, or A \\cup B \\setminus C")
    if operator:
        regions, holds = [region(part) for part in split(found, operator)], SET_OPERATIONS[operator]
        return sum((ends for ends, _ in regions), []), lambda x: holds([inside(x) for _, inside in regions])
    if found == ["\\emptyset"] or found[:1] == ["\\{"] and enclosed(found):
        points = [real(member) for member in members(found)]
        return points, lambda x: any(close(x, point) for point in points)
    if enclosed(found) and found[0] in "([{" and not brackets(found):
        return region(found[1:-1])
    opener, closer, ends = brackets(found) or ("", "", [])
    if len(ends) != 2:
        raise Unreadable("no set")
    low, high = map(real, ends)
    finite = [end for end in (low, high) if abs(end) < float("inf")]

    def inside(x) -> bool:
        edge = [bracket for bracket, end in ((opener, low), (closer, high)) if end in finite and close(x, end)]
        return "(" not in edge and ")" not in edge if edge else low < x < high

    return finite, inside


REALS = ["\\mathbb", "{", "R", "}"]
INFINITE = (["\\infty"], ["+", "\\infty"], ["-", "\\infty"])
SET_OPERATIONS = {"\\setminus": lambda v: v[0] and not any(v[1:]), "\\cup": any, "\\cap": all}


def real(found: Tokens):
    """The value of an end of an interval, a point of a set."""
    found = strip(found)
    if found in INFINITE:
        return float("-inf" if found[0] == "-" else "inf")
    tree = parse(found)
    number = None if names(tree) else value(tree, {})
    if number is None or number.imag != 0:
        raise Unreadable("no real number")
    return number.real


def same_sets(given: Tokens, reference: Tokens, algebra: Algebra | None):
    """Sets of reals with \\cup, \\cap or \\setminus are equal if they agree at all ends, between them and beyond."""
    if not {*SET_OPERATIONS, "\\ne"} & {*given, *reference}:
        return NotThisKind
    try:
        (ends, left), (more, right) = region(given), region(reference)
    except (ValueError, ZeroDivisionError):  # Unreadable too
        return NotThisKind
    if len(ends) + len(more) > MAX_PAIRED:
        return NotThisKind
    if len({name_of(found) for found in (given, reference)} - {""}) > 1:
        return False
    ends = sorted(ends + more) or [0]
    points = [ends[0] - 1, *ends, *((a + b) / 2 for a, b in zip(ends, ends[1:], strict=False)), ends[-1] + 1]
    return all(left(point) == right(point) for point in points)


def signs(found: Tokens) -> list[Tokens]:
    """Both values of an answer with \\pm."""
    if not {"\\pm", "\\mp"} & set(found):
        return [found]
    upper, lower = {"\\pm": "+", "\\mp": "-"}, {"\\pm": "-", "\\mp": "+"}
    return [[choice.get(token, token) for token in found] for choice in (upper, lower)]


def is_list(found: Tokens) -> bool:
    return len(members(found)) != 1 or found[:1] == ["\\{"] or "\\cup" in found


def same_lists(given: Tokens, reference: Tokens, algebra: Algebra | None):
    if not is_list(given) and not is_list(reference):
        return NotThisKind
    left, right = members(given), members(reference)
    if len(left) == 1 and len(right) > 1 and given[0] == "(" and enclosed(given) and reference[0] != "\\{":
        return ordered(split(given[1:-1], ",", ";"), right, algebra)  # parentheses around a list
    if len(right) == 1 and len(left) > 1 and reference[0] == "(" and enclosed(reference) and given[0] != "\\{":
        return ordered(left, split(reference[1:-1], ",", ";"), algebra)
    if len(left) != len(right) or not all([*left, *right]):
        return False
    if len(left) == 1 and "\\{" in (left[0][0], right[0][0]) and left[0][0] != right[0][0]:
        return False  # a set is not its member, nor a set of sets a set
    return (matched if any_order(left, right) else ordered)(left, right, algebra)


def any_order(left: list[Tokens], right: list[Tokens]) -> bool:
    """Whether the members of two lists may pair in any order. Not if members differ in their names, or units, and some
    lack one: x=1, y=2 is 1, 2 but not 2, 1."""
    named = [{name_of(member) for member in side} for side in (left, right)]
    units = [{quantity(member)[1] for member in side} for side in (left, right)]
    if "" in named[0] & named[1] and len(named[0]) > 1 and len(named[1]) > 1:
        return False
    return not any("" in a | b and (len(a - {""}) > 1 or len(b - {""}) > 1) for a, b in (named, units))


def name_of(member: Tokens) -> str:
    """The name in `name = value`; "" without one."""
    sides, relations = chain(member)
    return next((spelled(side) for side in sides if is_name(side, sums=True)), "") if relations else ""


def matched(left: list[Tokens], right: list[Tokens], algebra: Algebra | None) -> bool | None:
    """Whether the members pair off. Equal spellings pair first. The others take any equal member, because equality is
    transitive."""
    rest = {position: spelled(member) for position, member in enumerate(right)}
    unmatched = []
    for member in left:
        spelling = spelled(member)
        found = next((position for position, other in rest.items() if other == spelling), None)
        if found is None:
            unmatched.append(member)
        else:
            del rest[found]
    if len(unmatched) > MAX_PAIRED:
        return False
    undecided = False
    for member in unmatched:
        verdicts = {}
        for position in rest:
            verdicts[position] = same(member, right[position], algebra)
            if verdicts[position]:
                del rest[position]
                break
        else:
            if None not in verdicts.values():
                return False
            undecided = True
    return None if undecided else True


def ordered(left: list[Tokens], right: list[Tokens], algebra: Algebra | None) -> bool | None:
    if len(left) != len(right):
        return False
    return all_of(same(strip(a), strip(b), algebra) for a, b in zip(left, right, strict=True))


def brackets(found: Tokens) -> tuple[str, str, list[Tokens]] | None:
    """(opener, closer, members) of a tuple or an interval."""
    if found == REALS:
        return "(", ")", [["-", "\\infty"], ["\\infty"]]
    opener, closer = found[0], found[-1]
    opener, closer = {"\\langle": "("}.get(opener, opener), {"\\rangle": ")"}.get(closer, closer)
    if opener in "([" and closer in ")]" and enclosed(found):
        parts = split(found[1:-1], ",", ";")
        return (opener, closer, parts) if len(parts) > 1 else None
    return None


def same_tuples(given: Tokens, reference: Tokens, algebra: Algebra | None):
    left, right = brackets(given), brackets(reference)
    if left is None and right is None:
        return NotThisKind
    if left is None or right is None or left[:2] != right[:2]:
        return False
    return ordered(left[2], right[2], algebra)


def interval(found: Tokens) -> tuple[str, Tokens] | None:
    """(name, interval) that an inequality in one name describes, or that a name lies in."""
    sides, relations = chain(found)
    if relations == ["\\in"] and is_name(sides[0]):
        return spelled(sides[0]), sides[1]
    if not relations or not set(relations) <= {"<", "\\le"}:
        return None
    if len(sides) == 2 and is_name(sides[0]):
        sides, relations = [["-", "\\infty"], *sides], ["<", *relations]
    elif len(sides) == 2 and is_name(sides[1]):
        sides, relations = [*sides, ["\\infty"]], [*relations, "<"]
    if len(sides) != 3 or not is_name(sides[1]):
        return None
    low, high = "[" if relations[0] == "\\le" else "(", "]" if relations[1] == "\\le" else ")"
    return spelled(sides[1]), [low, *sides[0], ",", *sides[2], high]


def same_matrices(given: Tokens, reference: Tokens, algebra: Algebra | None):
    tables = [entries(found) for found in (given, reference)]
    if tables == [None, None]:
        return NotThisKind
    if None in tables:  # a matrix against a product or a sum of matrices, or against something else
        return "\\begin:matrix" in given and "\\begin:matrix" in reference and by_algebra(given, reference, algebra)
    if [len(row) for row in tables[0]] != [len(row) for row in tables[1]]:
        return False
    left, right = ([entry for row in table for entry in row] for table in tables)
    return ordered(left, right, algebra)


def entries(found: Tokens) -> list[list[Tokens]] | None:
    if found[0] != "\\begin:matrix" or found[-1] != "\\end:matrix":
        return None
    rows = [row for row in split(found[1:-1], "\\\\") if row]
    return [split(row, "&") for row in rows]


def same_ratios(given: Tokens, reference: Tokens, algebra: Algebra | None):
    left, right = split(given, ":", "\\pmod"), split(reference, ":", "\\pmod")
    if len(left) == len(right) == 1:
        return NotThisKind
    if any(re.match(r"0\d", part[0]) and part[1][0] != '"' for part in left + right if len(part) > 1):
        return False  # 3:00 xyz: not zero times xyz
    return ordered(left, right, algebra)


# 3. Equations and inequalities


def chain(found: Tokens) -> tuple[list[Tokens], list[str]]:
    """Sides and relations of `a < b = c`, with > turned round so that only < and \\le remain."""
    sides: list[Tokens] = [[]]
    relations = []
    level = 0
    for token in found:
        level += (token in OPENERS) - (token in CLOSERS)
        if level == 0 and token in RELATIONS:
            relations.append(token)
            sides.append([])
        else:
            sides[-1].append(token)
    if (
        relations
        and set(relations) <= set(MIRRORED) | {"="}
        and (
            set(relations) & set(MIRRORED) or is_name(sides[-1]) and not is_name(sides[0], sums=True)  # 5 = x is x = 5
        )
    ):
        sides.reverse()
        relations = [MIRRORED.get(relation, relation) for relation in reversed(relations)]
    return [strip(side) for side in sides], relations


def is_name(found: Tokens, sums: bool = False) -> bool:
    """Whether it only names something: x, x_1, AB, f(2), \\angle ABC, \\frac{AB}{CD}, V_1:V_2 (with sums also m+n)."""
    position, letters = 0, 0
    while position < len(found):
        token = found[position]
        if token == "_" or (token == "(" and position):
            position = argument_end(found, position + (token == "_"))
            continue
        if is_number(token) or token in NOT_IN_NAMES - ({"+", "-"} if sums and position else set()):
            return False
        letters += token.isalpha() or token[0] in '"\\'
        position += 1
    return letters > 0


def argument_end(found: Tokens, start: int) -> int:
    """The position after the token or the group that begins at start."""
    level = 0
    for position in range(start, len(found)):
        level += (found[position] in OPENERS) - (found[position] in CLOSERS)
        if level <= 0:
            return position + 1
    return len(found)


def same_chains(given: Tokens, reference: Tokens, algebra: Algebra | None):
    (left, between), (right, wanted) = chain(given), chain(reference)
    if not between and not wanted:
        return NotThisKind
    if not all(left) or not all(right):
        return False
    equals = {"=", "\\in", "\\equiv"}
    if not wanted and brackets(reference) and (described := interval(given)):
        return same_tuples(described[1], reference, algebra)
    if not between and brackets(given) and (described := interval(reference)):
        return same_tuples(given, described[1], algebra)
    if not wanted:
        if not set(between) <= equals or not is_name(left[0], sums=True) and not same(left[0], left[-1], algebra):
            return False
        holds = all_of(is_name(side) or same(side, left[-1], algebra) for side in left[1:-1])
        return all_of([same(left[-1], reference, algebra), holds])
    if not between:
        if set(wanted) <= equals and all(is_name(side) for side in right[:-1]):
            return same(given, right[-1], algebra)
        return False
    if between == wanted == ["="] and is_name(left[0]) and spelled(left[0]) == spelled(right[0]):
        return same(left[1], right[1], algebra)
    if between != wanted and (described := interval(given)) and (expected := interval(reference)):
        return described[0] == expected[0] and same(described[1], expected[1], algebra)
    if between == wanted and len(left) == len(right):
        sidewise = all_of(same(a, b, algebra) for a, b in zip(left, right, strict=True))
        if sidewise is not False:
            return sidewise
    if between == wanted == ["\\ne"] or between == wanted == ["="]:
        return proportional(left, right, signed=False)
    if between == wanted and len(between) == 1:
        return proportional(left, right, signed=True)
    return False


def proportional(left: list[Tokens], right: list[Tokens], signed: bool) -> bool:
    """Whether left[0] - left[1] is a constant times right[0] - right[1] (signed: a positive constant)."""
    texts = [sorted(plain_words(side) for side in sides if is_text(side) or is_word(side)) for sides in (left, right)]
    if all(texts) and texts[0] != texts[1]:
        return False
    try:
        a, b = (("sum", parse(x), ("product", ("number", Fraction(-1)), parse(y))) for x, y in (left, right))
        return constant_ratio(a, b, signed)
    except Unreadable:
        return False


# 4. Quantities: a value and perhaps a unit


def same_quantities(given: Tokens, reference: Tokens, algebra: Algebra | None) -> bool | None:
    (left, unit), (right, wanted) = quantity(given), quantity(reference)
    if unit and wanted:
        return unit == wanted and same_values(left, right, algebra)
    if wanted == "%":
        return any_of([same_values(left, right, algebra), same_values(left, [*right, "%"], algebra)])
    if unit == "%":
        return same_values([*left, "%"], right, algebra)
    return same_values(left, right, algebra)


def quantity(found: Tokens) -> tuple[Tokens, str]:
    """(value, unit) of an answer; the unit is "" if there is none that can be told from an unknown."""
    bare = [token for token in found if token not in CURRENCY]
    if len(bare) < len(found):
        return bare, "$" if "$" in found else next(token for token in found if token in CURRENCY)
    if found[-1] in ("%", "°", "'") and len(found) > 1:
        return (found[:-1], found[-1]) if found[-1] != "'" or is_number(found[-2]) else (found, "")
    start = next((position for position, token in enumerate(found) if token[0] == '"'), 0)
    tail = found[start:]
    if not start or any(
        token[0] != '"' and token not in ("/", "^", "{", "}", "-", "*", ".") and not token.isdecimal() for token in tail
    ):
        return found, ""
    unit = " ".join(token.lstrip('"').strip() for token in tail if token not in "{}.").strip(" .")
    words = re.findall(r"[a-z]+", unit.lower())
    if len(words) > 5 or NO_UNIT & set(words) or re.search(r"\d{2}", unit):
        return found, ""
    return found[:start], unit_name(unit)


def unit_name(unit: str) -> str:
    """One name for the spellings of a unit: square centimeters, sq. cm, cm^2, cm ^ 2."""
    unit = re.sub(r"\s*([/^*-])\s*", r"\1", unit.translate(str.maketrans("", "", "{}")))
    power = ""
    for word, exponent in (("square ", "^2"), ("sq. ", "^2"), ("sq ", "^2"), ("cubic ", "^3"), ("cu ", "^3")):
        if unit.lower().startswith(word):
            unit, power = unit[len(word) :], exponent
    parts = re.split(r"([/*^ ])", unit + power)
    return UNIT_NAMES.get(unit.lower() + power) or "".join(
        UNIT_NAMES.get(part.lower(), part.removesuffix("s") if len(part) > 3 else part) for part in parts
    )


def same_values(given: Tokens, reference: Tokens, algebra: Algebra | None) -> bool | None:
    infinite = [found in INFINITE for found in (given, reference)]
    if any(infinite):
        return all(infinite) and given.count("-") == reference.count("-")
    left = right = None
    try:
        left, right = parse(given), parse(reference)
        a, b = exact(left), exact(right)
        equal = a == b if a is not None and b is not None else same_value(left, right)
        return equal or rounds(given, right, b) or rounds(reference, left, a)
    except TooLarge:
        return left is not None and reduced(left) == reduced(right)
    except Unreadable:
        return by_algebra(given, reference, algebra)


def rounds(found: Tokens, tree: tuple, rational: Fraction | None) -> bool:
    """Whether a decimal of six significant digits or more is the rounding of a value that no decimal writes out."""
    *sign, token = found
    if sign not in ([], ["-"]) or not re.fullmatch(r"\d*\.\d+", token) or len(token.replace(".", "").lstrip("0")) < 6:
        return False
    if rational is None:
        if names(tree) or uses_i(tree):
            return False
        near = value(tree, {})
        if near.imag != 0:
            return False
    else:
        denominator = rational.denominator
        while denominator % 10 in (0, 2, 4, 5, 6, 8):
            denominator //= 5 if denominator % 5 == 0 else 2
        if denominator == 1:
            return False
        near = rational
    decimals = 10 ** len(token.partition(".")[2])
    return abs(near * decimals - int(literal(token) * decimals) * (-1 if sign else 1)) <= 0.5


def by_algebra(given: Tokens, reference: Tokens, algebra: Algebra | None) -> bool | None:
    """The algebra's verdict on formulas that latex.py cannot read, if one has a construct of FOR_ALGEBRA. It knows no
    words and does not tell x from X, so those are unequal."""
    letters = {token for token in (*given, *reference) if token.isalpha()}
    words = any(token[0] == '"' for token in (*given, *reference))
    if words or not FOR_ALGEBRA & {*given, *reference} or len({letter.lower() for letter in letters}) < len(letters):
        return False
    texts = [re.sub(r":(\w+)", r"{p\1}", " ".join(apart(found))) for found in (given, reference)]
    return algebra(*texts) if algebra else None
