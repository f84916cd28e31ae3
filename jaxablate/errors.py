"""The one error type that a user's input can cause."""


class UserError(ValueError):
    """Something the user gave cannot be used.

    The message is one line that says what was got, what is allowed and what to do. Command-line
    programs print it without a traceback and exit with code 1.
    """
