"""Charts as inline SVG, without ids, whose colors come from the page's style sheet and follow light and dark mode.

Every name and number is escaped here, so a finished chart is Markup that templates show as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

_WIDTH = 480
_LETTER = 7.2  # width of a letter in pixels at the charts' font size


@dataclass(frozen=True)
class Series:
    """One line of a chart; `color` is the number of its color in the style sheet."""

    name: str
    color: int
    xs: Sequence[float]
    ys: Sequence[float]


def _picture(width: float, height: float, body: Sequence[str], alt: str, *, least: float = 0) -> Markup:
    """Make an SVG that scales with its column, and scrolls if the column is narrower than `least` pixels."""
    style = f' style="max-width:{1.25 * width:.0f}px{f";min-width:{least:.0f}px" if least else ""}"'
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(alt)}"{style}>'
    return Markup(f"{head}{''.join(body)}</svg>")


def _text(x: float, y: float, words: str, anchor: str = "start", kind: str = "", extra: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}{extra}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _box(x: float, y: float, width: float, height: float, kind: str, told: str = "", opacity: float = 1) -> str:
    """Make a rectangle; `told` appears when the pointer rests on it."""
    faint = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    start = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"{faint}'
    return f"{start}><title>{escape(told)}</title></rect>" if told else f"{start}/>"


def _short(name: str, letters: int) -> str:
    """Shorten a name so that it fits."""
    return name if len(name) <= letters else name[: max(1, letters - 1)] + "…"


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Choose round numbers between two limits."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _label_of(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.10g}".replace("-", "\N{MINUS SIGN}")


def _padded(values: Sequence[float], least: float = 1.0) -> tuple[float, float]:
    """Choose limits a little outside the values."""
    low, high = min(values), max(values)
    room = max(0.06 * (high - low), least / 2)
    return low - room, high + room


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    alt: str,
    *,
    levels: Sequence[Series] = (),
    log: bool = False,
    bare_y: bool = False,
    zero: bool = False,
    whole: bool = False,
    height: float = 300,
) -> Markup:
    """Draw lines over a shared pair of axes; `levels` are dashed horizontal lines, and a series of one point is a dot."""
    left, right, top, bottom = (26.0 if bare_y else 46.0), 14.0, 14.0, 46.0
    xs = [x for one in series for x in one.xs]
    ys = [y for one in (*series, *levels) for y in one.ys]
    if not ys:
        return Markup("")
    x_low, x_high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    if log:
        x_low, x_high = math.log10(x_low), math.log10(x_high)
    if x_high - x_low < 1e-9:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    y_low, y_high = (0.0, max(ys) * 1.08 or 1.0) if bare_y else _padded(ys, 2.0)

    def at_x(value: float) -> float:
        place = math.log10(value) if log else value
        return left + (place - x_low) / (x_high - x_low) * (_WIDTH - left - right)

    def at_y(value: float) -> float:
        return top + (y_high - value) / (y_high - y_low) * (height - top - bottom)

    body = []
    for tick in [] if bare_y else _ticks(y_low, y_high):
        body += [_line(left, at_y(tick), _WIDTH - right, at_y(tick), "grid")]
        body += [_text(left - 7, at_y(tick) + 4, _label_of(tick), "end", "tick")]
    for tick in _powers(x_low, x_high) if log else _ticks(x_low, x_high, 6):
        if whole and tick % 1:
            continue
        body += [_line(at_x(tick), height - bottom, at_x(tick), height - bottom + 4, "axis")]
        body += [_text(at_x(tick), height - bottom + 18, _label_of(tick), "middle", "tick")]
    body.append(_line(left, height - bottom, _WIDTH - right, height - bottom, "axis"))
    body.append(_text((left + _WIDTH - right) / 2, height - 8, x_label, "middle", "label"))
    body.append(
        _text(
            0, 0, y_label, "middle", "label", f' transform="translate(11 {(height - bottom) / 2 + 6:.0f}) rotate(-90)"'
        )
    )
    if zero and x_low < 0 < x_high:
        body.append(_line(at_x(0), top, at_x(0), height - bottom, "zero"))
    for one in levels:
        body.append(_line(left, at_y(one.ys[0]), _WIDTH - right, at_y(one.ys[0]), f"level s{one.color}"))
    for one in series:
        points = [(at_x(x), at_y(y)) for x, y in zip(one.xs, one.ys, strict=True)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if bare_y:
            floor = at_y(0)
            body.append(
                f'<path d="{path}L{points[-1][0]:.1f} {floor:.1f}L{points[0][0]:.1f} {floor:.1f}Z" class="area s{one.color}"/>'
            )
        body.append(f'<path d="{path}" class="line s{one.color}"><title>{escape(one.name)}</title></path>')
        if not bare_y and len(points) <= 40:
            for (x, y), told in zip(points, zip(one.xs, one.ys, strict=True), strict=True):
                words = f"{one.name}: {told[1]:.1f} % at {_label_of(round(told[0], 2))}"
                body.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" class="dot s{one.color}"><title>{escape(words)}</title></circle>'
                )
    return _picture(_WIDTH, height, body, alt)


@dataclass(frozen=True)
class Dots:
    """One row of a dot chart: (value, text that appears on the dot) for every unit."""

    name: str
    color: int
    dots: Sequence[tuple[float, str]]


def dot_chart(rows: Sequence[Dots], x_label: str, alt: str) -> Markup:
    """Draw every value as a dot, one line per row, with a bar at the mean and a dotted line at 0."""
    letters = min(22, max(3, *(len(row.name) for row in rows)))
    left, right, high = 12 + letters * _LETTER, 14.0, 34.0
    height = high * len(rows) + 52
    values = [value for row in rows for value, _ in row.dots]
    low, top = _padded([0.0, *values], 2.0)

    def at(value: float) -> float:
        return left + (value - low) / (top - low) * (_WIDTH - left - right)

    body = []
    for tick in _ticks(low, top):
        body += [_line(at(tick), 4, at(tick), height - 46, "grid")]
        body += [_text(at(tick), height - 30, _label_of(tick), "middle", "tick")]
    body.append(_line(at(0), 4, at(0), height - 46, "zero"))
    body.append(_text((left + _WIDTH - right) / 2, height - 8, x_label, "middle", "label"))
    for number, row in enumerate(rows):
        y = 4 + high * (number + 0.5)
        middle = at(sum(value for value, _ in row.dots) / len(row.dots))
        body.append(_text(left - 7, y + 4, _short(row.name, letters), "end", "tick"))
        body.append(_line(middle, y - 12, middle, y + 12, f"mean s{row.color}"))
        for value, told in row.dots:
            body.append(
                f'<circle cx="{at(value):.1f}" cy="{y:.1f}" r="5" class="unit s{row.color}"><title>{escape(told)}</title></circle>'
            )
    return _picture(_WIDTH, height, body, alt)


def _powers(low: float, high: float) -> list[float]:
    """Choose the ticks of a logarithmic axis, whose limits are given as powers of ten."""
    steps = (1, 2, 5) if high - low < 2.2 else (1,)
    numbers = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [number for number in numbers if low - 1e-9 <= math.log10(number) <= high + 1e-9]


@dataclass(frozen=True)
class Bar:
    """One client's bar: its percentage, and a mark for what the client would reach alone."""

    name: str
    value: float
    mark: float | None
    told: str


