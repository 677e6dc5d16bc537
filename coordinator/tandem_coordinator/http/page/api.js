// Talking to the coordinator, over the same API as any client.

import { $ } from "./dom.js";

/** Headers of a request, with the token that was typed. */
export function headers() {
  const token = $("token").value.trim();
  return { "content-type": "application/json", ...(token ? { authorization: `Bearer ${token}` } : {}) };
}

async function refusal(response) {
  let words = `the coordinator answered ${response.status}`;
  try {
    words = (await response.json()).error.message;
  } catch {
    // no JSON: something between us and the coordinator answered
  }
  if (response.status === 401) $("token-option").hidden = false;
  return new Error(words);
}

/** The events of a streamed answer. */
export async function* events(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended before the completion did");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** The name that the model is served under. */
export async function servedName() {
  const response = await fetch("/v1/models", { headers: headers() });
  return response.ok ? (await response.json()).data[0].id : "";
}

/** Options that a form sets; what is left empty is the coordinator's to choose. */
export function chosen(fields) {
  const options = {};
  for (const [name, id] of Object.entries(fields)) {
    const field = $(id);
    if (field.value) options[name] = field.type === "number" ? field.valueAsNumber : field.value;
  }
  return options;
}
