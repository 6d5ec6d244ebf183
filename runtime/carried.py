"""carried.py: what an algorithm hands from a step to the next, in a checkpoint: any JSON-able value with arrays in it.

   training/carried_0.safetensors      of rank 0; arrays of one dtype end to end, and the value around them as JSON

Left out: what the value is, which the algorithm knows (attnrl.py).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def save(value, training: Path, rank: int) -> None:
    """Writes the value of a rank; numpy arrays of one dimension may stand anywhere in it."""
    arrays = defaultdict(list)

    def put(array: np.ndarray) -> dict:
        arrays[str(array.dtype)].append(array)
        return {"dtype": str(array.dtype), "length": len(array)}

    text = json.dumps(value, default=put)
    tensors = {dtype: torch.from_numpy(np.concatenate(parts)) for dtype, parts in arrays.items()}
    index = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
    save_file(tensors | {"index": index}, training / f"carried_{rank}.safetensors")


def load(training: Path) -> list:
    """The values of all ranks of the saved run, by rank; none where its algorithm hands nothing on."""
    values = []
    for rank in range(len(list(training.glob("carried_*.safetensors")))):
        arrays = {key: tensor.numpy() for key, tensor in load_file(training / f"carried_{rank}.safetensors").items()}
        read = Counter()

        def get(found: dict, arrays=arrays, read=read):
            if set(found) != {"dtype", "length"}:
                return found
            begin = read[found["dtype"]]
            read[found["dtype"]] += found["length"]
            return arrays[found["dtype"]][begin : begin + found["length"]]

        values.append(json.loads(arrays["index"].tobytes(), object_hook=get))
    return values