def bar_chart(bars: Sequence[Bar | str], alt: str, x_label: str) -> Markup:
    """Draw horizontal bars from 0 to 100 percent, with names; a text between them says what is left out."""
    letters = min(22, max([3, *(len(bar.name) for bar in bars if isinstance(bar, Bar))]))
    left, right, row = 12 + letters * _LETTER, 44.0, 17.0
    height = row * len(bars) + 44

    def at(value: float) -> float:
        return left + value / 100 * (_WIDTH - left - right)

    body = []
    for tick in (0, 20, 40, 60, 80, 100):
        body += [
            _line(at(tick), 4, at(tick), height - 40, "grid"),
            _text(at(tick), height - 25, str(tick), "middle", "tick"),
        ]
    body.append(_text(at(50), height - 6, x_label, "middle", "label"))
    for number, bar in enumerate(bars):
        y = 4 + row * number
        if isinstance(bar, str):
            body.append(_text(at(0) + 6, y + 12, bar, kind="tick"))
            continue
        kind = "bar hurt" if bar.mark is not None and bar.value < bar.mark else "bar"
        body.append(_text(left - 7, y + 12, _short(bar.name, letters), "end", "tick"))
        body.append(_box(left, y + 2, max(at(bar.value) - left, 0.8), row - 4, kind, bar.told))
        if bar.mark is not None:
            body.append(_line(at(bar.mark), y, at(bar.mark), y + row, "mark"))
        body.append(_text(_WIDTH - 8, y + 12, f"{bar.value:.0f}", "end"))
    return _picture(_WIDTH, height, body, alt)


