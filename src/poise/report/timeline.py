"""The GPU timeline: who held which GPUs when, run by run, to zoom into; without a script, a coarse picture of each run.

What the script in `assets` draws is packed into the page as columns, deflated and in base64, one element a run,
so that only the run that is looked at need be unpacked:

    common    JSON: span in seconds, time units in it, nodes, tenants by GPU time (most first), jobs
    a run     six columns of blocks one after another: start (less that of the block before), length, first row, rows, job,
              end + 8·lane. Of a column all low bytes come first, then all middle, then all high ones. Starts and lengths are
              in time units, `UNITS` to the span
"""

import json
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from poise.model.cluster import Cluster
from poise.model.errors import InvariantError
from poise.report.amounts import amount
from poise.report.markup import element, escape, fit
from poise.report.page import Exhibit
from poise.report.stills import COLOURS, still
from poise.report.tracks import ENDS, Small, Track, coarsened

UNITS = 1 << 22
"""Moments that a timeline tells apart; the deepest zoom shows some thousand of them side by side."""
MOST_BLOCKS = 600_000
"""Of all runs together; a run gets its part of it."""
FEWEST_BLOCKS = 5_000
"""A run shows at least so many, however many runs there are."""
_LIMIT = 1 << 24
_SCRIPTS = ("data.js", "view.js", "picture.js", "timeline.js")
"""One script, in the order in which its parts build on one another."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """Jobs and tenants of all runs, and the runs in terms of them."""

    tenants: tuple[str, ...]
    jobs: tuple[str, ...]
    tenant: Small
    gpus: Small
    tracks: tuple[Track, ...]


def timeline(tracks: Sequence[tuple[str, Track]], cluster: Cluster) -> Exhibit | None:
    """Runs of one cluster by name, in one view with one zoom; None if no job ever held a GPU."""
    if not any(len(track.start) for _, track in tracks):
        return None
    most = max(FEWEST_BLOCKS, MOST_BLOCKS // len(tracks))
    thinned = [coarsened(track, most) for _, track in tracks]
    span = max(float(track.end.max(initial=0.0)) for _, track in tracks)
    packed = _packed([track for track, _ in thinned])
    names = [name for name, _ in tracks]
    remarks = [
        _remark(name, len(track.start), len(fewer.start), length)
        for (name, track), (fewer, length) in zip(tracks, thinned, strict=True)
        if length
    ]
    stills = [still(name, track, packed.tenants, cluster, span) for name, track in zip(names, packed.tracks, strict=True)]
    data = [_hold("common", _common(packed, cluster, span)), *(_hold("run", _blocks(each, span)) for each in packed.tracks)]
    markup = element(
        "div",
        _live(names, remarks),
        *data,
        element("noscript", element("p", escape(_WITHOUT)), element("div", *map(_figure, stills), class_="figures")),
        class_="timeline",
        role="group",
        aria_label="GPU timeline",
    )
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return Exhibit(markup, _asset("timeline.css"), f'"use strict";\n{{\n{parts}}}')


_WITHOUT = (
    "Without its script, this page shows each run as a coarse picture: a cell is coloured by who held the GPU in its middle "
    "at that moment."
)
_KEYS = (
    "Zoom by wheel or pinch, by dragging across a part, or with + and −; arrows move, 0 shows the whole, "
    "Shift with ↑ and ↓ shows fewer or more GPUs. Rest on a block, or tap it, to read whose it is; choose an entry of the "
    "key to see it alone. Where several jobs fall into a pixel, their colours mix."
)


def _live(names: Sequence[str], remarks: Sequence[str]) -> str:
    """What the script brings to life; hidden until it has."""
    buttons = [
        *(("in", "+", "Zoom in"), ("out", "−", "Zoom out"), ("left", "←", "Earlier"), ("right", "→", "Later")),
        *(("fewer", "↕+", "Fewer GPUs"), ("more", "↕−", "More GPUs"), ("whole", "Whole", "Show the whole")),
    ]
    tools = [
        element("button", escape(text), type="button", data_do=do, aria_label=name, title=name) for do, text, name in buttons
    ]
    colours = element("label", "Colour by ", element("select", aria_label="Colour by"))
    return element(
        "div",
        _runs(names),
        element("div", *tools, colours, class_="tools"),
        element(
            "div",
            element("canvas"),
            element("div", class_="part", hidden="hidden"),
            element("div", class_="tip", hidden="hidden"),
            class_="stage",
            tabindex="0",
            role="application",
            aria_label="GPU timeline: rows are GPUs, time runs to the right. Plus and minus zoom, arrows move, 0 resets.",
        ),
        element("p", class_="shown", role="status"),
        element("div", class_="key", role="group", aria_label="Key"),
        *(element("p", escape(remark), class_="fine") for remark in remarks),
        element("p", escape(_KEYS), class_="fine help"),
        class_="live",
        hidden="hidden",
    )


def _figure(svg: str) -> str:
    return element("figure", svg)


def _runs(names: Sequence[str]) -> str:
    first = {"checked": "checked"}
    choices = [
        element(
            "label",
            element("input", type="radio", name="run", value=str(place), **({} if place else first)),
            element("span", escape(name)),
        )
        for place, name in enumerate(names)
    ]
    return element("div", *choices, class_="runs", role="radiogroup", aria_label="Policy")


def _remark(name: str, blocks: int, drawn: int, length: float) -> str:
    return (
        f"{name}: {blocks:,} blocks are drawn as {drawn:,}. Those shorter than {amount(length, 'seconds')} that follow one "
        "another on a GPU are put together, in the colour of the longest; the time that GPUs were held is kept."
    )


def _packed(tracks: Sequence[Track]) -> _Packed:
    """Number jobs and tenants alike in all runs; tenants by the GPU time of all runs, the largest first."""
    held: dict[str, float] = {}
    jobs: dict[str, tuple[str, int]] = {}
    for track in tracks:
        time = np.bincount(track.owner, (track.end - track.start) * track.rows, minlength=len(track.tenants))
        for name, more in zip(track.tenants, time.tolist(), strict=True):
            held[name] = held.get(name, 0.0) + more
        owners = (track.tenants[place] for place in track.tenant.tolist())
        jobs.update(zip(track.jobs, zip(owners, track.gpus.tolist(), strict=True), strict=True))
    tenants = sorted(held, key=lambda name: (-held[name], name))
    place = {name: index for index, name in enumerate(tenants)}
    at = {name: index for index, name in enumerate(jobs)}
    return _Packed(
        tuple(tenants),
        tuple(jobs),
        np.array([place[tenant] for tenant, _ in jobs.values()], dtype=np.int32),
        np.array([gpus for _, gpus in jobs.values()], dtype=np.int32),
        tuple(_renumbered(track, at, place) for track in tracks),
    )


def _renumbered(track: Track, at: dict[str, int], place: dict[str, int]) -> Track:
    new = [at[name] for name in track.jobs] + [len(at) + place[name] for name in track.tenants]
    return replace(track, job=np.array(new, dtype=np.int32)[track.job])


def _common(packed: _Packed, cluster: Cluster, span: float) -> bytes:
    document = {
        "span": span,
        "units": UNITS,
        "ends": [str(end) for end in ENDS],
        "colours": COLOURS,
        "nodes": [[fit(node.name), node.gpus, fit(node.gpu_type)] for node in cluster.nodes],
        "tenants": [fit(name) for name in packed.tenants],
        "jobs": [fit(name) for name in packed.jobs],
        "tenant": packed.tenant.tolist(),
        "gpus": packed.gpus.tolist(),
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _blocks(track: Track, span: float) -> bytes:
    start = np.floor(track.start * (UNITS / span)).astype(np.int64)
    length = np.maximum(1, np.ceil(track.end * (UNITS / span)).astype(np.int64) - start)
    ending = track.ended + 8 * track.lane
    columns = (np.diff(start, prepend=0), length, track.row, track.rows, track.job, ending)
    return b"".join(_planes(column) for column in columns)


def _planes(column: NDArray[np.integer]) -> bytes:
    """Low, middle and high bytes of a column, each together: bytes of a kind deflate better."""
    if column.size and not (column.min() >= 0 and column.max() < _LIMIT):
        raise InvariantError(f"a column of the timeline holds {column.min()} to {column.max()}; expected 0 to {_LIMIT - 1}")
    return b"".join((column >> shift & 255).astype(np.uint8).tobytes() for shift in (0, 8, 16))


def _hold(kind: str, data: bytes) -> str:
    """Data that no browser runs: a script of no language."""
    return element("script", b64encode(zlib.compress(data, 6)).decode("ascii"), type="text/plain", data_holds=kind)


def _asset(name: str) -> str:
    return resources.files("poise.report").joinpath("assets", name).read_text(encoding="utf-8")
