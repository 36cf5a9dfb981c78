"""Sizes of launches. Triton's own functions for these may be called in kernels too, and take a host
about 10 us a call (Triton 3.6), a third of a launch."""


def cdiv(whole: int, part: int) -> int:
    """Parts that cover a whole."""
    return -(-whole // part)


def power_of_2(least: int) -> int:
    """The smallest power of two that is no less than `least`, which is positive."""
    return 1 << (least - 1).bit_length()
