"""The page of a report: one file of HTML, with its style, its script and its values, that needs no network.

report.html   the page without values, for people to read and change
page_of       puts the values there, as JSON that no text in it can end, and says in a policy that nothing is loaded
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

#: What stands in the page where something is put.
_TITLE, _POLICY, _VALUES = "{{title}}", "{{policy}}", "{{values}}"
#: What of JSON a browser might take for HTML, and how JSON says it else.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_BEGIN, _END = "<script>", "</script>"


def page_of(values: dict[str, Any]) -> bytes:
    """Returns the page that shows these values, which have a "title"."""
    page = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    head, _, rest = page.partition(_VALUES)
    script = rest[rest.index(_BEGIN) + len(_BEGIN) : rest.rindex(_END)]
    own = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    head = head.replace(_POLICY, policy).replace(_TITLE, escape(values["title"]))
    return f"{head}{in_html(values)}{rest}".encode()


def in_html(values: object) -> str:
    """Returns values as JSON that means the same to whoever reads it, and has nothing in it that HTML gives a meaning
    to."""
    text = msgspec.json.encode(values).decode()
    for sign, said in _ESCAPES.items():
        text = text.replace(sign, said)
    return text
