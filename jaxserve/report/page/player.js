// A recorded run in place of the feed: a slider over its snapshots.

import { get, seconds } from "./format.js";

const PER_SECOND = 10; // snapshots while it plays

export class Player {
  constructor(live, run) {
    this.live = live;
    this.snapshots = run.snapshots;
    this.timer = null;
    get("player").hidden = false;
    get("predictions").hidden = !run.snapshots.some((one) => one.requests.some((each) => each.predicted_ttft !== null));
    get("moment").max = this.snapshots.length - 1;
    get("moment").addEventListener("input", () => this.go(Number(get("moment").value)));
    get("play").addEventListener("click", () => this.toggle());
    get("moment").value = this.snapshots.length - 1;
    this.go(this.snapshots.length - 1);
  }

  // Shows the run as it was at a snapshot, with all that happened before.
  go(at) {
    this.live.clear();
    this.snapshots.slice(0, at + 1).forEach((one, place) => this.live.add(one, place === at));
    this.label(at);
  }

  label(at) {
    const said = seconds(this.snapshots[at].time - this.snapshots[0].time);
    get("moment-value").textContent = said;
    get("moment").setAttribute("aria-valuetext", said);
  }

  toggle() {
    if (this.timer !== null) {
      clearInterval(this.timer);
      this.timer = null;
    } else {
      if (Number(get("moment").value) >= this.snapshots.length - 1) {
        get("moment").value = 0;
        this.go(0);
      }
      this.timer = setInterval(() => this.next(), 1000 / PER_SECOND);
    }
    get("play").textContent = this.timer === null ? "Play" : "Pause";
  }

  next() {
    const at = Number(get("moment").value) + 1;
    if (at >= this.snapshots.length) {
      this.toggle();
      return;
    }
    get("moment").value = at;
    this.live.add(this.snapshots[at]);
    this.label(at);
  }
}
