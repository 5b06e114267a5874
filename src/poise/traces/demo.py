"""The small trace that comes with Poise: 240 jobs of four tenants in 8.5 hours, 1.3 times what 24 GPUs can do in them.

It is `synthetic:` + DEMO_SPEC, written down so that it can be looked at; a test compares the two.
"""

from importlib.resources import files
from typing import BinaryIO, cast

from poise.traces.intake import Intake
from poise.traces.registry import format_named
from poise.traces.schema import Trace

DEMO_SPEC = (
    "jobs=240,seed=7,rate=30,sizes=1:0.55/2:0.2/4:0.15/8:0.1,durations=lognormal:930:1,tenants=4,"
    "models=vae/superresolution/dcgan/gru/lstm/resnet50/resnext50"
)


def demo_trace() -> Trace:
    """The trace of the demonstration."""
    with files("poise.traces").joinpath("data", "demo.jsonl").open("rb") as stream:
        return Trace("demo", tuple(format_named("poise").read(Intake("demo.jsonl", cast(BinaryIO, stream)))))
