"""A list of sites, written and read again, is decided about as the loss that it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyc.compiler.plan import make_plan
from policyc.compiler.plan_tables import as_json
from policyc.compiler.site_lists import BadSiteList, ListPlan, SiteList, read_path, write_path
from policyc.language.loader import parse
from policyc.language.policy import Policy
from policyc.language.selectors import PathSegment
from tests.support.jaxpr_tools import find_sites
from tests.support.kind_programs import PROGRAMS

BY_NAME = {program.name: program for program in PROGRAMS}
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


@pytest.mark.parametrize("name", NAMES)
def test_a_list_is_decided_about_like_its_loss(name: str) -> None:
    program = BY_NAME[name]
    sites = find_sites(program.loss, program.params)
    policy = parse(POLICY)
    plan = make_plan(policy, sites)
    listed = SiteList.from_json(as_json(make_plan(Policy(), sites)))
    list_plan = ListPlan(policy, listed)
    assert listed.total_flops == sites.total_flops
    assert tuple(share.matched for share in list_plan.shares) == plan.counts
    assert sum(plan.counts) > 0
    assert list_plan.rules.phases == plan.phases
    for phase in plan.phases:
        expected = {
            (number, position): plan.decisions(phase)[site.address, layer].choices
            for number, site in enumerate(sites)
            for position, layer in enumerate(site.layers())
        }
        assert {(s, i): choices for s, i, choices in list_plan.choices(phase)} == expected


def test_shares_of_rules_are_those_of_the_sites() -> None:
    program = BY_NAME["gpt_scanned_tied"]
    sites = find_sites(program.loss, program.params)
    listed = SiteList.from_json(as_json(make_plan(Policy(), sites)))
    mlp, fprop = ListPlan(parse("* where mlp -> fp8\n* @ fprop where mlp -> bf16"), listed).shares
    own = sum(s.flops * s.repeats for s in sites if s.kind.name == "mlp")
    assert mlp.decided == fprop.decided == sum(s.count for s in sites if s.kind.name == "mlp") > 0
    assert fprop.flops == pytest.approx(own / sites.total_flops)
    assert mlp.flops == pytest.approx(2 * own / sites.total_flops)


def test_unmet_expectations_and_unmatched_rules_are_reported() -> None:
    program = BY_NAME["gpt_unrolled"]
    sites = find_sites(program.loss, program.params)
    listed = SiteList.from_json(as_json(make_plan(Policy(), sites)))
    policy = parse("* -> bf16 expect 7\nnothing -> fp8\nnobody -> fp8 expect 0\n")
    first, second = ListPlan(policy, listed).check()
    assert (first.code, first.span.line) == ("expect-violated", 1)
    assert first.fix is not None
    assert [(edit.span.text, edit.text) for edit in first.fix.edits] == [("7", str(listed.count))]
    assert (second.code, second.span.line) == ("unmatched-rule", 2)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": 3}', '{"schema": 4, "sites": [{}], "other_products": []}', "[" * 99999],
)
def test_another_file_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(BadSiteList, match="policyc sites --format json"):
        SiteList.from_json(text)


@pytest.mark.parametrize("path", ["/dev/zero", "/", "missing.json", "a\0b"])
def test_only_regular_files_are_read(path: str) -> None:
    with pytest.raises(BadSiteList, match=r"no such file|cannot be read"):
        SiteList.read(Path(path))


SEGMENTS = st.builds(PathSegment, st.text(min_size=1), st.none() | st.integers(0, 99), st.none())
SIZED = st.builds(PathSegment, st.text(min_size=1), st.integers(0, 99), st.integers(1, 100))


@given(st.lists(SEGMENTS | SIZED, min_size=1).map(tuple))
def test_every_path_is_read_as_it_was_written(path: tuple[PathSegment, ...]) -> None:
    assert read_path(json.loads(json.dumps(write_path(path)))) == path
