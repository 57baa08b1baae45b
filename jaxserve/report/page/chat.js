// Two lanes of requests with objectives: a chat, and long documents beside it. Each answer says what was kept.

import { read, stream } from "./api.js";
import { element, get, replace, seconds } from "./format.js";

const FILLER = "The quick brown fox jumps over the lazy dog while the engine decodes other requests. ";

// A slider of 0 to 100 is logarithmic between two numbers of milliseconds.
function logarithmic(low, high) {
  return {
    value: (place) => Number((low * (high / low) ** (place / 100)).toPrecision(2)),
    place: (value) => Math.round((100 * Math.log(value / low)) / Math.log(high / low)),
  };
}

const SCALES = { ttft: logarithmic(20, 3600000), tpot: logarithmic(5, 60000) };

function milliseconds(value) {
  return value === undefined ? "–" : seconds(value / 1e3);
}

export class Chat {
  constructor(failed, explain) {
    this.failed = failed;
    this.explain = explain; // shows a request by the id of its answer
    this.messages = [];
    this.model = null;
    for (const name of ["ttft", "tpot"]) get(name).addEventListener("input", () => this.label());
    get("words").addEventListener("input", () => this.label());
    get("no-objectives").addEventListener("change", () => this.label());
    get("chat-form").addEventListener("submit", (event) => this.send(event));
    get("document-form").addEventListener("submit", (event) => this.sendDocument(event));
    get("chat-clear").addEventListener("click", () => this.clear());
    get("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        get("chat-form").requestSubmit();
      }
    });
    this.promise({ ttft: 1000, tpot: 100 });
  }

  promise(goals) {
    for (const [name, value] of Object.entries(goals)) {
      get(name).value = Math.max(0, Math.min(100, SCALES[name].place(value)));
    }
    this.label();
  }

  label() {
    for (const name of ["ttft", "tpot"]) {
      get(name).disabled = get("no-objectives").checked;
      const said = get(name).disabled ? "–" : milliseconds(SCALES[name].value(Number(get(name).value)));
      get(`${name}-value`).textContent = said;
      get(name).setAttribute("aria-valuetext", said);
    }
    get("words-value").textContent = `about ${get("words").value} words`;
  }

  // Reads the model and the default objectives of the server.
  async load() {
    try {
      const [models, load] = await Promise.all([read("v1/models"), read("load")]);
      this.model = models.data[0].id;
      const context = models.data[0].max_model_len;
      if (context) {
        get("words").max = Math.max(100, Math.floor(context / 2 / 50) * 50);
        get("words").value = Math.floor(context / 4 / 50) * 50;
        get("max-tokens").value = Math.min(100, Math.floor(context / 4));
      }
      const { ttft, tpot } = load.objectives;
      if (ttft.seconds && tpot.seconds) this.promise({ ttft: ttft.seconds * 1e3, tpot: tpot.seconds * 1e3 });
      this.label();
    } catch (error) {
      this.failed(error);
    }
  }

  tiers(names) {
    const known = new Set([...get("tier").options].map((one) => one.value));
    for (const name of names) {
      if (!known.has(name)) get("tier").append(element("option", { value: name }, name));
    }
  }

  clear() {
    this.messages = [];
    replace(get("chat-log"));
  }

  objectives() {
    if (get("no-objectives").checked) return { service_tier: "best_effort" };
    const goals = ["ttft", "tpot"].map((name) => [`${name}_slo_ms`, SCALES[name].value(Number(get(name).value))]);
    return Object.fromEntries(goals);
  }

  async send(event) {
    event.preventDefault();
    const text = get("prompt").value.trim();
    if (!text || !get("chat-stop").disabled) return;
    get("prompt").value = "";
    this.messages.push({ role: "user", content: text });
    get("chat-log").append(element("p", { className: "message user" }, text));
    const max_tokens = Number(get("max-tokens").value) || 100;
    const body = { messages: this.messages, max_tokens, ...this.objectives() };
    const answer = await this.run("chat", body);
    if (answer) this.messages.push({ role: "assistant", content: answer });
    else this.messages.pop();
  }

  async sendDocument(event) {
    event.preventDefault();
    if (!get("document-stop").disabled) return;
    const words = Number(get("words").value);
    const text = FILLER.repeat(Math.ceil(words / 15)).split(" ").slice(0, words).join(" ");
    const tier = get("tier").value;
    const goals = tier ? { service_tier: tier } : this.objectives();
    get("document-log").append(element("p", { className: "message user" }, `A document of ${words} words${tier && `, ${tier}`}`));
    const messages = [{ role: "user", content: `Summarize: ${text}` }];
    await this.run("document", { messages, max_tokens: 16, ...goals });
  }

  // Streams one answer into a lane, and returns its text; "" if it failed.
  async run(lane, body) {
    const log = get(`${lane}-log`);
    const stop = get(`${lane}-stop`);
    const thought = element("span", { className: "thought" });
    const text = element("span");
    const kept = element("span", { className: "kept" }, "waiting …");
    log.append(element("p", { className: "message" }, thought, text, kept));
    log.scrollTop = log.scrollHeight;
    const leaving = new AbortController();
    const cancel = () => leaving.abort();
    stop.addEventListener("click", cancel);
    stop.disabled = false;
    const began = performance.now();
    let first = null;
    let usage = null;
    let id = null;
    let reason = "";
    try {
      const asked = { model: this.model, ...body, stream: true, stream_options: { include_usage: true } };
      for await (const chunk of stream("v1/chat/completions", leaving.signal, asked)) {
        id = chunk.id ?? id;
        usage = chunk.usage ?? usage;
        const choice = chunk.choices?.[0];
        reason = choice?.finish_reason ?? reason;
        const [said, thinking] = [choice?.delta?.content, choice?.delta?.reasoning_content ?? choice?.delta?.reasoning];
        if (said || thinking) {
          if (first === null) {
            first = performance.now() - began;
            kept.textContent = "answering …";
          }
          if (said) text.append(said);
          if (thinking) thought.append(thinking);
          if (log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
        }
      }
      replace(kept, ...this.outcome(usage?.slo, first, id, reason));
    } catch (error) {
      const left = error.name === "AbortError";
      replace(kept, element("span", { className: left ? "" : "bad" }, left ? "stopped" : error.message));
      if (!left) this.failed(error);
      return text.textContent;
    } finally {
      stop.removeEventListener("click", cancel);
      stop.disabled = true;
      log.scrollTop = log.scrollHeight;
    }
    return text.textContent;
  }

  // Returns what an answer's usage says, beside what was measured here.
  outcome(slo, first, id, reason) {
    const here = first === null ? [] : [`here after ${milliseconds(first)}`];
    const why = element("button", { type: "button" }, "why?");
    why.setAttribute("aria-label", "why? Show what happened to this request");
    why.addEventListener("click", () => this.explain(id));
    if (!slo) return [`${["no objectives", ...here, reason].join(", ")} `, why];
    const verdict = element("strong", { className: slo.attained ? "good" : "bad" }, slo.attained ? "on time" : "late");
    const limit = (value) => (value === undefined ? "no objective" : `objective ${milliseconds(value)}`);
    const ttft = `: first token after ${milliseconds(slo.ttft_ms)}`;
    const guessed = slo.predicted_ttft_ms === undefined ? [] : [`predicted ${milliseconds(slo.predicted_ttft_ms)}`];
    const beside = [limit(slo.ttft_slo_ms), ...guessed, ...here].join("; ");
    const tpot = slo.tpot_ms === undefined ? "" : `, then ${milliseconds(slo.tpot_ms)} a token (${limit(slo.tpot_slo_ms)})`;
    return [verdict, `${ttft} (${beside})${tpot} `, why];
  }
}
