"""The table of number formats. To add a format, add a row here and its rounding in `policyc.numerics.quantize`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A number layout.

    Attributes:
      bits: the width of one element, without its share of the scales.
      block: the number of elements that share a scale; 0 if the whole tensor does.
      scale: the type of the block scale; None if there are no block scales.
      tensor_scale: whether there is an fp32 scale for the whole tensor, alone or in addition to the block scales.
      options: the names of the recipe options that the format takes.
      color: its color in pictures. Okabe and Ito's are distinct with red-green color blindness.
    """

    name: str
    bits: int
    element: str
    block: int = 0
    scale: str | None = None
    tensor_scale: bool = False
    options: tuple[str, ...] = ()
    color: str = ""
    summary: str

    @property
    def is_quantized(self) -> bool:
        """Whether values of this format have a scale."""
        return self.scale is not None or self.tensor_scale


_NVFP4_OPTIONS = (
    "rht", "rht_size", "rht_signs", "sr", "scale2d", "block_scale", "scale", "scale_error", "scale_bound", "rounding",
    "mean_split", "outer", "backward",
)  # fmt: skip

UE5M3 = "nvfp4_ue5m3"
"""The format of nvfp4(block_scale=ue5m3)."""

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            name="nvfp4",
            color="#d55e00",
            bits=4,
            element="e2m1",
            block=16,
            scale="e4m3",
            tensor_scale=True,
            options=_NVFP4_OPTIONS,
            summary="E2M1, an E4M3 scale per 16, an fp32 scale per tensor",
        ),
        Format(
            name=UE5M3,
            color="#009e73",
            bits=4,
            element="e2m1",
            block=16,
            scale="ue5m3",
            tensor_scale=True,
            options=("rht", "rht_size", "rht_signs", "sr", "scale2d", "mean_split", "backward"),
            summary="E2M1, a UE5M3 scale per 16; gradients also have an fp32 scale per tensor",
        ),
        Format(
            name="mxfp4",
            color="#e69f00",
            bits=4,
            element="e2m1",
            block=32,
            scale="e8m0",
            options=("rht", "rht_size", "rht_signs", "sr", "scale_rounding", "backward"),
            summary="E2M1, an E8M0 scale per 32",
        ),
        Format(
            name="mxfp8",
            color="#0072b2",
            bits=8,
            element="e4m3",
            block=32,
            scale="e8m0",
            options=("scale2d", "backward"),
            summary="E4M3, an E8M0 scale per 32",
        ),
        Format(
            name="fp8",
            color="#56b4e9",
            bits=8,
            element="e4m3",
            tensor_scale=True,
            options=("grad", "outer", "sums", "backward"),
            summary="E4M3 (gradients E5M2), an fp32 scale per tensor or per row",
        ),
        Format(
            name="fp4",
            color="#f0e442",
            bits=4,
            element="e2m1",
            tensor_scale=True,
            options=("rht", "rht_size", "rht_signs", "sr", "backward"),
            summary="E2M1, an fp32 scale per tensor: for ablations of block scales",
        ),
        Format(
            name="bf16",
            color="#c3c9d2",
            bits=16,
            element="bf16",
            summary="operands cast to bfloat16, fp32 accumulation",
        ),
        Format(
            name="f32",
            color="#5f6875",
            bits=32,
            element="f32",
            summary="operands cast to float32, fp32 accumulation",
        ),
        Format(name="keep", bits=0, element="", summary="the equation exactly as it is"),
    )
}

OTHER_FORMAT_NAMES = {
    "bfloat16": "bf16",
    **dict.fromkeys(("fp32", "float32", "float", "single"), "f32"),
    **dict.fromkeys(("e4m3", "e4m3fn", "e5m2", "float8", "f8", "f8e4m3fn", "f8e5m2", "f8e4m3"), "fp8"),
    **dict.fromkeys(("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "fp8_e4m3", "fp8_e5m2"), "fp8"),
    **dict.fromkeys(("none", "off", "skip", "ignore", "original"), "keep"),
}
"""Names of the formats in other libraries."""

MISSING_FORMATS = {
    **dict.fromkeys(
        ("fp16", "float16", "f16", "half"), "there is no fp16: bf16 has the same size, but other values"
    ),
    **dict.fromkeys(("tf32", "fp24"), "there is no tf32: f32 is exact, bf16 is faster"),
    **dict.fromkeys(
        ("f4", "float4", "e2m1", "float4_e2m1", "float4_e2m1fn"),
        "choose nvfp4 or mxfp4, or fp4, which has no block scales",
    ),
    **dict.fromkeys(("fp6", "mxfp6", "e3m2", "e2m3"), "there is no 6-bit format: choose mxfp8 or nvfp4"),
    **dict.fromkeys(("int8", "int4", "uint8"), "there are no integer formats: choose fp8 or nvfp4"),
}
"""Help for formats that have no counterpart here. No fix is offered, because another format has other values."""
