"""Show a run in a notebook: its curves, and its figures as a table."""

from __future__ import annotations

from pathlib import Path

from tessera.errors import TesseraError, nearest
from tessera.observe.report.charts import chart_of, charts_of, names_to_draw
from tessera.observe.report.page import facts_of, state_of, write_page
from tessera.observe.report.recorded import read_run
from tessera.runtime import html


class Plot:
    """Hold charts of a run. A notebook shows them; elsewhere `save` writes them as a page."""

    def __init__(self, title: str, charts: list[str]) -> None:
        self.title, self.charts = title, charts

    def __repr__(self) -> str:
        return f"Plot({self.title}: {len(self.charts)} charts; save('plot.html') writes them)"

    def _repr_html_(self) -> str:
        return html.fragment([f'<div class="charts">{"".join(self.charts)}</div>'])

    def save(self, path: str | Path) -> Path:
        """Write the charts as one page that needs nothing else, and return its path."""
        body = [f"<h1>{html.escape(self.title)}</h1>", f'<div class="charts">{"".join(self.charts)}</div>']
        write_page(Path(path), html.page(f"{self.title} · Tessera", body))
        return Path(path)


def plot_run(folder: Path, names: tuple[str, ...]) -> Plot:
    """Return charts of some names of `metrics.jsonl`; by default the charts of the report."""
    run = read_run(folder)
    if not names:
        return Plot(run.name, charts_of(run))
    recorded = names_to_draw(run)
    for name in names:
        if name not in recorded:
            raise TesseraError(
                f"the run recorded no {name!r}",
                where="plot",
                allowed=recorded,
                nearest=nearest(name, recorded),
                code="run.number-not-recorded",
            )
    return Plot(run.name, [chart_of(run, name) for name in names])


def table_of(folder: Path) -> str:
    """Return the figures of a run as a table for a notebook."""
    run = read_run(folder)
    rows = [(html.escape(name), html.escape(value)) for name, value in facts_of(run)]
    return html.fragment([state_of(run), html.table(("run", run.name), rows)])
