"""problems.py: where queries and their reference answers come from.

    load("data/tiny/train.jsonl")                        one JSON object a line: {"uid", "problem", "answer"}
    load("problems.json")                                one JSON array of such objects
    load("train.parquet")                                columns of these names, or the form that verl uses
    load("agentica-org/DeepScaleR-Preview-Dataset")      a hub data set, through the `datasets` package
    load("owner/name:subset", split="test")              one subset of a hub data set

Every row goes through `to_problem`, which is strict: a mistake in the data costs one line here and days in
a run. The first one raises a UserError that names file and line. Whether an answer can be *parsed* is the
question of verify.py, not of this file.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

from runtime.errors import UserError, nearest

EXTENSIONS = (".jsonl", ".json", ".parquet")
MAX_LINE_BYTES = 1_000_000
HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<subset>[\w.-]+))?")

# What widely used sets wrap around a problem; the prompt of a run says it already, and in its own words.
INSTRUCTIONS = re.compile(
    r"^\s*Solve the following math problem step by step\. The last line of your response should be of the "
    r"form Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s*"
    r"|\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$"
    r"|\s*(Let's think|Please reason) step by step,? and (output the|put your) final answer within "
    r"\\boxed\{\}\.\s*$"
)


class EmptyField(UserError):
    """A row without problem text or without answer: there is nothing to train on."""


@dataclass(frozen=True)
class Problem:
    """A query with its reference answer (a list: any of them is right) and the place it was read from."""

    uid: str
    problem: str
    answer: str | list[str]
    where: str  # "train.jsonl:17": lines count from 1, and so do the rows of a parquet file or a hub data set


def load(
    source: str | Path,
    *,
    split: str = "train",
    problem_field: str = "problem",
    answer_field: str = "answer",
    uid_field: str = "uid",
    limit: int | None = None,
) -> list[Problem]:
    """The first `limit` problems of `source` (all by default), in its order.

    Fields may be dotted paths into a row (`reward_model.ground_truth`). A number as answer becomes a string.
    A row without uid gets `STEM-ROW`, rows counted from 0: stable as long as the file keeps its order. A row
    in verl's form (`prompt` a list of messages, `reward_model.ground_truth`) is recognised where
    `problem_field` is absent; its uid is `DATA_SOURCE-INDEX`. `split` matters for hub data sets alone.

    Raises UserError at the first mistake. In parquet files and hub data sets, which a user cannot edit, rows
    with an empty problem or answer are left out instead, and a warning on stderr counts them.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit of {source}: found {limit}, allowed: 1 or more, or none for all")
    fields = (problem_field, answer_field, uid_field)
    name, rows = read(str(source), split)
    editable = name.endswith((".jsonl", ".json"))
    problems: list[Problem] = []
    empty: list[str] = []  # where
    for number, (line, row) in enumerate(rows):
        where = f"{name}:{line}"
        try:
            problem = to_problem(row, where, f"{Path(name).stem}-{number}", *fields)
        except EmptyField:
            if editable:
                raise
            empty.append(where)
            continue
        problems.append(problem)
        if len(problems) == limit:
            break
    if not problems:
        raise UserError(f"{name}: found no problem in it, allowed: at least one")
    check_uids(problems)
    if empty:
        rows_left_out = f"left out {len(empty)} without problem or answer: {_few(empty)}"
        print(f"warning: {name}: {rows_left_out}", file=sys.stderr)
    return problems


def check_uids(problems: Iterable[Problem]) -> None:
    """Raises UserError for a uid that two problems share: the replay buffer would mix their samples."""
    first: dict[str, Problem] = {}
    for problem in problems:
        if first.setdefault(problem.uid, problem) is not problem:
            earlier = first[problem.uid].where
            raise UserError(f"{problem.where}: duplicate uid {problem.uid!r}, first at {earlier}; rename one")


def conflicts(problems: Iterable[Problem]) -> list[list[Problem]]:
    """Groups of problems with the same text (white space aside) but other answers: one is wrong."""
    same_text: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        same_text[" ".join(problem.problem.split())].append(problem)
    return [group for group in same_text.values() if len({frozenset(listed(p.answer)) for p in group}) > 1]


# --- Sources -----------------------------------------------------------------------------------------------


