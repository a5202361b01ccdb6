"use strict";

// The jobs of one rendezvous, live. The server sends a snapshot whenever something changed; the page draws what it says, as text only.

const QUIET_MS = 12000; // The server says something every 5 s.
const KEPT = 8; // Jobs that are over stay on the page, as they were last seen.
const RATES = 60; // Points of the small plot.
const TROUBLE = new Set(["lost", "failed", "stalled", "stuck"]);

const find = (id) => document.getElementById(id);
const state = { token: null, wanted: null, live: new Map(), marks: new Map(), rates: new Map(), over: new Map(), reader: null, stream: 0 };

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// -- the link's fragment -----------------------------------------------------------------------------------------------------------

function readFragment() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("job")) state.wanted = given.get("job");
  if (!given.has("token")) return;
  state.token = given.get("token");
  // The token leaves the address bar, so that it is in no screenshot and no bookmark; a reload of this tab still has it.
  sessionStorage.setItem("token", state.token);
  given.delete("token");
  const rest = given.toString();
  history.replaceState(null, "", location.pathname + (rest ? "#" + rest : ""));
}

function ask(wrong) {
  find("ask").hidden = false;
  find("wrong").hidden = !wrong;
  find("token").focus();
}

// -- the stream --------------------------------------------------------------------------------------------------------------------

function show(kind, text) {
  find("link").dataset.state = kind;
  find("link").textContent = text;
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function follow() {
  const mine = ++state.stream; // A newer call ends the older.
  state.reader?.abort();
  let wait = 500;
  while (mine === state.stream) {
    const reader = (state.reader = new AbortController());
    let guard = setTimeout(() => reader.abort(), QUIET_MS);
    try {
      const query = state.wanted === null ? "" : "?job=" + encodeURIComponent(state.wanted);
      const headers = state.token === null ? {} : { Authorization: "Bearer " + state.token };
      const answer = await fetch("api/v1/events" + query, { headers, signal: reader.signal, cache: "no-store" });
      if (mine !== state.stream) return;
      if (answer.status === 401) {
        show("down", "no token");
        sessionStorage.removeItem("token");
        ask(state.token !== null);
        return;
      }
      if (!answer.ok) throw new Error((await answer.json()).error ?? "it answered " + answer.status);
      find("ask").hidden = true;
      for await (const event of events(answer.body)) {
        if (mine !== state.stream) return;
        clearTimeout(guard);
        guard = setTimeout(() => reader.abort(), QUIET_MS);
        wait = 500;
        show("live", "live");
        if (event !== null) take(JSON.parse(event));
        else rest();
      }
      show("down", "the rendezvous ended the connection, trying again");
    } catch (error) {
      if (mine !== state.stream) return;
      show("down", error.name === "Error" ? error.message : "no answer from the rendezvous, trying again");
    } finally {
      clearTimeout(guard);
    }
    await pause(wait);
    wait = Math.min(2 * wait, 5000);
  }
}

// The data of each Server-Sent Event, null for a comment. EventSource would do, but it can not send the token.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      yield data.length ? data.join("\n") : null;
    }
  }
}

// How many calls a second the newest world makes in the group that is furthest, from one snapshot to another.
function measure(view) {
  const seqs = (view.worlds.at(-1)?.members ?? []).flatMap((member) => member.progress.map((one) => one.seq));
  const now = { at: performance.now(), generation: view.generation, seq: seqs.length ? Math.max(...seqs) : null };
  const before = state.marks.get(view.job);
  if (before && now.at - before.at < 900 && before.generation === now.generation) return;
  state.marks.set(view.job, now);
  if (!before || before.seq === null || now.seq === null || before.generation !== now.generation) return;
  const rate = Math.max(0, (1000 * (now.seq - before.seq)) / (now.at - before.at));
  state.rates.set(view.job, [...(state.rates.get(view.job) ?? []), rate].slice(-RATES));
}

