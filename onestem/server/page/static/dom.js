// Elements and numbers. Text goes in as text nodes only: nothing of a prompt is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const html = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

// 1234567 -> "1.23M", 0.0123 -> "0.0123"; three digits that count.
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) {
      const scaled = value / (letter === "k" ? 1e3 : unit);
      return `${Number(scaled.toPrecision(3))}${letter}`;
    }
  }
  return size >= 1000 || Number.isInteger(value)
    ? String(Math.round(value))
    : String(Number(value.toPrecision(3)));
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`;
}

export const clock = (time) =>
  time === null || time === undefined ? "–" : new Date(time * 1000).toLocaleTimeString([], { hour12: false });

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");

// A token's text in quotation marks; what cannot be seen stands as in JSON.
export const quoted = (text) => html("q", {}, JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"'));

// Long names are cut by the style; pointing at one shows all of it.
export const name = (text) => html("span", { class: "cut", title: text }, text);

// Draws a part only when what it shows has changed, so that a selection or a hover stays.
export function whenChanged(draw) {
  let drawn;
  return (shown) => {
    const signature = JSON.stringify(shown);
    if (signature !== drawn) draw(shown);
    drawn = signature;
  };
}
