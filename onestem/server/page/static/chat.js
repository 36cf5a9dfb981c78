// A conversation with the served model. It asks as any application does: /v1, streamed, with a key.

import { at, html } from "./dom.js";

// The values of the events of a stream, as they come; an error ends it.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    text += part.value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const event of whole.filter((one) => !one.startsWith(":"))) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw new Error(value.error.message);
      yield value;
    }
  }
  throw new Error("the answer was cut off");
}

function cost({ prompt_tokens: prompt, completion_tokens: answer, prompt_tokens_details: details }) {
  const cached = details?.cached_tokens ?? 0;
  return `Prompt ${prompt} tokens: ${cached} shared with what was computed before, ${prompt - cached} computed. Answer ${answer} tokens.`;
}

// Messages so far, and the request that is running.
let messages = [];
let running = null;

async function answer(asked, shown) {
  const system = at("chat-system").value.trim();
  const before = system ? [{ role: "system", content: system }] : [];
  const key = at("chat-key").value.trim();
  // With its origin: a page that was opened as http://USER:KEY@... may fetch no relative address.
  const reply = await fetch(`${location.origin}/v1/chat/completions`, {
    method: "POST",
    signal: running.signal,
    headers: { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
    body: JSON.stringify({ messages: [...before, ...asked], stream: true, stream_options: { include_usage: true } }),
  });
  if (reply.status === 401) at("chat-key").hidden = false;
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  for await (const { choices, usage } of events(reply.body)) {
    const delta = choices[0]?.delta;
    if (delta?.reasoning_content) thought(shown).append(delta.reasoning_content);
    shown.append(delta?.content ?? "");
    at("chat-log").scrollTop = at("chat-log").scrollHeight;
    if (usage) at("chat-cost").textContent = cost(usage);
  }
}

const said = (role, text) => at("chat-log").appendChild(html("p", { class: role }, text));

// What the model thinks before an answer.
function thought(answer) {
  const before = answer.previousSibling;
  if (before.className === "reasoning") return before;
  return at("chat-log").insertBefore(html("p", { class: "reasoning" }), answer);
}

async function send() {
  const text = at("chat-text").value;
  if (running || !text.trim()) return;
  const mine = (running = new AbortController());
  const asked = [...messages, { role: "user", content: text }];
  const shown = [said("user", text), said("assistant", "")];
  at("chat-text").value = "";
  at("chat-cost").textContent = "";
  at("chat-send").textContent = "Stop";
  const error = await answer(asked, shown[1]).catch((reason) => reason);
  if (running !== mine) return; // the conversation began again
  idle();
  const before = shown[1].previousSibling === shown[0] ? [] : [shown[1].previousSibling];
  // An answer that was stopped stays as far as it came; what failed was never said.
  if (error === undefined || error.name === "AbortError") {
    const said = { role: "assistant", content: shown[1].textContent };
    for (const { textContent } of before) said.reasoning_content = textContent;
    messages = [...asked, said];
    return;
  }
  at("chat-cost").textContent = error.message;
  at("chat-text").value = text;
  for (const part of [...shown, ...before]) part.remove();
}

function idle() {
  running = null;
  at("chat-send").textContent = "Send";
}

function reset() {
  running?.abort();
  idle();
  messages = [];
  at("chat-log").replaceChildren();
  at("chat-cost").textContent = "";
}

export function chat() {
  at("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else send();
  });
  at("chat-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  at("chat-reset").addEventListener("click", reset);
}
