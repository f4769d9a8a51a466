"""The look of a report: one column, light and dark, no script, nothing fetched. And the colours that plots share with it."""

BASELINE = "#9aa5b1"  # the colour of what the others are compared with
OTHERS = ("#2a78b8", "#d98a2b", "#5a9e6f", "#8d6cab", "#b5545c")
INK = "#1f2933"
FAINT = "#7b8794"
GRID = "#e4e7eb"
PREFILL, DECODE, BOOKKEEPING, IDLE = "#2a78b8", "#d98a2b", "#b5545c", "#e4e7eb"

STYLE = """\
:root { color-scheme: light dark; --ink: #1f2933; --faint: #616e7c; --line: #e4e7eb; --paper: #ffffff; --card: #f5f7fa; --accent: #1f6aa5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --faint: #9aa5b1; --line: #3e4c59; --paper: #14191f; --card: #1f2933; --accent: #7cb8e6; }
  img { filter: brightness(.93); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem; }
p, ul { max-width: 52rem; margin: .5rem 0; }
li { margin: .25rem 0; }
.lead { color: var(--faint); font-size: .95rem; max-width: none; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem; margin: 1rem 0; }
.cards div { background: var(--card); border-radius: .5rem; padding: .7rem 1rem .8rem; display: flex; flex-direction: column; }
.cards b { font-size: 1.9rem; line-height: 1.2; color: var(--accent); font-variant-numeric: tabular-nums; }
.cards span { font-weight: 600; }
.cards small { color: var(--faint); font-size: .86rem; line-height: 1.4; }
figure { margin: 1rem 0; overflow-x: auto; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: .35rem; }
figcaption { color: var(--faint); font-size: .86rem; margin-top: .4rem; max-width: 52rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; white-space: normal; }
.word { text-align: left; white-space: normal; }
td.word:first-child { white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; }
code, pre { font: .88em/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
code { background: var(--card); padding: .08em .3em; border-radius: .25em; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: .4rem; overflow-x: auto; }
"""
