"""`poise ray release`: let go of a Ray cluster that a service has driven."""

from importlib.util import find_spec

import click

from poise.scheduler.model.errors import PoiseError, RequestError

EPILOG = """\b
Example:
  poise ray release --address 10.0.0.1:6379
"""


@click.group(epilog=EPILOG)
def ray() -> None:
    """Work with the Ray cluster of `poise serve --backend ray`."""


@ray.command(epilog=EPILOG, short_help="Give back all that a service holds of a Ray cluster")
@click.option("--address", default="auto", metavar="HOST:PORT", help="Of the head node.  [default: as Ray finds it]")
def release(address: str) -> int:
    """Give back all that a service holds of a Ray cluster, after the service has been stopped.

    Runs are asked to save their work, and end within the time that the service was given by --fence. Then agents end, and
    their GPUs are Ray's again. The jobs stay with the service, and go on when it starts again.
    """
    from poise.service.backends.ray import driver
    from poise.service.backends.ray.driver_process import NOT_INSTALLED

    if find_spec("ray") is None:
        raise RequestError(NOT_INSTALLED)
    try:
        driver.release(driver.connect(address), lambda text: click.echo(f"poise: {text}", err=True))
    except driver.RayRefusalError as error:
        raise RequestError(str(error)) from None
    except driver.RayTroubleError as error:
        raise PoiseError(str(error)) from None
    return 0
