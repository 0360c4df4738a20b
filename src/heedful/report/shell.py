"""The skeleton of all pages of heedful: one HTML file without network requests.

A page has a title and a text in English and in Chinese, light and dark colours, data, and one script. Both languages
are in the file; a switch shows one of them. A content security policy forbids every request and every script except the
page's own, so nothing in the data can run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

LANGUAGES = {"en": "English", "zh": "中文"}
"""Language codes for the `lang` attribute, and each language's own name."""

Said = Mapping[str, str]
"""A text by language: `{"en": …, "zh": …}`."""

UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
"""Characters to escape: in JSON they occur only inside strings, and unescaped they could end the script."""


def page(title: Said, body_html: str, css: str, script: str, data: object, *, language: str = "en") -> str:
    r"""One self-contained page.

    `body_html` goes into `<main>`; use `say` for its text in both languages. `script` runs after the page has loaded.
    It can use `heedful.data`, `heedful.language()`, `heedful.isDark()` and `heedful.onChange(f)`, which calls f after a
    switch of language or colours.

    >>> html = page({"en": "A page", "zh": "一页"}, "<p>Hello</p>", "", "", {"token": "</script><b>"})
    >>> "<p>Hello</p>" in html, r"\u003c/script\u003e\u003cb\u003e" in html
    (True, True)
    """
    check_language(language)
    both = asset("shell.js") + script
    styles = asset("shell.css") + css
    for name, text, end in (("script", both, "</script"), ("script", both, "<!--"), ("css", styles, "</style")):
        if end in text.lower():
            raise ValueError(f"{name} holds {end!r}, which would end it inside the page; write it in two pieces.")
    titles = "".join(f' data-title-{code}="{escape(title[code])}"' for code in LANGUAGES)
    return f"""<!doctype html>
<html lang="{language}"{titles}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(both)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="heedful">
<link rel="icon" href="data:,">
<title>{escape(title[language])}</title>
<style>{styles}</style>
</head>
<body>
<a class="skip" href="#main">{say({"en": "Skip to the content", "zh": "跳到正文"})}</a>
<header class="bar">
<span class="brand" aria-hidden="true">heedful</span>
<div class="switches">
<div class="switch" role="group" data-en-aria-label="Language" data-zh-aria-label="语言">{_languages(language)}</div>
<div class="switch" role="group" data-en-aria-label="Colours" data-zh-aria-label="配色">{_themes()}</div>
</div>
</header>
<main id="main" tabindex="-1">
{body_html}
</main>
<script type="application/json" id="data">{embed(data)}</script>
<script>{both}</script>
</body>
</html>
"""


def embed(data: object) -> str:
    r"""JSON that is safe between script tags; non-finite numbers become null.

    >>> embed(["</script>", float("nan"), 1.0])
    '["\\u003c/script\\u003e",null,1.0]'
    """
    try:
        text = _json(data)
    except ValueError:  # rare: JSON has no non-finite numbers
        text = _json(finite(data))
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _json(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def finite(data: Any) -> Any:
    """The same data with None for NaN and infinities, which JSON does not have."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return data


def say(text: Said, tag: str = "span") -> str:
    """HTML with a text in every language; the page shows one of them.

    >>> say({"en": "a < b", "zh": "甲"})
    '<span lang="en">a &lt; b</span><span lang="zh">甲</span>'
    """
    return "".join(f'<{tag} lang="{code}">{escape(text[code])}</{tag}>' for code in LANGUAGES)


def asset(name: str) -> str:
    """The text of a file in `assets`: style, script or text."""
    return (files("heedful.report") / "assets" / name).read_text(encoding="utf-8")


def check_language(language: str) -> None:
    """Raise for a language that pages do not have."""
    if language not in LANGUAGES:
        raise ValueError(f"language={language!r}: pages are written in {', '.join(map(repr, LANGUAGES))}.")


def _policy(script: str) -> str:
    """The content security policy: no requests, only the page's own scripts (by hash), only embedded pictures."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ["default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "img-src data: blob:"]
    return "; ".join([*rules, "font-src data:", "base-uri 'none'", "form-action 'none'"])


def _languages(chosen: str) -> str:
    return "".join(
        f'<button type="button" data-language="{code}" lang="{code}" aria-pressed="{str(code == chosen).lower()}">'
        f"{name}</button>"
        for code, name in LANGUAGES.items()
    )


def _themes() -> str:
    """The colour switch: three choices, the first follows the reader's system."""
    names = {
        "auto": {"en": "Auto", "zh": "自动"},
        "light": {"en": "Light", "zh": "浅色"},
        "dark": {"en": "Dark", "zh": "深色"},
    }
    return "".join(
        f'<button type="button" data-theme-choice="{code}" aria-pressed="{str(code == "auto").lower()}">'
        f"{say(name)}</button>"
        for code, name in names.items()
    )
