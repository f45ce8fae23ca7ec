// Requests to the server of this page, or to a second server.
import { say } from "./dom.js";

export const HOME = new URL(".", document.baseURI).href;
export const nameOf = server => new URL(server).host;
export const saveKey = (server, key) => sessionStorage.setItem(`key of ${server}`, key);

// Return an address that a user typed in the form of HOME, or null if it is none.
export function addressOf(text) {
  const address = /^https?:\/\//i.test(text) ? text : `http://${text}`;
  return URL.canParse(address) ? address.replace(/\/*(\/v1)?\/*$/, "/") : null;
}

const problem = (message, status) => Object.assign(new Error(message), { status });

// Send JSON, or nothing, and return the response. Raise the sentence of the server if it refuses.
export async function request(server, path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(`key of ${server}`);
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = { method: body === undefined ? "GET" : "POST", headers, body, signal };
  const response = await fetch(new URL(path, server), options).catch(error => {
    if (error.name === "AbortError") throw error;
    const word = server === HOME ? "noServer" : "noSecondServer";
    throw problem(say(word, { server: nameOf(server), origin: location.origin }));
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null); // null: a proxy answered, not the server
  throw problem(answer?.error?.message ?? `${response.status} ${response.statusText}`, response.status);
}

// Yield the chunks of a streamed chat answer.
export async function* streamChat(server, body, signal) {
  const response = await request(server, "v1/chat/completions", body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read().catch(() => ({ done: true }));
    signal.throwIfAborted();
    if (done) throw problem(say("ended"));
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter(line => line.startsWith("data:"))) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw problem(chunk.error.message);
      yield chunk;
    }
  }
}
