"""Writes tensors as Hugging Face's libraries read them: safetensors of limited size, with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

SHARD_BYTES = 5 * 10**9  # largest size of one safetensors file, unless a single tensor is larger


def write_folder(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray[Any, Any]]], files: Mapping[str, str]
) -> int:
    """Writes tensors and the texts of `files` to a folder, which gets its name only when it is complete.

    It replaces a folder of this name. All processes call it, the first one writes. Returns the bytes of the tensors.
    """
    is_writer = jax.process_index() == 0
    unfinished = folder.with_name(folder.name + ".unfinished")
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray[Any, Any]] = {}
    total = size = 0

    def flush() -> None:
        if is_writer:
            save_file(pending, unfinished / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    try:
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        names: set[str] = set()
        for name, array in tensors:
            if name in names:
                raise ValueError(f"two parameters have the tensor {name}")
            if pending and size + array.nbytes > SHARD_BYTES:
                flush()
                size = 0
            names.add(name)
            pending[name] = array
            size, total = size + array.nbytes, total + array.nbytes
        flush()
        if not is_writer:
            return total
        index: dict[str, str] = {}
        for number, shard in enumerate(shards):
            part = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            file = part if len(shards) > 1 else "model.safetensors"
            (unfinished / f"{number}.safetensors").rename(unfinished / file)
            index |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            content = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
            files = {**files, "model.safetensors.index.json": content}
        for name, text in files.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except BaseException:
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return total
