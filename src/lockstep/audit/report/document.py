# SPDX-License-Identifier: Apache-2.0
"""A report as one file of HTML: without network, light and dark, wide and narrow."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5f6670; --ground: #ffffff;
  --panel: #f4f5f7; --line: #d9dce1; --error: #b42318; --warning: #9a6700; --notice: #175cd3;
  --good: #067647; --mark: #fff3c4; --a: #175cd3; --b: #c4320a; --c: #067647; --d: #6938ef; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3ae; --ground: #14171a;
  --panel: #1d2126; --line: #343a42; --error: #ff8a7a; --warning: #f3c04b; --notice: #84b6ff;
  --good: #5bd3a0; --mark: #4a3f14; --a: #84b6ff; --b: #ff9c73; --c: #5bd3a0; --d: #b9a3ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; color: var(--ink);
  background: var(--ground); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 0; }
.soft { color: var(--soft); } .good { color: var(--good); }
section { border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; margin: 1rem 0; }
.error h2 { color: var(--error); } .warning h2 { color: var(--warning); }
.notice h2 { color: var(--notice); }
pre, table, .chart { overflow-x: auto; display: block; max-width: 100%; }
pre { background: var(--panel); padding: .5rem; border-radius: .25rem; font-size: .85rem;
  margin: .25rem 0 .75rem; }
mark { background: var(--mark); color: inherit; display: inline-block; min-width: 100%; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
.chart svg { height: auto; } svg text { fill: var(--soft); font-size: 13px; }
svg text.rank { text-anchor: middle; font-size: 12px; }
code { background: var(--panel); padding: 0 .2rem; border-radius: .2rem; font-size: .9em; }
.plot { display: grid; grid-template-columns: auto 1fr; gap: 0 .5rem; color: var(--soft);
  font-size: .8rem; } .plot svg { width: 100%; height: 150px; grid-column: 2; }
.scale, .steps { display: flex; justify-content: space-between; }
.scale { flex-direction: column; text-align: right; } .steps { grid-column: 2; }
.legend span { margin-right: 1rem; } .legend i { display: inline-block; width: .8rem;
  height: .8rem; margin-right: .3rem; }
.legend .rank0, .rank0.key { background: var(--a); } .legend .rank1 { background: var(--b); }
.legend .rank2 { background: var(--c); } .legend .rank3 { background: var(--d); }
polyline.rank0 { stroke: var(--a); } polyline.rank1 { stroke: var(--b); }
polyline.rank2 { stroke: var(--c); } polyline.rank3 { stroke: var(--d); }
polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.axis { stroke: var(--line); vector-effect: non-scaling-stroke; }
h3 { font-size: 1rem; margin: .75rem 0 0; }
td.share { --tint: color-mix(in srgb, var(--a) calc(var(--share) * 35%), transparent);
  background-image: linear-gradient(var(--tint), var(--tint)); }
.cell-0 { fill: var(--good); } .cell-1 { fill: var(--error); } .cell-2 { fill: var(--line); }
"""


def document(title: str, body: str) -> str:
    """The whole page; `title` and `body` are HTML."""
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{title}</h1>{body}</body></html>\n"
    )
