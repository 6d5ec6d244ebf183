"""problems.py: a file or a hub data set -> problems with their reference answers.

    load("data/tiny/train.jsonl")                        one JSON object per line: {"uid", "problem", "answer"}
    load("problems.json")                                one JSON array of such objects
    load("train.parquet")                                columns of these names, or the form that verl uses
    load("agentica-org/DeepScaleR-Preview-Dataset")      a hub data set, through the `datasets` package
    load("owner/name:subset", split="test")              one subset of a hub data set

The first mistake raises a UserError that names file and line. Left out: whether an answer can be graded (verify.py).
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
MISSING = object()  # of a field that a row does not have
HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<subset>[\w.-]+))?")

# What widely used data sets write around a problem. A run has its own prompt_suffix.
INSTRUCTIONS = re.compile(
    r"^\s*Solve the following math problem step by step\. The last line of your response should be of the "
    r"form Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s*"
    r"|\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$"
    r"|\s*(Let's think|Please reason) step by step,? and (output the|put your) final answer within "
    r"\\boxed\{\}\.\s*$"
)


class EmptyField(UserError):
    """A row whose problem or answer is empty or null: there is nothing to train on."""


@dataclass(frozen=True)
class Problem:
    """A query, its reference answer (a list: any of them is correct) and the place that it was read from."""

    uid: str
    problem: str
    answer: str | list[str]
    where: str  # "train.jsonl:17": lines count from 1, and so do rows of a parquet file or a hub data set


def load(source: str | Path, *, split: str = "train", limit: int | None = None, **fields: str) -> list[Problem]:
    """The first `limit` problems of `source` (all by default), in its order. `split`: of a hub data set.

    fields: problem_field, answer_field, uid_field; each may be a dotted path into the row. A number as answer becomes a
    string. A row without uid gets `STEM-ROW`, rows counted from 0, so uids are stable while the file keeps its order. A
    row in verl's form (`prompt` a list of messages, `reward_model.ground_truth`) is recognised where `problem_field` is
    absent or null; its uid is `DATA_SOURCE-INDEX`, unless `uid_field` is given.

    Raises UserError at the first mistake. In a parquet file or a hub data set, which a user cannot edit, rows whose
    problem or answer is empty, null or NaN are left out instead, and a warning on stderr counts them.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit of {source}: found {limit}, allowed: 1 or more, or none for all")
    name, rows = read(str(source), split)
    problems: list[Problem] = []
    empty: list[str] = []  # the place of each
    for number, (line, row) in enumerate(rows):
        where = f"{name}:{line}"
        try:
            problems.append(to_problem(row, where, f"{Path(name).stem}-{number}", **fields))
        except EmptyField:
            if name.endswith((".jsonl", ".json")):
                raise
            empty.append(where)
        if len(problems) == limit:
            break
    left_out = f"left out {len(empty)} without problem or answer: {_few(empty)}"
    if not problems:
        raise UserError(f"{name}: found no problem in it, allowed: at least one{f'; {left_out}' if empty else ''}")
    check_uids(problems)
    if empty:
        print(f"warning: {name}: {left_out}", file=sys.stderr)
    return problems


def check_uids(problems: Iterable[Problem]) -> None:
    """Raises UserError for a uid that two problems share: the replay buffer would mix their responses."""
    first: dict[str, Problem] = {}
    for problem in problems:
        if first.setdefault(problem.uid, problem) is not problem:
            earlier = first[problem.uid].where
            raise UserError(f"{problem.where}: duplicate uid {problem.uid!r}, first at {earlier}; rename one")


def conflicts(problems: Iterable[Problem]) -> list[list[Problem]]:
    """Groups of problems with the same text (apart from white space) and different answers: one is wrong."""
    same_text: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        same_text[" ".join(problem.problem.split())].append(problem)
    return [group for group in same_text.values() if len({frozenset(listed(p.answer)) for p in group}) > 1]


# --- Sources: (line or row number from 1, row) -----------------------------------------------------------------------


