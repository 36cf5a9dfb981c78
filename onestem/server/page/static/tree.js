// The tree of runs: left to right by token, each leaf a row, a run as high as its leaves.

import { html, short, svg } from "./dom.js";

const LEVELS = ["0", "1", "2–3", "4–7", "8–15", "16 or more"];
const AXIS = 16;
const ROW_LEAST = 5;
const ROW_MOST = 34;

export const level = (readers) => (readers > 0 ? Math.min(5, 1 + Math.floor(Math.log2(readers))) : 0);

// Gives each run of the list {run, children, row, rows}; what has no parent here is a root.
export function arrange(runs) {
  const nodes = new Map(runs.map((run) => [run.id, { run, children: [], parent: null, row: 0, rows: 0 }]));
  const roots = [];
  for (const node of nodes.values()) {
    node.parent = nodes.get(node.run.parent) ?? null;
    (node.parent ? node.parent.children : roots).push(node);
  }
  let row = 0;
  // A stack, not recursion: a chain of runs may be long.
  const order = [];
  const stack = sorted(roots).toReversed();
  while (stack.length) {
    const node = stack.pop();
    order.push(node);
    node.row = row;
    if (!node.children.length) row += 1;
    node.children = sorted(node.children);
    stack.push(...node.children.toReversed());
  }
  for (const node of order.reverse()) {
    node.rows = node.children.reduce((sum, child) => sum + child.rows, 0) || 1;
  }
  return { nodes, roots: sorted(roots), rows: row };
}

// Largest first would jump about with the readers: the oldest first stays where it is.
const sorted = (nodes) => nodes.toSorted((a, b) => a.run.id - b.run.id);

export class Tree {
  constructor(place, details, legend) {
    this.place = place;
    this.details = details;
    this.chosen = null;
    this.pointed = null;
    this.shape = arrange([]);
    legend.append("Readers:", ...LEVELS.map((text, i) => key(`readers-${i}`, text)), key("series-1", "pinned"));
    place.addEventListener("click", (event) => this.choose(idOf(event)));
    // Not pointerover: that one comes also when a picture is drawn anew under a resting pointer.
    place.addEventListener("pointermove", (event) => this.point(idOf(event)));
    place.addEventListener("pointerleave", () => this.point(null));
    place.addEventListener("keydown", (event) => this.walk(event));
    new ResizeObserver(() => this.draw()).observe(place);
  }

  show(runs) {
    this.shape = arrange(runs);
    this.draw();
    this.point(this.pointed);
  }

  point(id) {
    this.pointed = id;
    this.describe(id ?? this.chosen);
  }

  draw() {
    const { nodes, rows } = this.shape;
    const width = Math.max(200, this.place.clientWidth);
    const height = Math.max(ROW_LEAST, Math.min(ROW_MOST, 400 / Math.max(1, rows)));
    const most = Math.max(1, ...[...nodes.values()].map(({ run }) => run.start + run.tokens));
    const picture = svg("svg", { viewBox: `0 0 ${width} ${AXIS + rows * height}`, height: AXIS + rows * height });
    picture.append(...axis(most, width));
    for (const node of nodes.values()) picture.append(...this.block(node, width / most, height));
    if (!rows) picture.append(svg("text", { x: 4, y: 12, class: "axis" }, "nothing is stored"));
    this.place.replaceChildren(picture);
  }

  block({ run, row, rows }, scale, height) {
    const box = { x: run.start * scale, y: AXIS + row * height, width: Math.max(2, run.tokens * scale), height: rows * height };
    const chosen = run.id === this.chosen ? " chosen" : "";
    const parts = [svg("rect", { ...box, class: `run readers-${level(run.readers)}${chosen}`, "data-run": run.id })];
    if (run.computed < run.tokens) {
      const missing = box.width * (1 - run.computed / run.tokens);
      parts.push(svg("rect", { ...box, x: box.x + box.width - missing, width: missing, class: "missing" }));
    }
    if (run.pinned) parts.push(svg("rect", { ...box, width: 3, class: "pin" }));
    if (box.width > 60 && box.height > 13) parts.push(label(run, box));
    return parts;
  }

  choose(id) {
    this.chosen = id === this.chosen ? null : id;
    this.draw();
    this.point(null);
  }

  describe(id) {
    const node = this.shape.nodes.get(id);
    if (!node) {
      this.details.replaceChildren(html("dd", { class: "quiet words" }, "Point at a run, or choose one, to see what it is."));
      return;
    }
    this.details.replaceChildren(...facts(node));
  }

  walk(event) {
    const node = this.shape.nodes.get(this.chosen);
    const next = node ? neighbour(node, event.key, this.shape.roots) : this.shape.roots[0];
    if (!event.key.startsWith("Arrow") || !next) return;
    event.preventDefault();
    this.chosen = next.run.id;
    this.draw();
    this.point(null);
  }
}

function neighbour(node, pressed, roots) {
  const beside = node.parent ? node.parent.children : roots;
  const position = beside.indexOf(node);
  return {
    ArrowLeft: node.parent,
    ArrowRight: node.children[0],
    ArrowUp: beside[position - 1],
    ArrowDown: beside[position + 1],
  }[pressed];
}

function idOf(event) {
  const id = event.target.getAttribute?.("data-run");
  return id === null || id === undefined ? null : Number(id);
}

const key = (name, text) => html("span", {}, html("i", { class: name }), text);

// A run that several prefixes share has the name of one of them, or none.
const pinName = (run) => (typeof run.pinned === "string" ? run.pinned : null);

const owner = (run) => `${run.owner ?? "unknown"}${run.salted ? "; other keys never match it" : ""}`;

function label(run, box) {
  const words = pinName(run) ?? run.text ?? `${run.tokens} tokens`;
  // About 6.2 pixels a letter at this size: what is longer is cut.
  const letters = Math.floor((box.width - 10) / 6.2);
  const line = words.replace(/\s+/g, " ");
  const shown = line.length > letters ? `${line.slice(0, Math.max(0, letters - 1))}…` : line;
  const dark = level(run.readers) >= 4 ? "dark" : null;
  return svg("text", { x: box.x + 7, y: box.y + Math.min(box.height / 2 + 4, 24), class: dark }, shown);
}

function axis(most, width) {
  const step = 10 ** Math.floor(Math.log10(most));
  const every = most / step < 2 ? step / 4 : most / step < 5 ? step / 2 : step;
  const marks = [];
  for (let token = 0; token < most * 0.96; token += Math.max(1, every)) {
    marks.push(svg("text", { x: (token / most) * width + 2, y: 11, class: "axis" }, token ? short(token) : "token 0"));
  }
  return marks;
}

function facts({ run, parent, children }) {
  const rows = [
    ["Run", String(run.id)],
    ["Tokens", `${run.tokens}, from ${run.start} to ${run.start + run.tokens}`],
    ["Computed", run.computed < run.tokens ? `${run.computed} of ${run.tokens}` : "all"],
    ["Readers", run.readers ? `${run.readers} running sequence${run.readers > 1 ? "s" : ""}` : run.pinned ? "none now" : "none: may be evicted"],
    ["Pinned", run.pinned ? `by ${pinName(run) ? `prefix ${pinName(run)}` : "a prefix"}` : "no"],
    ["Owner", owner(run)],
    ["Continues", parent ? `run ${parent.run.id}` : "nothing: prompts begin here"],
    ["Continued by", `${children.length} run${children.length === 1 ? "" : "s"}`],
    ["First ids", run.first_token_ids.join(" ")],
  ];
  const list = rows.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]);
  return run.text === null ? list : [...list, html("dd", { class: "words" }, run.text)];
}
