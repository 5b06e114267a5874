"""Hypothesis profiles: `check` is the same every time; POISE_HYPOTHESIS=long looks at many random examples."""

import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "check", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", deadline=None, max_examples=1500, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("quick", settings.get_profile("long"), max_examples=300, phases=[Phase.generate, Phase.explicit])
settings.load_profile(os.environ.get("POISE_HYPOTHESIS", "check"))
