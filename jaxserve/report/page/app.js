// The page: its tabs, the key, and the feed that is read while it is looked at.

import { read, setKey, stream } from "./api.js";
import { Chat } from "./chat.js";
import { get } from "./format.js";
import { Live } from "./live.js";
import { Player } from "./player.js";
import { Requests } from "./requests.js";

const SLOWEST = 10000; // milliseconds between two attempts to read the feed

const tabs = [...document.querySelectorAll("[role=tab]")];
let recorded = null; // about the run that this page shows, if it shows no server
let feed = null; // AbortController of the feed that is being read

function failed(error) {
  if (error.status === 401) askForKey(error.message);
  else say(error.message);
}

function say(text) {
  get("status").textContent = text;
}

function askForKey(message) {
  get("key-error").textContent = sessionStorage.length ? message : "";
  get("key").hidden = false;
  get("key-value").focus();
}

const requests = new Requests(failed);
const live = new Live();
const chat = new Chat(failed, async (id) => {
  choose("requests");
  await requests.chooseKey(id);
});

function chosen() {
  return tabs.find((tab) => tab.getAttribute("aria-selected") === "true").getAttribute("aria-controls");
}

function choose(name, focus = false) {
  for (const tab of tabs) {
    const here = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", String(here));
    tab.tabIndex = here ? 0 : -1;
    get(tab.getAttribute("aria-controls")).hidden = !here;
    if (here && focus) tab.focus();
  }
  history.replaceState(null, "", `#${name}`);
  if (name === "requests") requests.load();
  look();
}

function takes(snapshot) {
  live.add(snapshot, chosen() === "live");
  requests.add(snapshot.requests);
  const { model, policy, routing, version } = snapshot.server;
  get("about").textContent = `${model}, policy ${policy}, routing ${routing}, version ${version}`;
}

// Reads the feed while Live or Requests is looked at, and only then.
async function look() {
  const wanted = recorded === null && !document.hidden && chosen() !== "chat";
  if (!wanted) {
    feed?.abort();
    feed = null;
    return;
  }
  if (feed !== null) return;
  const mine = (feed = new AbortController());
  let pause = 500;
  while (feed === mine) {
    try {
      for await (const snapshot of stream("v1/live", mine.signal)) {
        if (feed !== mine) return;
        say("");
        get("key").hidden = true;
        pause = 500;
        takes(snapshot);
      }
      say("The server ended the stream; trying again.");
    } catch (error) {
      if (feed !== mine) return;
      failed(error);
      if (error.status === 401) {
        feed = null;
        return;
      }
      if (error.status === undefined) say("The server does not answer; trying again.");
    }
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(SLOWEST, 2 * pause);
  }
}

for (const tab of tabs) tab.addEventListener("click", () => choose(tab.getAttribute("aria-controls")));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const shown = tabs.filter((tab) => !tab.hidden);
  const at = shown.indexOf(document.activeElement);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
  if (to === undefined || at < 0) return;
  event.preventDefault();
  choose(shown[(to + shown.length) % shown.length].getAttribute("aria-controls"), true);
});
get("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = get("key-value").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) { // fetch would refuse it in every request until the tab is closed
    get("key-error").textContent = "A key has letters, digits and signs of ASCII only.";
    return;
  }
  setKey(key);
  get("key-value").value = "";
  get("key").hidden = true;
  say("");
  start();
});
document.addEventListener("visibilitychange", look);

// Says how far the start of the server is, until it is ready.
async function ready() {
  while (true) {
    const response = await fetch("health", { cache: "no-store" });
    if (response.ok) break;
    say((await response.json()).error.message);
    await new Promise((done) => setTimeout(done, 1000));
  }
  say("");
}

async function start() {
  const about = await read("dashboard/about.json");
  recorded = about.recorded;
  if (recorded !== null) {
    get("tab-chat").hidden = true;
    get("about").textContent = recorded.title;
    new Player(live, await read("dashboard/run.json"));
  } else {
    chat.tiers(about.tiers);
    await ready();
    await chat.load();
  }
  const asked = location.hash.slice(1);
  const names = tabs.filter((tab) => !tab.hidden).map((tab) => tab.getAttribute("aria-controls"));
  choose(names.includes(asked) ? asked : names[0]);
}

start().catch(failed);
