"""How the doctor's page looks: light and dark, on a desk and on a phone."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--ink:#1c2024;--soft:#5d6675;--line:#d8dbe2;--page:#fbfbfc;--card:#fff;--main:#2f5fd0;
--loss:#c23b3b;--warning:#b07000;--note:#4a6a8a;--sound:#2e8b57;--trained:#bfe8cf;--media:#dfe6f7}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaee;--soft:#9aa3b2;--line:#343a46;--page:#14171c;--card:#1c2027;
--main:#7da2ff;--loss:#ff7d7d;--warning:#ffc04d;--note:#9cbcdc;--sound:#63c793;--trained:#1f5537;--media:#2a3555}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;padding:28px;
max-width:1160px}
h1{font-size:26px;line-height:1.25;margin:4px 0}h2{font-size:18px;margin:34px 0 12px}
h3{font-size:14px;margin:0 0 8px;display:flex;flex-wrap:wrap;gap:4px 12px;align-items:baseline;overflow-wrap:anywhere}
h3 .soft{margin-left:auto;font-weight:400}p{margin:6px 0}.soft{color:var(--soft)}code{font-size:13px}
header{border-left:5px solid var(--sound);padding-left:16px;overflow-wrap:anywhere}
header.loss{border-color:var(--loss)}header.warning{border-color:var(--warning)}
.facts{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));margin:18px 0}
.fact,figure,article,.finding,.wide{background:var(--card);border:1px solid var(--line);border-radius:10px}
.fact{padding:10px 14px}.fact b{display:block;font-size:19px;font-variant-numeric:tabular-nums}
.finding{padding:10px 14px;margin:8px 0;border-left:5px solid var(--note);overflow-wrap:anywhere}
.finding.loss{border-left-color:var(--loss)}.finding.warning{border-left-color:var(--warning)}
.finding summary{cursor:pointer}.finding ul{margin:8px 0;padding-left:20px}
.charts{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))}
figure{margin:0;padding:12px 14px}figcaption{font-weight:600;display:flex;justify-content:space-between;gap:10px}
figcaption span{font-weight:400;color:var(--soft);font-size:12px}figure p{font-size:12.5px;margin:4px 0 0}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11px;paint-order:stroke;stroke:var(--card);stroke-width:3px}
.bar{fill:var(--main);opacity:.85}.bar:hover{opacity:1}line.share{stroke:var(--soft);stroke-dasharray:3 3}
line.mark{stroke:var(--loss)}svg text.mark{fill:var(--loss)}
.wide{overflow-x:auto;padding:6px 14px}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:5px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th[colspan]{text-align:center}th{font-weight:600;color:var(--soft);font-size:13px}td:first-child,th:first-child{text-align:left}
tr:last-child td{border-bottom:0}.chosen td{font-weight:700;background:var(--media)}
article{padding:14px;margin:12px 0}pre{margin:0;font:13px/1.6 ui-monospace,monospace;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:420px;overflow-y:auto}
mark{background:var(--trained);color:inherit;border-radius:3px}
.media{background:var(--media);border-radius:3px;padding:0 4px}.problem{color:var(--loss)}
.thumbs{display:flex;flex-wrap:wrap;gap:10px;margin:0 0 10px}.thumb{font-size:12px;text-align:center;max-width:152px}
.thumb img,.none{display:block;max-width:144px;max-height:144px;margin:0 auto 2px;border-radius:6px;
border:1px solid var(--line)}.none{padding:20px 12px;color:var(--soft)}
@media(max-width:560px){body{padding:14px}h1{font-size:21px}.fact b{font-size:16px}h3 .soft{margin-left:0}}
"""
