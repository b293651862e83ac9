"""What conversion raises."""


class ConversionError(ValueError):
    """The module cannot be converted, or the finished program failed a check. Nothing is left on disk."""