function take(snapshot) {
  if (snapshot.job !== null) measure(snapshot.job);
  const now = new Map(snapshot.jobs.map((summary) => [summary.job, { summary, view: null }]));
  for (const [name, known] of state.live) {
    if (now.has(name)) now.get(name).view = known.view;
    else state.over.set(name, { ...known, at: new Date() });
  }
  for (const name of now.keys()) state.over.delete(name);
  while (state.over.size > KEPT) state.over.delete(state.over.keys().next().value);
  state.live = now;
  if (snapshot.job !== null && now.has(snapshot.job.job)) now.get(snapshot.job.job).view = snapshot.job;
  if (state.wanted === null && now.size > 0) choose(now.keys().next().value);
  draw();
}

function choose(name) {
  if (state.wanted === name) return;
  state.wanted = name;
  history.replaceState(null, "", location.pathname + "#job=" + encodeURIComponent(name));
  draw();
  follow();
}

// -- drawing -----------------------------------------------------------------------------------------------------------------------

function count(byState) {
  const order = ["active", "forming", "away", "lost", "failed", "stalled", "stuck", "left"];
  const known = order.filter((name) => byState[name]).concat(Object.keys(byState).filter((name) => !order.includes(name)));
  return known.map((name) => byState[name] + " " + name).join(", ");
}

function mood(summary, over) {
  if (Object.keys(summary.members_by_state).some((name) => TROUBLE.has(name)) || summary.state === "failed") return "bad";
  if (!over && summary.members_by_state.away) return "wait";
  return over || summary.state === "ended" ? "over" : summary.state === "formed" ? "good" : "wait";
}

function drawJobs() {
  const entries = [...state.live, ...state.over].map(([name, known]) => {
    const over = state.over.has(name);
    const text = over ? "over" : count(known.summary.members_by_state) || known.summary.state;
    const dot = make("span", { class: "dot", "data-state": mood(known.summary, over) }, name);
    const button = make("button", { type: "button", "aria-current": name === state.wanted ? "true" : null }, dot, make("small", {}, text));
    button.addEventListener("click", () => choose(name));
    return button;
  });
  const none = make("p", { class: "soft" }, "No job is here. Start one with aiodist run, or join with AIODIST_RENDEZVOUS set.");
  const held = document.activeElement?.closest?.("#jobs") ? [...find("jobs").children].indexOf(document.activeElement) : -1;
  find("jobs").replaceChildren(...(entries.length ? entries : [none]));
  if (held >= 0) find("jobs").children[held]?.focus?.();
}

function cell(name, label, ...children) {
  return make("td", { class: name, "data-label": label }, ...children.map((child) => (child === null ? "-" : child)));
}

function row(member, name) {
  const kind = TROUBLE.has(name) ? "trouble" : name === "left" ? "over" : name === "away" ? "wait" : "";
  const reason = member.reason ? make("span", { class: "reason" }, member.reason) : null;
  const stateCell = make("td", { class: "state", "data-label": "state" }, name);
  const last = member.progress?.length ? member.progress.reduce((one, other) => (other.lag > one.lag ? other : one)) : null;
  const rank = member.rank === null ? "any" : String(member.rank);
  return make(
    "tr",
    { class: kind || null, "data-rank": rank, "data-state": name },
    cell("rank number", "rank", rank),
    cell("host", "host", member.host),
    cell("pid number", "pid", member.pid === null ? null : String(member.pid)),
    cell("device", "device", member.device),
    cell("call", "last call", last === null ? null : last.seq < 0 ? "none yet" : make("span", { title: last.group + " at " + last.site }, last.collective + " #" + last.seq)),
    cell("lag number", "lag", last === null ? null : String(last.lag)),
    stateCell,
    make("td", { class: "why", "data-label": "" }, reason),
  );
}

