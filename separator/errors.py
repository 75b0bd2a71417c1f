"""The one exception of the package: what went wrong, the value received, what is accepted, the remedy."""


class SeparatorError(ValueError):
    """A request that cannot be carried out; the message names the offending value and the remedy."""
