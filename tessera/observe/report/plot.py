"""Show a run in a notebook: its curves, and its figures as a table."""

from __future__ import annotations

from pathlib import Path

from tessera.observe.report.charts import charts_of
from tessera.observe.report.page import facts_of, state_of
from tessera.observe.report.recorded import read_run
from tessera.runtime import html


class Plot:
    """Hold the charts of a run. A notebook shows them."""

    def __init__(self, folder: Path) -> None:
        run = read_run(folder)
        self.title, self.charts = run.name, charts_of(run)

    def __repr__(self) -> str:
        return f"Plot({self.title}: {len(self.charts)} charts, for a notebook)"

    def _repr_html_(self) -> str:
        return html.fragment([f'<div class="charts">{"".join(self.charts)}</div>'])


def table_of(folder: Path) -> str:
    """Return the figures of a run as a table for a notebook."""
    run = read_run(folder)
    rows = [(html.escape(name), html.escape(value)) for name, value in facts_of(run)]
    return html.fragment([state_of(run), html.table(("run", run.name), rows)])
