"""The bundled policies: clean, formatted, documented, and equal to what they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policyc import load, parse
from policyc.language import bundled
from policyc.language.formatter import format_text
from policyc.language.loader import parse_with_diagnostics
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax

EXPECTED = {
    "te_nvfp4", "te_nvfp4_bound", "te_nvfp4_no_rht", "llama_nvfp4", "llama3_8b_nvfp4", "nvfp4_paper_12b",
    "nvfp4_late_switch", "quartet2", "fp8", "mxfp8", "mxfp4", "bf16", "fp8_with_head", "mlp_nvfp4_rest_fp8",
    "mlp_nvfp4_late_fp8", "mlp_nvfp4_tail_fp8", "rollout_nvfp4",
}  # fmt: skip
BUNDLED = list(bundled.bundled_policies().items())


def test_the_bundled_policies_are_all_there() -> None:
    assert bundled.bundled_policies().keys() >= EXPECTED


@pytest.mark.parametrize(("name", "path"), BUNDLED, ids=[name for name, _ in BUNDLED])
class TestBundled:
    """Every bundled policy."""

    def test_is_clean(self, name: str, path: Path) -> None:
        ran = policyc("lint", name)
        assert (ran.code, ran.out) == (0, "")

    def test_is_formatted(self, name: str, path: Path) -> None:
        loaded = parse_with_diagnostics(path.read_text(encoding="utf-8"), path=path)
        assert format_text(loaded.file.source.text) == path.read_text(encoding="utf-8")

    def test_prints_and_parses_to_itself(self, name: str, path: Path) -> None:
        policy = load(name)
        assert parse(str(policy)) == policy
        assert load(path) == policy

    def test_has_a_header_with_intent_source_and_expectation(self, name: str, path: Path) -> None:
        header = path.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        assert all(line.startswith("#") for line in header)
        assert re.fullmatch(r"# [A-Za-z].*\.", header[0])
        labels = [line.split(":")[0] for line in header if re.match(r"# \w+:  ", line)]
        assert labels == ["# Intent", "# Source", "# Expect"]

    def test_has_at_most_six_lines_of_rules_and_variants(self, name: str, path: Path) -> None:
        code = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
        rules = [line for line in code if line and not line.startswith(("recipe ", "import "))]
        assert len(rules) <= 6

    def test_resolves_under_every_variant(self, name: str, path: Path) -> None:
        policy = load(name)
        for variant in (policy, *(policy.variant(v.name) for v in policy.variants)):
            resolve = variant.resolver()
            assert all(len(resolve(rule.recipe).treatments) == 6 for rule in variant.rules)
            assert parse(str(variant)) == variant
