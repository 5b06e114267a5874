"""The package itself: what it offers by name, and that looking at it costs nothing."""

import subprocess
import sys

import poise
import poise.service.client


def test_what_the_package_offers_is_listed_and_there() -> None:
    assert {"Client", "__version__"} <= set(poise.__all__) <= set(dir(poise))
    assert poise.Client is poise.service.client.Client
    assert all(getattr(poise, name) is not None for name in dir(poise))


def test_listing_the_package_does_not_bring_the_client_in() -> None:
    look = (
        "import sys, poise; assert 'Client' in dir(poise);"
        " print('poise.service.client' in sys.modules, 'httpx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    assert not hasattr(poise, "Cleint")
