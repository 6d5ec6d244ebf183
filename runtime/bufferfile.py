"""bufferfile.py: the sample buffer in a checkpoint; a save writes only the responses that are new since the last one.

   training/buffer_0.json              rank 0: numbers of the stored responses, verdicts, names of its files
   training/buffer/SHA256.safetensors  responses; never changed once written, and named after its own checksum

Consecutive checkpoints share a file by hard links, so that each folder is complete and any may be deleted. The stored
responses of a file are written anew once more than half of it has been evicted, where it is one of many small files,
and where it cannot be linked. Damage of a file is damage of each checkpoint that shares it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from runtime.files import checksum
from runtime.ranks import Ranks

FILE_TOKENS = 2**24  # per file, which takes 128 MB and as much memory while it is written
SMALL_FILES = 64  # most files of less than half of that, per rank


def save(buffer, training: Path, rank: int) -> dict[str, list[int]]:
    """Writes the buffer of a rank into a checkpoint's folder; returns file name -> numbers of the responses in it."""
    folder = training / "buffer"
    folder.mkdir(exist_ok=True)
    alive = {path: [n for n in numbers if n in buffer.stored] for path, numbers in buffer.files.items()}
    small = {path for path, numbers in alive.items() if 2 * sum(map(buffer.size, numbers)) < FILE_TOKENS}
    files, new = {}, dict.fromkeys(buffer.stored)
    for path, numbers in buffer.files.items():
        full = 2 * len(alive[path]) >= len(numbers) and (path not in small or len(small) < SMALL_FILES)
        if full and linked(path, folder / path.name):
            files[path.name] = numbers
            for number in alive[path]:
                del new[number]
    for numbers in batches(buffer, list(new)):
        files[written(buffer.part(numbers), folder / f"{rank}.tmp").name] = numbers
    (training / f"buffer_{rank}.json").write_text(json.dumps(buffer.summary() | {"files": list(files)}))
    return files


def written(part: dict, aside: Path) -> Path:
    """Writes a file of responses aside and gives it its name. A function, so that its memory is free afterwards."""
    index = torch.frombuffer(bytearray(json.dumps(part["index"]), "utf-8"), dtype=torch.uint8)
    save_file(part | {"index": index}, aside)
    return aside.rename(aside.with_name(f"{checksum(aside)}.safetensors"))


def linked(path: Path, target: Path) -> bool:
    """Gives a file of an older checkpoint a second name in this one; False where that cannot be."""
    try:
        os.link(path, target)
    except OSError:  # someone has deleted it, or the file system has no hard links
        return False
    return True


def batches(buffer, numbers: Sequence[int]) -> Iterator[list[int]]:
    """The numbers in lists of FILE_TOKENS tokens, give or take a response."""
    begins = itertools.accumulate(map(buffer.size, numbers), initial=0)
    pairs = zip(begins, numbers, strict=False)  # `begins` also has the end of all
    for _, batch in itertools.groupby(pairs, key=lambda pair: pair[0] // FILE_TOKENS):
        yield [number for _, number in batch]


def load(buffer, training: Path, ranks: Ranks, keep=lambda uid: True) -> None:
    """Fills the buffer of this rank: with its own files, or with its uids out of those of another number of ranks."""
    lists, files = sorted(training.glob("buffer_*.json")), {}
    if same := len(lists) == ranks.size:
        lists = [training / f"buffer_{ranks.rank}.json"]

    def read(names: list[str]) -> Iterator[dict]:
        for name in names:
            part = load_file(training / "buffer" / name)
            part["index"] = json.loads(part["index"].numpy().tobytes())
            files[training / "buffer" / name] = [record["number"] for record in part["index"]]
            yield part

    states = [json.loads(path.read_text()) for path in lists]
    buffer.load_state_dict(*(state | {"parts": read(state["files"])} for state in states), keep=keep)
    buffer.files = files if same else {}
