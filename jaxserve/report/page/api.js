// Requests to the server, with the API key if there is one. The key lives as long as the browser's tab.

const KEY = "jaxserve-key";

export class Failed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function checked(response) {
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not JSON: a proxy answered
  }
  throw new Failed(response.status, message);
}

export async function read(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

// Yields the objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const block = text.slice(0, end);
      text = text.slice(end + 2);
      if (!block.startsWith("data: ")) continue;
      if (block === "data: [DONE]") return;
      yield JSON.parse(block.slice(6));
    }
  }
}

// Yields the objects that a server streams. Raises Failed for a refusal, before or within the stream.
export async function* stream(path, signal, body = null) {
  const asked = body === null ? {} : { method: "POST", body: JSON.stringify(body) };
  const type = body === null ? {} : { "Content-Type": "application/json" };
  const response = await checked(await fetch(path, { ...asked, headers: headers(type), signal, cache: "no-store" }));
  for await (const one of events(response)) {
    if (one.error) throw new Failed(one.error.code, one.error.message);
    yield one;
  }
}