function table(rows) {
  const heads = [["rank", "number"], ["host"], ["pid", "number"], ["device"], ["last call"], ["lag", "number"], ["state"], [""]];
  const head = make("tr", {}, ...heads.map(([text, kind]) => make("th", { scope: "col", class: kind }, text)));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

const ranks = (listed, all) => (all === 1 ? "rank " : "ranks ") + listed.slice(0, 16).join(", ") + (all > 16 ? " and " + (all - 16) + " more" : "");

function meetings(title, list) {
  if (!list.length) return [];
  const items = list.map((one) => make("li", {}, make("b", {}, one.name), " waits for " + ranks(one.missing, one.missing_count)));
  return [make("h3", {}, title), make("ul", {}, ...items)];
}

function drawWorld(world, alone) {
  const title = alone ? [] : [make("h3", {}, "generation " + world.generation)];
  const rest = world.members_left_out ? [make("p", { class: "soft" }, "and " + world.members_left_out + " more ranks")] : [];
  return [
    ...title,
    table(world.members.map((member) => row(member, member.state))),
    ...rest,
    ...meetings("barriers", world.barriers),
    ...meetings("groups and channels being made", world.gathers),
  ];
}

function drawForming(forming) {
  if (!forming.members.length) return [];
  const missing = forming.missing_count ? "waiting for " + ranks(forming.missing, forming.missing_count) : "all ranks are here";
  return [make("h3", {}, "forming: " + missing), table(forming.members.map((member) => row(member, "joined")))];
}

// Nothing changed for a while: the plot goes on, down to nothing.
function rest() {
  const view = state.live.get(state.wanted)?.view;
  if (!view) return;
  measure(view);
  drawJob();
}

function sparkline(rates) {
  if (rates.length < 2) return null;
  const top = Math.max(...rates, 1e-9);
  const left = RATES - rates.length; // The newest is on the right.
  const points = rates.map((rate, index) => (((left + index) * 118) / (RATES - 1) + 1).toFixed(1) + "," + (23 - (18 * rate) / top).toFixed(1));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  for (const [name, value] of Object.entries({ viewBox: "0 0 120 24", width: 120, height: 24, "aria-hidden": "true" })) svg.setAttribute(name, value);
  svg.append(line);
  return make("span", { class: "plot" }, svg, " " + rates.at(-1).toPrecision(3) + " calls/s");
}

function drawJob() {
  const known = state.live.get(state.wanted) ?? state.over.get(state.wanted);
  if (!known?.view) return find("job").replaceChildren(...(state.wanted === null ? [] : [make("p", { class: "soft" }, "No job " + state.wanted + " is here.")]));
  const view = known.view;
  const plot = known.at ? null : sparkline(state.rates.get(view.job) ?? []);
  const facts = [view.state, "generation " + view.generation, ...view.worlds.map((world) => world.world_size + " ranks, " + world.keys + " keys")];
  const over = known.at ? [make("p", { class: "bad" }, "Over since " + known.at.toLocaleTimeString() + "; this is how it was last seen.")] : [];
  find("job").replaceChildren(
    make("div", { class: "head" }, make("h2", {}, view.job), make("span", { class: "soft" }, facts.join(" · ")), plot),
    ...over,
    ...(view.failure ? [make("p", { class: "bad" }, view.failure)] : []),
    ...view.worlds.flatMap((world) => drawWorld(world, view.worlds.length === 1)),
    ...drawForming(view.forming),
  );
}

function draw() {
  drawJobs();
  drawJob();
}

// -- the start ---------------------------------------------------------------------------------------------------------------------

state.token = sessionStorage.getItem("token");
readFragment();
addEventListener("hashchange", () => {
  const before = state.wanted;
  readFragment();
  if (state.wanted !== before || location.hash.includes("token=")) draw();
  follow();
});
find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = find("token").value.trim();
  sessionStorage.setItem("token", state.token);
  find("token").value = "";
  follow();
});
follow();