def read(source: str, split: str = "train") -> tuple[str, Iterator[tuple[int, Any]]]:
    """The name that messages use for `source`, and its rows."""
    path, hub = Path(source), HUB_NAME.fullmatch(source)
    if hub and not path.exists() and not path.parent.is_dir() and path.suffix not in EXTENSIONS:
        return hub["repo"], hub_rows(hub["repo"], split, hub["subset"])
    allowed = "a file or a hub data set owner/name"
    if not source:
        raise UserError(f"data: found an empty name, allowed: {allowed}")
    if path.is_dir():
        files = sorted(p.name for p in path.iterdir() if p.suffix in EXTENSIONS)
        raise UserError(f"{source}: found a directory, allowed: a file; it holds {_few(files) or 'no data file'}")
    if not path.exists():
        folder = path.parent
        near = nearest(path.name, [p.name for p in folder.iterdir()]) if folder.is_dir() else None
        hint = f", its folder {str(folder)!r} does not exist" if near is None else near
        raise UserError(f"{source}: no such file{hint}; allowed: {allowed}")
    if path.suffix not in EXTENSIONS:
        raise UserError(f"{source}: unknown extension {path.suffix!r}, allowed: {', '.join(EXTENSIONS)}")
    if path.stat().st_size == 0:
        raise UserError(f"{source}: the file is empty, allowed: at least one problem")
    return path.name, file_rows(path)


def file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    rows = {".jsonl": jsonl_rows, ".json": json_rows, ".parquet": parquet_rows}[path.suffix]
    try:
        with path.open("rb") as file:
            yield from rows(file, path.name)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def jsonl_rows(file: BinaryIO, name: str) -> Iterator[tuple[int, Any]]:
    for number, data in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(data) > MAX_LINE_BYTES:
            raise UserError(f"{name}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes, allowed: up to that")
        text = decode(data, name, number)
        if text.strip():
            yield number, parse(text.rstrip(), name, number)


def json_rows(file: BinaryIO, name: str) -> Iterator[tuple[int, Any]]:
    text = decode(file.read(), name, 1)
    array = parse(text, name, 1)
    if not isinstance(array, list):
        hint = "one array of objects (one object per line: extension .jsonl)"
        raise UserError(f"{name}: found {_kind(array)}, allowed: {hint}")
    gap, line, seen, end = re.compile(r"[\s,]*"), 1, 0, text.index("[") + 1
    for row in array:
        start = gap.match(text, end).end()
        line, seen = line + text.count("\n", seen, start), start
        yield line, row
        end = json.JSONDecoder().raw_decode(text, start)[1]


def decode(data: bytes, name: str, line: int) -> str:
    """UTF-8 without its byte order mark. line: the number of the first line of `data`."""
    try:
        text, found, at = data.decode("utf-8-sig"), "a NUL character", data.find(0)
    except UnicodeDecodeError as error:
        text, at = "", error.start
        what = "a file in UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else f"0x{data[at]:02x}"
        found = f"{what} at byte {at - data.rfind(10, 0, at)}"
    if at >= 0:
        raise UserError(f"{name}:{line + data.count(10, 0, at)}: found {found}, allowed: text in UTF-8")
    return text


def parse(text: str, name: str, line: int) -> Any:
    """The JSON value. line: the number of the first line of `text`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = ""
        if name.endswith(".json") and error.msg == "Extra data":
            hint = "; a file of one object per line has the extension .jsonl"
        elif name.endswith(".jsonl") and text.lstrip().startswith("["):
            hint = "; a file that is one array has the extension .json"
        where = f"{name}:{line + error.lineno - 1}"
        raise UserError(f"{where}: bad JSON at column {error.colno}: {error.msg}{hint}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of thousands of digits
        raise UserError(f"{name}:{line}: bad JSON: {error}") from error


def parquet_rows(file: BinaryIO, name: str) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{name}: a parquet file needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{name}: corrupt parquet file after row {number}: {reason}") from error


def hub_rows(
    repo: str, split: str = "train", subset: str | None = None, revision: str | None = None
) -> Iterator[tuple[int, Any]]:
    """Rows of a hub data set at a revision (none: the newest), or of a folder that holds a copy of one."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{repo}: a hub data set needs the package datasets: pip install datasets") from error
    try:
        rows = datasets.load_dataset(repo, subset, split=split, revision=revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"hub data set {repo}, split {split!r}: {reason}") from error
    yield from enumerate(rows, 1)


# --- One row ---------------------------------------------------------------------------------------------------------


