"""Reader of Gavel's throughput tables (JSON), with the pairs.

`{type: {"('Model (batch size N)', gang)": {"null": steps/s alone, "('Other', gang)": [mine, the other's], …}}}`

A type `T_unconsolidated` holds what type T does when the gang is spread over more nodes than it needs; the table does
not say how far, so the value holds within a rack and across racks. 0 means "does not fit, or was not measured": such a
job does not run there. Pairs of unequal gangs and pairs of spread gangs have no place in our tables and are left out.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from poise.model.errors import ThroughputError, Where
from poise.model.speed import Locality
from poise.throughput.lines import MOST_GPUS, RATE, is_rate, shown
from poise.throughput.measured import Alone, JobClass, Throughputs, Together, same_model

_REFERENCE = "v100"
_SPREAD = "_unconsolidated"
_KEY = re.compile(r"""\((['"])(?P<model>[^'"]+?)(?: \(batch size (?P<batch>[0-9]{1,15})\))?\1, (?P<gpus>[0-9]{1,7})\)""")


class _Gang(NamedTuple):
    job: JobClass
    gpus: int


def parse_gavel(text: str, file: str, skews: Mapping[str, float]) -> Throughputs:
    """The table in this text. Its reference is v100, or where there is none the first type of the file."""
    types = _object(_loaded(text, file), Where(file), "GPU types")
    alone: list[Alone] = []
    together: list[Together] = []
    for gpu_type, classes in types.items():
        for each in _measurements(gpu_type, classes, file):
            if isinstance(each, Alone):
                alone.append(each)
            else:
                together.append(each)
    if not alone:
        raise ThroughputError(f"{Where(file)}: expected the speed of at least one job alone (`null`), got none")
    measured = {each.gpu_type for each in alone}
    reference = _REFERENCE if _REFERENCE in measured else alone[0].gpu_type
    return Throughputs.of(Path(file).name, reference, alone, together, skews)


def _loaded(text: str, file: str) -> object:
    try:
        loaded: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ThroughputError(f"{Where(file, error.lineno)}: expected JSON as Gavel writes it: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ThroughputError(f"{Where(file)}: expected JSON as Gavel writes it: {shown(str(error))}") from None
    return loaded


def _measurements(gpu_type: str, classes: object, file: str) -> Iterator[Alone | Together]:
    where = Where(file, field=gpu_type)
    name = gpu_type.removesuffix(_SPREAD).lower()
    locality = Locality.PACKED if gpu_type == gpu_type.removesuffix(_SPREAD) else Locality.RACK
    for key, speeds in _object(classes, where, "job classes").items():
        gang = _gang(key, where)
        place = Where(file, field=f"{gpu_type} {key}")
        for other_key, value in _object(speeds, place, "speeds").items():
            if other_key == "null":
                yield Alone(gang.job, name, gang.gpus, locality, _rate(value, place))
            elif locality is Locality.PACKED and (other := _gang(other_key, place)).gpus == gang.gpus:
                yield Together(gang.job, other.job, name, gang.gpus, _rates(value, place))


def _object(value: object, where: Where, of: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ThroughputError(f"{where}: expected an object of {of}, got {shown(value)}")
    return value


def _gang(key: str, where: Where) -> _Gang:
    gang = _parsed(key)
    if gang is None:
        raise ThroughputError(f"{where}: expected a key like \"('A3C (batch size 4)', 1)\", got {shown(key)}")
    return gang


@lru_cache(maxsize=1024)
def _parsed(key: str) -> _Gang | None:
    """The class and gang that a key names. Few keys recur thousands of times."""
    found = _KEY.fullmatch(key)
    if found is None or not same_model(found["model"]):
        return None
    gpus, batch_size = int(found["gpus"]), int(found["batch"]) if found["batch"] else None
    return _Gang(JobClass(found["model"], batch_size), gpus) if 1 <= gpus <= MOST_GPUS and batch_size != 0 else None


def _rates(value: object, where: Where) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ThroughputError(f"{where}: expected two speeds of a pair, got {shown(value)}")
    return _rate(value[0], where), _rate(value[1], where)


def _rate(value: object, where: Where) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not is_rate(number):
        raise ThroughputError(f"{where}: expected steps per second: {RATE}, got {shown(value)}")
    return abs(float(number))
