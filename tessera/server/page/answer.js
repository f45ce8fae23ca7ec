// One answer of a model: it is requested, drawn while it grows, and its prompt is shown as tokens.
import { HOME, nameOf, request, streamChat } from "./api.js";
import { element } from "./dom.js";
import { fittingBody } from "./images.js";
import { Markdown } from "./markdown.js";

function folded(name, content) {
  return element("details", { className: name }, element("summary", { word: name }), content);
}

export class Answer {
  // `again`: called when the user asks for another answer. `failed(server, error)`: called after a refusal.
  constructor(again, failed) {
    this.failed = failed;
    this.name = element("h2");
    this.thoughts = folded("reasoning", element("pre"));
    this.body = element("div", { className: "text" });
    this.markdown = new Markdown(this.body);
    this.error = element("p", { className: "error", role: "alert" });
    this.facts = element("p", { className: "facts soft" });
    this.tokens = element("div");
    this.prompt = folded("tokens", this.tokens);
    this.prompt.ontoggle = () => this.prompt.open && this.showTokens();
    const button = element("button", { type: "button", className: "again", word: "again", onclick: again });
    const parts = [this.name, this.thoughts, this.body, this.error, this.facts, button, this.prompt];
    this.node = element("section", { className: "answer" }, ...parts);
  }

  // Ask a model. Errors are shown, and never raised. `messages`: returns the messages.
  async run({ server, model, messages, images, sampling, signal }) {
    Object.assign(this, { server, model, messages, text: "", thought: "", first: 0, last: 0 });
    this.name.textContent = server === HOME ? model : `${model} · ${nameOf(server)}`;
    this.error.textContent = "";
    this.facts.replaceChildren();
    this.prompt.open = false;
    this.node.ariaBusy = "true";
    this.draw();
    const begun = performance.now();
    const fields = { model, stream: true, stream_options: { include_usage: true }, ...sampling };
    let [end, usage] = [null, null];
    try {
      const body = await fittingBody(() => JSON.stringify({ ...fields, messages: messages() }), images);
      for await (const chunk of streamChat(server, body, signal)) {
        usage = chunk.usage ?? usage;
        end = chunk.choices[0]?.finish_reason ?? end;
        this.add(chunk.choices[0]?.delta ?? {});
      }
    } catch (error) {
      if (!signal.aborted) this.error.textContent = error.message;
      this.failed(server, error);
    }
    if (signal.aborted) this.fact("stopped");
    if (end === "length") this.fact("cut");
    if (usage) this.count(usage, begun);
    this.node.ariaBusy = "false";
    this.draw();
  }

  add({ content, reasoning, reasoning_content }) {
    const thought = reasoning ?? reasoning_content;
    if (!content && !thought) return;
    this.last = performance.now();
    this.first ||= this.last;
    this.text += content ?? "";
    this.thought += thought ?? "";
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const main = this.node.closest("main") ?? this.node; // the node itself: the conversation was cleared
    const atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 120;
    this.thoughts.hidden = !this.thought;
    this.thoughts.lastChild.textContent = this.thought;
    this.markdown.show(this.text);
    if (atEnd) main.scrollTop = main.scrollHeight;
  }

  count({ prompt_tokens: prompt, completion_tokens: count, prompt_tokens_details: details }, begun) {
    const seconds = (this.last - this.first) / 1000;
    this.fact("newTokens", { count });
    if (seconds > 0.05) this.fact("rate", { rate: ((count - 1) / seconds).toFixed(1) });
    if (this.first) this.fact("first", { first: ((this.first - begun) / 1000).toFixed(2) });
    this.fact("prompt", { count: prompt, cached: details?.cached_tokens ?? 0 });
  }

  fact(word, values) {
    this.facts.append(element("span", { word, values }));
  }

  // Show the tokens of the prompt. Equal tokens in a row, such as those of an image, are one entry.
  async showTokens() {
    const fields = { model: this.model, messages: this.messages(), return_token_strs: true };
    try {
      const answer = await (await request(this.server, "tokenize", JSON.stringify(fields))).json();
      const { count, max_model_len: length, tokens, token_strs: texts } = answer;
      const list = element("ol");
      for (let at = 0, end = 0; at < count; at = end) {
        while (tokens[end] === tokens[at]) end++;
        const text = texts[at].replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→");
        const id = end - at > 1 ? `${tokens[at]} ×${end - at}` : tokens[at];
        list.append(element("li", {}, element("code", {}, text), element("small", {}, id)));
      }
      const note = element("p", { className: "soft", word: "promptLength", values: { count, length } });
      this.tokens.replaceChildren(note, list);
    } catch (error) {
      this.tokens.replaceChildren(element("p", { className: "error" }, error.message));
    }
  }
}
