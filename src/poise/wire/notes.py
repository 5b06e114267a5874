"""What is taken and comes to nothing: said at submission, so that its owner does not count on it."""

from collections.abc import Iterable

from poise.wire.request import Request

NO_PRIORITIES = "no policy of this version looks at priorities"


def notes_on(requests: Iterable[Request]) -> tuple[str, ...]:
    """A line for people for each thing that jobs ask for and do not get."""
    asked = sorted({each.priority for each in requests if each.priority})
    if not asked:
        return ()
    shown = ", ".join(map(str, asked[:5])) + (", …" if len(asked) > 5 else "")
    return (f"priority {shown} has no effect: {NO_PRIORITIES}; --weight counts under policies that share",)