def stacked_bars(rows: Sequence[tuple[str, Sequence[float], str]], parts: Sequence[str], alt: str) -> Markup:
    """Draw one bar per row, divided into parts; a row is (name, one value per part, text after the bar)."""
    letters = min(22, max(3, *(len(name) for name, _, _ in rows)))
    behind = 8 + max(len(words) for _, _, words in rows) * _LETTER
    left, high, height = 12 + letters * _LETTER, 24.0, 24.0 * len(rows) + 8
    most = max([*(sum(values) for _, values, _ in rows), 1e-9])
    body = []
    for number, (name, values, words) in enumerate(rows):
        x, y = left, 4 + high * number
        body.append(_text(left - 7, y + 15, _short(name, letters), "end", "tick"))
        for part, value in enumerate(values):
            width = value / most * (_WIDTH - left - behind)
            body.append(_box(x, y + 3, width, high - 7, f"part p{part}", f"{name}: {parts[part]} {value:.1f} s"))
            x += width
        body.append(_text(x + 6, y + 15, words, kind="tick"))
    return _picture(_WIDTH, height, body, alt)


def heat_map(
    table: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    alt: str,
    *,
    unit: str,
    row_label: str,
    column_label: str,
    most: float | None = None,
) -> Markup:
    """Draw rows by columns, stronger for more; small maps have numbers and tooltips, large ones are drawn in shades."""
    side = 26.0 if len(columns) <= 16 else 15.0 if len(columns) <= 50 else 9.0
    high = 20.0 if len(rows) <= 30 else 13.0
    letters, tall = (min(24, max(map(len, names))) for names in (rows, columns))
    left, top = max(64.0, 24 + letters * _LETTER), 24 + min(tall, 22) * (_LETTER if tall > 2 or side < 20 else 8 / tall)
    width, height = left + side * len(columns) + 12, top + high * len(rows) + 8
    most = most or max((value for row in table for value in row), default=1) or 1
    small = len(rows) * len(columns) <= 600
    body = [_text(left, 12, column_label, kind="label"), _text(4, top - 6, row_label, kind="label")]
    for number, name in enumerate(columns):
        x = left + side * (number + 0.5)
        if side < 12 and number % 2:  # only every other name fits
            continue
        turned = f' transform="translate({x + 4:.1f} {top - 5:.1f}) rotate(-90)"'
        upright = tall <= 2 and side > 20
        body.append(
            _text(x, top - 5, name, "middle", "tick")
            if upright
            else _text(0, 0, _short(name, 22), "start", "tick", turned)
        )
    for number, name in enumerate(rows):
        body.append(_text(left - 6, top + high * (number + 0.5) + 4, _short(name, 24), "end", "tick"))
    shades: dict[int, list[str]] = {}
    for i, cells in enumerate(table):
        for j, value in enumerate(cells):
            if not value:
                continue
            x, y, strength = left + side * j, top + high * i, value / most
            if small:
                told = f"{rows[i]}, {columns[j]}: {_label_of(round(value, 1))} {unit}"
                body.append(_box(x + 0.5, y + 0.5, side - 1, high - 1, "cell", told, 0.12 + 0.88 * strength))
                if side > 20:
                    kind = "number strong" if strength > 0.55 else "number"
                    body.append(_text(x + side / 2, y + high / 2 + 3.5, f"{value:.0f}", "middle", kind))
            else:
                shades.setdefault(min(9, int(strength * 10)), []).append(
                    f"M{x:.0f} {y:.0f}h{side:.0f}v{high:.0f}h-{side:.0f}z"
                )
    for shade, paths in sorted(shades.items()):
        body.append(f'<path d="{"".join(paths)}" class="cell" fill-opacity="{0.12 + 0.088 * (shade + 1):.2f}"/>')
    body.append(
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{side * len(columns):.1f}" height="{high * len(rows):.1f}" class="frame"/>'
    )
    return _picture(width, height, body, alt, least=min(width, max(320, 0.8 * width)))


