"use strict";
(() => {
  const FIELDS = ["parent", "tokens", "requests", "alone", "aloneTokens", "hidden", "hiddenRequests", "hiddenTokens", "words", "aloneWords"];
  const AXIS = 20;
  const place = document.getElementById("tree");
  const about = document.getElementById("about");
  const path = document.getElementById("path");
  const buttons = document.querySelectorAll("#which button");
  const trees = JSON.parse(document.getElementById("data").textContent);

  // Nodes of a tree. Rows are requests from the top; in a node first its children, the largest first, then what is left out, then
  // who goes on alone.
  function read(lists) {
    const nodes = lists.map((values, number) => {
      const node = { number, children: [] };
      FIELDS.forEach((name, i) => { node[name] = values[i]; });
      return node;
    });
    for (const node of nodes) {
      const parent = node.number ? nodes[node.parent] : null;
      node.parent = parent;
      node.start = parent ? parent.end : 0;
      node.end = node.start + node.tokens;
      if (parent) parent.children.push(node);
    }
    nodes[0].top = 0;
    for (const node of nodes) {
      let top = node.top;
      node.children.sort((a, b) => b.requests - a.requests || a.number - b.number);
      for (const child of node.children) {
        child.top = top;
        top += child.requests;
      }
      node.hiddenTop = top;
      node.aloneTop = top + node.hiddenRequests;
    }
    for (const node of nodes.toReversed()) {
      node.reach = Math.max(node.end + 1, node.end + node.aloneTokens, node.end + node.hiddenTokens,
        ...node.children.map((child) => child.reach));
    }
    return nodes;
  }

  const count = (number) => Math.round(number).toLocaleString("en").replaceAll(",", "\u202f");
  const several = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
  const saved = (node) => node.tokens * (node.requests - 1);
  const level = (node) => root.requests < 2 ? 1 : 1 + Math.floor(3.99 * Math.log(node.requests) / Math.log(root.requests));

  function make(name, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  let nodes;
  let root;
  let zoomed;
  let drawn = new Map(); // number of a node -> its element
  let width = 0;

  function draw() {
    width = Math.max(place.clientWidth, 280);
    const height = Math.max(300, Math.min(560, width * 0.52));
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "tree",
      "aria-label": `Shared prefixes of ${several(root.requests, "request")}, ${several(nodes.length - 1, "prefix").replace("prefixs", "prefixes")} drawn` });
    const hatch = make("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" });
    hatch.append(make("path", { d: "M-1 7 7 -1M-1 1 1 -1M5 7 7 5", fill: "none" }));
    svg.append(hatch);
    const from = zoomed.start;
    const scale = { x: width / (zoomed.reach - from), y: (height - AXIS) / Math.max(zoomed.requests, 1) };
    const box = (start, top, tokens, requests) => ({
      x: (start - from) * scale.x, y: AXIS + (top - zoomed.top) * scale.y,
      width: Math.max(tokens * scale.x, 0.5), height: requests * scale.y,
    });
    axis(svg, from, scale.x, height);
    drawn = new Map();
    const waiting = [zoomed];
    while (waiting.length) {
      const node = waiting.pop();
      if (node.requests * scale.y < 0.4) continue;
      if (node.tokens) block(svg, node, box(node.start, node.top, node.tokens, node.requests));
      rest(svg, node, box(node.end, node.aloneTop, node.aloneTokens, node.alone), "alone",
        () => `${several(node.alone, "request")} alone`);
      rest(svg, node, box(node.end, node.hiddenTop, node.hiddenTokens, node.hiddenRequests), "hidden",
        () => `${count(node.hidden)} left out`);
      for (let i = node.children.length - 1; i >= 0; i--) waiting.push(node.children[i]);
    }
    place.replaceChildren(svg);
    const first = zoomed.tokens ? zoomed : zoomed.children[0];
    if (first && drawn.has(first.number)) drawn.get(first.number).setAttribute("tabindex", "0");
    crumbs();
  }

  function axis(svg, from, scale, height) {
    const rough = 90 / scale;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough));
    for (let at = Math.ceil(from / step) * step; (at - from) * scale < width - 30; at += step) {
      const x = (at - from) * scale;
      svg.append(make("line", { x1: x, x2: x, y1: AXIS - 5, y2: height }));
      svg.append(make("text", { x: x + 3, y: AXIS - 7, class: "axis" }, at === 0 ? "0 tokens" : count(at)));
    }
  }

  function label(svg, box, text, kind) {
    if (box.height < 14 || box.width < 44) return;
    const most = Math.floor((box.width - 10) / 6.4);
    const line = text.replace(/\s+/g, " ").trim();
    const shown = line.length > most ? `${line.slice(0, Math.max(most - 1, 1))}…` : line;
    svg.append(make("text", { x: box.x + 5, y: box.y + Math.min(box.height / 2 + 4, 200), class: kind }, shown));
  }

  function block(svg, node, box) {
    const kind = `level-${level(node)}`;
    const rect = make("rect", { ...box, rx: Math.min(2, box.height / 4), "stroke-width": Math.min(1, box.height / 8), class: `block ${kind}`, tabindex: -1, role: "treeitem",
      "data-node": node.number, "aria-label": `${several(node.requests, "request")}, ${several(node.tokens, "token")}: ${node.words}` });
    rect.addEventListener("click", () => zoom(node));
    rect.addEventListener("mouseenter", () => tell(node));
    rect.addEventListener("focus", () => tell(node));
    svg.append(rect);
    drawn.set(node.number, rect);
    label(svg, box, `${count(node.requests)} × ${count(node.tokens)} · ${node.words}`, kind);
  }

  function rest(svg, node, box, kind, text) {
    if (box.height < 0.4) return;
    const attributes = kind === "hidden" ? { fill: "url(#hatch)" } : {};
    const rect = make("rect", { ...box, class: kind, "aria-hidden": "true", ...attributes });
    rect.addEventListener("mouseenter", () => tell(node));
    svg.append(rect);
    label(svg, box, text(), "axis");
  }

  function tell(node) {
    const facts = [["requests", count(node.requests)]];
    if (node.tokens) facts.push(["tokens", `${count(node.tokens)}, from ${count(node.start)} to ${count(node.end)}: computed once, ${count(saved(node))} saved`]);
    if (node.words) facts.push(["begins", node.words]);
    if (node.alone) facts.push(["then alone", `${several(node.alone, "request")}, ${several(node.aloneTokens, "token")} each on average`], ["like", node.aloneWords]);
    if (node.hidden) facts.push(["left out", `${count(node.hidden)} smaller prefixes`]);
    about.replaceChildren(...facts.flatMap(([name, value]) => {
      const term = document.createElement("dt");
      const text = document.createElement("dd");
      term.textContent = name;
      text.textContent = value;
      if (name === "begins" || name === "like") text.className = "words";
      return [term, text];
    }));
  }

  function crumbs() {
    const line = [];
    for (let node = zoomed; node; node = node.parent) line.unshift(node);
    path.replaceChildren(...(zoomed === root ? [] : line).map((node) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = node === root ? "all requests" : (node.words.trim() || several(node.tokens, "token"));
      if (node === zoomed) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => zoom(node));
      return button;
    }));
  }

  function zoom(node, focused = node) {
    zoomed = node;
    draw();
    tell(node);
    const element = drawn.get(focused.number);
    if (element) element.focus();
  }

  function walk(node, key) {
    const siblings = node.parent ? node.parent.children : [node];
    const at = siblings.indexOf(node);
    return { ArrowLeft: node.parent, ArrowRight: node.children[0], ArrowUp: siblings[at - 1], ArrowDown: siblings[at + 1] }[key];
  }

  place.addEventListener("keydown", (event) => {
    const number = event.target.dataset.node;
    if (number === undefined) return;
    const node = nodes[Number(number)];
    if (event.key === "Enter" || event.key === " ") zoom(node);
    else if (event.key === "Escape") { if (zoomed !== root) zoom(zoomed.parent, zoomed); }
    else if (event.key.startsWith("Arrow")) {
      const next = walk(node, event.key);
      if (next && drawn.has(next.number)) drawn.get(next.number).focus();
    } else return;
    event.preventDefault();
  });

  function choose(name) {
    nodes = read(trees[name]);
    root = nodes[0];
    zoomed = root;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.tree === name));
    draw();
    tell(root.children.length === 1 ? root.children[0] : root);
  }

  for (const button of buttons) button.addEventListener("click", () => choose(button.dataset.tree));
  choose("now");
  new ResizeObserver(() => { if (Math.abs(place.clientWidth - width) > 1) draw(); }).observe(place);
})();
