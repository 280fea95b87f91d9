"""Which forward GEMMs servers can run: a table of obstacles, each with the edit of the policy that would do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from policyc.compiler.planning.plan import Decision
from policyc.compiler.sites.site import Site
from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Recipe, Treatment
from policyc.numerics.targets import TARGETS
from policyc.serving.formats import BLOCK, BOUNDS

Server = Literal["vllm", "sglang", "trtllm", "transformers"]
SERVERS: dict[Server, str] = {
    "vllm": "vLLM 00155cd (modelopt.py, compressed_tensors/utils.py)",
    "sglang": "SGLang 003ca3e (modelopt_quant.py)",
    "trtllm": "TensorRT-LLM 01ea6d7 (modeling_utils.py)",
    "transformers": "transformers 5.23 with compressed-tensors 0.20",
}
"""The servers, with the version whose source the table was read from."""


NEEDS: dict[Server, dict[str, tuple[float, float | None]]] = {
    "vllm": {"nvfp4": (10.0, 7.5), "fp8": (8.9, 7.5)},
    "sglang": {"nvfp4": (10.0, 7.5), "fp8": (8.9, 8.0)},
    "trtllm": {"nvfp4": (10.0, None), "fp8": (8.9, None)},
}
"""The compute capability that a format needs, and that it needs if activations are not quantized (Marlin kernels; None:
there are none). transformers decodes weights to bf16 on any machine."""


def describe_needs(server: Server, format: str) -> str:
    """The hardware on which a server runs a format as training does, and where it does not quantize activations."""
    if server not in NEEDS:
        return (
            f"decodes {format} to bf16 on any machine and does not quantize activations, other than training"
        )
    native, weights_only = NEEDS[server][format]
    gpus = sorted(
        t.name for t in TARGETS.values() if t.compute_capability >= (int(native), round(native % 1 * 10))
    )
    others = "does not run it on others"
    if weights_only is not None:
        others = (
            f"does not quantize activations on others, other than training; the least is SM {weights_only}"
        )
    return f"multiplies {format} on GPUs from SM {native} on ({', '.join(gpus)}), and {others}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardGemm:
    """The forward GEMM of a site in a layer.

    Attributes:
      siblings: the recipes of the weights that read the same activation.
      kept: the names of the sites that are not quantized.
    """

    site: Site
    recipe: Recipe
    siblings: tuple[Treatment | None, ...] = ()
    kept: Collection[str] = ()

    @property
    def weight(self) -> Treatment:
        return self.recipe.gemm_treatments(Gemm.FPROP)[1]

    @property
    def activation(self) -> Treatment:
        return self.recipe.gemm_treatments(Gemm.FPROP)[0]

    @property
    def is_fp4(self) -> bool:
        return self.weight.format == "nvfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A reason why a server cannot run a quantized forward GEMM. `servers` are those that it holds for."""

    reason: str
    edit: str
    applies: Callable[[ForwardGemm], bool]
    servers: Sequence[Server] = tuple(SERVERS)


_FUSING: tuple[Server, ...] = ("vllm", "sglang", "trtllm")
_MATCHING_PARTS: tuple[Server, ...] = ("vllm", "sglang")
OBSTACLES = (
    Obstacle(
        reason="a site of two activations is quantized, and servers compute it in bf16",
        edit="write keep for it",
        applies=lambda g: g.site.weight is None,
    ),
    Obstacle(
        reason="it looks up an embedding, which servers do in bf16",
        edit="write keep for it",
        applies=lambda g: g.site.has_one_hot,
    ),
    Obstacle(
        reason="files have nvfp4 and fp8, and no other format",
        edit="write nvfp4 or fp8",
        applies=lambda g: g.weight.format not in BOUNDS,
    ),
    Obstacle(
        reason="fprop rounds stochastically, which no server does",
        edit="write sr=grad",
        applies=lambda g: "sr" in (g.weight.rounding, g.activation.rounding),
    ),
    Obstacle(
        reason="fprop rotates its operands, which loaders do not",
        edit="write rht=wgrad",
        applies=lambda g: bool(g.weight.rht or g.activation.rht),
    ),
    Obstacle(
        reason="fprop splits off the mean of x, which no server does",
        edit="leave out mean_split",
        applies=lambda g: g.activation.mean_split,
    ),
    Obstacle(
        reason="the weight has an outer scale per row, which files have for fp8 only",
        edit="write outer=tensor",
        applies=lambda g: g.weight.outer == "row" and g.is_fp4,
    ),
    Obstacle(
        reason="the activation has 16x16 tiles, and servers have blocks of 1x16",
        edit="write scale2d=weights",
        applies=lambda g: g.activation.tile2d,
    ),
    Obstacle(
        reason=f"k is not a multiple of {BLOCK}, and blocks must fill it",
        edit=f"write bf16 where k % {BLOCK} != 0",
        applies=lambda g: g.is_fp4 and g.site.k % BLOCK != 0,
    ),
    Obstacle(
        reason="it interleaves scales in tiles of 128 x 4, which must fit",
        edit="write fp8 where n % 128 != 0 or k % 64 != 0",
        applies=lambda g: g.is_fp4 and (g.site.n % 128 != 0 or g.site.k % 64 != 0),
        servers=("sglang",),
    ),
    Obstacle(
        reason="it runs all linears that read this activation as one, and they have different recipes",
        edit="give them one recipe",
        applies=lambda g: any(sibling != g.weight for sibling in g.siblings),
        servers=_FUSING,
    ),
    Obstacle(
        reason="it has no kernel for a quantized head in ModelOpt's layout",
        edit="write keep for the head, or export compressed-tensors",
        applies=lambda g: bool(g.site.kind.flags.get("head")),
        servers=("vllm",),
    ),
    Obstacle(
        reason="it has no kernel for a quantized head",
        edit="write keep for the head",
        applies=lambda g: bool(g.site.kind.flags.get("head")),
        servers=("sglang",),
    ),
    Obstacle(
        reason="the name of a kept site is a part of its name, and the ignore list of a ModelOpt file matches parts",
        edit="give both one recipe, or export compressed-tensors",
        applies=lambda g: any(name != g.site.name and name in g.site.name for name in g.kept),
        servers=_MATCHING_PARTS,
    ),
)
"""The first that applies is reported."""


def find_obstacle(gemm: ForwardGemm, server: Server | None = None) -> Obstacle | None:
    """Why a server cannot run a forward GEMM, or any server; None if it can. Without a scale, nothing is in the way."""
    if not is_quantized(gemm.weight) and not is_quantized(gemm.activation):
        return None
    applying = (o for o in OBSTACLES if o.servers == tuple(SERVERS) or server in o.servers)
    return next((obstacle for obstacle in applying if obstacle.applies(gemm)), None)


def is_quantized(treatment: Treatment) -> bool:
    return FORMATS[treatment.format].is_quantized


def served_format(decision: Decision) -> str:
    """The format of the stored weight; empty if it is stored as it is."""
    weight = None if decision.recipe is None else decision.recipe.gemm_treatments(Gemm.FPROP)[1]
    if weight is None or not is_quantized(weight):
        return ""
    return "fp8-row" if (weight.format, weight.outer) == ("fp8", "row") else weight.format
