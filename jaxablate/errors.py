"""The errors that a user's input or model can cause."""


class UserError(ValueError):
    """Something the user gave cannot be used.

    The message is one line that says what was got, what is allowed and what to do. Command-line
    programs print it without a traceback and exit with code 1.
    """


class NonFiniteError(ArithmeticError):
    """A model gave NaN or infinity; the message says at which layer or configuration."""
