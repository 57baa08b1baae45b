// What the server does now: tables, plots of the last minutes, and events as they happen.

import { clock, element, get, percent, replace, seconds } from "./format.js";
import { lines, scatter, slacks } from "./plots.js";

const MINUTES = 5;
const POINTS = 300; // requests in the plot of predictions
const EVENTS = 200;

const WORDS = {
  stop: (one) => `${one.instance}: a prefill step was stopped for more urgent work`,
  demotion: (one) => `${one.instance}: ${named(one)} became best effort`,
  deflection: (one) => `${one.instance}: the prompt of ${named(one)} was given to this decode instance`,
  move: (one) => `${one.instance}: ${named(one)} came with its KV from ${one.text}`,
  reroute: (one) => `${one.instance}: ${named(one)} was sent on from ${one.text}`,
  preemption: (one) => `${one.instance}: the KV of ${requests(one.count)} was dropped, because pages ran out`,
  role: (one) => `${one.instance} is a ${one.text} instance now`,
  hang: (one) => `${one.instance}: a step does not end`,
  failure: (one) => `${one.instance}: a step failed`,
};

function requests(count) {
  return count === 1 ? "a request" : `${count} requests`;
}

function named(event) {
  return event.request === null ? "a request" : `request ${event.request}`;
}

// Returns cells; those of a `less` column are left out on narrow screens.
function cells(values, className = "") {
  return values.map((value) => element("td", { className }, value));
}

function step(one) {
  if (one.step === null) return "idle";
  const parts = [];
  if (one.step.prefill_tokens) parts.push(`prefill ${one.step.prefill_tokens}`);
  if (one.step.decodes) parts.push(`decode ${one.step.decodes}`);
  return `${parts.join(" + ")}, ${seconds(one.step.predicted)}`;
}

function instance(one) {
  const usage = element("meter", { max: 1, high: 0.9, value: one.kv_usage, title: `${one.pages_held} of ${one.pages} pages` });
  usage.setAttribute("aria-label", `KV cache of ${one.name}`);
  const kv = element("td", {}, usage, ` ${percent(one.kv_usage)}`);
  const name = element("th", { scope: "row", className: "name" }, one.name, element("small", { className: "narrow" }, ` ${one.role}`));
  const late = one.slack !== null && one.slack < 0;
  const slack = element("td", { className: late ? "bad" : "" }, seconds(one.slack));
  const [role, running] = cells([one.role, String(one.running)], "less");
  return element("tr", {}, name, role, ...cells([step(one)]), running, ...cells([String(one.waiting)]), kv, slack);
}

function busy(one) {
  return one.waiting || one.running || one.ended;
}

function classRow([name, one]) {
  const on = element("td", { className: one.attainment !== null && one.attainment < 0.9 ? "bad" : "" }, percent(one.attainment));
  const counts = [...cells([one.waiting, one.running].map(String), "less"), ...cells([String(one.ended)])];
  const slacks = [one.ttft_slack, one.tpot_slack].map((value) =>
    element("td", { className: value !== null && value < 0 ? "bad" : "" }, seconds(value)));
  return element("tr", {}, element("th", { scope: "row", className: "name" }, name), ...counts, on, ...slacks);
}

function eventLine(one) {
  const words = (WORDS[one.kind] ?? (() => `${one.instance}: ${one.kind}`))(one);
  return element("li", {}, element("time", {}, clock(one.time)), ` ${words}`);
}

export class Live {
  constructor() {
    this.history = []; // snapshots of the last MINUTES
    this.points = []; // [predicted, measured, class]
    this.seen = new Set(); // classes that have had a request
  }

  // Forgets what was shown, before other snapshots.
  clear() {
    this.history = [];
    this.points = [];
    replace(get("events"));
  }

  // Takes a snapshot in, and shows it unless more follow at once.
  add(snapshot, show = true) {
    this.history.push(snapshot);
    while (this.history[0].time < snapshot.time - 60 * MINUTES) this.history.shift();
    for (const one of snapshot.requests) {
      if (one.predicted_ttft !== null && one.ttft !== null) this.points.push([one.predicted_ttft, one.ttft, one.class]);
    }
    this.points.splice(0, this.points.length - POINTS);
    get("events").prepend(...snapshot.events.slice().reverse().map(eventLine));
    while (get("events").children.length > EVENTS) get("events").lastChild.remove();
    if (show) this.show(snapshot);
  }

  show(snapshot) {
    replace(get("instances").tBodies[0], ...snapshot.instances.map(instance));
    for (const [name, one] of Object.entries(snapshot.classes)) if (busy(one)) this.seen.add(name);
    const classes = Object.entries(snapshot.classes).filter(([name]) => this.seen.has(name));
    const none = element("tr", {}, element("td", { colSpan: 7 }, "No request yet."));
    replace(get("classes").tBodies[0], ...(classes.length ? classes.map(classRow) : [none]));
    const totals = Object.entries(snapshot.counts).map(([name, count]) => `${count} ${name}`);
    get("counts").textContent = `Since the start: ${totals.join(", ")}.`;
    this.plot(classes.map(([name]) => name));
  }

  plot(names) {
    const last = this.history.at(-1).time;
    const xs = [Math.max(this.history[0].time, last - 60 * MINUTES), last];
    const common = { xs, formatX: clock };
    const series = (of) => new Map(names.map((name) => [name, this.history.map((one) => [one.time, of(one.classes[name])])]));
    const share = series((one) => one?.attainment ?? null);
    lines(get("plot-attainment"), "Share of requests on time, by class", share, { ...common, ys: [0, 1], formatY: percent });
    const slack = series((one) => one?.ttft_slack ?? null);
    slacks(get("plot-slack"), "Median TTFT slack, by class", slack, { ...common, formatY: seconds });
    scatter(get("plot-ttft"), "Measured over predicted TTFT", this.points, seconds);
    const rates = new Map(["prompt", "generated"].map((name) =>
      [name, this.history.map((one) => [one.time, one.rates[`${name}_tokens`]])]));
    const most = Math.max(10, ...[...rates.values()].flat().map(([, value]) => value ?? 0));
    lines(get("plot-tokens"), "Tokens per second", rates, { ...common, ys: [0, most], formatY: (value) => String(Math.round(value)) });
  }
}
