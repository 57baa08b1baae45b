// Small plots in SVG.

import { element, replace } from "./format.js";

const WIDTH = 480;
const HEIGHT = 180;
const LEFT = 56;
const BOTTOM = 22;
const TOP = 8;
const COLORS = 7;

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

export function picture(label, width, height, ...shapes) {
  const made = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  made.append(...shapes);
  return made;
}

export { shape };

const colors = new Map(); // by name: the same one in every plot

export function color(name) {
  if (!colors.has(name)) colors.set(name, colors.size % COLORS);
  return colors.get(name);
}

export function legend(entries) {
  const marks = entries.map(([name, mark]) => {
    const box = picture("", 10, 10, shape("rect", { width: 10, height: 10, class: mark }));
    box.setAttribute("aria-hidden", "true");
    return element("span", {}, box, name);
  });
  return element("div", { className: "legend" }, ...marks);
}

function scale([low, high], [from, to]) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

function frame(xs, ys, formatX, formatY) {
  const x = scale(xs, [LEFT, WIDTH - 8]);
  const y = scale(ys, [HEIGHT - BOTTOM, TOP]);
  const middle = (ys[0] + ys[1]) / 2;
  const shapes = [shape("path", { class: "axis", d: `M${LEFT} ${TOP}V${HEIGHT - BOTTOM}H${WIDTH - 8}` })];
  for (const value of [ys[0], middle, ys[1]]) {
    shapes.push(shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, formatY(value)));
  }
  shapes.push(shape("text", { x: LEFT, y: HEIGHT - 6 }, formatX(xs[0])));
  shapes.push(shape("text", { x: WIDTH - 8, y: HEIGHT - 6, "text-anchor": "end" }, formatX(xs[1])));
  return { x, y, shapes };
}

// A scale of seconds of either sign, on which 10 ms and a minute can both be seen.
const SMALLEST = 0.01;
const compress = (value) => Math.sign(value) * Math.log10(1 + Math.abs(value) / SMALLEST);
const expand = (value) => Math.sign(value) * SMALLEST * (10 ** Math.abs(value) - 1);

// Draws seconds of either sign on a logarithmic axis, with a line at zero.
export function slacks(parent, label, series, { xs, formatX, formatY }) {
  const points = (each) => each.map(([at, value]) => [at, value === null ? null : compress(value)]);
  const made = new Map([...series].map(([name, each]) => [name, points(each)]));
  const values = [...made.values()].flat().map(([, value]) => value).filter((value) => value !== null);
  const ys = [Math.min(compress(-0.1), ...values), Math.max(compress(0.1), ...values)];
  lines(parent, label, made, { xs, ys, formatX, formatY: (value) => formatY(expand(value)), zero: true });
}

// Draws lines: series is a map from a name to [[x, y], ...], where y may be null.
export function lines(parent, label, series, { xs, ys, formatX, formatY, zero = false }) {
  const { x, y, shapes } = frame(xs, ys, formatX, formatY);
  if (zero && ys[0] < 0 && ys[1] > 0) {
    shapes.push(shape("path", { class: "goal", d: `M${LEFT} ${y(0)}H${WIDTH - 8}` }));
  }
  for (const [name, points] of series) {
    let path = "";
    let pen = "M";
    for (const [at, value] of points) {
      if (value === null) pen = "M";
      else {
        path += `${pen}${x(at).toFixed(1)} ${y(Math.min(ys[1], Math.max(ys[0], value))).toFixed(1)}`;
        pen = "L";
      }
    }
    if (path) shapes.push(shape("path", { class: `line s${color(name)}`, d: path }));
  }
  replace(parent, picture(label, WIDTH, HEIGHT, ...shapes), legend([...series.keys()].map((name) => [name, `f${color(name)}`])));
}

// Draws points [x, y, name] on logarithmic axes of the same range, with the line on which both are equal.
export function scatter(parent, label, points, format) {
  const values = points.flatMap(([a, b]) => [a, b]).filter((value) => value > 0);
  if (!values.length) {
    replace(parent, element("p", {}, "No request with a prediction has ended."));
    return;
  }
  const range = [Math.log10(Math.min(...values)) - 0.1, Math.log10(Math.max(...values)) + 0.1];
  const power = (value) => format(10 ** value);
  const { x, y, shapes } = frame(range, range, power, power);
  shapes.push(shape("path", { class: "axis", d: `M${x(range[0])} ${y(range[0])}L${x(range[1])} ${y(range[1])}` }));
  for (const [a, b, name] of points) {
    if (a > 0 && b > 0) {
      const at = { cx: x(Math.log10(a)).toFixed(1), cy: y(Math.log10(b)).toFixed(1) };
      shapes.push(shape("circle", { ...at, r: 3, class: `f${color(name)}`, "fill-opacity": 0.7 }));
    }
  }
  const names = [...new Set(points.map(([, , name]) => name))];
  replace(parent, picture(label, WIDTH, HEIGHT, ...shapes), legend(names.map((name) => [name, `f${color(name)}`])));
}
