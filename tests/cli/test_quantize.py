"""`policyc quantize`: its files hold the bits of NVIDIA's reference vectors, and bad input is an error."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from policyc.hardware.selftest.golden import read_arrays
from tests.support.command import CommandResult, policyc

# The command compiles every operation by itself: there is nothing to fuse, and optimizing changes no bit.
pytestmark = pytest.mark.any_jax

REFERENCE = read_arrays()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])
WEIGHT = ("--role", "weight", "--product", "fprop")
TOKENS = ("--role", "activation", "--product", "wgrad")
GRADIENT = ("--role", "gradient", "--product", "wgrad")
BF16 = "normal_48x80_bfloat16_1d"
ROTATED = "rht_64x128_bf16"


def run(folder: Path, array: np.ndarray, *options: str) -> tuple[CommandResult, dict[str, np.ndarray]]:
    """Quantizes an array. Returns the result of the command, and the arrays of the file it wrote."""
    np.save(folder / "in.npy", array)
    result = policyc("quantize", folder / "in.npy", *options, "--out", folder / "out.npz")
    arrays = dict(np.load(folder / "out.npz")) if (folder / "out.npz").exists() else {}
    return result, arrays


def test_without_a_file_the_error_is_printed(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones((4, 32), np.float32))
    result = policyc("quantize", tmp_path / "in.npy", "--recipe", "nvfp4", *TOKENS)
    assert result.code == 0, result.err
    assert "SQNR" in result.out or "dB" in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["in.npy"]


def reference_input(case: str) -> np.ndarray:
    """The input of a reference vector. numpy saves bfloat16 as two-byte voids."""
    x = REFERENCE[f"{case}/x"]
    return x.view("V2") if x.dtype == np.uint16 else x


@pytest.mark.parametrize(
    ("case", "options", "codes", "scales"),
    [
        (BF16, ("--recipe", "nvfp4", "--role", "activation", "--product", "fprop"), "q", "s"),
        (ROTATED, ("--recipe", "nvfp4(rht=wgrad)", *TOKENS, "--axis", "0"), "q_t", "s_t"),
    ],
)  # fmt: skip
def test_the_file_holds_the_bits_of_the_reference(
    tmp_path: Path, case: str, options: tuple[str, ...], codes: str, scales: str
) -> None:
    result, arrays = run(tmp_path, reference_input(case), *options)
    assert result.code == 0
    packed = REFERENCE[f"{case}/{codes}"]
    np.testing.assert_array_equal(arrays["packed"], packed)
    np.testing.assert_array_equal(
        arrays["codes"], np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    )
    np.testing.assert_array_equal(arrays["scales"], REFERENCE[f"{case}/{scales}"])
    amax = REFERENCE[f"{case}/{'amax_col' if codes == 'q_t' else 'amax_row'}"]
    np.testing.assert_array_equal(arrays["amax"], amax)
    by_block = np.repeat(arrays["scales"].view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=-1)
    values = E2M1[arrays["codes"]] * by_block[:, : arrays["codes"].shape[1]] * (np.float64(amax) / 2688)
    # fp32 has 24 bits, and a product of three numbers is rounded at most three times.
    np.testing.assert_allclose(arrays["dequantized"], values, rtol=3 * 2**-24)
    assert {k: v.dtype for k, v in arrays.items()} == {
        "codes": np.uint8, "packed": np.uint8, "scales": np.uint8, "amax": np.float32, "dequantized": np.float32,
    }  # fmt: skip
    for figure in ("SQNR", "relative error", "flushed", "saturated", "zero blocks", "gain"):
        assert figure in result.out


@pytest.mark.parametrize(
    ("array", "options", "code", "message"),
    [
        (np.arange(4), ("--recipe", "nvfp4", *WEIGHT), 2, "int64"),
        (np.float32(3), ("--recipe", "nvfp4", *WEIGHT), 2, "at least one axis"),
        (np.ones(16, "f4"), ("--recipe", "nvfp5", *WEIGHT), 1, "did you mean 'nvfp4'?"),
        (np.ones(16, "f4"), ("--recipe", "nvfp4", "--role", "gradient", "--product", "fprop"), 2, "has no gradient"),
        (np.ones(16, "f4"), ("--recipe", "nvfp4", *WEIGHT, "--axis", "1"), 2, "1 axes"),
        (np.ones(16, "f4"), ("--recipe", "bf16; * -> fp8", *WEIGHT), 2, "one recipe"),
        (np.ones((16, 16), "f4"), ("--recipe", "nvfp4(rht=wgrad.grad)", *GRADIENT), 2, "both"),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_and_writes_no_file(
    tmp_path: Path, array: np.ndarray, options: tuple[str, ...], code: int, message: str
) -> None:
    result, arrays = run(tmp_path, array, *options)
    assert result.code == code
    assert message in result.err
    assert not arrays
    assert os.listdir(tmp_path) == ["in.npy"]


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
@pytest.mark.usefixtures("capfdbinary")
@pytest.mark.parametrize("out", ["/dev/null", "/dev/stdout", "-"])
def test_a_device_as_output(tmp_path: Path, out: str) -> None:
    """An archive can be written to a device, and the error is not printed into an archive on standard output."""
    np.save(tmp_path / "in.npy", np.ones((16, 16), np.float32))
    result = policyc("quantize", tmp_path / "in.npy", "--recipe", "fp8", *WEIGHT, "--out", out)
    assert result.code == 0
    assert "SQNR" in (result.out if out == "/dev/null" else result.err)
    assert "SQNR" not in (result.err if out == "/dev/null" else result.out)
