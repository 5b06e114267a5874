"""The live half of `poise shares`."""

from poise.cli.live_asking import connected, document, echo_json
from poise.cli.live_rows import shares_table
from poise.cli.tables import show_table
from poise.model.errors import RequestError
from poise.model.units import counted


def live_shares(weights: tuple[str, ...], *, as_json: bool) -> int:
    """Change the weights that are given, then show all tenants."""
    wanted = [_weight(text) for text in weights]
    with connected() as client:
        found = client.set_weights(wanted)
    if as_json:
        echo_json(document(found))
    else:
        promised = "" if found.policy is None or found.promise is None else f"; {found.policy} {found.promise}"
        show_table(shares_table(found), counted(len(found.tenants), "tenant") + promised)
    return 0


def _weight(text: str) -> tuple[str, float]:
    tenant, equals, number = text.partition("=")
    try:
        return tenant, float(number)
    except ValueError:
        expected = f"{tenant}=WEIGHT, a number" if equals else "TENANT=WEIGHT"
        raise RequestError(f"--set: expected {expected}, got {text!r}") from None