def matrix(table: Sequence[Sequence[int]], names: Sequence[str], alt: str, *, rest: bool = False) -> Markup:
    """Draw true by predicted classes, shaded by the share of the true class; correct ones have another color.

    With `rest`, the last class stands for several classes, so its own cell is neither right nor wrong.
    """
    count = len(names)
    side = 34.0 if count <= 4 else 24.0 if count <= 8 else 20.0
    letters = min(12, max(map(len, names)))
    left, top = 22 + letters * _LETTER, 30 + letters * _LETTER
    if letters <= 2:
        top = 34.0
    body = [_text(left, 11, "predicted", kind="label"), _text(2, top - 6, "true", kind="label")]
    for number, name in enumerate(names):
        x, y = left + side * (number + 0.5), top + side * (number + 0.5)
        turned = f' transform="translate({x + 4:.1f} {top - 5:.1f}) rotate(-90)"'
        body.append(_text(left - 6, y + 4, _short(name, letters), "end", "tick"))
        body.append(
            _text(x, top - 5, name, "middle", "tick")
            if letters <= 2
            else _text(0, 0, _short(name, letters), "start", "tick", turned)
        )
    for i, cells in enumerate(table):
        whole = sum(cells)
        for j, value in enumerate(cells):
            if not value:
                continue
            x, y, share = left + side * j, top + side * i, value / whole
            told = f"{names[i]} classified as {names[j]}: {value} of {whole}"
            kind = "wrong"
            if i == j:
                told, kind = f"{names[i]}: {value} of {whole} correct", "right"
            if i == j and rest and i == count - 1:
                told, kind = f"{names[i]} among themselves: {value} of {whole}", "neither"
            body.append(_box(x + 0.5, y + 0.5, side - 1, side - 1, kind, told, 0.15 + 0.85 * share))
            body.append(
                _text(
                    x + side / 2,
                    y + side / 2 + 3.5,
                    str(value),
                    "middle",
                    "number strong" if share > 0.55 else "number",
                )
            )
    body.append(
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{side * count:.1f}" height="{side * count:.1f}" class="frame"/>'
    )
    size = left + side * count + 6
    return Markup(f'<span style="--most:{size:.0f}px">{_picture(size, top + side * count + 4, body, alt)}</span>')


def reliability_plot(bins: Sequence[tuple[int, float, float]], alt: str) -> Markup:
    """Draw the share of positive images over their mean probability, by (images, mean probability, share).

    Perfect probabilities lie on the diagonal. The area of a dot stands for its images.
    """
    size, left, bottom, top = 220.0, 48.0, 40.0, 8.0
    height = size + top + bottom

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x * size, top + (1 - y) * size

    body = []
    for tick in (0.0, 0.5, 1.0):
        (x, low), (_, y) = at(tick, 0), at(0, tick)
        body += [_line(left, y, left + size, y, "grid"), _line(x, low, x, top, "grid")]
        body += [_text(left - 6, y + 4, _label_of(tick), "end", "tick")]
        body += [_text(x, low + 16, _label_of(tick), "middle", "tick")]
    body.append(_line(*at(0, 0), *at(1, 1), "zero"))
    body.append(_text(left + size / 2, height - 6, "mean probability", "middle", "label"))
    turned = f' transform="translate(10 {top + size / 2:.0f}) rotate(-90)"'
    body.append(_text(0, 0, "share of positive images", "middle", "label", turned))
    points = [at(chance, share) for _, chance, share in bins]
    if points:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        body.append(f'<path d="{path}" class="line s1"/>')
    most = max((images for images, _, _ in bins), default=1)
    for (x, y), (images, chance, share) in zip(points, bins, strict=True):
        told = f"{images} images: mean probability {chance:.2f}, {100 * share:.0f} % positive"
        radius = 2.5 + 7.5 * math.sqrt(images / most)
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="unit s1"><title>{escape(told)}</title></circle>'
        )
    return _picture(left + size + 12, height, body, alt)
