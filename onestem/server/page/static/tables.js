// Prefixes, jobs and recent requests.

import { bytes, clock, html, name, percent, quoted, seconds, short } from "./dom.js";

// columns: [[title, cell(row) -> text or element, class]]
function table(columns, rows, empty) {
  if (!rows.length) return html("p", { class: "quiet" }, empty);
  const head = html("tr", {}, ...columns.map(([title, , kind]) => html("th", { class: kind, scope: "col" }, title)));
  const body = rows.map((row) =>
    html("tr", {}, ...columns.map(([, cell, kind]) => html("td", { class: kind }, cell(row)))),
  );
  return html("table", {}, html("thead", {}, head), html("tbody", {}, ...body));
}

const PREFIXES = [
  ["Name", (prefix) => `${prefix.name}${prefix.version > 1 ? `, version ${prefix.version}` : ""}`, "name"],
  ["Of", (prefix) => prefix.key ?? "operator"],
  ["State", (prefix) => (prefix.ready ? "ready" : `computing, ${percent(prefix.computed_tokens, prefix.tokens)}`)],
  ["Tokens", (prefix) => short(prefix.tokens), "number"],
  ["Memory", (prefix) => bytes(prefix.bytes), "number"],
  ["Readers", (prefix) => String(prefix.readers), "number"],
  ["Hits", (prefix) => short(prefix.hits), "number"],
  ["Last used", (prefix) => clock(prefix.last_used), "number"],
];

const JOBS = [
  ["Job", (job) => name(job.id)],
  ["Of", (job) => job.key ?? "–"],
  ["State", (job) => job.status.replace("_", " ")],
  ["Done", progress],
  ["Failed", (job) => String(job.failed), "number"],
  ["Since", (job) => clock(job.created_at), "number"],
];

const REQUESTS = [
  ["Time", (request) => clock(request.time)],
  ["Request", (request) => name(request.id)],
  ["Of", (request) => [request.key, request.app].filter((part) => part !== null).join(" / ") || "–"],
  ["Prompt", (request) => short(request.prompt_tokens), "number"],
  ["Answer", (request) => short(request.output_tokens), "number"],
  ["First token", (request) => seconds(request.ttft), "number"],
  ["Per token", (request) => seconds(request.tpot), "number"],
  ["End", (request) => html("span", { class: ["stop", "length"].includes(request.finish) ? null : "bad" }, request.finish)],
  ["Reuse", reuse, "wide"],
];

export const prefixes = (place) => (rows) => place.replaceChildren(table(PREFIXES, rows, "None is pinned."));
export const jobs = (place) => (rows) => place.replaceChildren(table(JOBS, rows, "No job was posted."));
export const requests = (place) => (rows) =>
  place.replaceChildren(table(REQUESTS, rows, "No request has ended yet."));

function progress(job) {
  const done = job.completed + job.failed;
  return html("span", {}, html("progress", { max: Math.max(1, job.total), value: done }), ` ${short(done)} of ${short(job.total)}`);
}

function reuse(request) {
  const bar = html("span", { class: "share" }, html("i"));
  bar.firstChild.style.width = percent(request.cached_tokens, request.prompt_tokens || 1);
  return html("span", {}, bar, ...explanation(request));
}

// Tokens of the tiers below KV memory, as far as there are any.
export const copied = ({ host_tokens: host, disk_tokens: disk }, show) =>
  [[host, "host memory"], [disk, "files"]]
    .filter(([count]) => count)
    .map(([count, tier]) => `${show(count)} from ${tier}`)
    .join(", ");

// What was shared, and where and why the match ended, as text and quotations.
export function explanation(request) {
  const { prompt_tokens: prompt, reuse: found } = request;
  if (found === null) return ["Nothing was looked up: sharing is off, or the request never ran."];
  const { matched_tokens: matched, source } = found;
  const start = matched
    ? [`${matched} of ${prompt} prompt tokens shared with ${origin(source)}; `]
    : [`Nothing of ${prompt} prompt tokens shared; `];
  const below = copied(request, String);
  return [...start, ...ending(found, prompt), below && ` Copied back: ${below}.`];
}

const origin = (source) => (source === "earlier request" ? "an earlier request" : source === "none" ? "others" : source);

function ending({ ended, at, expected, got, matched_tokens: matched }, prompt) {
  const where = at ?? matched;
  const reasons = {
    "prompt ended": ["all but the last token, which is always computed: the answer begins from it."],
    salt: [`from token ${where} what is stored belongs to another key, so it is not looked at.`],
    evicted: [`what followed token ${where} was evicted to make room.`],
  };
  if (ended === "prompt ended" && prompt - matched > 1) return ["then the prompt ended."];
  if (reasons[ended]) return reasons[ended];
  if (ended !== "differs") return [`the match ended at token ${where}: ${ended}.`];
  if (expected === null || got === null) return [`at token ${where} the prompt goes on differently.`];
  return [`at token ${where} it goes on with `, quoted(got), " where ", quoted(expected), " is stored."];
}
