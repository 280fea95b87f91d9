"""A report as one page of HTML. Its charts are drawn by uPlot 1.6.32 (MIT), which is embedded in the page.

Texts come from files of runs: every one of them is escaped here, or embedded as data that the page shows as text.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

from policyc.base.web_page import compress_json, fill_template, read_asset
from policyc.experiments.report.build import Report
from policyc.experiments.report.charts import colors_of
from policyc.experiments.report.format import (
    FIGURES,
    TIME_NOTE,
    format_figure,
    format_gap,
    format_interval,
    known_figures,
    summarize,
    time_table,
)
from policyc.experiments.report.runs import RunData
from policyc.experiments.report.sweeps import SweepData
from policyc.experiments.report.tables import heat_maps, plan_table
from policyc.experiments.report.values import Record, escape_texts, safe_html

_read = partial(read_asset, "policyc.experiments.report")

_OPEN_RUNS = 12  # a longer table of runs is closed at first
_COLORS = 12  # that page.css defines; charts.js draws further lines dashed


def render_page(report: Report) -> str:
    """The whole page."""
    data, sweep = report.data, report.sweep
    colors = {variant.name: color for color, variant in colors_of(sweep)}
    parts = [_header(data), _inequalities(data)]
    if len(sweep.runs) == 1:
        parts += [_cards(data["variants"][0]["runs"][0])]
    else:
        parts += [_verdicts(data, colors), _variant_table(data, colors)]
    parts += [_charts(data), _time(data), _equal_loss(data, colors)]
    parts += [_run_table(data, colors), _failures(data), _numerics(sweep), _policies(data, sweep)]
    parts += [_environment(data), _commands(data), _notes(data)]
    embedded = {
        "charts": data["charts"],
        "comparisons": data["comparisons"],
        "speed_ups": data["speed_ups"],
        "colors": colors,
        "margin": data["statistics"]["margin"],
    }
    return fill_template(
        _read("page.html"),
        {
            "title": safe_html(data["title"]),
            "style": _read("uPlot.min.css") + _read("page.css"),
            "body": "\n".join(part for part in parts if part),
            "data": compress_json(escape_texts(embedded)),
            "uplot_license": _read("uPlot.LICENSE"),
            "uplot": _read("uPlot.min.js"),
            "script": _read("charts.js") + _read("main.js"),
        },
    )


# ---- elements


def _section(id: str, title: str, content: str, note: str = "") -> str:
    if not content:
        return ""
    small = f" <small>{safe_html(note)}</small>" if note else ""
    return f'<section id="{id}"><h2>{safe_html(title)}{small}</h2>{content}</section>'


def _details(title: str, content: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{content}</details>"


def _columns(*blocks: str) -> str:
    return f"<div class=columns>{''.join(blocks)}</div>"


def _chip(name: str, color: int) -> str:
    breakable = safe_html(name).replace("_", "_<wbr>")
    return f'<span class=chip><i class="c{color % _COLORS}"></i><span>{breakable}</span></span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], css_class: str = "") -> str:
    """A table of cells that are already HTML. Columns after the first are numbers."""
    titles = "".join(f"<th>{safe_html(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    opening = f'<table class="{css_class}">' if css_class else "<table>"
    return f"<div class=scroll>{opening}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


# ---- top of the page


def _header(data: Record) -> str:
    runs = [run for variant in data["variants"] for run in variant["runs"]]
    finished = sum(run["state"] == "finished" for run in runs)
    facts = [f"{finished} of {len(runs)} runs finished" if len(runs) > 1 else f"run {runs[0]['state']}"]
    devices = {e["values"].get("device", "") for e in data["environment"]} - {""}
    facts += sorted(devices)
    tokens = max((run["tokens"] or 0 for run in runs), default=0)
    facts += [f"{format_figure('tokens', tokens)} tokens a run"] if tokens else []
    facts += [
        f"{max(run['last_step'] for run in runs):,} steps",
        data["created"].replace("T", " ").replace("+00:00", " UTC"),
    ]
    return (
        f"<header><p class=quiet>{safe_html(data['title'])}</p><h1>{safe_html(summarize(data))}</h1>"
        f"<p class=quiet>{safe_html(' · '.join(facts))}</p></header>"
    )


def _inequalities(data: Record) -> str:
    """What makes the runs incomparable. It stands before the verdicts, which do not count then."""
    return "".join(
        f"<p class=warning>Not comparable: {safe_html(text)}.</p>" for text in data["inequalities"]
    )


def _cards(run: Record) -> str:
    """The figures of a single run."""
    figures: list[tuple[str, Any]] = [("steps", f"{run['last_step']:,}")]
    figures += [("tokens", format_figure("tokens", run["tokens"]))] if run["tokens"] else []
    figures += [(label, format_figure(name, run[name])) for name, label in FIGURES if run[name] is not None]
    cards = "".join(
        f"<div><b>{safe_html(value)}</b><span>{safe_html(label)}</span></div>" for label, value in figures
    )
    return f"<div class=cards>{cards}</div>"


def _verdicts(data: Record, colors: dict[str, int]) -> str:
    """One table for each baseline, with the reason of each verdict, and how verdicts are made."""
    content = ""
    for baseline in data["statistics"]["baselines"]:
        rows = [c for c in data["comparisons"] if c["baseline"] == baseline]
        if rows:
            first = baseline == data["statistics"]["baselines"][0]
            figure = f'<figure class=chart data-gaps="{safe_html(baseline)}"></figure>'
            table = f"<div class=verdict-columns>{_verdict_table(rows, colors)}{figure}</div>"
            content += table if first else _details(f"Against {safe_html(baseline)}", table)
    if not content:
        return ""
    rules = "".join(f"<li>{safe_html(rule)}</li>" for rule in data["statistics"]["rules"])
    content += _details(
        "How verdicts are made: fixed before the runs", f"<ul class=rules>{rules}</ul>", is_open=True
    )
    title = f"Verdicts against {data['statistics']['baselines'][0]}"
    return _section("verdicts", title, content, f"margin {data['statistics']['margin']}")


def _verdict_table(rows: Sequence[Record], colors: dict[str, int]) -> str:
    body = ""
    for row in rows:
        verdict = row["verdict"]
        detectable = "–" if row["detectable"] is None else f"{row['detectable']:.4f}"
        cells = (
            _chip(row["variant"], colors[row["variant"]]),
            f'<span class="verdict {verdict}">{verdict}</span>',
            f"<b>{safe_html(format_gap(row['gap']))}</b>",
            safe_html(format_interval(row["interval"])),
            str(len(row["seeds"])),
            detectable,
        )
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        body += f"<tr class=reason><td colspan=6><div>{safe_html(row['reason'])}</div></td></tr>"
    head = "".join(
        f"<th>{title}</th>"
        for title in ("variant", "verdict", "gap, nats", "interval", "seeds", "detectable")
    )
    return f"<div class=scroll><table class=verdicts><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _variant_table(data: Record, colors: dict[str, int]) -> str:
    columns = known_figures([variant["figures"] for variant in data["variants"]])
    speed_ups = (data["speed_ups"] or {}).get("values", {})
    head = [
        "variant",
        "finished",
        *(label for _, label in columns),
        *(["predicted speed-up"] if speed_ups else []),
    ]
    rows = []
    for variant in data["variants"]:
        states = variant["states"]
        lost = f" <span class=warning>{states['failed']} failed</span>" if states["failed"] else ""
        cells = [
            _chip(variant["name"], colors[variant["name"]]),
            f"{states['finished']}/{len(variant['runs'])}{lost}",
        ]
        cells += [safe_html(format_figure(name, variant["figures"].get(name))) for name, _ in columns]
        if speed_ups:
            cells.append(safe_html(format_figure("ratio", speed_ups.get(variant["name"]))))
        rows.append(cells)
    note = "losses: means over the seeds that finished; memory: the largest; spikes: the sum"
    return _section("variants", "Variants", _table(head, rows), note)


def _charts(data: Record) -> str:
    figures = ""
    if data["speed_ups"]:
        figures += "<figure class=chart data-speed-ups></figure>"
    for number, chart in enumerate(data["charts"]):
        wide = " wide" if chart["id"] == "loss" or chart["id"].startswith("gap-") else ""
        figures += f'<figure class="chart{wide}" data-chart="{number}"></figure>'
    hint = (
        "<p class='quiet hint'>Point at a chart for values. Drag to zoom, double-click to reset. Click a name to hide "
        "it.</p>"
    )
    return _section("charts", "Over the run", f"{hint}<div class=charts>{figures}</div>")


def _time(data: Record) -> str:
    """Where the time of each run went."""
    head, rows = time_table(data)
    table = _table(head, [[safe_html(cell) for cell in row] for row in rows]) if rows else ""
    content = table if len(rows) <= _OPEN_RUNS else _details(f"All {len(rows)} runs", table)
    return _section("time", "Time", content and content + f"<p class=quiet>{safe_html(TIME_NOTE)}</p>")


def _equal_loss(data: Record, colors: dict[str, int]) -> str:
    """What each variant costs in tokens and gains in speed. Speeds that nobody measured or predicted have no column."""
    rows = data["equal_loss"]
    kinds = [
        kind for kind in ("measured", "predicted") if any(row[f"{kind}_speed_up"] is not None for row in rows)
    ]
    cells = []
    for row in rows:
        speed_ups = [row[f"{kind}_speed_up"] for kind in kinds]
        gains = [None if ratio is None else ratio / row["token_ratio"] for ratio in speed_ups]
        figures = [value for pair in zip(speed_ups, gains, strict=True) for value in pair]
        cells.append(
            [
                _chip(row["variant"], colors[row["variant"]]),
                safe_html(row["baseline"]),
                f"{row['loss']:.4f}",
                f"{row['token_ratio'] - 1:+.1%}",
                *(safe_html(format_figure("ratio", value)) for value in figures),
            ]
        )
    unit = data["axis"]  # tokens, or steps if the runs do not say how many tokens they have seen
    head = ["variant", "baseline", "loss", f"extra {unit}"]
    head += [title for kind in kinds for title in (f"{kind} speed-up", "to that loss")]
    content = (
        _table(head, cells) + f"<p class=quiet>{_EQUAL_LOSS_NOTE.replace('tokens', unit)}</p>" if rows else ""
    )
    return _section("equal-loss", "Time to equal loss", content)


_EQUAL_LOSS_NOTE = (
    "The loss is the larger of the two final trailing losses; extra tokens are what the variant needs beyond the "
    "baseline to reach it. A variant breaks even at a speed-up of 1 plus the extra tokens. Where the learning rate "
    "decays, the baseline is met before its own decay: a baseline with a shorter schedule would need fewer tokens, so "
    "the extra tokens are a lower bound. An emulated format is slower than bf16: its measured speed says nothing about "
    "native GEMMs."
)


# ---- runs


def _run_table(data: Record, colors: dict[str, int]) -> str:
    runs = [(variant["name"], run) for variant in data["variants"] for run in variant["runs"]]
    if len(runs) == 1:
        return ""
    columns = known_figures([run for _, run in runs])
    rows = []
    for name, run in runs:
        mark = " class=warning" if run["state"] == "failed" else ""
        state = f"<span{mark}>{safe_html(run['state'])}</span>"
        seed = "–" if run["seed"] is None else str(run["seed"])
        figures = [safe_html(format_figure(column, run[column])) for column, _ in columns]
        rows.append([_chip(name, colors[name]), seed, state, f"{run['last_step']:,}", *figures])
    head = ["variant", "seed", "state", "step", *(label for _, label in columns)]
    table = _details(f"All {len(runs)} runs", _table(head, rows))
    return _section("runs", "Runs", table + f"<p class=quiet>{safe_html(data['statistics']['spikes'])}</p>")


def _failures(data: Record) -> str:
    """The runs that failed, each with its last lines."""
    content = ""
    for variant in data["variants"]:
        for run in variant["runs"]:
            if run["state"] == "failed":
                tail = f"<pre>{_safe_lines(run['log_tail'])}</pre>" if run["log_tail"] else ""
                content += (
                    f"<h3>{safe_html(run['name'])} <small>{safe_html(run['reason'])}</small></h3>{tail}"
                )
    return _section("failures", "Failed runs", content)


def _safe_lines(lines: Sequence[str]) -> str:
    return "\n".join(safe_html(line) for line in lines)


def _numerics(sweep: SweepData) -> str:
    """The last telemetry of one run of each variant: that of the first seed that has some."""
    measured: list[RunData] = []
    for variant in sweep.variants:
        measured += [run for run in variant.runs if run.stats][:1]
    tables = [(run, heat_maps(run)) for run in measured]
    blocks = [
        _columns(*maps) if len(sweep.runs) == 1 else _details(safe_html(run.name), _columns(*maps))
        for run, maps in tables
        if maps
    ]
    return _section("numerics", "Quantization error by layer", "".join(blocks))


def _policies(data: Record, sweep: SweepData) -> str:
    """The text or the diff of each policy, its hashes, and its plan."""
    diffs = {diff["variant"]: diff for diff in data["diffs"]}
    content = ""
    for variant, summary in zip(sweep.variants, data["variants"], strict=True):
        hashes = [("policy", h) for h in summary["policy_sha256"]] + [
            ("plan", h) for h in summary["plan_sha256"]
        ]
        facts = [*summary["policy_names"], *(f"{label} {value[:12]}" for label, value in hashes)]
        facts += [f"backend {name}" for name in summary["backends"]]
        diff = diffs.get(variant.name)
        body = f"<p>{safe_html(variant.edit)}</p>" if variant.edit else ""
        body += "".join(f"<p class=warning>{safe_html(finding)}</p>" for finding in variant.findings)
        if diff is not None:
            body += f"<p class=quiet>against {safe_html(diff['against'])}</p><pre>{_diff_lines(diff['lines'])}</pre>"
        elif variant.policy_text is not None:
            body += f"<pre>{_safe_lines(variant.policy_text.splitlines())}</pre>"
        plan = next((run.plan for run in variant.runs if run.plan is not None), None)
        if plan is not None:
            body += "<h4>Plan</h4>" + plan_table(plan)
        if body or facts:
            title = (
                f"<b>{safe_html(variant.name)}</b> <small><code>{safe_html(', '.join(facts))}</code></small>"
            )
            content += _details(title, body, is_open=len(sweep.runs) == 1)
    for row in data["not_run"]:
        content += f"<p class=quiet>Not run: {safe_html(row.get('name', ''))} ({safe_html(row.get('reason', ''))})</p>"
    return _section("policies", "Policies and plans", content)


def _diff_lines(lines: Sequence[str]) -> str:
    kinds = {"+": "added", "-": "removed", "@": "place"}
    return "\n".join(
        f'<span class="{kinds.get(line[:1], "same")}">{safe_html(line)}</span>' for line in lines
    )


# ---- end of the page


def _environment(data: Record) -> str:
    content = ""
    for entry in data["environment"]:
        rows = [[safe_html(name), safe_html(value)] for name, value in entry["values"].items()]
        settings = [[safe_html(name), safe_html(value)] for name, value in entry["settings"].items()]
        runs = entry["runs"]
        label = safe_html(", ".join(runs) if len(runs) <= 3 else f"{runs[0]} and {len(runs) - 1} more runs")
        many = len(data["environment"]) > 1
        block = _table(["environment", ""], rows, "facts") + (
            _table(["setting", ""], settings, "facts") if settings else ""
        )
        content += _details(label, _columns(block)) if many else _columns(block)
    return _section("environment", "Settings, device and versions", content)


def _commands(data: Record) -> str:
    blocks = [
        f"<p class=quiet>{safe_html(command['of'])}</p><pre>{safe_html(shlex.join(command['words']))}</pre>"
        for command in data["commands"]
    ]
    rest = _details(f"{len(blocks) - 1} runs", "".join(blocks[1:])) if blocks[1:] else ""
    return _section("commands", "Commands", "".join(blocks[:1]) + rest)


def _notes(data: Record) -> str:
    notes = [f"<p class=quiet>Left out: {safe_html(problem)}.</p>" for problem in data["problems"]]
    return f"<footer>{''.join(notes)}<p class=quiet>policyc {safe_html(data['policyc'])}</p></footer>"
