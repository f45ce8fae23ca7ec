"""`memory.html`: memory over time with the phases of the steps, as one file that needs nothing else."""

from __future__ import annotations

import html

from tessera.train.profile.memory import Timeline

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1160, 360, 70, 14, 30
COLUMNS = 1000  # of the chart: each shows the highest point of its stretch of time
_HUES = {"forward": "#4c7be8", "backward": "#d9822b", "optimizer": "#2e8b57", "clipping": "#8a63c9", "data": "#c23b3b"}
_REST = "#8a94a6"
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2024;--soft:#667;--line:#d8dbe2;--page:#fbfbfc;--card:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaee;--soft:#9aa3b2;--line:#343a46;--page:#14171c;--card:#1c2027}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;padding:28px;
max-width:1240px}h1{font-size:24px;margin:0}h2{font-size:18px;margin:28px 0 10px}.soft{color:var(--soft)}
figure{margin:16px 0;padding:12px 14px;background:var(--card);border:1px solid var(--line);border-radius:10px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:12px}.grid{stroke:var(--line)}
.line{fill:none;stroke:var(--ink);stroke-width:1.5}.peak{stroke:#c23b3b;stroke-dasharray:4 4}
.key{margin-right:16px;font-size:13px}.key i{display:inline-block;width:12px;height:12px;margin-right:6px;opacity:.45;
vertical-align:-1px}table{border-collapse:collapse;width:100%}td,th{padding:5px 14px 5px 0;text-align:left;
border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}td.bar{width:40%}
td.bar div{height:10px;background:#4c7be8;border-radius:3px}
"""


def memory_page(timeline: Timeline, title: str, sentences: list[str]) -> str:
    unit, name = (2**30, "GiB") if timeline.peak >= 2**30 else (2**20, "MiB")
    rows = "".join(
        f"<tr><td>{html.escape(holder)}</td><td>{size / unit:.3f} {name}</td><td>{size / timeline.peak:.1%}</td>"
        f'<td class="bar"><div style="width:{max(0.3, 100 * size / timeline.peak):.1f}%"></div></td></tr>'
        for holder, size in timeline.holders
    )
    said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    keys = "".join(
        f'<span class="key"><i style="background:{_HUES.get(phase, _REST)}"></i>{phase}</span>'
        for phase in dict.fromkeys(span.name for span in timeline.spans)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<h2>What bounds the step</h2><ul>{said}</ul><h2>Memory</h2>"
        f'<div class="soft">{timeline.peak / unit:.3f} {name} at most, in {timeline.peak_phase}. '
        "Time is the host's: when it asked for memory and gave it back.</div>"
        f"<figure>{_chart(timeline, unit, name)}<div>{keys}</div></figure>"
        f"<h2>What held the memory at the highest point</h2><table><tr><th>by</th><th>bytes</th><th>share</th><th></th>"
        f"</tr>{rows}</table></body></html>"
    )


def _chart(timeline: Timeline, unit: int, name: str) -> str:
    begin = timeline.points[0][0]
    end = max(timeline.points[-1][0], timeline.spans[-1].end if timeline.spans else 0)
    width, height = WIDTH - LEFT - 10, HEIGHT - TOP - BOTTOM

    def across(time: int) -> float:
        return LEFT + (time - begin) / max(1, end - begin) * width

    def up(size: float) -> float:
        return HEIGHT - BOTTOM - max(size, 0) / max(1, timeline.peak * 1.05) * height

    parts = [
        f'<rect x="{across(span.start):.1f}" y="{TOP}" width="{max(0.5, across(span.end) - across(span.start)):.1f}" '
        f'height="{height}" fill="{_HUES.get(span.name, _REST)}" opacity=".16"><title>{span.name}</title></rect>'
        for span in timeline.spans
    ]
    for i in range(5):
        size = timeline.peak * 1.05 * i / 4
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{up(size):.1f}" y2="{up(size):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(size) + 4:.1f}" text-anchor="end">{size / unit:.3g} {name}</text>')
        time = begin + (end - begin) * i // 4
        parts.append(
            f'<text x="{across(time):.1f}" y="{HEIGHT - 10}" text-anchor="{"end" if i == 4 else "middle"}">'
            f"{(time - begin) / 1e6:.4g} ms</text>"
        )
    line = " ".join(f"{across(time):.1f},{up(size):.1f}" for time, size in _thin(timeline.points, begin, end))
    parts.append(f'<polyline class="line" points="{line}"/>')
    place = across(timeline.peak_time)
    parts.append(f'<line class="peak" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over time">{"".join(parts)}</svg>'


def _thin(points: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The lowest and the highest point of each column, in their order: no peak is lost."""
    columns: dict[int, list[tuple[int, int]]] = {}
    for point in points:
        columns.setdefault((point[0] - begin) * COLUMNS // max(1, end - begin), []).append(point)
    out: list[tuple[int, int]] = []
    for column in columns.values():
        low, high = min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])
        out += sorted({low, high})
    return out