def read(source: str, split: str = "train") -> tuple[str, Iterator[tuple[int, Any]]]:
    """The name that messages use for `source`, and its rows as (line or row number from 1, row)."""
    path = Path(source)
    hub = HUB_NAME.fullmatch(source)
    if hub and not path.exists() and not path.parent.is_dir() and path.suffix not in EXTENSIONS:
        return hub["repo"], hub_rows(hub["repo"], split, hub["subset"])
    _check_file(source)
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    return path.name, readers[path.suffix](path)


def _check_file(source: str) -> None:
    path = Path(source)
    if not source:
        raise UserError("data: found an empty name, allowed: a file or a hub data set owner/name")
    if path.is_dir():
        files = sorted(p.name for p in path.iterdir() if p.suffix in EXTENSIONS)
        held = _few(files) or "no data file"
        raise UserError(f"{source}: found a directory, allowed: a file; it holds {held}")
    if not path.exists():
        if path.parent.is_dir():
            hint = nearest(path.name, [p.name for p in path.parent.iterdir()])
        else:
            hint = f", its folder {str(path.parent)!r} does not exist"
        raise UserError(f"{source}: no such file{hint}; allowed: a file or a hub data set owner/name")
    if path.suffix not in EXTENSIONS:
        raise UserError(f"{source}: unknown extension {path.suffix!r}, allowed: {', '.join(EXTENSIONS)}")
    if path.stat().st_size == 0:
        raise UserError(f"{source}: the file is empty, allowed: at least one problem")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with _binary(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path.name}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"{where}: a line of more than {MAX_LINE_BYTES:,} bytes, allowed: up to that")
            text = _decode(line, path.name, number)
            if text.strip():
                yield number, _parse_line(text, where)


