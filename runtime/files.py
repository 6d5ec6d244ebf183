"""files.py: files that are never half-written, and JSONL.

    write_atomically(path, text)               # the file has the old text or the new one, whenever the process dies
    append(path, rows)                         # rows of a JSONL file
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from runtime.errors import UserError


@contextlib.contextmanager
def writing(what: Path, hint: str = "") -> Iterator[None]:
    """Within the block, a full or write-protected disk raises a UserError that names `what` was to be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what}: cannot be written: {reason}{hint}") from error


def write_atomically(path: Path, text: str) -> None:
    """The file has the old text or the new one, never a part of it; a failure leaves no other file behind."""
    aside = path.with_name(f".{path.name}.tmp")
    with writing(path), contextlib.ExitStack() as stack:
        stack.callback(aside.unlink, missing_ok=True)
        aside.write_text(text, encoding="utf-8")
        fsync(aside)
        os.replace(aside, path)
        fsync(path.parent)


def json_line(row: dict) -> str:
    """One line of UTF-8. Half a surrogate pair, which no encoding of Unicode holds, becomes its JSON escape."""
    line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    return line.encode("utf-8", "backslashreplace").decode("utf-8")


def append(path: Path, rows: list[dict]) -> None:
    with writing(path), open(path, "a", encoding="utf-8") as f:
        f.write("".join(map(json_line, rows)))


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a JSONL log. A last line that a crash cut short is left out."""
    rows = []
    for line in path.read_bytes().split(b"\n"):  # not splitlines: a response may hold any Unicode line separator
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def checksum(path: Path) -> str:
    """sha256 of the file, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Returns when the file, or the list of names of the directory, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
