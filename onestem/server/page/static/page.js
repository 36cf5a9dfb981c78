// Puts the parts together; each is drawn from the last state alone.

import { Chart, memory } from "./charts.js";
import { chat } from "./chat.js";
import { at, clock, html, percent, seconds, short, whenChanged } from "./dom.js";
import { follow, History } from "./feed.js";
import { copied, jobs, prefixes, requests } from "./tables.js";
import { Tree } from "./tree.js";

const history = new History();
let state = null;
let link = null;

const tree = new Tree(at("tree"), at("run"), at("tree-legend"));
const charts = [
  new Chart(at("charts"), "Tokens per second", [["output_tokens", "answers"], ["computed_tokens", "prompts computed"], ["prompt_tokens", "prompts asked"]], short),
  new Chart(at("charts"), "Requests", [["running", "running"], ["waiting", "waiting"]], short),
  new Chart(at("charts"), "Time to first token", [["ttft_p50", "median"], ["ttft_p99", "99th percentile"]], seconds),
  new Chart(at("charts"), "Time per token", [["tpot_p50", "median"], ["tpot_p99", "99th percentile"]], seconds),
  new Chart(at("charts"), "KV memory in use, tokens", [["kv_used_tokens", "used"]], short),
];
const parts = {
  runs: whenChanged((runs) => tree.show(runs)),
  prefixes: whenChanged(prefixes(at("prefixes"))),
  jobs: whenChanged(jobs(at("jobs"))),
  requests: whenChanged(requests(at("requests"))),
  kv: whenChanged((kv) => memory(at("memory"), at("memory-legend"), kv)),
};

chat();
follow(
  (now) => {
    state = now;
    history.add(now.history);
    show();
  },
  (now) => {
    link = now;
    showLink();
  },
);

function show() {
  const { model } = state;
  at("model").textContent =
    `${model.name}, ${model.dtype} on ${model.device}, attention ${model.attention}, sharing ${model.share}`;
  at("tiles").replaceChildren(...tiles().map(([value, text]) => html("div", { class: "tile" }, html("b", {}, value), html("span", {}, text))));
  for (const [name, draw] of Object.entries(parts)) draw(state[name]);
  for (const chart of charts) chart.show(history.columns);
  at("left-out").textContent = state.runs_left_out ? `${state.runs_left_out} smaller runs are not drawn.` : "";
  showLink();
}

function tiles() {
  const { totals, queue, kv } = state;
  const last = (name) => history.columns[name]?.at(-1);
  return [
    [short(last("output_tokens")), "tokens answered per second, over five seconds"],
    [short(queue.running), "sequences running"],
    [`${short(queue.waiting)}`, `waiting, of ${short(queue.limit)} at most`],
    [seconds(last("ttft_p50")), "to the first token, median"],
    [seconds(last("tpot_p50")), "per token, median"],
    [percent(totals.cached_tokens, totals.prompt_tokens), `of all prompt tokens came from ${origins()}`],
    [short(totals.shared_read_tokens ?? 0), "reads of stored tokens saved: one read served several sequences"],
    [percent(kv.total_tokens - kv.free_tokens, kv.total_tokens), "of KV memory in use"],
    [short(totals.requests), `requests; ${short(totals.refused)} refused, ${short(totals.failed)} failed, ${short(totals.num_preempted)} preempted`],
  ];
}

function origins() {
  const { cached_tokens: cached, prompt_tokens: all, ...totals } = state.totals;
  const below = copied(totals, (count) => percent(count, all));
  const inMemory = cached - totals.host_tokens - totals.disk_tokens;
  return below ? `the cache: ${percent(inMemory, all)} from KV memory, ${below}` : "KV memory";
}

// Who is away matters more than any figure: it is said above everything.
function showLink() {
  const engine = link === "lost" ? "lost" : (state?.engine.state ?? "starting");
  at("engine").textContent = { lost: "no connection", running: "engine running", starting: "engine starting", stuck: "engine stuck", down: "engine down" }[engine];
  at("engine").className = `badge ${engine === "stuck" ? "down" : engine}`;
  at("link").textContent = { live: "live", polling: "asked every two seconds" }[link] ?? "";
  const text = bannerText(engine);
  at("banner").hidden = text === null;
  at("banner").textContent = text ?? "";
  at("banner").className = `banner ${engine === "starting" ? "starting" : "down"}`;
  document.body.classList.toggle("stale", ["lost", "stuck", "down"].includes(engine));
}

function bannerText(engine) {
  if (engine === "lost") {
    return state
      ? `The server does not answer. What is shown is of ${clock(state.time)}; this page keeps trying.`
      : "The server does not answer; this page keeps trying.";
  }
  if (engine === "running") return null;
  if (engine === "starting") return "The engine is starting. Requests wait until it is ready.";
  const { since, error, restarts } = state.engine;
  const why = error ? `: ${error}` : "";
  return `The engine is down since ${clock(since)}${why}. Requests are answered with 503 until it runs again (restarts so far: ${restarts}).`;
}