def _parse_line(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; a file that is one array has the extension .json" if text.lstrip().startswith("[") else ""
        raise UserError(f"{where}: bad JSON at column {error.colno}: {error.msg}{hint}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of thousands of digits
        raise UserError(f"{where}: bad JSON: {error}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with _binary(path) as file:
        text = _decode(file.read(), path.name, 1)
    try:
        array = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; a file of one object a line has the extension .jsonl" if error.msg == "Extra data" else ""
        where = f"{path.name}:{error.lineno}"
        raise UserError(f"{where}: bad JSON at column {error.colno}: {error.msg}{hint}") from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path.name}: bad JSON: {error}") from error
    if not isinstance(array, list):
        hint = "one array of objects (one object a line: extension .jsonl)"
        raise UserError(f"{path.name}: found {_kind(array)}, allowed: {hint}")
    yield from zip(_start_lines(text, len(array)), array, strict=True)


def _start_lines(text: str, count: int) -> Iterator[int]:
    """The line on which each of the `count` elements of the valid JSON array `text` starts."""
    decode, gap = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    line, seen, end = 1, 0, text.index("[") + 1
    for _ in range(count):
        start = gap.match(text, end).end()
        line, seen = line + text.count("\n", seen, start), start
        yield line
        _, end = decode(text, start)


def _binary(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _decode(data: bytes, name: str, line: int) -> str:
    """UTF-8 without its byte order mark. `line` is the number of the first line of `data`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = data.rfind(b"\n", 0, error.start) + 1
        utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        found = "a file in UTF-16" if utf16 else f"0x{data[error.start]:02x}"
        where = f"{name}:{line + data.count(10, 0, start)}"
        place = f"{where}: found {found} at byte {error.start - start + 1}"
        raise UserError(f"{place}, allowed: UTF-8") from error
    if "\0" in text:
        where = f"{name}:{line + text.count(chr(10), 0, text.index(chr(0)))}"
        raise UserError(f"{where}: found a NUL character, allowed: text in UTF-8")
    return text


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path.name}: a parquet file needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path.name}: corrupt parquet file after row {number}: {reason}") from error


def hub_rows(repo: str, split: str = "train", subset: str | None = None) -> Iterator[tuple[int, Any]]:
    """Rows of a hub data set, or of a folder that holds a copy of one, as (row number from 1, row)."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{repo}: a hub data set needs the package datasets: pip install datasets") from error
    try:
        rows = datasets.load_dataset(repo, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"hub data set {repo}, split {split!r}: {reason}") from error
    yield from enumerate(rows, 1)


# --- One row -----------------------------------------------------------------------------------------------


def to_problem(
    row: Any,
    where: str,
    default_uid: str,
    problem_field: str = "problem",
    answer_field: str = "answer",
    uid_field: str = "uid",
) -> Problem:
    """The problem in `row`. Raises EmptyField for a blank problem or answer, UserError for other mistakes."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: found {_kind(row)}, allowed: an object with the fields problem and answer")
    if _is_verl(row) and _get(row, problem_field) is None:
        problem, answer, uid = row["prompt"], row["reward_model"].get("ground_truth"), _verl_uid(row)
    else:
        problem, answer = (_required(row, field, where) for field in (problem_field, answer_field))
        uid = _get(row, uid_field) if uid_field == "uid" else _required(row, uid_field, where)
    found = Problem(
        uid=default_uid if uid is None else _uid(uid, where),
        problem=_problem_text(problem, where),
        answer=_answer_list(answer, where) if isinstance(answer, list) else _answer(answer, where),
        where=where,
    )
    for text in (found.uid, found.problem, *listed(found.answer)):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{where}: found half a surrogate pair in {text[:40]!a}, allowed: text")
    return found


def _required(row: dict, field: str, where: str) -> Any:
    value = _get(row, field)
    if value is None:
        fields = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{where}: no field {field!r}{nearest(field, row)}; this row has {fields[:200]}")
    return value


def _get(row: dict, field: str) -> Any:
    """`row[field]`, or the value at the dotted path `field`; None where it is absent."""
    if field in row:
        return row[field]
    value: Any = row
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _is_verl(row: dict) -> bool:
    return isinstance(row.get("prompt"), list) and isinstance(row.get("reward_model"), dict)


def _verl_uid(row: dict) -> str | None:
    source, index = row.get("data_source"), _get(row, "extra_info.index")
    return None if source is None or index is None else f"{source}-{index}"


def _uid(uid: Any, where: str) -> str:
    if isinstance(uid, bool) or not isinstance(uid, (str, int)) or uid == "":
        raise UserError(f"{where}: uid is {_kind(uid)}, allowed: an integer, or a string that is not empty")
    return str(uid)


def _problem_text(problem: Any, where: str) -> str:
    """The text itself, or the last user turn of a chat without the instructions around it."""
    if isinstance(problem, list):
        turns = [m.get("content") for m in problem if isinstance(m, dict) and m.get("role") == "user"]
        if not turns or not isinstance(turns[-1], str):
            raise UserError(f"{where}: problem is an array without user turn, allowed: text or messages")
        problem = INSTRUCTIONS.sub("", turns[-1])
    if not isinstance(problem, str):
        raise UserError(f"{where}: problem is {_kind(problem)}, allowed: a string")
    if not problem.strip():
        raise EmptyField(f"{where}: problem is empty, allowed: a text")
    return problem.strip()


def _answer_list(answers: list, where: str) -> list[str]:
    if not answers:
        raise EmptyField(f"{where}: answer is an empty list, allowed: a string, a number or a list of them")
    return [_answer(answer, where) for answer in answers]


def _answer(answer: Any, where: str) -> str:
    """One reference answer as a string: 27 and 27.0 are "27", 1e-7 is "0.0000001"."""
    if isinstance(answer, str) and answer.strip():
        return answer.strip()
    if isinstance(answer, float) and math.isfinite(answer):
        return str(int(answer)) if answer.is_integer() else format(Decimal(repr(answer)), "f")
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    kind = EmptyField if answer is None or isinstance(answer, str) else UserError
    raise kind(f"{where}: answer is {_kind(answer)}, allowed: a filled string, a number or a list of them")


def listed(answer: str | list[str]) -> list[str]:
    return [answer] if isinstance(answer, str) else answer


def _few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _kind(value: Any) -> str:
    """What kind of JSON value this is, in a reader's words; a number or a boolean with its value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"a boolean ({str(value).lower()})"
    if isinstance(value, (int, float)):
        return f"a number ({value})"
    if isinstance(value, str):
        return "a string" if value.strip() else "an empty string"
    return {dict: "an object", list: "an array"}.get(type(value), f"of type {type(value).__name__}")
