"""Text from elsewhere on a terminal: no letter of it is a command to the terminal."""


def plain(text: str) -> str:
    """The text with everything that is not to be seen (escape codes, line ends, changes of direction) written out."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _written(each) for each in text)


def _written(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
