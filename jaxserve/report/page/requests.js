// Requests that have ended, and what happened to the chosen one.

import { Failed, read } from "./api.js";
import { element, get, replace, seconds } from "./format.js";
import { legend, picture, shape } from "./plots.js";

const ROWS = 500;
const WIDTH = 640;
const LANE = 26;
const LEFT = 110;

export class Requests {
  constructor(failed) {
    this.rows = new Map(); // by id, oldest first
    this.elements = new Map(); // of the rows that have been shown
    this.chosen = null;
    this.failed = failed;
    get("late-only").addEventListener("change", () => this.show());
  }

  add(requests) {
    if (!requests.length) return;
    for (const one of requests) this.rows.set(one.id, one);
    for (const id of [...this.rows.keys()].slice(0, Math.max(0, this.rows.size - ROWS))) {
      this.rows.delete(id);
      this.elements.delete(id);
    }
    this.show();
  }

  async load() {
    try {
      this.add((await read("v1/requests?limit=200")).data.reverse());
    } catch (error) {
      this.failed(error);
      return;
    }
    this.show();
  }

  // Chooses the request of an answer, by the id of the answer.
  async chooseKey(key) {
    await this.load();
    const found = [...this.rows.values()].find((one) => one.key === key);
    if (found) await this.choose(found.id);
  }

  show() {
    const late = get("late-only").checked;
    const rows = [...this.rows.values()].reverse().filter((one) => !late || verdict(one) === "late");
    const none = element("tr", {}, element("td", { colSpan: 7 }, this.rows.size ? "No late request." : "No request yet."));
    arrange(get("ended-requests").tBodies[0], rows.length ? rows.map((one) => this.shown(one)) : [none]);
  }

  // Returns the row of a request, the same one each time: it may have the focus, or be about to be clicked.
  shown(one) {
    if (!this.elements.has(one.id)) this.elements.set(one.id, this.row(one));
    const row = this.elements.get(one.id);
    row.classList.toggle("chosen", one.id === this.chosen);
    return row;
  }

  row(one) {
    const open = element("button", { type: "button" }, one.id);
    open.dataset.request = one.id;
    open.setAttribute("aria-label", `Show request ${one.id}`);
    open.addEventListener("click", () => this.choose(one.id));
    const words = verdict(one);
    const on = element("td", { className: words === "late" ? "bad" : words === "yes" ? "good" : "" }, words);
    const times = [time(one.ttft, one.ttft_slo), time(one.tpot, one.tpot_slo)];
    const sizes = [one.prompt_tokens, one.output_tokens].map((value) => element("td", { className: "less" }, String(value)));
    return element("tr", {}, element("td", {}, open), on, ...times, element("td", { className: "name" }, one.class), ...sizes);
  }

  async choose(id) {
    this.chosen = id;
    this.show();
    get("detail-title").textContent = `Request ${id}: reading …`;
    replace(get("timeline"));
    replace(get("words-of"));
    let found;
    try {
      found = await read(`v1/requests/${encodeURIComponent(id)}`);
    } catch (error) {
      if (!(error instanceof Failed) || error.status !== 404) this.failed(error);
      if (this.chosen === id) get("detail-title").textContent = `Request ${id}: ${error.message}`;
      return;
    }
    if (this.chosen !== id) return; // another was chosen meanwhile
    get("detail-title").textContent = `Request ${id}`;
    replace(get("timeline"), ...timeline(found));
    replace(get("words-of"), ...words(found));
    get("detail").focus({ preventScroll: false });
  }
}

// Lets a parent have these children, without moving those that are in place.
function arrange(parent, children) {
  const wanted = new Set(children);
  for (const one of [...parent.children]) if (!wanted.has(one)) one.remove();
  children.forEach((one, at) => {
    if (parent.children[at] !== one) parent.insertBefore(one, parent.children[at] ?? null);
  });
}

// Returns whether a request was on time; "left" if its client did not wait for it.
function verdict(one) {
  return one.attained ? "yes" : one.finish_reason === "abort" ? "left" : "late";
}

// Returns a cell with a time, red if it is over its objective, which the title names.
function time(value, objective) {
  const missed = value !== null && objective !== null && value > objective;
  const title = objective === null ? "no objective" : `objective: ${seconds(objective)}`;
  return element("td", { className: missed ? "bad" : "", title }, seconds(value));
}

function words(found) {
  // Times begin a line that says what happened; the others are the head and the verdict.
  const events = found.lines.findLastIndex((line) => /^ *-?[\d.]+ s {2}/.test(line)) + 1;
  const verdicts = found.lines.slice(events);
  const className = `verdict ${found.attained ? "good" : "bad"}`;
  const known = found.predicted_ttft !== null && found.predicted_ttft !== undefined;
  const predicted = known ? [`Predicted when it was routed: first token after ${seconds(found.predicted_ttft)}.`] : [];
  const others = [...predicted, ...found.lines.slice(0, events)];
  return [
    ...verdicts.map((line) => element("li", { className }, line.trim())),
    ...others.map((line) => element("li", {}, line.trim())),
  ];
}

function timeline(found) {
  const names = [...new Set(found.bars.map((bar) => bar.instance))];
  const last = Math.max(found.last_token ?? 0, ...found.bars.map((bar) => bar.end)) || 1;
  const end = found.ttft_slo !== null && found.ttft_slo < 2 * last ? Math.max(last, found.ttft_slo) : last;
  const x = (time) => LEFT + (Math.max(0, Math.min(time, end)) / end) * (WIDTH - LEFT - 10);
  const height = names.length * LANE + 52;
  const shapes = [];
  names.forEach((name, at) => {
    shapes.push(shape("text", { x: LEFT - 8, y: at * LANE + 22, "text-anchor": "end" }, name));
  });
  for (const bar of found.bars) {
    const width = Math.max(1, x(bar.end) - x(bar.start)).toFixed(1);
    const place = { x: x(bar.start).toFixed(1), y: names.indexOf(bar.instance) * LANE + 8, width, height: LANE - 8 };
    const box = shape("rect", { ...place, class: bar.kind });
    box.append(shape("title", {}, `${bar.kind}, ${seconds(bar.start)} to ${seconds(bar.end)}`));
    shapes.push(box);
  }
  const marks = [[found.ttft_slo, "TTFT due", "goal"], [found.first_token, "first token", "axis"]];
  marks.forEach(([time, name, className], at) => {
    if (time === null || time > end) return;
    const bottom = height - 38;
    shapes.push(shape("path", { class: className, d: `M${x(time)} 4V${bottom}` }));
    const anchor = x(time) > WIDTH / 2 ? "end" : "start";
    shapes.push(shape("text", { x: x(time), y: bottom + 14 + 18 * at, "text-anchor": anchor }, `${name}, ${seconds(time)}`));
  });
  const kinds = [["prefill", "prefill"], ["decode", "decode"], ["KV transfer", "transfer"], ["other requests", "other"]];
  const seen = kinds.filter(([, kind]) => found.bars.some((bar) => bar.kind === kind));
  return [picture(`Timeline of request ${found.id}`, WIDTH, height, ...shapes), legend(seen)];
}
