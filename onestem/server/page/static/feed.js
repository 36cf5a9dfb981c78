// The server's state, live: events if they come, else a request every two seconds.

const HISTORY_SECONDS = 300;
const SILENT_MS = 6000; // Events come once a second: then something is wrong.
const POLL_MS = 2000;

// An event's history holds only what is new to its stream; a first event, or a poll, all of it.
export class History {
  constructor() {
    this.columns = { time: [] };
  }

  add(part) {
    const last = this.columns.time.at(-1) ?? -Infinity;
    const fresh = part.time.findIndex((time) => time > last);
    if (fresh < 0) return;
    const before = this.columns.time.length;
    for (const name of Object.keys(part)) {
      const column = (this.columns[name] ??= new Array(before).fill(null));
      column.push(...part[name].slice(fresh));
    }
    const first = this.columns.time.at(-1) - HISTORY_SECONDS;
    const old = this.columns.time.findIndex((time) => time >= first);
    for (const column of Object.values(this.columns)) column.splice(0, old);
  }
}

// Calls onState(state) for each state, onLink("live" | "polling" | "lost") when that changes.
export function follow(onState, onLink) {
  let link = null;
  let heard = 0;
  let source = null;
  let polling = false;

  const say = (now) => {
    if (now !== link) onLink((link = now));
  };
  const take = (state, how) => {
    heard = Date.now();
    say(how);
    onState(state);
  };

  function listen() {
    source = new EventSource("/internal/events");
    source.addEventListener("error", () => (heard = 0));
    source.addEventListener("state", (event) => take(JSON.parse(event.data), "live"));
  }

  async function poll() {
    if (polling) return;
    polling = true;
    try {
      const answer = await fetch("/internal/state", { signal: AbortSignal.timeout(5000), cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const state = await answer.json();
      if (Date.now() - heard > POLL_MS) take(state, "polling");
    } catch {
      say("lost");
    } finally {
      polling = false;
    }
  }

  setInterval(() => {
    if (Date.now() - heard < (link === "live" ? SILENT_MS : POLL_MS)) return;
    poll();
    // A closed source never comes back by itself; one that connects again does.
    if (source.readyState === EventSource.CLOSED) listen();
  }, POLL_MS / 2);
  listen();
}
