"""answers.py: a file of answers: in its first line the settings that they depend on, then one line per response.

    {"settings": {"model": "DIR", "temperature": 0.6, "seed": 0, ...}}
    {"uid": "aime24-0", "sample": 0, "correct": false, "tokens": 812, "finished": true, "response": "..."}

FILE is complete or absent. Until it is complete, FILE.partial (FILE.partial1 on rank 1) keeps each response as it ends.
The evaluations of a run (evals/step_NNNNNN.jsonl) are such files without settings.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from runtime.errors import UserError, nearest
from runtime.files import append, json_line, read_jsonl, write_atomically

NAMES = ("model", "data", "limit")  # of what `weights` and `problems` are checksums: they may change alone
ANSWER = {"uid": str, "correct": bool, "tokens": int | None, "finished": bool}


def json_objects(path: Path) -> Iterator[tuple[str, dict]]:
    """("FILE:LINE", object) of each line. UserError for a file that cannot be read and for a line that is no object."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise UserError(f"{path}: cannot be read: {error.strerror}{near}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # bad JSON, or not UTF-8
            raise UserError(f"{path}:{number}: bad JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: found {line[:40].decode()!r}, allowed: an object")
        yield f"{path}:{number}", row


def read(path: Path) -> tuple[dict, list[dict]]:
    """The settings (empty where the file has none) and the rows of an answer file."""
    settings, rows = {}, []
    for where, row in json_objects(path):
        if isinstance(row.get("settings"), dict) and not rows:
            settings = row["settings"]
            continue
        for key, kind in ANSWER.items():
            if key not in row or not isinstance(row[key], kind):
                kind = getattr(kind, "__name__", kind)
                raise UserError(f"{where}: no {key!r} of type {kind}; is this an answer file of eval.py?")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: found no answer in it, allowed: at least one")
    return settings, rows


def write(path: Path, settings: dict, rows: Sequence[dict]) -> None:
    write_atomically(path, "".join(map(json_line, [{"settings": settings}, *rows])))


def read_sets(path: str) -> dict[str, list[dict]]:
    """Set name -> rows. A file is one set, named by its settings or else by its name; a folder holds a file per set."""
    folder = Path(path)
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]
    if not files:
        raise UserError(f"{path}: found no answer file NAME.jsonl in the folder")
    found = [(file, *read(file)) for file in files]
    if folder.is_dir():
        return {file.stem: rows for file, _, rows in found}
    return {Path(settings.get("data") or file.stem).stem: rows for file, settings, rows in found}


class AnswerFile:
    """The answers of one set while they are made. No path: nothing is kept.

    done: (uid, sample) -> row of FILE: `--n 64` after `--n 16` keeps the 16 and adds 48.
    begun: (uid, sample) -> {"ids", "finished"} that an interrupted command left in FILE.partial.
    Raises UserError where these depend on other settings, or where a file is something else.
    """

    def __init__(self, path: Path | None, settings: dict, rank: int = 0):
        self.path, self.settings, self.done, self.begun, self.own = path, settings, {}, {}, None
        if path is None:
            return
        self.partial = Path(f"{path}.partial{rank or ''}")
        if path.exists():
            before, rows = read(path)
            self.check(path, before)
            self.done = {(row["uid"], row["sample"]): row for row in rows}
        for file in self.partials():
            self.begun |= {(row["uid"], row["sample"]): row for row in self.read_partial(file)}

    def partials(self) -> list[Path]:
        """Those of all ranks: the interrupted command may have had more of them."""
        return sorted(self.path.parent.glob(f"{self.path.name}.partial*"))

    def read_partial(self, file: Path) -> list[dict]:
        lines = read_jsonl(file) if file.is_file() else []
        keys = {"uid", "sample", "ids", "finished"}
        ours = all(isinstance(line, dict) for line in lines) and all(keys <= set(line) for line in lines[1:])
        if not lines or not ours or not isinstance(lines[0].get("settings"), dict):
            raise UserError(f"{file}: not what an interrupted evaluation leaves; allowed: another --out")
        self.check(file, lines[0]["settings"])
        return lines[1:]

    def check(self, file: Path, before: dict) -> None:
        now = self.settings
        differing = sorted(key for key in before | now if before.get(key) != now.get(key))
        if set(differing) <= set(NAMES):
            return
        found = ", ".join(f"{key} {before.get(key)!r} and not {now.get(key)!r}" for key in differing)
        raise UserError(f"{file}: left by a command with {found}; allowed: that one, another --out, no file")

    def add(self, uid: str, sample: int, ids: Sequence[int], finished: bool) -> None:
        """Keeps one response as it ends."""
        if self.path is None:
            return
        if self.own is None:  # the file without a last line that was cut short
            self.own = self.read_partial(self.partial) if self.partial.exists() else []
            write(self.partial, self.settings, self.own)
        append(self.partial, [{"uid": uid, "sample": sample, "finished": finished, "ids": list(map(int, ids))}])

    def complete(self, rows: Sequence[dict]) -> None:
        """FILE has `rows`, in their order of problems, and what it had before; FILE.partial is gone."""
        if self.path is None:
            return
        merged = self.done | {(row["uid"], row["sample"]): row for row in rows}
        place = {row["uid"]: i for i, row in enumerate(rows)}
        merged = sorted(merged.values(), key=lambda row: (place[row["uid"]], row["sample"]))
        write(self.path, self.settings, merged)
        for file in self.partials():
            file.unlink()


def read_responses(path: str, uids: Collection[str]) -> list[dict]:
    """One row per response of another engine, not verified: uid, sample, tokens, finished, response.

    A line has `uid` and `response`, one text or a list of them; `finished` (absent: true) and `tokens` (absent:
    unknown) are one value or a list as long. Several lines with a uid are its samples in this order.
    Raises UserError for a uid that is not in `uids`, and where one of these has no response.
    """
    count, rows = dict.fromkeys(uids, 0), []
    for where, row in json_objects(Path(path)):
        uid = row.get("uid")
        if uid not in count:
            raise UserError(f"{where}: uid {uid!r} is in none of the sets{nearest(str(uid), count)}")
        texts, finished, tokens = row.get("response"), row.get("finished", True), row.get("tokens")
        texts = texts if isinstance(texts, list) else [texts]
        finished, tokens = (x if isinstance(x, list) else [x] * len(texts) for x in (finished, tokens))
        for key, values, kind in (("response", texts, str), ("finished", finished, bool), ("tokens", tokens, int)):
            wrong = [x for x in values if type(x) is not kind and (key, x) != ("tokens", None)]
            if wrong or not values or len(values) != len(texts):
                found = repr(wrong[0]) if wrong else f"{len(values)} values for {len(texts)} responses"
                raise UserError(f"{where}: {key}: found {found}, allowed: {kind.__name__}, or one for each response")
        for text, ended, length in zip(texts, finished, tokens, strict=True):
            rows.append({"uid": uid, "sample": count[uid], "tokens": length, "finished": ended, "response": text})
            count[uid] += 1
    if missing := [uid for uid, n in count.items() if not n]:
        raise UserError(f"{path}: no response to {len(missing)} problems, {missing[0]!r} among them; allowed: all")
    return rows
