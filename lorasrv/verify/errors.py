"""Why a verification has no verdict. Raised in its own process; the server's side has `VerificationFailed`."""


class CannotVerify(Exception):
    """The oracle cannot be built for this base or adapter. The message is for the operator, and holds no path."""
