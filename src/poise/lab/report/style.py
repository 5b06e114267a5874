"""How figures and pages look: colours as CSS variables, once for light and once for dark.

The first series take the colours of Okabe and Ito, which people with any common colour blindness tell apart; yellow is
left out because it vanishes on white. The four after them were searched for: of all that have enough contrast with the
paper, those that are furthest from the others to whichever eyes see them worst. Each series has a dash pattern too, so
that print in grey still works. Five patterns and eleven colours have no common factor: fifty-five series pass before a
pair repeats.
"""

_PALETTE = {  # on light paper, on a dark screen
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#1b2129", "#e4e8ec"),
    "muted": ("#5a6572", "#9ba7b4"),
    "grid": ("#e6e9ed", "#272e36"),
    "rule": ("#c9d0d8", "#3b444f"),
    "quiet": ("#a9b3be", "#596573"),
    "accent": ("#0072b2", "#4ba6e0"),
    "tint": ("#eaf3f9", "#17303f"),
    "wash": ("#f6f7f9", "#1b2027"),
}
LIGHT, DARK = ({name: pair[side] for name, pair in _PALETTE.items()} for side in (0, 1))
LIGHT_SERIES = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1b2129", "#783c00", "#2d1ea5", "#b41e78", "#9678ff",
)  # fmt: skip
DARK_SERIES = (
    "#3d97d6", "#ee7d2b", "#1fbf92", "#dc93ba", "#f0b429", "#93d3fa", "#e4e8ec", "#964b1e", "#4b4bb4", "#d22d87", "#9669ff",
)  # fmt: skip
DASHES = ("none", "8 3", "2.5 2", "10 3 2 3", "5 2 1.5 2 1.5 2")


def series_class(index: int) -> str:
    """The classes that give the series at a place in the order its colour and its dashes."""
    return f"series c{index % len(LIGHT_SERIES)} d{index % len(DASHES)}"


def _variables(colours: dict[str, str], series: tuple[str, ...]) -> str:
    named = [f"--{name}:{colour}" for name, colour in colours.items()]
    return ";".join(named + [f"--s{place}:{colour}" for place, colour in enumerate(series)])


# Paper is always light: the dark colours are for screens alone.
COLOURS = (
    f":root{{color-scheme:light dark;{_variables(LIGHT, LIGHT_SERIES)}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK, DARK_SERIES)}}}}}\n"
)
_SERIES = "".join(
    [f".fig .c{place}{{--c:var(--s{place})}}" for place in range(len(LIGHT_SERIES))]
    + [f".fig .d{place} .line{{stroke-dasharray:{dash}}}" for place, dash in enumerate(DASHES)]
)
FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
FIGURE = (
    f"""\
.fig{{font-family:{FONT};font-variant-numeric:tabular-nums}}
.fig text{{fill:var(--ink);font-size:12px}}
.fig .title{{font-size:14.5px;font-weight:600}}
.fig .soft{{fill:var(--muted)}}
.fig .strong{{font-weight:600}}
.fig .end{{text-anchor:end}}
.fig .middle{{text-anchor:middle}}
.fig .paper{{fill:var(--paper)}}
.fig .grid{{stroke:var(--grid);stroke-width:1;fill:none}}
.fig .rule{{stroke:var(--rule);stroke-width:1;fill:none}}
.fig .line{{fill:none;stroke:var(--c);stroke-width:1.7;stroke-linejoin:round}}
.fig .dot{{fill:var(--c)}}
.fig .bar{{fill:var(--quiet)}}
.fig .best .bar{{fill:var(--accent)}}
.fig .best .mark{{fill:var(--accent);font-weight:600}}
.fig .frontier{{fill:none;stroke:var(--accent);stroke-width:1.3;stroke-dasharray:4 3}}
.fig .point{{fill:var(--paper);stroke:var(--muted);stroke-width:1.6}}
.fig .best .point{{fill:var(--accent);stroke:var(--accent)}}
.fig .leader{{fill:none;stroke:var(--muted);stroke-width:1}}
.fig .halo{{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}}
.fig .series{{transition:opacity .12s}}
.fig .marks:hover>.series:not(:hover){{opacity:.15}}
"""
    + _SERIES
    + "\n@media print{.fig{print-color-adjust:exact;-webkit-print-color-adjust:exact}}\n"
)

PAGE = f"""\
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%;text-size-adjust:100%}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 {FONT};font-variant-numeric:tabular-nums}}
main,footer{{max-width:68rem;margin:0 auto;padding:0 1.5rem}}
header{{padding:2.5rem 0 .5rem}}
h1{{font-size:1.75rem;line-height:1.2;margin:0 0 .6rem;letter-spacing:-.01em;overflow-wrap:anywhere}}
h2{{font-size:1.2rem;line-height:1.3;margin:0 0 .5rem;overflow-wrap:anywhere}}
p{{max-width:44rem;margin:0 0 .8rem;overflow-wrap:anywhere}}
header p{{color:var(--muted)}}
nav{{margin:.4rem 0 0;font-size:.9rem}}
nav a{{display:inline-block;color:var(--accent);text-decoration:none;margin:0 1.1rem .2rem 0}}
nav a:hover,nav a:focus-visible{{text-decoration:underline}}
section{{border-top:1px solid var(--grid);padding:1.4rem 0 .4rem;margin-top:1.4rem;scroll-margin-top:.5rem}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr));
gap:1.8rem 2.6rem;margin:.9rem 0 .4rem}}
figure{{margin:0;max-width:42rem;min-width:0}}
figure .fig{{display:block;width:100%;height:auto}}
.scroll{{overflow-x:auto;margin:.8rem 0;border:1px solid var(--grid);border-radius:8px}}
.scroll:focus-visible{{outline:2px solid var(--accent)}}
table{{border-collapse:collapse;width:100%;font-size:.875rem;line-height:1.35}}
th,td{{padding:.5rem .8rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--grid)}}
tr:last-child>*{{border-bottom:0}}
thead th{{background:var(--wash);color:var(--muted);font-weight:600;border-bottom:1px solid var(--rule)}}
thead+tbody:empty{{display:none}}
tbody th{{font-weight:500;background:var(--paper);position:sticky;left:0}}
thead th:first-child{{position:sticky;left:0}}
tbody tr:hover>*{{background:var(--wash)}}
.n{{text-align:right}}
tbody .best,tbody tr:hover>.best{{background:var(--tint)}}
footer{{color:var(--muted);font-size:.85rem;padding-top:1.2rem;padding-bottom:2.5rem}}
@media screen and (max-width:36rem){{
.fig text{{font-size:13px}}
.fig .title{{font-size:16px}}
main,footer{{padding-left:.8rem;padding-right:.8rem}}
header{{padding-top:1.4rem}}
h1{{font-size:1.4rem}}
th,td{{padding:.45rem .6rem}}
}}
@media print{{
@page{{margin:14mm}}
body{{font-size:10pt}}
main,footer{{max-width:none;padding:0}}
header{{padding-top:0}}
nav{{display:none}}
.figures{{grid-template-columns:1fr 1fr;gap:6mm}}
.figures:has(figure:only-child){{grid-template-columns:1fr}}
figure,tr,p,.stage{{break-inside:avoid}}
h2,section>p{{break-after:avoid}}
.scroll{{overflow:visible;border:0}}
th,td{{padding:1mm 1.6mm;font-size:8.5pt;position:static;white-space:normal}}
tbody th{{overflow-wrap:anywhere;min-width:22mm}}
thead{{display:table-header-group}}
}}
"""
