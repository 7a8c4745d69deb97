"""The look of the HTML pages: template and style sheet, and the colours figures are drawn in.

Figures are drawn in the light colours below; in a page every one of them becomes a CSS variable, so
that figures follow the reader's light or dark setting like everything else.
"""

from __future__ import annotations

# name: (light, dark)
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "page": ("#ffffff", "#0d1117"),
    "card": ("#f6f8fa", "#151b23"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#cf222e", "#f85149"),
    "series1": ("#0969da", "#58a6ff"),
    "series2": ("#bc4c00", "#f0883e"),
    "series3": ("#1b7c83", "#39c5cf"),
    "series4": ("#8250df", "#bc8cff"),
    "series5": ("#bf3989", "#f778ba"),
    "series6": ("#7d6b00", "#d9c12f"),
}
SERIES = tuple(light for name, (light, _) in COLOURS.items() if name.startswith("series"))
# Second mark beside the colour, for readers who do not tell the colours apart.
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")


def _variables(index: int) -> str:
    return " ".join(f"--{name}: {pair[index]};" for name, pair in COLOURS.items())


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  -webkit-text-size-adjust: 100%; overflow-wrap: anywhere; }}
main, header, footer {{ max-width: 1120px; margin: 0 auto; padding: 0 20px; }}
header {{ padding-top: 28px; }}
footer {{ padding-bottom: 40px; color: var(--muted); font-size: 14px; }}
h1 {{ font-size: 28px; line-height: 1.2; margin: 0 0 8px; }}
h2 {{ font-size: 20px; line-height: 1.3; margin: 40px 0 12px; padding-bottom: 6px;
  border-bottom: 1px solid var(--line); }}
p {{ margin: 0 0 12px; max-width: 75ch; }}
.lead {{ color: var(--muted); }}
.note {{ color: var(--muted); font-size: 14px; }}
.cards {{ display: grid; gap: 12px; margin: 0 0 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); }}
.card {{ background: var(--card); border: 1px solid var(--line); border-left: 5px solid
  var(--muted); border-radius: 6px; padding: 12px 14px; }}
.card.good {{ border-left-color: var(--good); }}
.card.bad {{ border-left-color: var(--bad); }}
.card h3 {{ margin: 0; font-size: 14px; font-weight: 600; color: var(--muted); }}
.card strong {{ display: block; font-size: 20px; line-height: 1.3; margin: 2px 0; }}
.card.good strong {{ color: var(--good); }}
.card.bad strong {{ color: var(--bad); }}
.card p {{ margin: 0; font-size: 14px; }}
.figures {{ display: grid; gap: 20px; align-items: start; margin: 0 0 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }}
figure {{ margin: 0; min-width: 0; max-width: 540px; }}
figcaption {{ font-weight: 600; margin-bottom: 4px; }}
figcaption small {{ display: block; font-weight: 400; color: var(--muted); font-size: 14px; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figure svg text {{ fill: var(--ink); }}
.scroll {{ overflow-x: auto; margin: 0 0 16px; }}
.scroll:focus-visible {{ outline: 2px solid var(--series1); }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }}
.caption {{ font-size: 14px; font-weight: 600; margin-bottom: 2px; }}
th, td {{ padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }}
th {{ white-space: nowrap; }}
tbody th {{ white-space: normal; min-width: 12ch; overflow-wrap: break-word; }}
thead th {{ color: var(--muted); font-weight: 600; }}
.number {{ text-align: right; white-space: nowrap; }}
td.text {{ white-space: nowrap; }}
td.long {{ min-width: 30ch; max-width: 60ch; }}
details {{ margin: 0 0 16px; }}
summary {{ cursor: pointer; font-weight: 600; padding: 6px 0; }}
pre {{ overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 12px; font-size: 13px; line-height: 1.45; }}
@media (max-width: 600px) {{
  main, header, footer {{ padding-left: 16px; padding-right: 16px; }}
  h1 {{ font-size: 24px; }} h2 {{ margin-top: 32px; }} }}
@media print {{ .card, figure, tr {{ break-inside: avoid; }} }}
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
{% if lead %}<p class="lead">{{ lead }}</p>{% endif %}
</header>
<main>
{%- macro show(block) -%}
{% if block.kind == "paragraph" %}
<p{% if block.quiet %} class="note"{% endif %}>{{ block.text }}</p>
{% elif block.kind == "cards" %}
<div class="cards">
{% for card in block.cards %}
<div class="card {{ card.tone }}"><h3>{{ card.label }}</h3><strong>{{ card.value }}</strong>
{% if card.text %}<p>{{ card.text }}</p>{% endif %}</div>
{% endfor %}
</div>
{% elif block.kind == "figures" %}
<div class="figures">
{% for figure in block.figures %}
<figure><figcaption>{{ figure.title }}{% if figure.caption %}
<small>{{ figure.caption }}</small>{% endif %}</figcaption>
{{ figure.svg }}</figure>
{% endfor %}
</div>
{% elif block.kind == "table" %}
<p class="caption" id="table-{{ block.number }}">{{ block.caption }}</p>
<div class="scroll" role="region" tabindex="0" aria-labelledby="table-{{ block.number }}">
<table aria-labelledby="table-{{ block.number }}">
<thead><tr>{% for column in block.columns %}
<th scope="col"{% if column.number %} class="number"{% endif %}>{{ column.name }}</th>
{%- endfor %}</tr></thead>
<tbody>
{% for row in block.rows %}
<tr>{% for cell in row %}
{% if loop.first and not cell.number %}<th scope="row">{{ cell.text }}</th>
{% else %}<td class="{{ 'number' if cell.number else 'long' if cell.long else 'text' }}">
{{- cell.text }}</td>{% endif %}
{%- endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% elif block.kind == "details" %}
<details><summary>{{ block.summary }}</summary>
<pre>{{ block.text }}</pre></details>
{% endif %}
{%- endmacro %}
{% for section in sections %}
<section>
{% if section.title %}<h2>{{ section.title }}</h2>{% endif %}
{% for block in section.blocks %}{{ show(block) }}{% endfor %}
</section>
{% endfor %}
</main>
<footer>{% if footer %}<p>{{ footer }}</p>{% endif %}</footer>
</body>
</html>
"""
