"""What is kept on disk: checkpoints of a run, and weights as safetensors in the Hugging Face layout.

In: a state, the data's position, the run's identity; or parameters. Out: the same again after any crash; or a folder
that transformers reads. The traps: a checkpoint that loads is not always one that fits, so it holds what decided its
numbers. And Hugging Face keeps a linear as (out, in), a tensor for each layer; here it is (in, out), and stacked.
"""

import itertools
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from llama import model as llama
from llama.configs import BadRun, Model
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

FULL = "is the disk full? Earlier checkpoints are intact"
UNREAD = "remove its folder, and the run goes on from the one before it"
SHARD_BYTES = 5 * 10**9
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NAMES = {"embed": EMBED, "norm": "model.norm.weight", "lm_head": HEAD, "attention": "self_attn",
         "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}  # fmt: skip
FIELDS = {"hidden_size": "width", "intermediate_size": "hidden", "num_hidden_layers": "layers", "head_dim": "head_dim",
          "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "vocab_size": "vocab",
          "rms_norm_eps": "norm_eps", "rope_theta": "rope_theta"}  # fmt: skip


def latest(folder: Path) -> int | None:
    """The last step of which a folder has a whole checkpoint."""
    return max(ocp.utils.checkpoint_steps(folder), default=None)


class Checkpoints:
    """The checkpoints of a run, in one folder."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells every step of every save
        self.folder, self._identity = folder.resolve(), identity
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        with self._told("checkpoints cannot be kept here", "is the folder writable?"):
            self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, state: Any, position: int) -> None:
        """Begins to write. Returns once the state is copied; the file becomes valid when it is whole."""
        needed = sum(a.nbytes for a in jax.tree.leaves(state)) // jax.process_count()
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            room = f"{needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free in {self.folder}"
            last = f"The last good one is at step {latest(self.folder)}: make room and run this again"
            raise BadRun(f"no room for a checkpoint at step {step}: {room}. {last}")
        about = {"identity": self._identity, "position": position}
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
        with self._told(f"writing a checkpoint at step {step} failed", FULL):
            self._manager.save(step, args=parts)

    def restore(self, step: int, described: Any, accept_changes: bool) -> tuple[Any, int]:
        """The state and the data's position at a step."""
        unread = f"checkpoint {self.folder / str(step)} cannot be read"
        with self._told(unread, UNREAD):
            about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
            before, now = about["identity"], self._identity
        names = sorted(n for n in {*before, *now} if before.get(n) != now.get(n))
        changed = [f"\n  {n.replace('_', '-')}: {before.get(n)} there, {now.get(n)} now" for n in names]
        if changed and not accept_changes:
            remedy = "give another folder with --out, or --accept-changes to go on from it"
            what = f"the checkpoint at step {step} in {self.folder} is of another run"
            raise BadRun(f"{what}:{''.join(changed)}\n{remedy}")
        with self._told(unread, UNREAD):
            wanted = ocp.args.Composite(state=ocp.args.StandardRestore(described))
            state = self._manager.restore(step, args=wanted).state
        return state, about["position"]

    def close(self) -> None:
        """Waits for what is being written."""
        with self._told("writing a checkpoint failed", FULL):
            self._manager.wait_until_finished()
            self._manager.close()

    @contextmanager
    def _told(self, what: str, remedy: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise BadRun(f"{what} ({self.folder}): {reason}\n{remedy}") from error


def theirs(path: tuple[Any, ...], c: Model) -> tuple[list[str], bool, bool]:
    """The names of a parameter's tensors, one or a layer's each; is it a stack of them, and are they turned?"""
    names = [str(k.key) for k in path if hasattr(k, "key")]
    turned = names[-1].endswith(("_proj", "lm_head"))
    if names[0] != "layers":
        return [NAMES[names[0]]], False, turned
    inner = ".".join(NAMES.get(n, n) for n in names[1:])
    layers = range(c.layers) if c.scan else [path[1].idx]
    return [f"model.layers.{i}.{inner}.weight" for i in layers], c.scan, turned


def config_json(c: Model, dtype: str) -> dict[str, Any]:
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": dtype,
             "max_position_embeddings": 131072, "tie_word_embeddings": False}  # fmt: skip
    rope = {"rope_type": "llama3", "factor": c.rope_scaling, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    sizes = {name: getattr(c, ours) for name, ours in FIELDS.items()}
    return {**fixed, **sizes, "rope_scaling": rope if c.rope_scaling else None}


def save(params: Any, c: Model, folder: Path, dtype: str = "bfloat16") -> None:
    """Writes a folder that `from_pretrained` reads. It appears under its name when it is whole."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    total = sum(a.size for a in jax.tree.leaves(params)) * jax.numpy.dtype(dtype).itemsize
    count, done, index = total // SHARD_BYTES + 1, 0, {}

    def file_of(tensor: tuple[str, np.ndarray]) -> str:
        nonlocal done
        number, done = done * count // total + 1, done + tensor[1].nbytes
        found = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        return index.setdefault(tensor[0], found)

    for file, tensors in itertools.groupby(_tensors(params, c, dtype), file_of):
        held = dict(tensors)
        if jax.process_index() == 0:
            unfinished.mkdir(parents=True, exist_ok=True)
            save_file(held, unfinished / file, metadata={"format": "pt"})
    if jax.process_index() == 0:
        about = {"config.json": config_json(c, dtype)}
        if count > 1:
            about["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": index}
        for name, content in about.items():
            (unfinished / name).write_text(json.dumps(content, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def _tensors(params: Any, c: Model, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
        names, stacked, turned = theirs(path, c)
        whole = multihost_utils.process_allgather(value, tiled=True)
        for name, one in zip(names, whole if stacked else [whole], strict=True):
            array = np.asarray(one).astype(jax.numpy.dtype(dtype))
            yield name, np.ascontiguousarray(array.T if turned else array)


def load(folder: Path, c: Model, mesh: Mesh) -> Any:
    """Parameters in fp32, each device reading its own part."""
    found, fault = {}, folder / "config.json"
    try:
        there = json.loads(fault.read_text())
        for fault in sorted(folder.glob("*.safetensors")):
            opened = safe_open(fault, framework="np")
            found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise BadRun(f"--init-from {folder}: {fault.name} cannot be read, or is not whole: {error}") from None
    rope = there.get("rope_parameters") or there.get("rope_scaling") or {}  # as transformers 5 and 4 say it
    there = {"rope_theta": rope.get("rope_theta"), **there, "rope_scaling": rope.get("factor", 0)}
    ours = {**config_json(c, ""), "rope_scaling": c.rope_scaling}
    names = [n for n in (*FIELDS, "model_type", "rope_scaling") if there.get(n) not in (None, ours[n])]
    differ = [f"\n  {n}: {there[n]} there, {ours[n]} here" for n in names]
    if differ:
        raise BadRun(f"--init-from {folder} holds another model:{''.join(differ)}")
    if HEAD not in found and EMBED in found:
        found[HEAD] = found[EMBED]
        print(f"{folder} has no head of its own: it begins as a copy of the embedding, no longer tied")

    def leaf(path: Any, entry: llama.Leaf) -> jax.Array:
        names, stacked, turned = theirs(path, c)
        if missing := [name for name in names if name not in found]:
            raise BadRun(f"--init-from {folder} has no tensor named {missing[0]}: is it a Llama?")

        def piece(index: tuple[slice, ...]) -> np.ndarray:
            which, part = (names[index[0]], index[1:]) if stacked else (names, index)
            read = [found[name][part[::-1]].T if turned else found[name][part] for name in which]
            return (np.stack(read) if stacked else read[0]).astype(np.float32)

        return jax.make_array_from_callback(entry.shape, llama.sharding(mesh, entry.axes), piece)

    return jax.tree.map_with_path(leaf, llama.table(c))
