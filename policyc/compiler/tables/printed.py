"""Plans and sites that print as tables, as the public functions return them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from policyc.base.notebook import html_table
from policyc.compiler.planning.plan import Plan
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.tables.plan_tables import rule_rows, summary_lines
from policyc.compiler.tables.site_table import site_rows, sites_table


@dataclass(frozen=True, kw_only=True, repr=False)
class PrintedSites(Sites):
    """Sites that print as the table of `policyc sites`."""

    def __str__(self) -> str:
        return sites_table(self).rstrip()

    def _repr_html_(self) -> str:
        header, *rows = site_rows(self)
        return html_table(header, rows)


@dataclass(frozen=True, kw_only=True, repr=False)
class PrintedPlan(Plan):
    """A plan that prints as the table of `policyc apply`: the rules, and what they decide."""

    def __str__(self) -> str:
        return "\n".join([f"{self.policy.name}: {self.caption}", *summary_lines(self)])

    def _repr_html_(self) -> str:
        header, *rows = rule_rows(self)
        return html_table(header, rows, f"{self.policy.name}: {self.caption}")


def as_printed(plan: Plan) -> PrintedPlan:
    """The plan, and its sites, as objects that print as tables."""
    sites = PrintedSites(**_values(plan.sites))
    return PrintedPlan(**{**_values(plan), "sites": sites})


def _values(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
