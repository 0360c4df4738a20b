"""Numbers as text for readers: only significant digits, a true minus sign, powers of ten."""

from __future__ import annotations

import math

POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number_text(value: float | str, digits: int = 6) -> str:
    """A number as text, rounded to significant digits.

    >>> number_text(58.0), number_text(-0.02441), number_text(3.3333e-16), number_text(1 / 3), number_text("Infinity")
    ('58', '−0.02441', '3.33×10⁻¹⁶', '0.333333', '∞')
    """
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value)).replace("-", "−")
    text = f"{value:.{digits}g}"
    if "e" in text:
        text = f"{value:.{min(digits, 3)}g}"
        factor, power = text.split("e")
        text = f"{factor}×10{str(int(power)).translate(POWERS)}" if factor not in ("1", "-1") else _power(factor, power)
    return text.replace("-", "−")


def measured_text(value: float | str, noise: float | str | None) -> str:
    """A mean with its standard error, both rounded to the second digit of the error.

    >>> measured_text(0.771234, 0.0041), measured_text(115.83, 1.8), measured_text(3.0, None)
    ('0.7712 ± 0.0041', '115.8 ± 1.8', '3')
    """
    if noise is None:
        return number_text(value)
    value, noise = float(value), float(noise)
    if not (math.isfinite(value) and 1e-6 < noise < 1e6):
        return f"{number_text(value)} ± {number_text(noise, 2)}"
    decimals = max(0, 1 - math.floor(math.log10(noise)))
    return f"{value:.{decimals}f} ± {noise:.{decimals}f}".replace("-", "−")


def _power(factor: str, power: str) -> str:
    return f"{factor[:-1]}10{str(int(power)).translate(POWERS)}"
