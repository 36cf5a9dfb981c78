// Lines over the last minutes, and KV memory as one bar.

import { clock, html, percent, short, svg } from "./dom.js";

const HEIGHT = 120; // As in page.css.
const LEFT = 42;
const BOTTOM = 16;
const TOP = 6;
const SPAN = [60, 300]; // Seconds shown at least and at most.
const OWNERS_SHOWN = 8;

// The least of 1, 2, 2.5 and 5 times a power of ten that is at least value.
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((limit) => limit >= value * 0.9999);
}

export class Chart {
  // series: [[column of the history, name]]
  constructor(place, title, series, format) {
    this.series = series;
    this.format = format;
    this.columns = { time: [] };
    this.cursor = null;
    this.picture = svg("svg", { role: "img", "aria-label": title });
    this.legend = html("div", { class: "legend" });
    place.append(html("div", { class: "chart" }, html("h3", {}, title), this.picture, this.legend));
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => {
      this.cursor = null;
      this.draw();
    });
  }

  show(columns) {
    this.columns = columns;
    this.draw();
  }

  point(event) {
    const box = this.picture.getBoundingClientRect();
    this.cursor = this.end - this.span * (1 - (event.clientX - box.left - LEFT) / (this.width - LEFT));
    this.draw();
  }

  get width() {
    return this.picture.clientWidth || 320;
  }

  get span() {
    const known = this.end - (this.columns.time[0] ?? 0);
    return Math.min(SPAN[1], Math.max(SPAN[0], known));
  }

  get end() {
    return this.columns.time.at(-1) ?? 0;
  }

  draw() {
    const values = this.series.flatMap(([name]) => this.columns[name] ?? []).filter((value) => value !== null);
    const most = roundUp(Math.max(0, ...values));
    const width = this.width;
    const x = (time) => LEFT + (1 - (this.end - time) / this.span) * (width - LEFT);
    const y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - BOTTOM - TOP);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.replaceChildren(
      ...this.grid(most, x, y),
      ...this.series.map(([name], i) => svg("path", { d: line(this.columns.time, this.columns[name] ?? [], x, y), class: `series-${i}` })),
    );
    const shown = this.cursorIndex();
    if (this.cursor !== null && shown >= 0) {
      const place = x(this.columns.time[shown]);
      this.picture.append(svg("line", { x1: place, x2: place, y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor" }));
    }
    this.legend.replaceChildren(
      ...this.series.map(([name, text], i) => this.key(i, text, this.columns[name]?.[shown])),
      this.cursor === null ? "" : clock(this.columns.time[shown]),
    );
  }

  cursorIndex() {
    const { time } = this.columns;
    if (this.cursor === null) return time.length - 1;
    const next = time.findIndex((each) => each >= this.cursor);
    return next < 0 ? time.length - 1 : next;
  }

  key(i, text, value) {
    return html("span", {}, html("i", { class: `series-${i}` }), `${text} ${this.format(value)}`);
  }

  grid(most, x, y) {
    const parts = [0, most / 2, most].flatMap((value) => [
      svg("line", { x1: LEFT, x2: this.width, y1: y(value), y2: y(value) }),
      svg("text", { x: 0, y: y(value) + 4 }, value ? this.format(value) : "0"),
    ]);
    const every = this.span > 150 ? 60 : this.span > 75 ? 30 : 15;
    const marks = [];
    for (let ago = every; ago <= this.span; ago += every) {
      const text = every === 60 ? `−${ago / 60} min` : `−${ago} s`;
      marks.push(svg("text", { x: x(this.end - ago), y: HEIGHT - 3 }, text));
    }
    return [...parts, ...marks];
  }
}

// A line breaks where a value is missing.
export function line(times, values, x, y) {
  let path = "";
  let down = false;
  times.forEach((time, i) => {
    const value = values[i];
    if (value === null || value === undefined) {
      down = false;
      return;
    }
    path += `${down ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    // A single value between gaps would be invisible.
    if (!down) path += "h0.1";
    down = true;
  });
  return path;
}

// Colours stay with their owner as long as the page is open.
const colours = new Map();

function colour(owner) {
  if (!colours.has(owner)) colours.set(owner, `series-${colours.size % OWNERS_SHOWN}`);
  return colours.get(owner);
}

export function memory(bar, legend, kv) {
  const shown = kv.owners.slice(0, OWNERS_SHOWN);
  const rest = kv.owners.slice(OWNERS_SHOWN).reduce((sum, { tokens }) => sum + tokens, 0);
  const parts = shown.map(({ owner, tokens }) => [colour(owner), owner, tokens]);
  if (rest) parts.push(["series-8", `${kv.owners.length - OWNERS_SHOWN} others`, rest]);
  parts.push(["free", "free", kv.free_tokens]);
  bar.replaceChildren(
    ...parts.map(([name, owner, tokens]) => {
      const piece = html("div", { class: name, title: `${owner}: ${tokens} tokens` });
      piece.style.flex = `${tokens} 0 0`;
      return piece;
    }),
  );
  legend.replaceChildren(
    ...parts.map(([name, owner, tokens]) =>
      html("span", {}, html("i", { class: name }), `${owner} ${short(tokens)} (${percent(tokens, kv.total_tokens)})`),
    ),
    html("span", { class: "quiet" }, `of ${short(kv.total_tokens)} tokens`),
  );
}