def to_problem(
    row: Any, where: str, default_uid: str, problem_field="problem", answer_field="answer", uid_field="uid"
) -> Problem:
    """The problem in `row`. EmptyField for an empty or null problem or answer, UserError for any other mistake."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: found {_kind(row)}, allowed: an object with the fields problem and answer")
    uid = _get(row, "uid") if uid_field == "uid" else _required(row, uid_field, where)
    if _null(_get(row, problem_field)) and _is_verl(row):
        problem_field, answer_field = "prompt", "reward_model.ground_truth"
        source, index = _get(row, "data_source"), _get(row, "extra_info.index")
        if uid_field == "uid":
            uid = None if _null(source) or _null(index) else f"{source}-{index}"
    problem, answer = (_required(row, field, where) for field in (problem_field, answer_field))
    answer_at = f"{where}: {answer_field}"
    if answer == []:
        raise EmptyField(f"{answer_at} is an empty list, allowed: a string, a number or a list of them")
    found = Problem(
        uid=default_uid if _null(uid) else _uid(uid, where),
        problem=_problem_text(problem, f"{where}: {problem_field}"),
        answer=[_answer(a, answer_at) for a in answer] if isinstance(answer, list) else _answer(answer, answer_at),
        where=where,
    )
    for text in (found.uid, found.problem, *listed(found.answer)):
        if re.search("[\ud800-\udfff]", text):
            raise UserError(f"{where}: found half a surrogate pair in {text[:40]!a}, allowed: text")
    return found


def _required(row: dict, field: str, where: str) -> Any:
    value = _get(row, field)
    if value is MISSING:
        fields = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{where}: no field {field!r}{nearest(field, row)}; this row has {fields[:200]}")
    return value


def _get(row: dict, field: str) -> Any:
    """`row[field]`, or the value at the dotted path `field`: None below a null, MISSING where a field is absent."""
    if field in row:
        return row[field]
    value: Any = row
    for key in field.split("."):
        if not isinstance(value, dict):
            return None if _null(value) else MISSING
        value = value.get(key, MISSING)
    return value


def _null(value: Any) -> bool:
    """Absent, null, or NaN, which some writers of parquet files put for null."""
    return value is None or value is MISSING or isinstance(value, float) and math.isnan(value)


def _is_verl(row: dict) -> bool:
    prompt, reward = row.get("prompt", MISSING), row.get("reward_model", MISSING)
    return isinstance(prompt, list | None) and isinstance(reward, dict | None)


def _uid(uid: Any, where: str) -> str:
    if isinstance(uid, bool) or not isinstance(uid, (str, int)) or uid == "":
        raise UserError(f"{where}: uid is {_kind(uid)}, allowed: an integer, or a string that is not empty")
    return str(uid)


def _problem_text(problem: Any, where: str) -> str:
    """The text itself, or the last user turn of a chat without the instructions around it."""
    if isinstance(problem, list):
        turns = [m.get("content") for m in problem if isinstance(m, dict) and m.get("role") == "user"]
        if not turns and not all(map(_null, problem)):
            raise UserError(f"{where} is an array without user turn, allowed: text or messages")
        problem = turns[-1] if turns else None
        problem = INSTRUCTIONS.sub("", problem) if isinstance(problem, str) else problem
    if _null(problem) or isinstance(problem, str) and not problem.strip():
        raise EmptyField(f"{where} is {'empty' if isinstance(problem, str) else _kind(problem)}, allowed: a text")
    if not isinstance(problem, str):
        raise UserError(f"{where} is {_kind(problem)}, allowed: a string")
    return problem.strip()


def _answer(answer: Any, where: str) -> str:
    """One reference answer as a string: 27 and 27.0 are "27", 1e-7 is "0.0000001"."""
    if isinstance(answer, str) and answer.strip():
        return answer.strip()
    if isinstance(answer, float) and math.isfinite(answer):
        return str(int(answer)) if answer.is_integer() else format(Decimal(repr(answer)), "f")
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    kind = EmptyField if _null(answer) or isinstance(answer, str) else UserError
    raise kind(f"{where} is {_kind(answer)}, allowed: a filled string, a number or a list of them")


def listed(answer: str | list[str]) -> list[str]:
    return [answer] if isinstance(answer, str) else answer


def _few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _kind(value: Any) -> str:
    """What kind of JSON value this is; a number or a boolean with its value."""
    if isinstance(value, str):
        return "a string" if value.strip() else "an empty string"
    if type(value) in (int, float):
        return f"a number ({value})"
    kinds = {type(None): "null", bool: f"a boolean ({str(value).lower()})", dict: "an object", list: "an array"}
    return kinds.get(type(value), f"of type {type(value).__name__}")
