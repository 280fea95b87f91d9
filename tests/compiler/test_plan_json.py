"""A list of sites, written and read again, is decided about as the loss that it comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyc.compiler.matching.decisions import RuleDecisions
from policyc.compiler.planning.plan import make_plan
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.site_masks import SiteMasks
from policyc.compiler.tables.plan_json import (
    PLAN_SCHEMA,
    BadSiteList,
    as_json,
    parse_sites,
    read_path,
    read_sites,
    write_path,
)
from policyc.language.loader import parse
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm
from policyc.language.selectors import PathSegment
from tests.support import policy_oracle as oracle
from tests.support.kind_programs import sites_of
from tests.support.strategies import CHARACTERS

pytestmark = pytest.mark.any_jax

NAMES = ["gpt_unrolled", "llama_scanned_in_groups", "mixture_ragged_scanned"]
POLICY = """
* -> bf16
* where mlp -> nvfp4
* @ wgrad where experts -> fp8
layers[-1:].* -> mxfp8
w1, blocks.*.w2 @ fprop -> mxfp4
* where layer >= -1 and not scores -> bf16
* where k % 16 != 0 or router -> keep
after 50% { * where head -> f32 }
"""


def bare(site: Site) -> str:
    return re.sub(r"\[\d+\]", "", site.name)


def write_and_read(sites: Sites) -> Sites:
    return parse_sites(as_json(make_plan(Policy(), sites)))


@pytest.mark.parametrize("name", NAMES)
def test_a_list_is_decided_about_like_its_loss(name: str) -> None:
    sites = sites_of(name)
    policy = parse(POLICY)
    plan = make_plan(policy, sites)
    listed = write_and_read(sites)
    read_plan = make_plan(policy, listed)
    assert listed.total_flops == sites.total_flops
    assert [bare(site) for site in listed] == [bare(site) for site in sites]
    assert tuple(share.matched for share in read_plan.rules.shares) == read_plan.counts == plan.counts
    assert read_plan.rules.shares == plan.rules.shares
    assert sum(plan.counts) > 0
    assert read_plan.phases == plan.phases
    for phase in plan.phases:
        expected, found = (
            [
                (decision.rules, decision.recipe)
                for site in planned.sites
                for decision in (planned.decisions(phase)[site.address, layer] for layer in site.layers())
            ]
            for planned in (plan, read_plan)
        )
        assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_site_that_is_read_has_the_paths_and_attributes_of_its_layers(name: str) -> None:
    sites = sites_of(name)
    for site, other in zip(sites, write_and_read(sites), strict=True):
        for layer, number in zip(site.layers(), other.layers(), strict=True):
            assert {*other.paths(number), ()} == {*site.paths(layer), ()}
            assert other.attributes(number) == site.attributes(layer)


def test_a_list_is_matched_as_the_oracle_matches_its_names() -> None:
    """Sites with one layer, with several that have several names each, and with a condition on their layers."""
    names, random = oracle.SITE_NAMES, Random(0)
    layers = [tuple(random.sample(names, random.randint(1, 3))) for _ in range(600)]
    listed = [oracle_site(number, layers[number : number + 6]) for number in range(0, 600, 6)]
    sites = parse_sites(json.dumps({"schema": PLAN_SCHEMA, "sites": listed, "other_products": []})).sites
    masks = SiteMasks(sites)
    counts = set()
    for rule in (r for _ in range(12) for r in parse(oracle.random_policy(random)).rules):
        expected = []
        for number, (site, layer) in enumerate(masks.layers):
            is_in = rule.where is None or rule.where.holds(sites[site].attributes(layer)) is True
            matching = [
                s for s in rule.selectors if any(oracle.selector_matches(s, n) for n in layers[number])
            ]
            expected.append(tuple(is_in and any(gemm in s.products for s in matching) for gemm in Gemm))
        found = masks.match(rule)
        assert [tuple(bool(mask >> bit & 1) for mask in found) for bit in range(600)] == expected
        counts.add(sum(map(any, expected)))
    assert len(counts) > 30  # of 84 rules: most match some layers, and not all


def oracle_site(number: int, layers: list[tuple[oracle.SiteName, ...]]) -> dict[str, Any]:
    """A site as `as_json` writes it."""
    listed = [
        {
            "paths": [write_path(tuple(PathSegment(*segment) for segment in name)) for name in names],
            "layer": layer,
        }
        for layer, names in enumerate(layers)
    ]
    return {
        "address": [number], "scope": "", "parameters": ["w"], "place": "", "weight": "rhs", "blocks": 6,
        "kind": ("mlp", "attention", None)[number % 3], "m": 15 + number % 4, "n": 2, "k": 16, "batch": 1,
        "repeats": 1, "products": list(Gemm), "layers": listed, "opaque": None,
    }  # fmt: skip


def test_shares_of_rules_are_those_of_the_sites() -> None:
    sites = sites_of("gpt_scanned_tied")
    policy = parse("* where mlp -> fp8\n* @ fprop where mlp -> bf16")
    mlp, fprop = RuleDecisions(policy, write_and_read(sites)).shares
    own = sum(s.flops * s.repeats for s in sites if s.kind.name == "mlp")
    assert mlp.decided == fprop.decided == sum(s.count for s in sites if s.kind.name == "mlp") > 0
    assert fprop.flops == pytest.approx(own / sites.total_flops)
    assert mlp.flops == pytest.approx(2 * own / sites.total_flops)


def test_unmet_expectations_and_unmatched_rules_are_reported() -> None:
    sites = sites_of("gpt_unrolled")
    listed = write_and_read(sites)
    policy = parse("* -> bf16 expect 7\nnothing -> fp8\nnobody -> fp8 expect 0\n")
    first, second = RuleDecisions(policy, listed).check()
    assert (first.code, first.span.line) == ("expect-violated", 1)
    assert first.fix is not None
    assert [(edit.span.text, edit.text) for edit in first.fix.edits] == [("7", str(listed.count))]
    assert (second.code, second.span.line) == ("unmatched-rule", 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 3}',
        '{"schema": 4, "sites": [{}], "other_products": []}',
        '{"schema": 4, "sites": [{"layers": [], "blocks": 1}], "other_products": []}',
        "[" * 99999,
    ],
)
def test_another_file_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(BadSiteList, match="policyc sites --format json"):
        parse_sites(text)


@pytest.mark.parametrize("path", ["/dev/zero", "/", "missing.json", "a\0b"])
def test_only_regular_files_are_read(path: str) -> None:
    with pytest.raises(BadSiteList, match=r"no such file|cannot be read"):
        read_sites(Path(path))


NAMES = st.text(CHARACTERS, min_size=1)
SEGMENTS = st.builds(PathSegment, NAMES, st.none() | st.integers(0, 99), st.none())
SIZED = st.builds(PathSegment, NAMES, st.integers(0, 99), st.integers(1, 100))


@given(st.lists(SEGMENTS | SIZED, min_size=1, max_size=4).map(tuple))
def test_every_path_is_read_as_it_was_written(path: tuple[PathSegment, ...]) -> None:
    assert read_path(json.loads(json.dumps(write_path(path)))) == path
