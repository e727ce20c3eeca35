"""The one exception class for mistakes that a caller can mend."""


class MLAError(ValueError):
    """Bad input: the message names the argument, what was expected, what came and how to mend it."""

    def __init__(self, name: str, expected: str, got: object, mend: str = "") -> None:
        self.name, self.expected, self.got, self.mend = name, expected, got, mend
        if isinstance(got, OSError) and got.strerror:
            got = got.strerror  # the name says which file; the error may name a temporary one
        super().__init__(f"{name}: expected {expected}, got {got}" + (f"; {mend}" if mend else ""))

    def __reduce__(self) -> tuple[type["MLAError"], tuple[str, str, object, str]]:
        return type(self), (self.name, self.expected, self.got, self.mend)
