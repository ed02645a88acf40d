"""Numbers for people, with units and three significant digits."""


def nbytes(value: float | None) -> str:
    """Write bytes in kB, MB, GB or TB, which are powers of ten."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= 0.9995 * size:
            return f"{_three(value / size)} {unit}"
    return f"{value:.0f} B"


def count(value: float | None) -> str:
    """Write a large number with a prefix, as in 5.51 M parameters or 208 M multiply-adds."""
    if value is None:
        return "-"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{_three(value / size)} {unit}"
    return f"{value:g}"


def _three(value: float) -> str:
    """Write three significant digits, never an exponent."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Write hours, minutes and seconds."""
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def memory(megabytes: float | None) -> str:
    return "-" if megabytes is None else f"{megabytes:,.0f} MB"


def percent(value: float | None) -> str:
    """Write an accuracy without the percent sign, which the caller adds."""
    return "-" if value is None else f"{value:.1f}"


def points(value: float | None) -> str:
    """Write a difference of accuracies with its sign."""
    if value is None:
        return "-"
    return "0.0" if abs(value) < 0.05 else f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")


def whole_points(value: float) -> str:
    """Write a difference of accuracies with its sign and without decimals."""
    return "0" if abs(value) < 0.5 else f"{value:+.0f}".replace("-", "\N{MINUS SIGN}")


def amount(value: float | None) -> str:
    """Write a number of clients, which is a mean over seeds and may have a decimal."""
    return "-" if value is None else f"{value:.1f}".removesuffix(".0")


def client(name: str) -> str:
    """Name a client in a sentence: a site by its name, a numbered client as `client N`."""
    return f"client {name}" if name.isdigit() else name


def decimal(value: float | None) -> str:
    """Write a number from 0 to 1, such as an AUROC."""
    return "-" if value is None else f"{value:.3f}"


def signed_decimal(value: float) -> str:
    """Write a difference of numbers from 0 to 1 with its sign."""
    return "0.000" if abs(value) < 0.0005 else f"{value:+.3f}".replace("-", "\N{MINUS SIGN}")


def p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"
