"""What the playground shows, against its lists of sites. The page itself is tested in a browser."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from policyc.compiler.sites.site_list import Sites
from policyc.compiler.tables.plan_json import parse_sites
from policyc.editor.playground import check, list_examples, list_words
from tests.support.command import ROOT

LISTS = ROOT / "docs" / "playground" / "sites"

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(not LISTS.is_dir(), reason="an installed package has no docs"),
]


def sites_of(model: str) -> Sites:
    return parse_sites((LISTS / f"{model}.json").read_text(encoding="utf-8"))


def runs(plan: dict[str, Any], name: str, product: str) -> list[tuple[int, int, str]]:
    (row,) = (row for row in plan["rows"] if row["name"] == name)
    return [(run["first"], run["last"], run["format"]) for run in row["products"][product]]


@pytest.mark.parametrize(
    ("model", "count"), [("llama3_8b", 289), ("llama3_405b", 1135), ("mixtral_8x7b", 321)]
)
def test_every_list_can_be_planned(model: str, count: int) -> None:
    sites = sites_of(model)
    assert sites.count == count  # 9 or 10 GEMMs a layer and the head
    data = check(list_examples()["llama_nvfp4"], sites)
    assert not data["diagnostics"]
    assert sum(data["plan"]["formats"].values()) == pytest.approx(1)
    assert json.loads(json.dumps(data)) == data


def test_offsets_are_those_of_javascript() -> None:
    text = "# 🎉𝔘é\nrecipe base = fp8\n* -> bass\n* -> bf16\n"
    units = text.encode("utf-16-le")
    (finding,) = check(text, sites_of("vit_b16"))["diagnostics"]
    ((start, end, replacement),) = finding["fix"]["edits"]
    assert [
        units[2 * a : 2 * b].decode("utf-16-le")
        for a, b in [(start, end), (finding["start"], finding["end"])]
    ] == ["bass", "bass"]
    assert replacement == "base"
    rules = check(text.replace("bass", "base"), sites_of("vit_b16"))["plan"]["rules"]
    assert [units[: 2 * rule["end"]].decode("utf-16-le")[-4:] for rule in rules] == ["bass", "bf16"]


@pytest.mark.slow  # it traces the loss of a Llama
def test_a_list_is_what_its_script_writes(tmp_path: Path) -> None:
    script = runpy.run_path(str(LISTS.parent / "list_sites.py"))
    script["write"](tmp_path, "vit_b16", script["plan_vit"]())
    assert (tmp_path / "vit_b16.json").read_text() == (LISTS / "vit_b16.json").read_text()
    script["write"](tmp_path, "llama3_8b", script["plan_llama"]("llama3_8b"))
    assert (tmp_path / "llama3_8b.json").read_text() == (LISTS / "llama3_8b.json").read_text()


FROM_ARCHIVE = """
import sys
sys.path.insert(0, sys.argv[1])
from policyc.compiler.tables.plan_json import parse_sites
from policyc.editor import playground
playground.list_words()
text = playground.list_examples()["llama_nvfp4"] + "* -> nvfp4"
print(*(d["code"] for d in playground.check(text, parse_sites(open(sys.argv[2]).read()))["diagnostics"]))
"""


def test_the_archive_of_the_page_has_all_that_it_needs(tmp_path: Path) -> None:
    runpy.run_path(str(LISTS.parent / "build.py"))["write_archive"](tmp_path / "policyc.zip")
    with zipfile.ZipFile(tmp_path / "policyc.zip") as archive:
        archive.extractall(tmp_path)
    # -I -S: no packages but those of the archive, as in a browser
    words = [sys.executable, "-I", "-S", "-c", FROM_ARCHIVE, str(tmp_path), str(LISTS / "vit_b16.json")]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert "everything-in-4-bits" in result.stdout, result.stderr


def test_unrolled_layers_share_a_row() -> None:
    plan = check("* -> bf16\nblocks[-2:].mlp -> fp8\n* @ wgrad where scores -> keep", sites_of("vit_b16"))[
        "plan"
    ]
    assert runs(plan, "blocks.mlp.fc1", "fprop") == [(0, 9, "bf16"), (10, 11, "fp8")]
    assert runs(plan, "scores", "wgrad") == [(0, 11, "keep")]
    assert runs(plan, "head", "dgrad") == [(0, 0, "bf16")]
    assert [(rule["matched"], rule["decided"]) for rule in plan["rules"]] == [
        (98, 94),  # of 8 GEMMs in 12 blocks, the embedding and the head, all but two fc1 and fc2
        (4, 4),
        (24, 24),
    ]


def test_variants_and_phases_are_chosen() -> None:
    text = "* -> bf16\nafter 82% { * where mlp -> fp8 }\nvariant hot { * where mlp -> nvfp4 }\n"
    sites = sites_of("llama3_8b")
    late = check(text, sites, phase=1)
    assert late["plan"]["phases"] == ["until 82%", "after 82%"]
    assert runs(late["plan"], "layers.mlp.up_proj", "fprop") == [(0, 31, "fp8")]
    assert runs(check(text, sites)["plan"], "layers.mlp.up_proj", "fprop") == [(0, 31, "bf16")]
    hot = check(text, sites, variant="hot")
    assert hot["variants"] == ["hot"]
    assert runs(hot["plan"], "layers.mlp.up_proj", "fprop") == [(0, 31, "nvfp4")]


def test_errors_leave_no_plan_and_have_a_place() -> None:
    data = check("* -> bf16\n* where mpl -> fp8\n", sites_of("llama3_8b"))
    assert data["plan"] is None
    (finding,) = data["diagnostics"]
    assert (finding["line"], finding["start"], finding["end"]) == (2, 18, 21)


def test_the_words_to_color_do_not_overlap() -> None:
    words = [word for group in list_words().values() for word in group]
    assert len(words) == len(set(words))
