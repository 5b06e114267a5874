"""How series look: colours that all eyes tell apart, and enough of them."""

import re
from importlib import resources
from itertools import combinations

import numpy as np
import pytest

from poise.cli import compare
from poise.lab.report import style
from poise.lab.report.axes import FloatArray
from poise.lab.report.style import series_class
from poise.scheduler.policies.catalogue import POLICIES

SIGHTS = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "no blue cones": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
"""What eyes without one kind of cones see of a colour in linear light (Machado, Oliveira and Fernandes, 2009)."""


def linear(colour: str) -> FloatArray:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lightness_and_hue(light: FloatArray) -> FloatArray:
    """Oklab (Ottosson, 2020): equal distances look about equally different."""
    to_cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.793617785, -0.0040720468],
            [1.9779984951, -2.428592205, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.808675766],
        ]
    )
    found: FloatArray = to_lab @ np.cbrt(to_cones @ np.clip(light, 0, 1))
    return found


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("colours", [style.LIGHT_SERIES, style.DARK_SERIES], ids=["light", "dark"])
def test_colours_of_series_can_be_told_apart_by_all_eyes(colours: tuple[str, ...], sight: str) -> None:
    seen = [lightness_and_hue(SIGHTS[sight] @ linear(colour)) for colour in colours]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > (0.1 if sight == "all cones" else 0.045)


def test_no_two_of_many_policies_look_the_same_and_no_two_of_the_demonstration_have_one_colour() -> None:
    looks = [series_class(place) for place in range(len(POLICIES) + 20)]
    assert len(set(looks)) == len(looks)
    assert len({look.split()[1] for look in looks[: len(compare.POLICIES)]}) == len(compare.POLICIES)


def test_as_many_colours_have_a_texture_in_print_and_the_rest_is_grey() -> None:
    assets = resources.files("poise.lab.report") / "assets"
    strokes = (assets / "picture.js").read_text().partition("const STROKES = [")[2].partition("];")[0]
    assert len(set(re.findall(r"\[[^\]]*\]", strokes))) == len(style.LIGHT_SERIES)
    assert f".fig .c{len(style.LIGHT_SERIES)}{{--c:var(--quiet)}}" in (assets / "timeline.css").read_text()
