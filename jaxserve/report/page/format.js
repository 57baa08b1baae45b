// Numbers as people read them, and elements made without HTML: texts of others are never parsed.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size < 1 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${value.toFixed(size < 100 ? 2 : 0)} s`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value * 100)}%`;
}

// The time of day; of a recorded run the time since its start.
export function clock(time) {
  return time < 1e8 ? `${time.toFixed(1)} s` : new Date(time * 1e3).toLocaleTimeString();
}

// Returns an element with properties and children, which are elements or texts.
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children);
}

export function get(id) {
  return document.getElementById(id);
}
